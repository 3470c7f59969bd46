"""A results folder survives kills, refuses other configurations, and merges the records of several processes."""

import errno
import json
import math
import sys
from dataclasses import make_dataclass

import pytest

from eval.errors import EvalError
from eval.report.names import with_variant_names
from eval.store import Store, encode_record, read_records, record_key, write_json
from hf_sparse_attn import METHODS

CONFIG = {"benchmark": "passkey", "seed": 0, "device": None}


def record(sample_id: str, method: str = "full", error: str | None = None, **more) -> dict:
    return {
        "benchmark": "passkey",
        "task": "filler",
        "length": 100,
        "sample_id": sample_id,
        "method": method,
        "token_budget": None,
        "error": error,
        **more,
    }


def test_folder_is_created_claimed_and_claimed_again_by_the_same_configuration(tmp_path):
    store = Store(tmp_path / "deep" / "out")
    store.claim(CONFIG)
    store.append(record("a"))
    store.release()
    again = Store(tmp_path / "deep" / "out")
    again.claim({**CONFIG, "device": "cuda:1"})  # the device does not change the run
    assert again.records() == [record("a")]
    again.release()


def test_other_configuration_is_named_and_nothing_is_written(tmp_path):
    store = Store(tmp_path)
    store.claim(CONFIG)
    store.append(record("a"))
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
def test_record_that_a_kill_cut_short_is_dropped_and_overwritten(tmp_path, kept):
    store = Store(tmp_path)
    store.claim(CONFIG)
    store.append(record("a"))
    whole = store.own_file.read_bytes()
    store.own_file.write_bytes(whole + whole[:kept])
    assert store.records() == [record("a")]
    store.append(record("b"))
    assert read_records(store.own_file) == [record("a"), record("b")]
    store.release()


def test_damaged_record_in_the_middle_is_an_error_with_its_line(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(f"{json.dumps(record('a'))}\n{{broken\n{json.dumps(record('b'))}\n")
    with pytest.raises(EvalError, match=r"rows\.jsonl:2"):
        read_records(path)


def test_a_failed_record_is_replaced_by_a_successful_one(tmp_path):
    store = Store(tmp_path)
    store.claim(CONFIG)
    store.append(record("a", error="ValueError: no"))
    store.append(record("a"))
    assert store.records() == [record("a")]
    store.release()


@pytest.mark.parametrize(("failing", "succeeding"), [((1, 2), (0, 1)), ((1, 2), (0, 2)), ((0, 1), (1, 2))])
def test_a_failed_record_of_another_process_is_replaced_too(tmp_path, failing, succeeding):
    """A run that several processes began may be resumed by others, or by one."""
    Store(tmp_path).claim(CONFIG)
    Store(tmp_path, *failing).append(record("a", error="ValueError: no"))
    Store(tmp_path, *succeeding).append(record("a"))
    assert Store(tmp_path).records() == [record("a")]
    assert Store(tmp_path).merge([record_key(record("a"))]) == [record("a")]
    assert read_records(tmp_path / "rows.jsonl") == [record("a")]


def test_processes_records_are_merged_in_order(tmp_path):
    Store(tmp_path).claim(CONFIG)
    for rank, names in enumerate((["c", "a"], ["d", "b"])):
        store = Store(tmp_path, rank, 2)
        for name in names:
            store.append(record(name))
    order = [record_key(record(name)) for name in "abcd"]
    merged = Store(tmp_path).merge(order)
    assert [entry["sample_id"] for entry in merged] == ["a", "b", "c", "d"]
    assert read_records(tmp_path / "rows.jsonl") == merged
    assert sorted(path.name for path in tmp_path.glob("rows*")) == ["rows.jsonl"]


def keycodes(sample_id: str, variant: str = "", **parameters) -> dict:
    own = {"token_budget": 256, "bits": 1} | parameters
    return record(sample_id, "keycodes", variant=variant, parameters=own)


def set_default(monkeypatch, correction: str) -> None:
    monkeypatch.setitem(METHODS, "keycodes", make_dataclass("AnyKeyCodes", [("correction", str, correction)]))


def test_records_from_before_a_hyperparameter_get_the_value_that_it_had(tmp_path, monkeypatch):
    """And stand beside later ones: the report names the two by it, and a run that goes on finds them all."""
    set_default(monkeypatch, "unbiased")
    new = keycodes("a", "correction=least_squares", correction="least_squares")
    records = [keycodes("a"), keycodes("b", "bits=2", bits=2), new, record("a", parameters={})]
    (tmp_path / "rows.jsonl").write_bytes(b"".join(encode_record(each) + b"\n" for each in records))
    older, other, newer, dense = found = read_records(tmp_path / "rows.jsonl")
    assert older == keycodes("a", correction="unbiased")
    assert other == keycodes("b", "bits=2", bits=2, correction="unbiased")
    assert (newer, dense) == (new, record("a", parameters={}))
    assert [record_key(each) for each in found] == [record_key(each) for each in records]
    assert Store(tmp_path).records() == found
    names = [each["method"] for each in with_variant_names([older, newer])]
    assert names == ["keycodes (correction=unbiased)", "keycodes (correction=least_squares)"]


def test_they_are_named_by_it_once_the_default_is_another(tmp_path, monkeypatch):
    set_default(monkeypatch, "least_squares")
    records = [keycodes("a"), keycodes("b", "bits=2", bits=2), keycodes("a", correction="least_squares")]
    (tmp_path / "rows.jsonl").write_bytes(b"".join(encode_record(each) + b"\n" for each in records))
    assert [(each["variant"], each["parameters"]["correction"]) for each in read_records(tmp_path / "rows.jsonl")] == [
        ("correction=unbiased", "unbiased"),
        ("bits=2, correction=unbiased", "unbiased"),
        ("", "least_squares"),
    ]


def test_infinity_is_no_record(tmp_path):
    store = Store(tmp_path)
    store.claim(CONFIG)
    with pytest.raises(ValueError, match="JSON compliant"):
        store.append(record("a", score=float("inf")))
    assert store.records() == []
    store.release()


def test_a_record_with_a_lone_surrogate_is_read_back_unchanged(tmp_path):
    store = Store(tmp_path)
    store.append(record("\ud83d", prediction="caf\u00e9 \ud83d", references=["\udcff"]))
    assert store.records() == [record("\ud83d", prediction="caf\u00e9 \ud83d", references=["\udcff"])]
    assert "café".encode() in store.own_file.read_bytes()
    assert Store(tmp_path).merge([]) == store.records()


def test_a_whole_last_record_without_its_newline_is_kept(tmp_path):
    store = Store(tmp_path)
    store.append(record("a"))
    store.own_file.write_bytes(store.own_file.read_bytes().rstrip(b"\n"))
    assert store.records() == [record("a")]
    store.append(record("b"))
    assert store.records() == [record("a"), record("b")]


@pytest.mark.skipif(sys.platform == "win32", reason="limits of file sizes are POSIX's")
def test_a_disk_that_fills_up_within_a_record_keeps_the_records_so_far(tmp_path):
    import resource

    store = Store(tmp_path)
    store.append(record("a"))
    before = store.own_file.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 20, hard))
    try:
        with pytest.raises(EvalError, match=r"rows\.jsonl cannot be written: .*; the records so far are kept"):
            store.append(record("b"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert store.own_file.read_bytes() == before
    store.append(record("b"))
    assert store.records() == [record("a"), record("b")]


DAMAGED_RECORDS = {
    "[1]": "a record must be a JSON object, got list",
    '"text"': "a record must be a JSON object, got str",
    "{}": "the record has no benchmark",
    "\udc80\udcff": "codec can't decode",
    "[" * 50_000: "recursion",
    json.dumps(record(["a", "list"])): r"sample_id=\['a', 'list'\] is not allowed: text",
    json.dumps(record("a", error=3)): "error=3 is not allowed",
    json.dumps(record("a", score="good")): "score='good' is not allowed",
    json.dumps(record("a", score=math.nan)): "NaN is not a number",
    json.dumps(record("a")).replace('"error": null', '"tpot_ms": 1e999, "error": null'): "tpot_ms=inf is not allowed",
    json.dumps(record("a", tpot_ms=10**400)): "tpot_ms=1000.* is not allowed: a number",
}


@pytest.mark.parametrize("line", DAMAGED_RECORDS, ids=range(len(DAMAGED_RECORDS)))
def test_a_damaged_record_is_named_by_file_and_line(tmp_path, line):
    content = f"{json.dumps(record('a'))}\n{line}\n".encode("utf-8", "surrogateescape")
    (tmp_path / "rows.jsonl").write_bytes(content)
    with pytest.raises(EvalError, match=rf"rows\.jsonl:2: .*{DAMAGED_RECORDS[line]}"):
        Store(tmp_path).records()
    assert (tmp_path / "rows.jsonl").read_bytes() == content


@pytest.mark.parametrize("content", ["", "{", "[1]", "null", '"x"', "\udc80", "[" * 50_000], ids=range(7))
def test_a_damaged_configuration_is_named(tmp_path, content):
    (tmp_path / "config.json").write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(EvalError, match=r"config\.json is not the configuration of a run: "):
        Store(tmp_path).check(CONFIG)
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").mkdir()
    with pytest.raises(EvalError, match=r"config\.json cannot be read: "):
        Store(tmp_path).check(CONFIG)


@pytest.mark.parametrize("value", [math.nan, {1, 2}])
def test_settings_that_json_lacks_are_refused_before_any_work(tmp_path, value):
    with pytest.raises(EvalError, match="the run's settings cannot be stored as JSON"):
        Store(tmp_path / "out").check({**CONFIG, "options": {"depths": value}})


def test_a_tuple_in_the_settings_equals_a_list(tmp_path):
    store = Store(tmp_path)
    store.claim({**CONFIG, "options": {"depths": (0, 1)}})
    store.release()
    Store(tmp_path).check({**CONFIG, "options": {"depths": (0, 1)}})


def test_a_failed_write_keeps_the_existing_file(tmp_path, monkeypatch):
    path = tmp_path / "summary.json"
    write_json(path, {"a": 1})

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("eval.store.os.replace", full)
    with pytest.raises(OSError, match="No space"):
        write_json(path, {"a": 2})
    assert json.loads(path.read_text()) == {"a": 1}
    assert list(tmp_path.iterdir()) == [path]


def test_an_unknown_field_of_a_record_is_an_error(tmp_path):
    (tmp_path / "rows.jsonl").write_text(json.dumps(record("a", scores=None, speed=3)) + "\n")
    with pytest.raises(EvalError, match=r"rows\.jsonl:1: speed is unknown"):
        read_records(tmp_path / "rows.jsonl")
    (tmp_path / "rows.jsonl").write_text(json.dumps(record("a", scores={"difflib": 1.5})) + "\n")
    with pytest.raises(EvalError, match=r"rows\.jsonl:1: scores\.difflib=1\.5 is not allowed: at most 1"):
        read_records(tmp_path / "rows.jsonl")
