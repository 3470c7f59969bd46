"""The harness's terminal output, and parsing of its command line's lists."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from hf_sparse_attn.cli.progress import COLUMNS, WORTH_SAYING_SECONDS, about, moves_cursor, say
from hf_sparse_attn.cli.terminal import literal, one_line, visible

WORTH_EXPECTING_SECONDS = 600.0
WIDTH = 140
"""Width of a table in characters when the output is a file."""


@contextmanager
def progress(label: str, is_shown: bool) -> Iterator[Callable[[int, int, str | None], None]]:
    """Show progress on stderr; the yielded function takes the number done, the total and a label.

    On a terminal this is a bar. Elsewhere long runs print one line with the estimated time left, and every run prints
    one line at the end.
    """
    console = Console(stderr=True)
    if not is_shown or not moves_cursor(console):
        yield _plain_progress(visible(label)) if is_shown else _no_progress
        return
    with Progress(*COLUMNS, console=console) as bar:
        task = bar.add_task(visible(label), total=None)

        def update(done: int, total: int, what: str | None = None) -> None:
            bar.update(task, completed=done, total=total, description=visible(what or label))

        yield update


def _plain_progress(label: str) -> Callable[[int, int, str | None], None]:
    started = time.perf_counter()
    first: int | None = None
    is_said = False

    def update(done: int, total: int, what: str | None = None) -> None:
        nonlocal first, is_said
        seconds = time.perf_counter() - started
        first = done if first is None else first  # a resumed run starts with its existing records
        if done == total:
            say(f"{label}: {done} of {total} in {seconds:.1f} s")
        elif done > first and seconds >= WORTH_SAYING_SECONDS and not is_said:
            is_said = True
            say(f"{label}: {done} of {total}, {about(seconds * (total - done) / (done - first))} left")

    return update


def _no_progress(done: int, total: int, what: str | None = None) -> None: ...


def on_record(update: Callable[[int, int, str | None], None]) -> Callable[[int, int, dict[str, Any] | None], None]:
    """Return a function to call after each record, which moves the bar and prints the record's error, if any."""

    def show(done: int, total: int, record: dict[str, Any] | None) -> None:
        update(done, total, None)
        if record is not None and record["error"] is not None:
            typer.echo(
                one_line(f"{record['task']} {record['sample_id']} {record['method']}: {record['error']}"), err=True
            )

    return show


def on_start(label: str, seconds: float) -> None:
    """Say a long run's expected time on stderr."""
    if seconds >= WORTH_EXPECTING_SECONDS:
        say(f"{label}: expected to take {about(seconds)} or more (longer contexts are slower than the probe)")


def summary_table(summary: dict[str, Any], title: str) -> Table:
    """Return a run's summary as a table, one line per task, length, method, budget and variant."""
    table = Table(title=literal(title, "table.title"))
    costs = ("KV read", "context, s", "question, s", "TTFT, s", "TPOT, ms")
    diverges = any(entry.get("divergence") is not None for entry in summary["table"])
    followed = ("mean KL", "max KL", "agreement") if diverges else ()
    for column in ("task", "length", "method", "budget", "samples", "score", *followed, *costs):
        table.add_column(column, justify="left" if column in ("task", "method") else "right")
    for entry in summary["table"]:
        perplexity = entry.get("perplexity")
        table.add_row(
            entry["task"],
            number(entry["length"], "{:,}"),
            literal(f"{entry['method']} {entry['variant']}".strip()),
            number(entry["token_budget"], "{:,}"),
            f"{entry['samples']}" + (f" ({entry['errors']} errors)" if entry["errors"] else ""),
            number(entry["score"], "{:.1%}") if perplexity is None else f"perplexity {perplexity:.3f}",
            *((number(entry["divergence"], "{:.4f}"), number(entry["divergence_max"], "{:.3f}")) if diverges else ()),
            *((number(entry["top_agreement"], "{:.1%}"),) if diverges else ()),
            number(entry["kv_fraction"], "{:.1%}"),
            number(entry["context_seconds"], "{:.2f}"),
            number(entry["first_token_seconds"], "{:.3f}"),
            number(entry["ttft_seconds"], "{:.2f}"),
            number(entry["tpot_ms"], "{:.1f}"),
        )
    for place, entry in enumerate(summary["averages"]):
        if place == 0:
            table.add_section()
        table.add_row(
            literal(entry["group"]),
            number(entry["length"], "{:,}"),
            literal(f"{entry['method']} {entry['variant']}".strip()),
            number(entry["token_budget"], "{:,}"),
            f"{entry['samples']}" + (f" ({entry['errors']} errors)" if entry["errors"] else ""),
            number(entry["score"], "{:.1%}"),
        )
    overhead = summary["harness_seconds"] / summary["model_seconds"] if summary["model_seconds"] else None
    caption = f"{summary['device']}, {summary['dtype']}; the harness added {number(overhead, '{:.1%}')}"
    table.caption = literal("\n".join([caption, *_other_metrics(summary["table"])]), "table.caption")
    return table


def _other_metrics(entries: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a line for each entry whose task officially has several metrics."""
    for entry in entries:
        if entry.get("scores"):
            named = ", ".join(f"{name} {score:.1%}" for name, score in entry["scores"].items())
            method = " ".join(str(entry[name]) for name in ("method", "token_budget", "variant") if entry[name])
            yield f"{entry['task']}, {method}: {named} (the table has the first)"


def number(value: float | None, form: str) -> str:
    """Format a number; None becomes a dash."""
    return "-" if value is None else form.format(value)


def of_samples(text: str, entry: Mapping[str, Any], samples: int) -> str:
    """Return a figure of an entry of ``aggregate``, with its number of samples if it lacks some of ``samples``."""
    measured = entry["samples"] - entry["errors"]
    return text if measured == samples else f"{text} (n={measured})"
