"""Measure dense and patched side by side on the same prompts, and show both (``hf-sparse-attn compare``)."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from hf_sparse_attn.cli.memory import PeakMemory
from hf_sparse_attn.cli.terminal import literal

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from hf_sparse_attn.cli.passkey import Passkey
    from hf_sparse_attn.methods import SparseMethod


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
    """The runs of one side, dense or patched."""

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


def run_both_sides(
    model: PreTrainedModel,
    method: SparseMethod,
    prompts: int,
    answer: Callable[[int, bool, Callable[[], None]], Run],
    err: Console,
) -> tuple[Side, Side]:
    """Answer every prompt dense, then every prompt patched; the model is left unpatched."""
    from hf_sparse_attn import patch_model, unpatch_model

    dense, patched = Side(), Side()
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
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


def run_passkey(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    passkey: Passkey,
    max_new_tokens: int,
    sparse: bool,
    on_step: Callable[[], None],
) -> Run:
    """Let one side look for a passkey, in a forward pass a token; ``on_step`` is called after each."""
    from transformers import DynamicCache

    from hf_sparse_attn import SparseCache, sparse_attention_stats
    from hf_sparse_attn.cli.passkey import answer_passkey

    cache = SparseCache.for_model(model) if sparse else DynamicCache(config=model.config)
    answer = answer_passkey(model, tokenizer, passkey, cache, max_new_tokens, on_step)
    fraction = sparse_attention_stats(model).kv_fraction if sparse else 1.0
    return Run(
        answer.text, answer.token_ids, answer.prefill_seconds, answer.decode_seconds, answer.decode_steps, fraction
    )


def run_prompt(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    input_ids: list[int],
    max_new_tokens: int,
    sparse: bool,
    on_step: Callable[[], None],
) -> Run:
    """Let one side answer a prompt through ``generate()``, uncompiled; ``on_step`` is called with every token."""
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


def make_report(
    model_name: str, model: PreTrainedModel, method: SparseMethod, dense: Side, patched: Side
) -> dict[str, Any]:
    """Put both sides together, as ``--json`` prints them: settings, means, and every run beside its counterpart."""
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


def comparison_table(report: dict[str, Any]) -> Table:
    """Show a report of :func:`make_report` as a table."""
    parameters = ", ".join(f"{name}={value}" for name, value in report["parameters"].items())
    table = Table(
        "",
        "dense",
        report["method"],
        title=literal(f"{report['model']} ({report['dtype']}, {report['device']})", "table.title"),
        caption=literal(f"{report['method']}: {parameters}", "table.caption"),
    )
    sides = (report["dense"], report["sparse"])
    for entry in report["runs"]:
        if "depth" not in entry:
            table.add_row("answer", literal(entry["dense"]["answer"]), literal(entry["sparse"]["answer"]))
            continue
        answers = [_judged(entry[side]["answer"], entry[side]["found"]) for side in ("dense", "sparse")]
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


def _judged(answer: str, found: bool) -> Text:
    return literal(f"{answer} ").append(*(("found", "green") if found else ("missed", "red")))


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"
