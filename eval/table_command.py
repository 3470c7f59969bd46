"""``python -m eval table``: run a paper's table, and print the paper's figures beside ours."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from eval.config import RunConfig
from eval.errors import EvalError
from eval.options import (
    BudgetOption,
    ChatTemplateOption,
    CudaGraphOption,
    DataDirOption,
    DeviceOption,
    DtypeOption,
    LimitOption,
    ModelOption,
    ProtocolDirOption,
    harness_errors,
    result_folders,
)
from eval.sweep import run_one
from eval.terminal import WIDTH
from hf_sparse_attn.cli.terminal import integers, print_table, words

if TYPE_CHECKING:
    from eval.comparison import Comparison
    from eval.engine import Variant
    from eval.table_runs import Refusal, TableRun
    from eval.tables import PaperTable

REPORT = "table.json"
"""The file with the table in a results folder."""


def table(
    name: Annotated[str, typer.Argument(help="See `python -m eval list`.")],
    tasks: Annotated[str | None, typer.Option(help="Comma-separated.", show_default="the table's")] = None,
    model: ModelOption = None,
    limit: LimitOption = None,
    lengths: Annotated[str | None, typer.Option(help="In tokens, comma-separated.", show_default="the table's")] = None,
    token_budget: BudgetOption = None,
    chat_template: ChatTemplateOption = None,
    out: Annotated[Path | None, typer.Option(help="Results folder.", show_default="none")] = None,
    data_dir: DataDirOption = None,
    protocol_dir: ProtocolDirOption = None,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
    cuda_graph: CudaGraphOption = False,
) -> None:
    """Run a paper's table with the methods available here, and print its figures next to ours.

    Where the paper's figures could not be read, the table has ours alone and says why.

    A row of the table that cannot run says why, and the others run. Without --out nothing is kept, and an interrupted
    run cannot be resumed.
    """
    from eval.config import read_sweep
    from eval.processes import Processes
    from eval.table_runs import table_runs
    from eval.tables import read_table

    given = {
        "tasks": words("--tasks", tasks),
        "model": model,
        "limit": limit,
        "lengths": integers("--lengths", lengths),
        "token_budget": integers("--token-budget", token_budget),
        "chat_template": chat_template,
        "data_dir": data_dir,
        "protocol_dir": protocol_dir,
        "dtype": dtype,
        "device": device,
        "cuda_graph": cuda_graph or None,
    }
    with harness_errors():
        wanted = read_table(name)
        if out is None and Processes.current().world_size > 1:
            raise EvalError("--out is missing: several processes need a folder in common")
        runs = table_runs(read_sweep(wanted.path, {}), given)
        with tempfile.TemporaryDirectory() if out is None else nullcontext(str(out)) as folder:
            command = None if out is None else _command(name, given)
            is_measured = _run_and_print(wanted, runs, Path(folder), command)
    if not is_measured:
        raise typer.Exit(1)


def _command(name: str, given: Mapping[str, Any]) -> str:
    """Return the command of a table for its report, with D and P for folders of data and protocols."""
    words = ["python -m eval table", name]
    for option, value in given.items():
        if value not in (None, (), []):
            shown = {"data_dir": "D", "protocol_dir": "P"}.get(option, value)
            listed = ",".join(map(str, shown)) if isinstance(shown, (list, tuple)) else str(shown)
            flag = f"--{option.replace('_', '-')}"
            words.append(flag if value is True else f"{flag} {listed}")
    return " ".join(words)


def _run_and_print(wanted: PaperTable, runs: Sequence[TableRun], out: Path, command: str | None) -> bool:
    """Run each distinct run once, print the table, and return whether anything was measured.

    With ``command``, the one that made it, the table is written to ``out`` as well.
    """
    from eval.comparison_table import paper_table, table_report
    from eval.models import Models
    from eval.processes import Processes
    from eval.run_check import check_run
    from eval.session import write_result
    from eval.store import read_json

    processes = Processes.current()
    if (out / REPORT).exists() and (held := read_json(out / REPORT, "a table").get("name")) != wanted.name:
        raise EvalError(f"out={str(out)!r} holds the table {held}; name another folder for {wanted.name}")
    models = Models(processes)
    groups = _alike(runs)
    shared = [_united(group) for group in groups]
    for run in shared:  # before the first run, which may take hours
        check_run(run.config, run.variants, models)
    folders = result_folders([run.config for run in shared], out, wanted.name)
    if out not in folders and (out / "config.json").exists():
        raise EvalError(f"out={str(out)!r} holds the results of a run; name another folder for the table's")
    comparisons: list[Comparison] = []
    devices = set()
    is_measured = False
    for group, run, folder in zip(groups, shared, folders, strict=True):
        refusals = list(run.refusals)
        refuse = partial(_add_refusal, refusals)
        summary = run_one(
            run.config, folder, models, processes, keeps=command is not None, variants=run.variants, on_refusal=refuse
        )
        if processes.is_main:
            is_measured = is_measured or summary["errors"] < summary["rows"]
            devices.add(summary["device"])
            comparisons += _comparisons(wanted, group, run, folder, refusals)
    if not processes.is_main:
        return True
    device = ", ".join(sorted(devices))
    print_table(paper_table(comparisons, wanted.paper, device), WIDTH)
    if command is not None:
        assert wanted.paper is not None  # read_table refuses files of no paper
        write_result(out / REPORT, table_report(comparisons, wanted.name, wanted.paper, command, device))
    return is_measured


def _alike(runs: Sequence[TableRun]) -> list[list[TableRun]]:
    """Group the runs that one run can serve on another model than the paper's: they differ in variants alone."""
    groups: list[list[TableRun]] = []
    for run in runs:
        for group in groups:
            if _settings(run) == _settings(group[0]):
                group.append(run)
                break
        else:
            groups.append([run])
    return groups


def _united(group: Sequence[TableRun]) -> TableRun:
    """Return the run that serves a group: the first one, with the variants of all."""
    listed: list[dict[str, Any]] = []
    for run in group:
        listed += [each for each in run.config.variants if each not in listed]
    return replace(
        group[0],
        config=replace(group[0].config, variants=tuple(listed)),
        variants=tuple(dict.fromkeys(each for run in group for each in run.variants)),
        refusals=tuple(dict.fromkeys(each for run in group for each in run.refusals)),
    )


def _settings(run: TableRun) -> RunConfig:
    """Return a run's settings but for its variants."""
    return replace(run.config, variants=())


def _add_refusal(refusals: list[Refusal], variant: Variant, reason: str) -> None:
    from eval.table_runs import Refusal

    refusals.append(Refusal(variant.method.name, reason, variant.token_budget, variant.name))


def _comparisons(
    wanted: PaperTable, alike: Sequence[TableRun], shared: TableRun, folder: Path, refusals: Sequence[Refusal]
) -> list[Comparison]:
    """Return the figures of the runs that a folder's records stand for, each beside ours, and our other rows."""
    from eval.comparison import Measured, compare, figures_of_run, refusals_of, rows_of_ours
    from eval.store import read_records
    from eval.summary import summarise

    records = read_records(folder / "rows.jsonl")
    entries = summarise(records)
    reasons = [*refusals, *refusals_of(records)]
    compared: list[Comparison] = []
    for run in alike:
        compared += compare(figures_of_run(wanted.figures, run.printed), Measured.of(run, entries, reasons))
    return compared + rows_of_ours(shared.printed, Measured.of(shared, entries, reasons), compared)
