"""The page in a real browser."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from eval.report import write_report
from tests.browser import open_browser, set_width
from tests.eval.report_records import HOSTILE, needle_records, record, write_records, write_runs


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with open_browser(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture(scope="module")
def page_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = write_runs(tmp_path_factory.mktemp("runs"))
    # More columns than a screen has room for, and words that do not break by themselves.
    columns = [("full", None), *(("a_method_with_a_long_name", 64 * (index + 1)) for index in range(12))]
    wide = [record("wide", "t" * 60, 0, method, budget, prediction="x" * 300) for method, budget in columns]
    wide[1] |= {"score": 0.0, "prediction": "y" * 300}
    write_records(directory / "wide" / "rows.jsonl", wide + needle_records((8192,)))
    (directory / "wide" / "config.json").write_text(f'{{"word": "{"z" * 400}"}}', encoding="utf-8")
    return write_report(directory)


@pytest.fixture
def page(driver: Any, page_path: Path) -> Any:
    driver.set_window_size(1200, 900)
    driver.get(page_path.as_uri())
    return driver


def cells(driver: Any, selector: str) -> list[list[str]]:
    script = "return [...document.querySelectorAll(arguments[0])].map(r => [...r.cells].map(c => c.innerText.trim()))"
    found: list[list[str]] = driver.execute_script(script, f"{selector} tr")
    return found


def test_every_image_is_shown(page: Any) -> None:
    script = "return [...document.images].map(i => [i.complete, i.naturalWidth, i.naturalHeight, i.clientWidth, i.alt])"
    images = page.execute_script(script)
    assert len(images) == 14
    for complete, width, height, shown, alt in images:
        assert complete
        assert width > 0
        assert height > 0
        assert 0 < shown <= 1160
        assert alt


def test_tables_show_the_figures(page: Any) -> None:
    assert cells(page, "#\\31 -longbench .scores") == [
        ["task", "samples", "errors", "dense", "quest 256", "quest 1024", "window 256"],
        ["hotpotqa", "4", "1", "62.5", "25.0 (n=3)", "56.2", "31.2"],
        ["qasper", "4", "0", "30.0", "15.0", "27.0", "15.0"],
        ["average, over samples that all measured", "", "", "56.7", "20.0", "51.0", "28.3"],
    ]
    costs = cells(page, "#\\32 -needle .costs")
    assert len(costs) == 1 + 4 * 4
    assert costs[1][:3] == ["dense", "1,024", "5"]
    assert cells(page, "#\\33 -pg19 .scores")[1] == ["pg19", "2", "0", "16.000", "32.000", "32.000", "32.000"]


def test_what_a_model_wrote_stays_text(page: Any) -> None:
    assert page.title == "Sparse attention: evaluation report"
    assert HOSTILE.split("\u2028")[0].strip() in cells(page, "#\\31 -longbench .lost")[1][3]
    assert page.execute_script("return document.scripts.length") == 0


def test_console_is_silent_and_nothing_is_fetched(page: Any) -> None:
    assert page.get_log("browser") == []
    fetched = page.execute_script("return performance.getEntriesByType('resource').map(e => e.name)")
    assert [name for name in fetched if not name.startswith("data:")] == []


@pytest.mark.parametrize("width", [1200, 420])
def test_no_horizontal_overflow(page: Any, width: int) -> None:
    set_width(page, width)
    assert page.execute_script("return document.documentElement.scrollWidth") <= width
    script = """
        const edge = document.documentElement.clientWidth;
        const out = [...document.querySelectorAll('body *')].filter(
            e => !e.closest('.scroll table, .picture img') && e.getBoundingClientRect().right > edge + 0.5);
        return out.map(e => e.outerHTML.slice(0, 80));
    """
    assert page.execute_script(script) == []


def test_wide_tables_scroll_inside_their_own_box(page: Any) -> None:
    set_width(page, 420)
    script = """
        const box = document.querySelector('[id$="-wide"] .scroll');
        box.scrollLeft = 200;
        return [box.scrollWidth > box.clientWidth, box.scrollLeft, window.scrollX];
    """
    assert page.execute_script(script) == [True, 200, 0]


def test_links_lead_to_the_sections(page: Any) -> None:
    targets = page.execute_script("return [...document.querySelectorAll('nav a')].map(a => a.hash.slice(1))")
    assert targets == ["1-longbench", "2-needle", "3-pg19", "4-wide", "failures", "runs"]
    assert all(page.execute_script("return !!document.getElementById(arguments[0])", target) for target in targets)
