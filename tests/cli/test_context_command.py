"""``hf-sparse-attn context``: prepare, inspect and ask, on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from hf_sparse_attn import FixedContext, patch_model, unpatch_model
from hf_sparse_attn.cli.app import app
from hf_sparse_attn.cli.context.prompt import AFTER_QUESTION, encode_document, encode_question
from hf_sparse_attn.cli.models import load_model
from tests.cli.commands import invoke
from tests.tiny import make_tokenizer, save_model

TEXT = "The day is long. The wind is low. Out and home again. " * 8
QUESTIONS = ("The day is", "We sail on. The sea")
SMALL = ("--window", "20", "--clusters", "0.2", "--target-sparsity", "0.5")


def num_tokens() -> int:
    return len(make_tokenizer()(TEXT.strip())["input_ids"])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_model(tmp_path_factory.mktemp("model"), chat=True))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return str(path)


def prepare(model: str, text: str, output: Path, *options: str) -> dict[str, Any]:
    arguments = ("--model", model, "--text", text, "--output", str(output), "--json", *SMALL, *options)
    result = invoke("context", "prepare", *arguments)
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


@pytest.fixture(scope="module")
def prepared(model: str, text: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    path = tmp_path_factory.mktemp("context") / "text.context"
    return path, prepare(model, text, path)


def test_prepare_reports_what_it_wrote(prepared: tuple[Path, dict[str, Any]]) -> None:
    path, report = prepared
    tokens = num_tokens()
    assert (report["tokens"], report["layers"], report["kv_heads"]) == (tokens, 3, 1)
    assert report["counts"] == {"clusters": round(0.2 * (tokens - 20 - 4))}
    assert report["file_bytes"] == path.stat().st_size
    assert set(report["seconds"]) == {"prefill", "clustering", "calibration"}
    assert min(report["seconds"].values()) >= 0
    assert report["budget"]["target"] == 0.5
    shares = torch.tensor(report["budget"]["prefill"])
    assert shares.shape == (3, 1)
    assert report["budget"]["prefill_mean"] == pytest.approx(float(shares.mean()))
    assert 20 / tokens <= float(shares.min()) <= float(shares.max()) < 1


def test_prepare_shows_progress_and_a_table(model: str, text: str, tmp_path: Path) -> None:
    arguments = ("--model", model, "--text", text, "--output", str(tmp_path / "c"), *SMALL, "--chunk-size", "100")
    result = invoke("context", "prepare", *arguments, "--levels", "2", "--per-layer", "--set", "iterations=3")
    assert result.exit_code == 0, result.output
    for words in ("coarse clusters", "threshold", "target", "prefill, seconds", "iterations=3", "KV heads, decode"):
        assert words in result.stdout
    lines = [line for line in result.stderr.splitlines() if " in " in line]
    chunks = -(-num_tokens() // 100)
    assert [line.partition(" in ")[0] for line in lines] == [f"prefill: {chunks} chunks", "clustering: 3 layers"]


def test_a_text_from_stdin_gives_the_same_context(
    model: str, prepared: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    output = tmp_path / "text.context"
    arguments = ["context", "prepare", "--model", model, "--text", "-", "--output", str(output), *SMALL, "--json"]
    result = CliRunner().invoke(app, arguments, input=TEXT.encode())
    assert result.exit_code == 0, result.output
    contents = [json.loads(invoke("context", "inspect", str(path), "--json").stdout) for path in (output, prepared[0])]
    assert contents[0]["origin"] == contents[1]["origin"]
    assert contents[0]["budget"] == contents[1]["budget"]


def test_inspect_finds_what_prepare_reported(prepared: tuple[Path, dict[str, Any]], model: str) -> None:
    path, report = prepared
    result = invoke("context", "inspect", str(path), "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    for name in ("tokens", "layers", "kv_heads", "counts", "thresholds", "seconds", "file_bytes"):
        assert found[name] == report[name]
    assert found["budget"]["decode"] == [pytest.approx(shares) for shares in report["budget"]["decode"]]
    assert found["origin"]["model"] == model
    assert found["origin"]["dtype"] == "float32"
    assert found["method"]["window"] == 20
    kept = found["bytes"]["keys and values"]
    assert kept == 2 * 4 * 16 * report["tokens"] * 3  # K and V, float32, head_dim 16, 3 layers of one KV head
    assert kept < sum(found["bytes"].values()) < path.stat().st_size


def test_inspect_shows_a_bar_for_every_head(prepared: tuple[Path, dict[str, Any]]) -> None:
    result = invoke("context", "inspect", str(prepared[0]))
    assert result.exit_code == 0, result.output
    assert "window=20" in result.stdout
    bars = [char for char in result.stdout if "\u2581" <= char <= "\u2588"]
    assert len(bars) == 3


def expected_answers(model: str, path: Path, target: float | None = None) -> list[str]:
    """Answer each question alone through the Python interface."""
    loaded, tokenizer = load_model(model)
    context = FixedContext.load(path, loaded)
    if target is not None:
        context = context.retarget(target)
    patch_model(loaded, context.method)
    answers = []
    for question in QUESTIONS:
        token_ids = torch.tensor([encode_question(tokenizer, question, context.notes)])
        output = loaded.generate(
            token_ids,
            attention_mask=torch.ones_like(token_ids),
            past_key_values=context.cache(),
            max_new_tokens=6,
            do_sample=False,
        )
        answers.append(tokenizer.decode(output[0, token_ids.shape[1] :], skip_special_tokens=True).strip())
    unpatch_model(loaded)
    return answers


def test_ask_answers_a_batch_as_each_question_alone(
    model: str, prepared: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    (tmp_path / "questions.txt").write_text(f"{QUESTIONS[1]}\n\n", encoding="utf-8")
    arguments = (str(prepared[0]), QUESTIONS[0], "--questions", str(tmp_path / "questions.txt"), "--model", model)
    result = invoke("context", "ask", *arguments, "--max-new-tokens", "6", "--dense", "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["questions"] == list(QUESTIONS)
    sparse, dense = report["answers"]["squeezed"], report["answers"]["dense"]
    assert sparse["texts"] == expected_answers(model, prepared[0])
    assert dense["texts"] == expected_answers(model, prepared[0], target=0)
    assert 0 < sparse["kv_fraction"] < dense["kv_fraction"]
    assert sparse["first_token_seconds"] > 0
    assert sparse["ms_per_token"] > 0


def test_ask_shows_answers_beside_each_other(model: str, prepared: tuple[Path, dict[str, Any]]) -> None:
    arguments = (str(prepared[0]), *QUESTIONS, "--model", model, "--max-new-tokens", "2", "--batch-size", "1")
    result = invoke("context", "ask", *arguments, "--dense")
    assert result.exit_code == 0, result.output
    for words in (*QUESTIONS, "squeezed", "dense", "time to first token", "KV cache read"):
        assert words in result.stdout
    assert [line.partition(" in ")[0] for line in result.stderr.splitlines()[-2:]] == [
        "squeezed: 2 questions",
        "dense: 2 questions",
    ]


def test_with_the_chat_template_context_and_question_are_one_message(model: str, text: str, tmp_path: Path) -> None:
    prepare(model, text, tmp_path / "chat.context", "--chat")
    loaded, tokenizer = load_model(model)
    context = FixedContext.load(tmp_path / "chat.context", loaded)
    assert context.notes == {AFTER_QUESTION: "</s>"}
    token_ids, notes = encode_document(tokenizer, TEXT.strip(), chat=True)
    whole = tokenizer.apply_chat_template(
        [{"role": "user", "content": f"{TEXT.strip()}\n\n{QUESTIONS[0]}"}], add_generation_prompt=True, tokenize=False
    )
    parts = [*token_ids, *encode_question(tokenizer, QUESTIONS[0], notes)]
    assert parts == tokenizer(whole, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "no chat template"),
        ("{% for m in messages %}{{ m['content'] | upper }}{% endfor %}", "changes or repeats"),
        ("{% for m in messages %}{{ m['content'] }}{{ m['content'] }}{% endfor %}", "changes or repeats"),
    ],
)
def test_a_template_that_cannot_be_split_is_an_error(template: str | None, message: str) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    with pytest.raises(ValueError, match=message):
        encode_document(tokenizer, "a question", chat=True)


def fails(*arguments: str) -> str:
    """Run a command that fails, and return the line that says why."""
    result = invoke("context", *arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert "Traceback" not in result.output
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("error:")]
    return line


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--text", "nowhere.txt"), "nowhere.txt"),
        (("--output", "nowhere/c"), "nowhere/c"),
        (("--target-sparsity", "1"), "target_sparsity"),
        (("--clusters", "2"), "clusters"),
        (("--levels", "3"), "levels"),
        (("--window", "5000"), "sink_tokens + window = 5004"),
        (("--chunk-size", "0"), "chunk_size"),
        (("--set", "page_size=16"), "page_size"),
        (("--set", "window=16"), "--window"),
        (("--dtype", "float8"), "float8"),
        (("--model", "./nowhere"), "nowhere"),
    ],
)
def test_prepare_refuses_bad_input_and_writes_nothing(
    model: str, text: str, tmp_path: Path, options: tuple[str, ...], message: str
) -> None:
    usual = {"--model": model, "--text": text, "--output": str(tmp_path / "c")} | dict(
        zip(*[iter(options)] * 2, strict=True)
    )
    assert message in fails("prepare", *(word for pair in usual.items() for word in pair))
    assert list(tmp_path.iterdir()) == []


def test_a_text_beyond_the_positions_is_an_error(model: str, tmp_path: Path) -> None:
    (tmp_path / "long.txt").write_text("The sea is calm. " * 400)
    paths = ("--text", str(tmp_path / "long.txt"), "--output", str(tmp_path / "c"))
    assert "1024" in fails("prepare", "--model", model, *paths)
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("content", [b"", b"\n", b"\xff\xfe\xff"])
def test_an_empty_or_undecodable_text_is_an_error(model: str, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "text").write_bytes(content)
    fails("prepare", "--model", model, "--text", str(tmp_path / "text"), "--output", str(tmp_path / "c"))
    assert not (tmp_path / "c").exists()


def test_a_damaged_file_is_an_error(model: str, prepared: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    content = prepared[0].read_bytes()
    (tmp_path / "cut").write_bytes(content[:-100])
    (tmp_path / "text").write_bytes(b"no context")
    for name in ("cut", "text"):
        assert "damaged" in fails("inspect", str(tmp_path / name))
        assert "damaged" in fails("ask", str(tmp_path / name), "Why?", "--model", model)
    assert "nowhere" in fails("inspect", str(tmp_path / "nowhere"))


def test_ask_refuses_another_model(prepared: tuple[Path, dict[str, Any]], model: str) -> None:
    said = fails("ask", str(prepared[0]), "Why?", "--model", model, "--dtype", "bfloat16")
    assert "by a model in float32, but this one is in bfloat16: load it with dtype='float32'" in said


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "question is missing"),
        ((" ",), "question is missing"),
        (("--questions", "nowhere.txt"), "nowhere.txt"),
        (("Why?", "--max-new-tokens", "900"), "1024"),
        (("Why?", "--dtype", "float8"), "float8"),
    ],
)
def test_ask_refuses_bad_input(
    prepared: tuple[Path, dict[str, Any]], model: str, options: tuple[str, ...], message: str
) -> None:
    assert message in fails("ask", str(prepared[0]), *options, "--model", model)
