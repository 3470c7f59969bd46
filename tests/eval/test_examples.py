"""Examples: errors name file and line; the order of folders; the hub, replaced by a local server."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest

from eval.errors import EvalError
from eval.examples import ExamplesNotFoundError, _unzipped, load_examples, read_jsonl, unique_ids
from tests.eval.hub_stand_in import COMMIT, hub_stand_in

REPOSITORY = Path(__file__).resolve().parents[2]
HUB_ID = "owner/bench"
EXAMPLE = {"context": "c\u2028{}", "input": "", "answers": ["2020-01-01", "ü"], "all_classes": None}
REQUIRED = ("context", "input", "answers", "all_classes")


@pytest.fixture
def empty_hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def write_examples(path: Path, *examples: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(example, ensure_ascii=False) + "\n" for example in examples), encoding="utf-8")
    return path


def load(data_dir: Path | None, task_file: str = "trec.jsonl") -> tuple[list[dict[str, object]], str]:
    return load_examples(
        task_file, hub_id=HUB_ID, hub_filename="data.zip", data_dir=data_dir, benchmark="bench", required=REQUIRED
    )


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"context": "c", "input": ', "is not JSON"),
        ('["context"]', "is not a JSON object but list"),
        pytest.param("[" * 100_000, "is not JSON: maximum recursion depth", id="nested too deeply"),
        ('{"context": "a\\ud800b", "input": "", "answers": []}', "has a lone surrogate"),
        ('{"context": "c", "answers": []}', r"lacks input \(it has: context, answers\)"),
        ("{}", r"lacks context, input, answers \(it has: nothing\)"),
        ('{"context": 3, "input": "", "answers": []}', "context is of type int, not str"),
        ('{"context": "", "input": null, "answers": []}', "input is of type NoneType, not str"),
        ('{"context": "", "input": "", "answers": {}}', "answers is of type dict, not list or str"),
    ],
)
def test_malformed_line_is_named(line: str, problem: str, tmp_path: Path) -> None:
    path = write_examples(tmp_path / "trec.jsonl", EXAMPLE)
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
    with pytest.raises(EvalError, match=r"empty\.jsonl has no examples"):
        read_jsonl(tmp_path / "empty.jsonl", ())


def test_data_dir_is_looked_through_in_order(tmp_path: Path) -> None:
    for place in ("data", "bench", "."):  # each takes precedence over the previous one
        path = write_examples(tmp_path / place / "trec.jsonl", {**EXAMPLE, "input": place})
        examples, origin = load(tmp_path)
        assert examples == [{**EXAMPLE, "input": place}]
        assert Path(origin) == path


def test_missing_data_dir(tmp_path: Path) -> None:
    with pytest.raises(EvalError, match=r"--data-dir .*nowhere is not a folder"):
        load(tmp_path / "nowhere")


def test_offline_without_examples_says_where_it_looked_at_once(tmp_path: Path, empty_hub_cache: Path) -> None:
    with pytest.raises(ExamplesNotFoundError) as caught:
        load(tmp_path)
    for place in ("trec.jsonl", "bench/trec.jsonl", "data/trec.jsonl"):
        assert str(tmp_path / place) in str(caught.value)
    for part in ("data.zip", HUB_ID, "--data-dir", "hf download --repo-type dataset owner/bench data.zip"):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("examples", "names"),
    [
        ([{"id": 4}, {"id": "x"}], ["4", "x"]),
        ([{"id": 0}, {"id": 1}], ["0", "1"]),
        ([{"id": "a"}, {"id": "a"}], ["0", "1"]),
        ([{"id": "1"}, {}, {"id": ""}], ["0", "1", "2"]),
    ],
)
def test_unique_ids(examples: list[dict[str, object]], names: list[str]) -> None:
    assert unique_ids(examples, "id") == names


FETCH = """
import json, sys
from eval.errors import EvalError
from eval.examples import load_examples
for line in sys.stdin:
    hub_id, filename = json.loads(line)
    try:
        told = load_examples(
            "trec.jsonl", hub_id=hub_id, hub_filename=filename, data_dir=None, benchmark="bench",
            required=("context", "input", "answers"),
        )
    except EvalError as error:
        told = type(error).__name__, str(error)
    print(json.dumps(told), flush=True)
"""


@contextlib.contextmanager
def fetcher(endpoint: str, home: Path, **variables: str) -> Iterator[Callable[[str, str], Any]]:
    """Load examples in a new process, since the hub's client reads its settings at import.

    Returns a function that loads a repository's file and returns the examples and their origin, or the error's name and
    message.
    """
    environment = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    environment = {key: value for key, value in environment.items() if "proxy" not in key.lower()}
    environment |= {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "PYTHONIOENCODING": "utf-8", **variables}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "encoding": "utf-8"}
    with subprocess.Popen([sys.executable, "-c", FETCH], cwd=REPOSITORY, env=environment, **pipes) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        source, answers = process.stdin, process.stdout

        def fetch(hub_id: str, filename: str) -> Any:
            source.write(json.dumps([hub_id, filename]) + "\n")
            source.flush()
            return json.loads(answers.readline())

        yield fetch
        source.close()


def jsonl(*examples: object) -> bytes:
    return "".join(json.dumps(example) + "\n" for example in examples).encode()


def zipped(member: str, content: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(member, content)
    return buffer.getvalue()


BAD_FILES = {
    "owner/lacking": ("trec.jsonl", b'{"context": "c"}\n', "trec.jsonl:1 lacks input, answers"),
    "owner/cut": ("trec.jsonl", b'{"context": \n', "trec.jsonl cannot be read"),
    "owner/another": ("data.zip", zipped("data/lcc.jsonl", b"{}"), "does not give data/trec.jsonl"),
    "owner/no-zip": ("data.zip", b"no zip", "does not give data/trec.jsonl"),
    "owner/nothing": ("data.zip", None, "no examples of trec.jsonl"),
}


def test_examples_come_from_the_hub_and_then_from_its_cache(tmp_path: Path) -> None:
    other = {**EXAMPLE, "answers": [1, 2.5], "all_classes": ["a"]}
    files = {
        f"{HUB_ID}/data.zip": zipped("data/trec.jsonl", jsonl(EXAMPLE, other)),
        f"{HUB_ID}/trec.jsonl": jsonl(other),
        **{f"{hub_id}/{name}": content for hub_id, (name, content, _) in BAD_FILES.items() if content is not None},
    }
    requests: list[str] = []
    with contextlib.ExitStack() as stack:
        with hub_stand_in(files, requests) as endpoint:
            fetch = stack.enter_context(fetcher(endpoint, tmp_path))
            for filename, expected in (("data.zip", [EXAMPLE, other]), ("trec.jsonl", [other])):
                examples, origin = fetch(HUB_ID, filename)
                assert examples == expected
                assert origin == f"hub dataset {HUB_ID} at {COMMIT}, {filename}"
                assert f"GET /datasets/{HUB_ID}/resolve/main/{filename}" in requests
            for hub_id, (filename, _, problem) in BAD_FILES.items():
                name, message = fetch(hub_id, filename)
                assert name in ("EvalError", "ExamplesNotFoundError")
                assert problem in message
        # The server is gone.
        name, message = fetch("owner/never-fetched", "data.zip")
        assert name == "ExamplesNotFoundError"
        assert "--data-dir" in message
    with fetcher(endpoint, tmp_path, HF_HUB_OFFLINE="1") as fetch:
        assert fetch(HUB_ID, "data.zip")[0] == [EXAMPLE, other]


def damaged_archive(damage: str) -> bytes:
    """Return an archive of a file whose data are damaged, or said to be encrypted, or compressed in an unknown way."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("trec.jsonl", jsonl(EXAMPLE) * 200)
    content = bytearray(buffer.getvalue())
    local, central = 0, content.index(b"PK\x01\x02")
    if damage == "data":
        begin = local + 30 + len("trec.jsonl")
        content[begin : begin + 20] = b"\xff" * 20
    elif damage == "encrypted":
        content[local + 6] |= 1
        content[central + 8] |= 1
    else:
        content[local + 8] = content[central + 10] = 97
    return bytes(content)


@pytest.mark.parametrize("damage", ["data", "encrypted", "compression"])
def test_a_damaged_archive_is_named(tmp_path: Path, damage: str) -> None:
    (tmp_path / "data.zip").write_bytes(damaged_archive(damage))
    with pytest.raises(EvalError, match=r"data\.zip does not give trec\.jsonl: \w"):
        _unzipped(tmp_path / "data.zip", "trec.jsonl", tmp_path / "folder")


@pytest.mark.parametrize("member", ["../trec.jsonl", "data/../../trec.jsonl", "{outside}/trec.jsonl"])
def test_a_member_with_a_path_out_of_its_archive_stays_in_its_folder(tmp_path: Path, member: str) -> None:
    (tmp_path / "outside").mkdir()
    archive, name = tmp_path / "data.zip", member.format(outside=tmp_path / "outside")
    archive.write_bytes(zipped(name, b"{}"))
    unpacked = _unzipped(archive, name, tmp_path / "folder")
    assert unpacked.resolve().is_relative_to(tmp_path / "folder")
    assert {path for path in tmp_path.rglob("*") if path.is_file()} == {archive, unpacked}
