"""Rows: what is wrong with a line is said with its place; the order of places; the hub, by a stand-in."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import huggingface_hub.constants
import pytest

from eval.errors import EvalError
from eval.rows import RowsNotFoundError, load_rows, read_jsonl, unique_ids
from tests.eval.hub_stand_in import COMMIT, hub_stand_in

REPOSITORY = Path(__file__).resolve().parents[2]
HUB_ID = "owner/bench"
ROW = {"context": "c\u2028{}", "input": "", "answers": ["2020-01-01", "ü"], "all_classes": None}
REQUIRED = ("context", "input", "answers", "all_classes")


@pytest.fixture
def empty_hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def write_rows(path: Path, *rows: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def load(data_dir: Path | None, task_file: str = "trec.jsonl") -> tuple[list[dict[str, object]], str]:
    return load_rows(
        task_file, hub_id=HUB_ID, hub_filename="data.zip", data_dir=data_dir, benchmark="bench", required=REQUIRED
    )


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"context": "c", "input": ', "is not JSON"),
        ('["context"]', "is not a JSON object but list"),
        ('{"context": "c", "answers": []}', r"lacks input \(it has: context, answers\)"),
        ("{}", r"lacks context, input, answers \(it has: nothing\)"),
        ('{"context": 3, "input": "", "answers": []}', "context is of type int, not str"),
        ('{"context": "", "input": null, "answers": []}', "input is of type NoneType, not str"),
        ('{"context": "", "input": "", "answers": {}}', "answers is of type dict, not list or str"),
    ],
)
def test_malformed_line_is_named(line: str, problem: str, tmp_path: Path) -> None:
    path = write_rows(tmp_path / "trec.jsonl", ROW)
    path.write_text(path.read_text(encoding="utf-8") + "\n" + line + "\n", encoding="utf-8")
    with pytest.raises(EvalError, match=rf"trec\.jsonl:3:? {problem}"):
        read_jsonl(path, ("context", "input", "answers"))


def test_unreadable_and_empty_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(EvalError, match=r"none\.jsonl cannot be read"):
        read_jsonl(tmp_path / "none.jsonl", ())
    (tmp_path / "latin.jsonl").write_bytes(b'{"a": "\xe9"}\n')
    with pytest.raises(EvalError, match=r"latin\.jsonl cannot be read.*utf-8"):
        read_jsonl(tmp_path / "latin.jsonl", ())
    (tmp_path / "empty.jsonl").write_text("\n\n")
    with pytest.raises(EvalError, match=r"empty\.jsonl has no rows"):
        read_jsonl(tmp_path / "empty.jsonl", ())


def test_data_dir_is_looked_through_in_order(tmp_path: Path) -> None:
    for place in ("data", "bench", "."):  # each is preferred to the one before
        path = write_rows(tmp_path / place / "trec.jsonl", {**ROW, "input": place})
        rows, origin = load(tmp_path)
        assert rows == [{**ROW, "input": place}]
        assert Path(origin) == path


def test_data_dir_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(EvalError, match=r"--data-dir .*nowhere is not a folder"):
        load(tmp_path / "nowhere")


def test_offline_without_rows_says_where_it_looked_at_once(tmp_path: Path, empty_hub_cache: Path) -> None:
    with pytest.raises(RowsNotFoundError) as caught:
        load(tmp_path)
    for place in ("trec.jsonl", "bench/trec.jsonl", "data/trec.jsonl"):
        assert str(tmp_path / place) in str(caught.value)
    for part in ("data.zip", HUB_ID, "--data-dir", "hf download --repo-type dataset owner/bench data.zip"):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("rows", "names"),
    [
        ([{"id": 4}, {"id": "x"}], ["4", "x"]),
        ([{"id": 0}, {"id": 1}], ["0", "1"]),
        ([{"id": "a"}, {"id": "a"}], ["0", "1"]),
        ([{"id": "1"}, {}, {"id": ""}], ["0", "1", "2"]),
    ],
)
def test_unique_ids(rows: list[dict[str, object]], names: list[str]) -> None:
    assert unique_ids(rows, "id") == names


FETCH = """
import json, sys
from pathlib import Path
from eval.rows import load_rows
rows, origin = load_rows(
    "trec.jsonl", hub_id="owner/bench", hub_filename=sys.argv[1], data_dir=None, benchmark="bench",
    required=("context", "input", "answers"),
)
print(json.dumps([rows, origin]))
"""


def fetch(endpoint: str, filename: str, home: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Load rows in a process of its own, as the hub's client reads its settings when it is imported."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    environment = {key: value for key, value in environment.items() if "proxy" not in key.lower()}
    environment |= {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "PYTHONIOENCODING": "utf-8", **variables}
    return subprocess.run(
        [sys.executable, "-c", FETCH, filename],
        cwd=REPOSITORY,
        env=environment,
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=120,
        check=False,
    )


def jsonl(*rows: object) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def zipped(member: str, content: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(member, content)
    return buffer.getvalue()


def test_rows_come_from_the_hub_and_then_from_its_cache(tmp_path: Path) -> None:
    other = {**ROW, "answers": [1, 2.5], "all_classes": ["a"]}
    files = {
        f"{HUB_ID}/data.zip": zipped("data/trec.jsonl", jsonl(ROW, other)),
        f"{HUB_ID}/trec.jsonl": jsonl(other),
    }
    requests: list[str] = []
    with hub_stand_in(files, requests) as endpoint:
        for filename, expected in (("data.zip", [ROW, other]), ("trec.jsonl", [other])):
            result = fetch(endpoint, filename, tmp_path)
            assert result.returncode == 0, result.stderr
            rows, origin = json.loads(result.stdout)
            assert rows == expected
            assert origin == f"hub dataset {HUB_ID} at {COMMIT}, {filename}"
            assert f"GET /datasets/{HUB_ID}/resolve/main/{filename}" in requests
    again = fetch(endpoint, "data.zip", tmp_path, HF_HUB_OFFLINE="1")  # the server is gone
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout)[0] == [ROW, other]


@pytest.mark.parametrize(
    ("filename", "content", "problem"),
    [
        ("trec.jsonl", b'{"context": "c"}\n', "trec.jsonl:1 lacks input, answers"),
        ("trec.jsonl", b'{"context": \n', "trec.jsonl cannot be read"),
        ("data.zip", zipped("data/lcc.jsonl", b"{}"), "does not give data/trec.jsonl"),
        ("data.zip", b"no zip", "does not give data/trec.jsonl"),
        ("data.zip", None, "no rows of trec.jsonl"),
    ],
)
def test_bad_files_of_the_hub_are_named(filename: str, content: bytes | None, problem: str, tmp_path: Path) -> None:
    with hub_stand_in({} if content is None else {f"{HUB_ID}/{filename}": content}) as endpoint:
        result = fetch(endpoint, filename, tmp_path)
    assert result.returncode == 1
    last = [line for line in result.stderr.splitlines() if line.startswith("eval.")][-1]
    assert "Error: " in last
    assert problem in last


def test_unreachable_hub_is_said_with_what_to_do(tmp_path: Path) -> None:
    result = fetch("http://127.0.0.1:9", "data.zip", tmp_path)
    assert "eval.rows.RowsNotFoundError" in result.stderr
    assert "--data-dir" in result.stderr
