"""The harness's terminal output, and parsing of its command line's lists."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from hf_sparse_attn.cli.terminal import fail, literal, one_line, visible

WIDTH = 140
"""Width of a table in characters if the output is a file."""


@contextmanager
def progress(label: str, is_shown: bool) -> Iterator[Callable[[int, int, str | None], None]]:
    """Show a progress bar on stderr; the yielded function takes the numbers done and in total, and a label."""
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(*columns, TimeRemainingColumn(), console=console, disable=not is_shown) as bar:
        task = bar.add_task(visible(label), total=None)

        def update(done: int, total: int, what: str | None = None) -> None:
            bar.update(task, completed=done, total=total, description=visible(what or label))

        yield update


def on_record(update: Callable[[int, int, str | None], None]) -> Callable[[int, int, dict[str, Any] | None], None]:
    """Return a function to call after each record, which moves the bar and prints the record's error, if any."""

    def show(done: int, total: int, record: dict[str, Any] | None) -> None:
        update(done, total, None)
        if record is not None and record["error"] is not None:
            typer.echo(
                one_line(f"{record['task']} {record['sample_id']} {record['method']}: {record['error']}"), err=True
            )

    return show


def summary_table(summary: dict[str, Any], folder: Path) -> Table:
    """Show a run's summary, a line for each task, length, method and budget."""
    table = Table(title=literal(str(folder), "table.title"))
    for column in ("task", "length", "method", "budget", "samples", "score", "KV read", "TTFT, s", "TPOT, ms"):
        table.add_column(column, justify="left" if column in ("task", "method") else "right")
    for entry in summary["table"]:
        perplexity = entry.get("perplexity")
        table.add_row(
            entry["task"],
            number(entry["length"], "{:,}"),
            entry["method"],
            number(entry["token_budget"], "{:,}"),
            f"{entry['samples']}" + (f" ({entry['errors']} errors)" if entry["errors"] else ""),
            number(entry["score"], "{:.1%}") if perplexity is None else f"perplexity {perplexity:.3f}",
            number(entry["kv_fraction"], "{:.1%}"),
            number(entry["ttft_seconds"], "{:.2f}"),
            number(entry["tpot_ms"], "{:.1f}"),
        )
    overhead = summary["harness_seconds"] / summary["model_seconds"] if summary["model_seconds"] else None
    caption = f"{summary['device']}, {summary['dtype']}; the harness added {number(overhead, '{:.1%}')}"
    table.caption = literal(caption, "table.caption")
    return table


def number(value: float | None, form: str) -> str:
    """Format a number; None becomes a dash."""
    return "-" if value is None else form.format(value)


def split(text: str | None) -> tuple[str, ...]:
    """Parse a comma-separated list."""
    return tuple(part.strip() for part in text.split(",") if part.strip()) if text else ()


def integers(option: str, text: str | None) -> tuple[int, ...]:
    """Parse a comma-separated list of whole numbers; exit with an error that names ``option`` if it is not one."""
    try:
        return tuple(int(part) for part in split(text))
    except ValueError:
        fail(f"{option} {text!r} is not a comma-separated list of whole numbers")
