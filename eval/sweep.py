"""The runs of a sweep, one after another, with progress and summaries on the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from eval.config import RunConfig, with_dense
from eval.errors import EvalError
from eval.options import result_folders
from eval.terminal import WIDTH, on_record, on_start, progress, summary_table
from hf_sparse_attn.cli.terminal import one_line, print_table

if TYPE_CHECKING:
    from eval.engine import Variant
    from eval.models import Models
    from eval.processes import Processes
    from eval.run_check import OnRefusal


def run_all(configs: list[RunConfig], out: Path | None, file: Path | None, only: Sequence[int] | None = None) -> None:
    """Run each configuration in its own folder under ``out``, or in ``out`` itself if there is only one.

    ``file`` is the one that the configurations are from, if any. ``only`` has the numbers of those to run, from 1; the
    folders have the same names without it.

    Raises
    ------
    EvalError
        A run is invalid. Benchmarks and methods of all runs are checked before the first one.
    typer.Exit
        All records of a run are errors. The other runs have been made.
    """
    from eval.models import Models
    from eval.processes import Processes

    folders = result_folders(configs, out, None if file is None else file.stem)
    runs = [
        (number, config, folder)
        for number, (config, folder) in enumerate(zip(configs, folders, strict=True), start=1)
        if only is None or number in only
    ]
    for number, config, _ in runs:
        places = [str(file)] * (file is not None) + [f"run {number}"] * (len(configs) > 1)
        _check(config, "".join(f"{place}: " for place in places))
    processes = Processes.current()
    models = Models(processes)
    has_failed = False
    for _, config, folder in runs:
        summary = run_one(config, folder, models, processes, beside=folders)
        has_failed |= processes.is_main and summary["errors"] == summary["rows"]
    if has_failed:
        raise typer.Exit(1)


def _check(config: RunConfig, where: str) -> None:
    """Check a run's benchmark, its settings and its methods, which need neither model nor data."""
    from eval.engine import make_variants
    from eval.run_check import find_benchmark

    try:
        find_benchmark(config)
        make_variants(with_dense(config))
    except EvalError as error:
        raise EvalError(f"{where}{error}") from error


def run_one(
    config: RunConfig,
    folder: Path,
    models: Models,
    processes: Processes,
    *,
    keeps: bool = True,
    variants: Sequence[Variant] | None = None,
    on_refusal: OnRefusal | None = None,
    beside: Sequence[Path] = (),
) -> dict[str, Any]:
    """Run a configuration in a folder, and print and return its summary.

    ``keeps`` says whether the folder lasts, and is named on the terminal. The other arguments are those of
    :func:`eval.runner.run`.
    """
    from eval.runner import run

    label = f"{config.benchmark} -> {folder}" if keeps else config.benchmark
    with progress(label, processes.is_main) as update:
        say_expected = partial(on_start, config.benchmark) if processes.is_main else (lambda seconds: None)
        summary = run(
            config,
            folder,
            models,
            processes,
            on_record(update),
            say_expected,
            variants=variants,
            on_refusal=on_refusal,
            beside=beside,
        )
    if processes.is_main:
        print_table(summary_table(summary, str(folder) if keeps else folder.name), WIDTH)
        if summary["errors"]:
            where = f"; see {folder}/rows.jsonl" if keeps else ""
            message = f"{summary['errors']} of {summary['rows']} records are errors{where}"
            typer.echo(one_line(message), err=True)
    return summary
