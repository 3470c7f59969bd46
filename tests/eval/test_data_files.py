"""A run records the data files that its samples were built from, and goes on with no others."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import wonderwords
from transformers import LlamaConfig
from typer.testing import CliRunner

from eval import data_files, examples
from eval.benchmarks import BENCHMARKS, pg19
from eval.cli import app
from eval.config import make_config, with_dense
from eval.data_files import DataFile, as_json, collected, first_file, known_sha256, note_dataset, noted, remembered
from eval.engine import make_variants
from eval.errors import EvalError
from eval.processes import Processes
from eval.run_check import find_benchmark, prepare
from eval.runner import run
from eval.store import Store
from hf_sparse_attn.cli.models import load_model
from tests.eval.ruler_data import use_own_protocol, write_files
from tests.eval.tokenizers import tiny_tokenizer

SENTENCES = [f"On day {day} the boat number {day * 7 % 31} came home with {day * 3 % 17} fish." for day in range(300)]
BOOK, ESSAYS = " ".join(SENTENCES), json.dumps({"text": " ".join(SENTENCES[::-1])})
ROW = {"context": BOOK, "input": "Who?", "answers": ["a boat"], "all_classes": None, "length": 5000}
CHOICE = {"question": "Which?", "answer": "A", "difficulty": "easy", "length": "short", "domain": "Invented"}
CHOICES = {f"choice_{letter}": letter for letter in "ABCD"}
TURNS = [{"input": "Key?", "answer": "ab"}]
FACTS = [{"question": "Where is the harbour?", "answers": ["Vigo"]}]
BABI = {"input": BOOK, "question": "Where is the boat?", "target": "kitchen"}
FOUND_OF = {"context": BOOK, "input": "What is it?", "answer": ["01234"], "options": []}
WORDS = ("adjective", "noun")

Files = Mapping[str, str]
Expected = Mapping[str, list[str]]

# The settings of a benchmark, the files in its folder, and those that each task is built from.
CASES: dict[str, tuple[dict[str, Any], Files, Expected]] = {
    "passkey": (
        {"tasks": ["filler", "book"]},
        {"books/b.txt": BOOK, "a.txt": BOOK},
        {"book": ["a.txt", "books/b.txt"]},
    ),
    "questpasskey": ({}, {"a.txt": BOOK}, {}),
    "needle": (
        {"tasks": ["essay", "book"]},
        {"a.txt": BOOK, "json/PaulGrahamEssays.json": ESSAYS, "ruler/PaulGrahamEssays.json": ESSAYS},
        {"essay": ["ruler/PaulGrahamEssays.json"], "book": ["a.txt"]},
    ),
    "ruler": (
        {"tasks": ["niah_single_1", "niah_single_2", "fwe", "qa_1", "qa_2"]},
        {},
        {
            "niah_single_1": [f"wonderwords/{part}list.txt" for part in WORDS],
            "niah_single_2": [*(f"wonderwords/{part}list.txt" for part in WORDS), "PaulGrahamEssays.json"],
            "qa_1": ["squad.json"],
            "qa_2": ["hotpotqa.json"],
        },
    ),
    "longbench": (
        {"tasks": ["qasper", "trec"]},
        {"qasper.jsonl": json.dumps(ROW), "longbench/trec.jsonl": json.dumps(ROW), "lcc.jsonl": json.dumps(ROW)},
        {"qasper": ["qasper.jsonl"], "trec": ["longbench/trec.jsonl"]},
    ),
    "longbench_e": ({"tasks": ["qasper"]}, {"qasper_e.jsonl": json.dumps(ROW)}, {"qasper": ["qasper_e.jsonl"]}),
    "longbench_v2": (
        {},
        {"data/data.json": json.dumps([{"context": BOOK, **CHOICE, **CHOICES}])},
        {"choice": ["data/data.json"]},
    ),
    "infinitebench": (
        {"tasks": ["passkey", "kv_retrieval"]},
        {"passkey.jsonl": json.dumps(FOUND_OF)},
        {"passkey": ["passkey.jsonl"]},  # the other task's samples are generated
    ),
    "babilong": (
        {"tasks": ["qa1"], "lengths": [1000, 2000]},
        {"qa1/1k.json": json.dumps([BABI]), "babilong/qa1/2k.json": json.dumps([BABI])},
        {"qa1": ["qa1/1k.json", "babilong/qa1/2k.json"]},
    ),
    "pg19": ({"limit": 1}, {"a.txt": BOOK, "b.txt": BOOK}, {"books": ["a.txt"]}),
    "longanswer": ({"options": {"new_tokens": 300}}, {"pg19/a.txt": BOOK}, {"retelling": ["pg19/a.txt"]}),
    "gsm8k": (
        {"tasks": ["cot", "zeroshot"]},
        {"gsm8k/test.jsonl": json.dumps({"question": "How many boats?", "answer": "One.\n#### 1"}), "test.jsonl": ""},
        {"cot": ["gsm8k/test.jsonl"], "zeroshot": ["gsm8k/test.jsonl"]},
    ),
    "prefixqa": (
        {},
        {"prefixqa/prefixqa.jsonl": json.dumps({"context": BOOK, "questions": FACTS})},
        {"qa": ["prefixqa/prefixqa.jsonl"]},
    ),
    "scbench": (
        {"tasks": ["kv"]},
        {"scbench_kv.jsonl": json.dumps({"context": BOOK, "multi_turns": TURNS})},
        {"kv": ["scbench_kv.jsonl"]},
    ),
}
OWN_LENGTHS = ("longbench", "longbench_e", "longbench_v2", "infinitebench", "gsm8k", "prefixqa", "scbench")


class Loaded(NamedTuple):
    """A source of a loaded model."""

    model: Any
    tokenizer: Any

    def describe(self, config: Any) -> Any:
        return self.tokenizer, self.model.config

    def load(self, config: Any) -> Any:
        assert self.model.device is not None, "a refused run loads no model"
        return self.model


@pytest.fixture(scope="module")
def loaded(model_dir: str) -> Loaded:
    return Loaded(*load_model(model_dir, torch.float32, "cpu"))


def write(folder: Path, files: Files) -> Path:
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content, encoding="utf-8")
    return folder


def sha256(content: str) -> str:
    return hashlib.sha256(content.encode()).hexdigest()


def entry(name: str, content: str) -> dict[str, Any]:
    return {"file": name, "bytes": len(content.encode()), "sha256": sha256(content)}


def go(out: Path, loaded: Loaded, data: Path, **values: Any) -> dict[str, Any]:
    given = {"benchmark": "passkey", "model": "tiny", "tasks": ["filler", "book"], "lengths": [200], "limit": 1}
    return run(make_config({**given, "data_dir": str(data), **values}), out, loaded, Processes())


def recorded(out: Path) -> Any:
    return json.loads((out / "config.json").read_text(encoding="utf-8"))["data"]


def contents(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in out.iterdir() if path.name != ".lock"}


def test_every_benchmark_has_a_case() -> None:
    assert set(CASES) == set(BENCHMARKS)


@pytest.mark.parametrize("name", CASES)
def test_each_task_has_the_files_that_its_samples_are_built_from(
    name: str, tmp_path: Path, protocols: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    values, files, expected = CASES[name]
    folder = write(tmp_path / "data", files)
    if name == "ruler":
        use_own_protocol(monkeypatch)
        write_files(folder)
    lengths = {} if name in OWN_LENGTHS else {"lengths": [1000]}
    given = {"benchmark": name, "model": "tiny", "limit": 2, "data_dir": str(folder), **lengths, **values}
    config = with_dense(make_config({**given, "protocol_dir": str(protocols)}))
    source = Loaded(SimpleNamespace(config=LlamaConfig(max_position_embeddings=40_000)), tiny_tokenizer())
    for _ in range(2):  # what a benchmark has kept from the first time is noted too
        prepared = prepare(config, find_benchmark(config), None, make_variants(config), source)
        assert {task: [each.file for each in own] for task, own in prepared.files.items()} == expected
    for each in (each for own in prepared.files.values() for each in own):
        place = folder / each.file
        if each.file.startswith("wonderwords/"):
            place = Path(wonderwords.__file__).parent / "assets" / Path(each.file).name
        assert (each.bytes, each.sha256) == (place.stat().st_size, hashlib.sha256(place.read_bytes()).hexdigest())


def test_a_run_records_names_sizes_and_hashes_and_no_path_of_the_machine(
    tmp_path: Path, loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "data", {"books/b.txt": BOOK, "a.txt": BOOK + " \u00fc"})
    monkeypatch.chdir(tmp_path)
    go(tmp_path / "out", loaded, Path("data"))
    assert recorded(tmp_path / "out") == {"book": [entry("a.txt", BOOK + " \u00fc"), entry("books/b.txt", BOOK)]}
    assert str(tmp_path) not in (tmp_path / "out/config.json").read_text(encoding="utf-8")
    go(tmp_path / "absolute", loaded, tmp_path / "data")
    assert recorded(tmp_path / "absolute") == recorded(tmp_path / "out")
    go(tmp_path / "none", loaded, Path("data"), tasks=["filler"])
    assert recorded(tmp_path / "none") == {}


CHANGES: dict[str, tuple[Files, str]] = {
    "changed": (
        {"books/a.txt": BOOK[::-1], "books/b.txt": BOOK},
        f"book: books/a.txt had sha256 {sha256(BOOK)} and has sha256 {sha256(BOOK[::-1])}.",
    ),
    "added": (
        {"books/a.txt": BOOK, "books/b.txt": BOOK, "c.txt": BOOK[1:]},
        f"book: c.txt (sha256 {sha256(BOOK[1:])}) was not there.",
    ),
    "removed": ({"books/a.txt": BOOK}, f"book: books/b.txt (sha256 {sha256(BOOK)}) is missing."),
    "renamed": (
        {"books/a.txt": BOOK, "books/z.txt": BOOK},
        f"books/b.txt (sha256 {sha256(BOOK)}) is missing; book: books/z.txt (sha256 {sha256(BOOK)}) was not there.",
    ),
    "many": ({f"{number}.txt": BOOK for number in range(9)}, "; and 8 more."),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_run_does_not_go_on_with_other_data_and_writes_nothing(
    tmp_path: Path, loaded: Loaded, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, message = CHANGES[change]
    data, out = write(tmp_path / "data", {"books/a.txt": BOOK, "books/b.txt": BOOK}), tmp_path / "out"
    go(out, loaded, data)
    rows = (out / "rows.jsonl").read_bytes()
    (out / "rows.jsonl").write_bytes(rows[: rows.index(b"\n") + 1])  # something is left to measure
    before = contents(out)
    for path in data.glob("books/*.txt"):
        path.unlink()
    write(data, files)
    unloaded = Loaded(SimpleNamespace(config=loaded.model.config, device=None), loaded.tokenizer)
    with pytest.raises(EvalError) as caught:
        go(out, unloaded, data)
    assert message in str(caught.value)
    assert f"out={str(out)!r} has records of other data: book: " in str(caught.value)
    assert "Allowed: the files that its config.json names" in str(caught.value)
    assert contents(out) == before
    for path in (*data.glob("books/*.txt"), *data.glob("*.txt")):
        path.unlink()
    write(data, {"books/a.txt": BOOK, "books/b.txt": BOOK})
    assert go(out, loaded, data)["finished"]


def test_on_the_command_line_it_is_one_line(tmp_path: Path, model_dir: str) -> None:
    data, out = write(tmp_path / "data", {"a.txt": BOOK}), tmp_path / "out"
    given = ["run", "passkey", "--tasks", "book", "--model", model_dir, "--lengths", "200", "--limit", "1"]
    given += ["--data-dir", str(data), "--out", str(out)]
    assert CliRunner().invoke(app, given).exit_code == 0
    write(data, {"a.txt": BOOK + "More."})
    result = CliRunner().invoke(app, given)
    assert result.exit_code == 2
    (error,) = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert f"a.txt had sha256 {sha256(BOOK)} and has sha256 {sha256(BOOK + 'More.')}" in error


def test_a_file_may_move_to_another_folder(tmp_path: Path, loaded: Loaded) -> None:
    data, out = write(tmp_path / "data", {"a.txt": BOOK, "b.txt": BOOK}), tmp_path / "out"
    go(out, loaded, data)
    before = recorded(out)
    (data / "pg19").mkdir()
    (data / "a.txt").rename(data / "pg19/a.txt")
    assert go(out, loaded, data)["finished"]
    assert recorded(out) == before


def test_an_older_run_goes_on_and_then_has_its_files(tmp_path: Path, loaded: Loaded) -> None:
    data, out = write(tmp_path / "data", {"a.txt": BOOK}), tmp_path / "out"
    go(out, loaded, data)
    settings = json.loads((out / "config.json").read_text(encoding="utf-8"))
    older = {name: value for name, value in settings.items() if name != "data"} | {"device": "another GPU"}
    (out / "config.json").write_text(json.dumps(older), encoding="utf-8")
    records = (out / "rows.jsonl").read_bytes()
    assert go(out, loaded, data)["finished"]
    assert (out / "rows.jsonl").read_bytes() == records
    written = json.loads((out / "config.json").read_text(encoding="utf-8"))
    assert written == {**older, "data": {"book": [entry("a.txt", BOOK)]}}
    write(data, {"a.txt": BOOK[1:]})
    with pytest.raises(EvalError, match="has records of other data"):
        go(out, loaded, data)


@pytest.mark.parametrize(
    ("limit", "seed", "is_refused"), [(2, 0, True), (1, 0, False), (2, 1, False)], ids=["same", "fewer", "other seed"]
)
def test_runs_of_a_sweep_with_the_same_samples_have_the_same_data(
    tmp_path: Path, loaded: Loaded, limit: int, seed: int, is_refused: bool
) -> None:
    data = write(tmp_path / "data", {"a.txt": BOOK})
    first, second = tmp_path / "out" / "01-passkey", tmp_path / "out" / "02-passkey"
    write(data, {"b.txt": BOOK})
    config = {"benchmark": "passkey", "tasks": ["book"], "model": "tiny", "lengths": [200], "data_dir": str(data)}

    def go_on(out: Path, method: str, **settings: int) -> None:
        run_config = make_config({**config, "method": method, **settings})
        run(run_config, out, loaded, Processes(), beside=[first, second, tmp_path / "out" / "03-passkey"])

    go_on(first, "quest", limit=2, seed=0)
    (data / "b.txt").unlink()
    if is_refused:
        with pytest.raises(EvalError) as caught:
            go_on(second, "keycodes", limit=limit, seed=seed)
        assert f"out={str(second)!r} would have other samples than {str(first)!r}" in str(caught.value)
        assert f"book: b.txt (sha256 {sha256(BOOK)}) is missing" in str(caught.value)
        assert not second.exists()
    else:
        go_on(second, "keycodes", limit=limit, seed=seed)
        assert (second / "rows.jsonl").exists()


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (None, "data=None is not allowed: a mapping of tasks"),
        ({"book": {}}, "data.book={} is not allowed: a list"),
        ({"book": [{"bytes": 3}]}, "data.book.file is missing"),
        ({"book": [{"file": "a.txt", "bytes": "3"}]}, "data.book.bytes='3' is not allowed: a whole number"),
        ({"book": [{"file": "a.txt", "sha256": "0"}]}, "data.book.sha256='0' is not allowed"),
        ({"book": [{"file": "a.txt", "time": 3}]}, "data.book.time is unknown"),
    ],
)
def test_a_damaged_list_of_files_is_named_before_any_work(tmp_path: Path, value: Any, problem: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"data": value}), encoding="utf-8")
    with pytest.raises(EvalError) as caught:
        Store(tmp_path).check({})
    assert f"config.json is not the configuration of a run: {problem}" in str(caught.value)


def test_a_file_is_hashed_once_and_again_when_it_has_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed = []
    stock = data_files.file_sha256
    monkeypatch.setattr(data_files, "file_sha256", lambda path: hashed.append(path.name) or stock(path))  # type: ignore[func-returns-value]
    path = write(tmp_path, {"a.txt": BOOK}) / "a.txt"
    assert known_sha256(path) == known_sha256(path) == sha256(BOOK)
    assert noted(path, "a.txt") == first_file(tmp_path, ["none.txt", "a.txt"]) == path  # nothing asks for it here
    assert hashed == ["a.txt"]
    path.write_text(BOOK[::-1], encoding="utf-8")  # of the same size
    os.utime(path, ns=(1, 1))
    with collected() as found:
        noted(path, "a.txt")
    assert [each.sha256 for each in found] == [sha256(BOOK[::-1])]
    assert hashed == ["a.txt"] * 2


@pytest.mark.skipif(sys.platform == "win32", reason="links need rights there")
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").symlink_to(tmp_path / "gone.txt")
    with collected(), pytest.raises(EvalError, match=r"a\.txt cannot be read: .*No such file"):
        noted(tmp_path / "a.txt", "a.txt")


def test_a_data_set_of_the_hub_has_its_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: [{"text": BOOK}])
    monkeypatch.setattr(pg19, "_hub_books", remembered(pg19._hub_books.__wrapped__))  # type: ignore[attr-defined]
    for _ in range(2):  # from the library, and kept
        with collected() as found:
            assert len(pg19.named_books(None, 5)) == 1
        files = as_json({"books": list(found)})
        assert files == {"books": [{"file": "emozilla/pg19-test/test", "commit": pg19.REVISION}]}
    with collected() as found:
        examples.load_hub_dataset("owner/bench", "qa1", "", config="4k", revision="abc")
    assert list(found) == [DataFile("owner/bench/4k/qa1", commit="abc")]
    changed = data_files.differences({"qa1": list(found)}, {"qa1": [DataFile("owner/bench/4k/qa1", commit="def")]})
    assert changed == "qa1: owner/bench/4k/qa1 had commit abc and has commit def"


def test_what_is_noted_within_a_kept_result_reaches_every_caller(tmp_path: Path) -> None:
    calls = []

    @remembered
    def inner(name: str) -> str:
        calls.append(name)
        note_dataset(name, "1")
        return name

    @remembered
    def outer() -> str:
        return inner("a") + inner("b")

    assert outer() == "ab"
    with collected() as found:
        assert outer() == "ab"
        with collected() as apart:
            assert inner("b") == "b"
    assert [each.file for each in found] == ["a", "b"]
    assert [each.file for each in apart] == ["b"]
    assert calls == ["a", "b"]
