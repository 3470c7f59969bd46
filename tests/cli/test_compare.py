import io
import json
from pathlib import Path

import pytest

from hf_sparse_attn.cli.app import app
from hf_sparse_attn.cli.compare import Run, Side
from tests.cli.commands import invoke
from tests.tiny import save_bloom, save_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_model(tmp_path_factory.mktemp("model"), chat=True))


COMPARE_PASSKEY = ("--token-budget", "64", "--passkey-tokens", "400", "--depths", "0.1,0.5", "--max-new-tokens", "3")


def test_compare_passkey_json(model: str) -> None:
    result = invoke("compare", "--model", model, *COMPARE_PASSKEY, "--set", "sink_tokens=0", "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    (quest,) = report["variants"]
    assert (quest["name"], quest["method"]) == ("quest", "quest")
    assert quest["parameters"]["token_budget"] == 64
    assert quest["parameters"]["sink_tokens"] == 0
    assert report["passkey_tokens"] == 400
    assert [run["depth"] for run in report["runs"]] == [0.1, 0.5]
    assert report["dense"]["kv_fraction"] == 1.0
    assert 0 < quest["kv_fraction"] < 1
    assert quest["peak_memory_bytes"] > 0
    assert quest["found"] == sum(run["variants"][0]["found"] for run in report["runs"])


def test_compare_passkey_table(model: str) -> None:
    result = invoke("compare", "--model", model, *COMPARE_PASSKEY)
    assert result.exit_code == 0, result.output
    for text in ("dense", "quest", "answers agree", "KV cache read", "prefill", "ms per token", "peak memory"):
        assert text in result.stdout
    assert "answer" not in result.stderr


@pytest.mark.parametrize("raw", [(), ("--raw",)])
def test_whole_budget_answers_a_prompt_like_dense(model: str, tmp_path: Path, raw: tuple[str, ...]) -> None:
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("The ferry left the quay at seven. " * 5)
    arguments = ("--token-budget", "1024", "--prompt-file", str(prompt), "--max-new-tokens", "6", "--json", *raw)
    result = invoke("compare", "--model", model, *arguments)
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    (quest,) = report["variants"]
    assert quest["agree"] == 1
    assert quest["kv_fraction"] == 1.0
    assert report["runs"][0]["variants"][0]["answer"] == report["runs"][0]["dense"]["answer"]
    assert report["runs"][0]["dense"]["prefill_seconds"] > 0


def test_without_a_decoded_token_nothing_was_read(model: str, tmp_path: Path) -> None:
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("The ferry left the quay at seven. " * 5)
    arguments = ("compare", "--model", model, "--prompt-file", str(prompt), "--max-new-tokens", "1")
    report = json.loads(invoke(*arguments, "--json").stdout)
    for side in (report["dense"], *report["variants"]):
        assert side["kv_fraction"] is None
    (row,) = [line for line in invoke(*arguments).stdout.splitlines() if "KV cache read" in line]
    assert [cell.strip() for cell in row.split("│")[2:-1]] == ["-", "-"]


def test_the_mean_of_what_was_read_leaves_out_prompts_without_a_decoded_token() -> None:
    runs = [Run("", (), 1.0, 1.0, steps, fraction) for steps, fraction in ((0, None), (2, 0.25), (2, 0.75))]
    assert Side(runs).summary()["kv_fraction"] == 0.5


def test_a_method_that_extends_the_positions_may_go_beyond_them(model: str) -> None:
    arguments = ("--method", "tokenselect", "--token-budget", "128", "--passkey-tokens", "1100", "--depths", "0.5")
    result = invoke("compare", "--model", model, *arguments, "--max-new-tokens", "3", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["variants"][0]["kv_fraction"] < 1


SEVERAL = ("--method", "quest,tokenselect", "--token-budget", "64,128")


def test_several_methods_and_budgets_are_columns_of_one_table(model: str) -> None:
    result = invoke("compare", "--model", model, *COMPARE_PASSKEY[2:], *SEVERAL, columns=120)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= 120
    (header,) = [line for line in lines if "dense " in line and "quest 64" in line]
    assert [cell.strip() for cell in header.strip("┃").split("┃")] == ["", *COLUMNS]
    fractions = next(line for line in lines if "KV cache read" in line)
    assert fractions.count("%") == 5
    assert "quest: token_budget=64 or 128" in result.stdout


COLUMNS = ["dense", "quest 64", "quest 128", "tokenselect 64", "tokenselect 128"]


def test_several_methods_in_json_with_a_progress_line_each(model: str) -> None:
    repeated = ("--method", "quest", "--method", "tokenselect", "--token-budget", "64", "--token-budget", "128")
    own = ("--set", "quest.page_size=8", "--set", "chunk_size=64")
    result = invoke("compare", "--model", model, *COMPARE_PASSKEY[2:], *repeated, *own, "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert [variant["name"] for variant in report["variants"]] == COLUMNS[1:]
    for variant in report["variants"]:
        parameters = variant["parameters"]
        assert parameters.get("page_size", 8) == 8
        assert parameters.get("chunk_size", 64) == 64
    assert all(len(run["variants"]) == 4 for run in report["runs"])
    labels = [line.partition(":")[0] for line in result.stderr.splitlines() if " in " in line]
    assert labels == COLUMNS


def test_dense_attention_alone_gives_one_column(model: str) -> None:
    result = invoke("compare", "--model", model, *COMPARE_PASSKEY[2:], "--method", "full")
    assert result.exit_code == 0, result.output
    assert "dense" in result.stdout
    assert "agree" not in result.stdout


def test_long_work_is_announced_before_it(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_sparse_attn.cli.compare_command.expected_seconds", lambda *_: 30.0)
    result = invoke("compare", "--model", model, *COMPARE_PASSKEY, "--json")
    assert result.stderr.splitlines()[0] == "about 2 min for 2 x 2 passkeys of 435 tokens"


def test_an_interrupt_ends_without_a_traceback(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("hf_sparse_attn.cli.compare_command.run_side", interrupt)
    result = invoke("compare", "--model", model, *COMPARE_PASSKEY)
    assert result.exit_code == 130
    assert result.stdout == ""
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--method", "qest"), "quest"),
        (("--set", "page_sise=16"), "page_size"),
        (("--set", "page_size=17"), "17"),
        (("--set", "page_size=big"), "big"),
        (("--set", "page_size={[]:1}"), "page_size must be a whole number, got '{[]:1}'"),
        (("--set", f"page_size={'-' * 20_000}1"), "page_size must be a whole number, got '---"),
        (("--set", "page_size"), "name=value"),
        (("--set", "tokenselect.k=8"), "tokenselect"),
        (("--method", "quest,quest"), "twice"),
        (("--token-budget", "64,many"), "64,many"),
        (("--picture", "reads.bmp"), ".png, .svg, .pdf"),
        (("--picture", "nowhere/reads.png"), "nowhere/reads.png"),
        (("--html", "nowhere/page.html"), "nowhere/page.html"),
        (("--html", "page.html", "--method", "full"), "--html"),
        (
            ("--method", "tokenselect,quest", "--token-budget", "64", "--passkey-tokens", "1100"),
            "with quest the model has positions for 1024",
        ),
        (("--set", "token_budget=64", "--token-budget", "64"), "twice"),
        (("--token-budget", "8"), "8"),
        (("--token-budget", "0"), "0"),
        (("--depths", "0.5,two"), "0.5,two"),
        (("--depths", "1.5"), "1.5"),
        (("--prompt-file", "nowhere.txt"), "nowhere.txt"),
        (("--prompt-file", "nowhere.txt", "--passkey-tokens", "500"), "cannot be used together"),
        (("--prompt-file", "nowhere.txt", "--depths", "0.5"), "--depths and --seed are for passkeys"),
        (("--raw",), "--raw needs --prompt-file"),
        (("--method", "duo_attention", "--set", "heads=nowhere.tsv"), "heads='nowhere.tsv' cannot be read"),
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


def test_dense_attention_of_a_model_that_states_no_positions_is_an_error(tmp_path: Path) -> None:
    result = invoke("compare", "--model", str(save_bloom(tmp_path)), *COMPARE_PASSKEY[2:], "--method", "full")
    assert result.exit_code == 2
    assert "error: the configuration of model type 'bloom' has no max_position_embeddings" in result.stderr


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
@pytest.mark.parametrize("kind", ["Prompt", "Passkey"])
def test_an_answer_is_shown_literally_without_control_characters(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, answer: str, shown: str
) -> None:
    run = Run(answer, (1, 2), 0.1, 0.1, 1)
    monkeypatch.setattr(f"hf_sparse_attn.cli.compare.{kind}Work.run", lambda *_: run)
    (tmp_path / "prompt.txt").write_text("A prompt.")
    prompts = {
        "Prompt": ("--prompt-file", str(tmp_path / "prompt.txt")),
        "Passkey": ("--passkey-tokens", "400", "--depths", "0.5"),
    }
    arguments = ("compare", "--model", model, *prompts[kind])
    result = invoke(*arguments)
    assert result.exit_code == 0, result.output
    assert result.stdout.count(shown) == 2  # dense and sparse
    assert not [char for char in result.stdout if char != "\n" and not char.isprintable()]
    as_json = json.loads(invoke(*arguments, "--json").stdout)
    assert as_json["runs"][0]["dense"]["answer"] == answer


@pytest.mark.parametrize("name", ["./no[/x]", "./no\x1b[31m"])
def test_a_model_name_is_shown_literally(name: str) -> None:
    result = invoke("compare", "--model", name)
    assert result.exit_code == 2, result.output
    assert repr(name) in result.stderr
    assert "\x1b[31m" not in result.stderr


def test_an_answer_beyond_the_outputs_encoding_is_printed(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hf_sparse_attn.cli.compare.PromptWork.run", lambda *_: Run("漢字", (1, 2), 0.1, 0.1, 1))
    (tmp_path / "prompt.txt").write_text("A prompt.")
    output = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr("sys.stdout", output)
    app(("compare", "--model", model, "--prompt-file", str(tmp_path / "prompt.txt")), standalone_mode=False)
    output.flush()
    assert rb"\u6f22\u5b57" in output.buffer.getvalue()
