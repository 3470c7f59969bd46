"""The built documentation in a real browser; run by ``make docs`` after the build, not by ``make test``."""

import re
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from tests.browser import open_browser, set_width

SITE = Path(__file__).resolve().parents[2] / "build/site"
PAGES = sorted(path.parent.relative_to(SITE).as_posix() for path in SITE.rglob("index.html"))
LOADED = re.compile(r"<(?:script|img|source|iframe)\b[^>]*\bsrc=\"?([^\" >]+)|<link\b[^>]*\bhref=\"?([^\" >]+)[^>]*>")
SCHEMES = {"light": "default", "dark": "slate"}
"""Names of the themes, which a script of the page sets some time after it is loaded."""


class Quiet(SimpleHTTPRequestHandler):
    """Server that does not log requests."""

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(SITE))) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with open_browser(tmp_path_factory.mktemp("profile")) as found:
        yield found


def test_the_site_is_built() -> None:
    assert {".", "concepts", "methods/quest", "performance", "results", "api/models"} <= set(PAGES)


def open_page(browser: Any, address: str, scheme: str = "light") -> None:
    """Open a page as a first-time visitor who prefers a theme."""
    browser.get("about:blank")  # an open page would keep its theme
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    browser.execute_cdp_cmd(
        "Storage.clearDataForOrigin", {"origin": address[: address.index("/", 8)], "storageTypes": "all"}
    )
    browser.get(address)
    wait_until(browser, f"return document.body.dataset.mdColorScheme === '{SCHEMES[scheme]}'")


def wait_until(browser: Any, condition: str) -> None:
    """Wait until a script returns something true, ten seconds at most."""
    for _ in range(200):
        if browser.execute_script(condition):
            return
        browser.execute_async_script("setTimeout(arguments[0], 50)")
    pytest.fail(f"not so within ten seconds: {condition}")


@pytest.mark.parametrize("page", PAGES)
def test_a_page_loads_only_local_files_and_fits_any_screen_width(browser: Any, address: str, page: str) -> None:
    set_width(browser, 1280)
    open_page(browser, f"{address}/{page}/")
    assert browser.get_log("browser") == []
    fetched = browser.execute_script("return performance.getEntriesByType('resource').map(e => e.name)")
    assert [name for name in fetched if not name.startswith((address, "data:", "blob:"))] == []
    script = """
        const done = arguments[0], pictures = [...document.querySelectorAll('main img')];
        pictures.forEach(picture => { picture.loading = 'eager'; });
        Promise.all(pictures.map(picture => picture.decode().catch(() => 0)))
            .then(() => done(pictures.map(picture => [picture.src, picture.alt, picture.naturalWidth])));
    """
    for source, label, pixels in browser.execute_async_script(script):
        assert label, source
        assert pixels, source
    for width in (1280, 390):
        set_width(browser, width)
        assert browser.execute_script("return document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize("page", PAGES)
def test_a_page_refers_only_to_local_files(page: str) -> None:
    text = (SITE / page / "index.html").read_text(encoding="utf-8")
    loaded = [first or second for first, second in LOADED.findall(text)]
    assert [name for name in loaded if "//" in name and "hf-sparse-attn.github.io" not in name] == []


@pytest.mark.parametrize(("scheme", "shown"), [("light", "overview.svg"), ("dark", "overview-dark.svg")])
def test_the_home_page_shows_the_picture_of_its_theme(browser: Any, address: str, scheme: str, shown: str) -> None:
    open_page(browser, f"{address}/", scheme)
    script = "return [...document.querySelectorAll('main img')].filter(i => i.offsetWidth).map(i => i.src)"
    assert [source.rpartition("/")[2].partition("#")[0] for source in browser.execute_script(script)] == [shown]


@pytest.mark.parametrize(
    ("page", "drawing"),
    [
        ("concepts", "decode-step"),
        ("methods/keycodes", "keycodes-codes"),
        ("methods/psa", "psa-pipeline"),
        ("methods/squeezed", "squeezed-lookup"),
    ],
)
def test_a_drawing_takes_the_colours_of_the_theme(browser: Any, address: str, page: str, drawing: str) -> None:
    colours = []
    for scheme in ("light", "dark"):
        open_page(browser, f"{address}/{page}/", scheme)
        script = f"return getComputedStyle(document.querySelector('#{drawing} .head')).fill"
        colours.append(browser.execute_script(script))
    assert colours == ["rgb(31, 35, 40)", "rgb(230, 237, 243)"]


def test_wide_tables_scroll_inside_their_own_box(browser: Any, address: str) -> None:
    set_width(browser, 390)
    browser.get(f"{address}/performance/")
    script = """
        const box = document.querySelector('.md-typeset__scrollwrap');
        box.scrollLeft = 150;
        return [box.scrollLeft, window.scrollX];
    """
    assert browser.execute_script(script) == [150, 0]


def test_the_search_finds_a_public_name(browser: Any, address: str) -> None:
    set_width(browser, 1280)
    browser.get(f"{address}/?q=record_selections")
    script = "return [...document.querySelectorAll('.md-search-result__link')].map(a => a.getAttribute('href'))"
    wait_until(browser, f"{script}.length")
    found = browser.execute_script(script)
    assert any("api/models/#hf_sparse_attn.record_selections" in link for link in found)
