"""Configurations from values and from YAML, and their errors."""

import pytest

from eval.config import RunConfig, make_config, read_sweep, with_dense
from eval.errors import EvalError

GIVEN = {"benchmark": "passkey", "model": "smollm2"}


def test_single_values_become_lists_and_none_is_the_default():
    config = make_config({**GIVEN, "method": "quest", "token_budget": 256, "lengths": [100, 200], "limit": None})
    assert config == RunConfig("passkey", "smollm2", method=("quest",), token_budget=(256,), lengths=(100, 200))


def test_dense_runs_first_and_once():
    assert with_dense(make_config({**GIVEN, "method": ["quest", "full"]})).method == ("full", "quest")
    assert with_dense(make_config(GIVEN)).method == ("full",)


def test_a_name_that_is_no_text_is_unknown():
    for name in (1, None, True):
        with pytest.raises(EvalError, match=f"setting {name!r} is unknown"):
            make_config({"benchmark": "passkey", "model": "tiny", name: 2})


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"lenghts": 3}, r"'lenghts' is unknown \(did you mean 'lengths'\?\)"),
        ({"lengths": [0]}, r"lengths=0 is not allowed"),
        ({"lengths": "long"}, r"lengths='long' is not allowed"),
        ({"token_budget": [True]}, r"token_budget=True is not allowed"),
        ({"token_budget": [64, 64]}, r"token_budget=\[64, 64\] has duplicate entries"),
        ({"limit": 0}, r"limit=0 is not allowed"),
        ({"limit": "5"}, r"limit='5' is not allowed: a whole number"),
        ({"seed": 1.5}, r"seed=1\.5 is not allowed"),
        ({"question": "both"}, r"question='both' is not allowed: one of decode, prefill"),
        ({"chat": 1}, r"chat=1 is not allowed"),
        ({"method": [3]}, r"method=3 is not allowed: text"),
        ({"options": [1]}, r"options=\[1\] is not allowed: a mapping"),
        ({"model": None}, r"model is missing"),
    ],
)
def test_bad_values_are_named(values, said):
    with pytest.raises(EvalError, match=said):
        make_config({**GIVEN, **values} if values != {"model": None} else {"benchmark": "passkey"})


def test_sweep_shares_settings_and_the_command_line_wins(tmp_path):
    path = tmp_path / "sweep.yaml"
    path.write_text(
        "model: smollm2\nmethod: [quest]\nlimit: 5\nruns:\n"
        "  - {benchmark: passkey, lengths: [1000]}\n  - {benchmark: needle, limit: 2}\n"
    )
    passkey, needle = read_sweep(path, {"method": (), "limit": None, "token_budget": (128,)})
    assert (passkey.benchmark, passkey.limit, passkey.lengths, passkey.token_budget) == ("passkey", 5, (1000,), (128,))
    assert (needle.benchmark, needle.limit, needle.method) == ("needle", 2, ("quest",))
    assert [run.limit for run in read_sweep(path, {"limit": 1})] == [1, 1]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("- a list", "must hold a mapping"),
        ("model: [", "cannot be read as YAML"),
        ("model: smollm2\nlimit: 1\nlimit: 2", "'limit' is given twice .*line 3"),
        ("model: smollm2\nruns: [{benchmark: passkey, options: {repeats: 1, repeats: 2}}]", "'repeats' is given twice"),
        ("model: smollm2\noptions: {day: 2024-13-45}", "'2024-13-45' is not of type timestamp .*line 2"),
        ("options: {a: !!bool 3}", "'3' is not of type bool"),
        ('seed: !!int ""', "'' is not of type int"),
        ("options: {a: !!timestamp zz}", "'zz' is not of type timestamp"),
        ("options: {a: !!float x}", "'x' is not of type float"),
        pytest.param("seed: " + "1" * 5000, "'1{70}.* is not of type int", id="too many digits"),
        pytest.param("a: " + "[" * 3000, "cannot be read as YAML: maximum recursion depth", id="nested too deeply"),
        ("model: smollm2\nruns: 3", "runs must be a list"),
        ("model: smollm2\nbenchmark: passkey\nsede: 1", "did you mean 'seed'"),
    ],
)
def test_bad_file_is_named(tmp_path, content, said):
    path = tmp_path / "bad.yaml"
    path.write_text(content)
    with pytest.raises(EvalError, match=said) as raised:
        read_sweep(path, {})
    assert str(path) in str(raised.value)


def test_what_a_merge_key_brings_can_be_given_anew(tmp_path):
    path = tmp_path / "sweep.yaml"
    path.write_text("model: smollm2\nruns:\n  - &first {benchmark: passkey, limit: 3}\n  - {<<: *first, limit: 4}\n")
    assert [(run.benchmark, run.limit) for run in read_sweep(path, {})] == [("passkey", 3), ("passkey", 4)]


@pytest.mark.parametrize(("word", "chat"), [("on", "on"), ("off", "off"), ("auto", "auto"), ("'off'", "off")])
def test_words_that_yaml_reads_as_truth_values_are_chat_modes(tmp_path, word, chat):
    path = tmp_path / "sweep.yaml"
    path.write_text(f"model: smollm2\nbenchmark: passkey\nchat: {word}\n")
    assert [run.chat for run in read_sweep(path, {})] == [chat]


def test_missing_file_is_named(tmp_path):
    with pytest.raises(EvalError, match=r"nowhere\.yaml"):
        read_sweep(tmp_path / "nowhere.yaml", {})
