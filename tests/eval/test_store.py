"""A results folder survives kills, refuses other configurations, and merges what several processes wrote."""

import json

import pytest

from eval.errors import EvalError
from eval.store import Store, read_rows, row_key

CONFIG = {"benchmark": "passkey", "seed": 0, "device": None}


def row(sample_id: str, method: str = "full", error: str | None = None, **more) -> dict:
    return {
        "task": "filler",
        "length": 100,
        "sample_id": sample_id,
        "method": method,
        "token_budget": None,
        "error": error,
        **more,
    }


def test_folder_is_made_claimed_and_claimed_again_by_the_same_configuration(tmp_path):
    store = Store(tmp_path / "deep" / "out")
    store.claim(CONFIG)
    store.append(row("a"))
    store.release()
    again = Store(tmp_path / "deep" / "out")
    again.claim({**CONFIG, "device": "cuda:1"})  # where it runs does not make it another run
    assert again.rows() == [row("a")]
    again.release()


def test_other_configuration_is_named_and_nothing_is_written(tmp_path):
    store = Store(tmp_path)
    store.claim(CONFIG)
    store.append(row("a"))
    store.release()
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(EvalError, match=r"another configuration: seed was 0 and is 1"):
        Store(tmp_path).claim({**CONFIG, "seed": 1})
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_folder_with_other_files_is_refused(tmp_path):
    (tmp_path / "thesis.txt").write_text("all my work")
    with pytest.raises(EvalError, match=r"holds other files and no config\.json"):
        Store(tmp_path).claim(CONFIG)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_folder_in_use_is_refused(tmp_path):
    first = Store(tmp_path)
    first.claim(CONFIG)
    with pytest.raises(EvalError, match="in use by another run"):
        Store(tmp_path).claim(CONFIG)
    first.release()


def test_unwritable_folder_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(EvalError, match=r"cannot be written"):
        Store(tmp_path / "file" / "out").claim(CONFIG)


@pytest.mark.parametrize("kept", range(1, 40, 7))
def test_row_that_a_kill_cut_short_is_forgotten_and_overwritten(tmp_path, kept):
    store = Store(tmp_path)
    store.claim(CONFIG)
    store.append(row("a"))
    whole = store.own_rows.read_bytes()
    store.own_rows.write_bytes(whole + whole[:kept])
    assert store.rows() == [row("a")]
    store.append(row("b"))
    assert read_rows(store.own_rows) == [row("a"), row("b")]
    store.release()


def test_damaged_row_in_the_middle_is_an_error_with_its_line(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(f"{json.dumps(row('a'))}\n{{broken\n{json.dumps(row('b'))}\n")
    with pytest.raises(EvalError, match=r"rows\.jsonl:2"):
        read_rows(path)


def test_a_row_that_failed_gives_way_to_the_one_that_did_not(tmp_path):
    store = Store(tmp_path)
    store.claim(CONFIG)
    store.append(row("a", error="ValueError: no"))
    store.append(row("a"))
    assert store.rows() == [row("a")]
    store.release()


def test_processes_rows_are_merged_in_order(tmp_path):
    Store(tmp_path).claim(CONFIG)
    for rank, names in enumerate((["c", "a"], ["d", "b"])):
        store = Store(tmp_path, rank, 2)
        for name in names:
            store.append(row(name))
    order = [row_key(row(name)) for name in "abcd"]
    merged = Store(tmp_path).merge(order)
    assert [entry["sample_id"] for entry in merged] == ["a", "b", "c", "d"]
    assert read_rows(tmp_path / "rows.jsonl") == merged
    assert sorted(path.name for path in tmp_path.glob("rows*")) == ["rows.jsonl"]


def test_infinity_is_no_row(tmp_path):
    store = Store(tmp_path)
    store.claim(CONFIG)
    with pytest.raises(ValueError, match="JSON compliant"):
        store.append(row("a", score=float("inf")))
    assert store.rows() == []
    store.release()
