import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from hf_sparse_attn.cli.app import app
from hf_sparse_attn.cli.compare import Run
from hf_sparse_attn.cli.terminal import literal, one_line, visible
from tests.tiny import save_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_model(tmp_path_factory.mktemp("model"), chat=True))


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200"})


def test_methods_table() -> None:
    result = invoke("methods")
    assert result.exit_code == 0
    for text in ("quest", "2406.10774", "page_size=16", "decode"):
        assert text in result.stdout


def test_methods_json() -> None:
    (quest,) = [method for method in json.loads(invoke("methods", "--json").stdout) if method["name"] == "quest"]
    assert quest["parameters"]["page_size"] == 16
    assert quest["sparse_phases"] == ["decode"]


def test_module_entry_point() -> None:
    command = [sys.executable, "-m", "hf_sparse_attn", "--help"]
    root = Path(__file__).parents[2]
    environment = {"PYTHONPATH": f"{root}:{root / 'kernels/torch-ext'}", "PATH": ""}
    result = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    assert "hf-sparse-attn" in result.stdout


COMPARE_PASSKEY = ("--token-budget", "64", "--passkey-tokens", "400", "--depths", "0.1,0.5", "--max-new-tokens", "3")


def test_compare_passkey_json(model: str) -> None:
    result = invoke("compare", "--model", model, *COMPARE_PASSKEY, "--set", "sink_tokens=0", "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["parameters"]["token_budget"] == 64
    assert report["parameters"]["sink_tokens"] == 0
    assert [run["depth"] for run in report["runs"]] == [0.1, 0.5]
    assert report["dense"]["kv_fraction"] == 1.0
    assert 0 < report["sparse"]["kv_fraction"] < 1
    assert report["sparse"]["peak_memory_bytes"] > 0


def test_compare_passkey_table(model: str) -> None:
    result = invoke("compare", "--model", model, *COMPARE_PASSKEY)
    assert result.exit_code == 0, result.output
    for text in ("dense", "quest", "answers agree", "KV cache read", "prefill", "ms per token", "peak memory"):
        assert text in result.stdout
    assert "dense" in result.stderr  # the progress bar


@pytest.mark.parametrize("raw", [(), ("--raw",)])
def test_whole_budget_answers_a_prompt_like_dense(model: str, tmp_path: Path, raw: tuple[str, ...]) -> None:
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("The ferry left the quay at seven. " * 5)
    arguments = ("--token-budget", "1024", "--prompt-file", str(prompt), "--max-new-tokens", "6", "--json", *raw)
    result = invoke("compare", "--model", model, *arguments)
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["agree"] == 1
    assert report["sparse"]["kv_fraction"] == 1.0
    assert report["runs"][0]["dense"]["prefill_seconds"] > 0


def test_a_method_that_extends_the_positions_may_go_beyond_them(model: str) -> None:
    arguments = ("--method", "tokenselect", "--token-budget", "128", "--passkey-tokens", "1100", "--depths", "0.5")
    result = invoke("compare", "--model", model, *arguments, "--max-new-tokens", "3", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["sparse"]["kv_fraction"] < 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--method", "qest"), "quest"),
        (("--set", "page_sise=16"), "page_size"),
        (("--set", "page_size=17"), "17"),
        (("--set", "page_size=big"), "big"),
        (("--set", "page_size"), "name=value"),
        (("--set", "token_budget=64", "--token-budget", "64"), "twice"),
        (("--token-budget", "8"), "8"),
        (("--token-budget", "0"), "0"),
        (("--depths", "0.5,two"), "0.5,two"),
        (("--depths", "1.5"), "1.5"),
        (("--prompt-file", "nowhere.txt"), "nowhere.txt"),
        (("--prompt-file", "nowhere.txt", "--passkey-tokens", "500"), "exclude"),
        (("--passkey-tokens", "5"), "num_tokens=5"),
        (("--passkey-tokens", "5000"), "1024"),
        (("--dtype", "float8"), "float8"),
        (("--device", "abacus"), "abacus"),
        (("--model", "./nowhere"), "nowhere"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(model: str, arguments: tuple[str, ...], message: str) -> None:
    result = invoke("compare", *(() if "--model" in arguments else ("--model", model)), *arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("error:")]
    assert message in line
    assert "Traceback" not in result.output


def test_empty_prompt_file_is_an_error(model: str, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("\n")
    result = invoke("compare", "--model", model, "--prompt-file", str(tmp_path / "empty.txt"))
    assert result.exit_code == 2
    assert "empty" in result.stderr


HOSTILE = {
    r"\[x^2 + 1\]": r"\[x^2 + 1\]",
    r"\[/x] [/] [bold]no[/bold] :smile:": r"\[/x] [/] [bold]no[/bold] :smile:",
    "\x1b[31mred\x1b[0m\x07 \x9b2J \r\u202eback": r"\x1b[31mred\x1b[0m\x07 \x9b2J \r\u202eback",
    "lone \ud83d surrogate": r"lone \ud83d surrogate",
    "two\nlines": "two",
}


@pytest.mark.parametrize(("answer", "shown"), HOSTILE.items())
@pytest.mark.parametrize("kind", ["prompt", "passkey"])
def test_defect_7_an_answer_is_shown_as_it_is_and_steers_nothing(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, answer: str, shown: str
) -> None:
    run = Run(answer, (1, 2), 0.1, 0.1, 1)
    monkeypatch.setattr(f"hf_sparse_attn.cli.app.run_{kind}", lambda *_: run)
    (tmp_path / "prompt.txt").write_text("A prompt.")
    prompts = {
        "prompt": ("--prompt-file", str(tmp_path / "prompt.txt")),
        "passkey": ("--passkey-tokens", "400", "--depths", "0.5"),
    }
    arguments = ("compare", "--model", model, *prompts[kind])
    result = invoke(*arguments)
    assert result.exit_code == 0, result.output
    assert result.stdout.count(shown) == 2  # dense and sparse
    assert not [char for char in result.stdout if char != "\n" and not char.isprintable()]
    as_json = json.loads(invoke(*arguments, "--json").stdout)
    assert as_json["runs"][0]["dense"]["answer"] == answer


@pytest.mark.parametrize("name", ["./no[/x]", "./no\x1b[31m"])
def test_defect_7_a_models_name_is_shown_as_it_is(name: str) -> None:
    result = invoke("compare", "--model", name)
    assert result.exit_code == 2, result.output
    assert repr(name) in result.stderr
    assert "\x1b[31m" not in result.stderr


def test_defect_7_text_that_steers_a_terminal_becomes_escapes() -> None:
    assert visible("a\tb\nc é 漢 👩\u200d🚀") == "a\tb\nc é 漢 👩\u200d🚀"
    assert visible("\x00\x7f\x85\u2028\u2066") == r"\x00\x7f\x85\u2028\u2066"
    assert one_line("first\n  second\x1b") == r"first second\x1b"
    assert literal("[red]x").plain == "[red]x"


def test_defect_7_an_answer_beyond_the_outputs_encoding_is_printed(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hf_sparse_attn.cli.app.run_prompt", lambda *_: Run("漢字", (1, 2), 0.1, 0.1, 1))
    (tmp_path / "prompt.txt").write_text("A prompt.")
    output = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr("sys.stdout", output)
    app(("compare", "--model", model, "--prompt-file", str(tmp_path / "prompt.txt")), standalone_mode=False)
    output.flush()
    assert rb"\u6f22\u5b57" in output.buffer.getvalue()
