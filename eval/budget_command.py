"""``python -m eval budget``: search for each method's smallest dense-equivalent setting."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from eval.config import make_config, read_sweep, read_yaml
from eval.errors import EvalError
from eval.options import (
    BenchmarkArgument,
    ChatOption,
    ChatTemplateOption,
    ConfigOption,
    DataDirOption,
    DeviceOption,
    DtypeOption,
    LengthsOption,
    LimitOption,
    MethodOption,
    ModelOption,
    ParameterOption,
    ProtocolDirOption,
    QuestionOption,
    SeedOption,
    SettingOption,
    TasksOption,
    given,
    harness_errors,
    result_folders,
)
from eval.terminal import WIDTH, on_record, progress
from hf_sparse_attn.cli.terminal import integers, parse_settings, print_table, visible, words

if TYPE_CHECKING:
    from eval.config import RunConfig
    from eval.findings import Target


def budget(
    benchmark: BenchmarkArgument = None,
    config: ConfigOption = None,
    target: Annotated[
        float | None, typer.Option(help="Least share of dense attention's score.", show_default="0.98")
    ] = None,
    divergence: Annotated[
        float | None, typer.Option(help="Instead: greatest mean KL from dense attention, in nats per token.")
    ] = None,
    steps: Annotated[
        list[str] | None,
        typer.Option(metavar="METHOD=VALUES", help="Settings to choose from, such as quest=[64,128]; repeatable."),
    ] = None,
    pool: Annotated[
        bool | None,
        typer.Option("--pool", help="One setting for all tasks together.", show_default="one a task"),
    ] = None,
    tasks: TasksOption = None,
    model: ModelOption = None,
    method: MethodOption = None,
    parameter: ParameterOption = None,
    lengths: LengthsOption = None,
    limit: LimitOption = None,
    records: Annotated[
        list[Path] | None,
        typer.Option(metavar="FOLDER", help="Judge the records of a results folder; measures nothing. Repeatable."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Results folder.", show_default="eval-results/budget-BENCHMARK-MODEL, or the file's name"),
    ] = None,
    seed: SeedOption = None,
    question: QuestionOption = None,
    chat: ChatOption = None,
    chat_template: ChatTemplateOption = None,
    data_dir: DataDirOption = None,
    protocol_dir: ProtocolDirOption = None,
    settings: SettingOption = None,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
) -> None:
    """Find each method's smallest budget, or threshold, that is as good as dense attention, by bisection.

    Every probe is stored; finished samples are skipped. Options override the file.
    """
    overrides = {
        "benchmark": benchmark,
        "tasks": words("--tasks", tasks),
        "model": model,
        "method": words("--method", method),
        "parameters": parse_settings("--parameter", parameter or []),
        "lengths": integers("--lengths", lengths),
        "limit": limit,
        "seed": seed,
        "question": question,
        "chat": chat,
        "chat_template": chat_template,
        "data_dir": data_dir,
        "protocol_dir": protocol_dir,
        "options": parse_settings("--set", settings or []),
        "dtype": dtype,
        "device": device,
    }
    asked = {"target": target, "divergence": divergence, "steps": parse_settings("--steps", steps or []), "pool": pool}
    if records:
        with harness_errors():
            _judge(records, make_target({}, asked), out, given(overrides) | given({"config": config}))
        return
    with harness_errors():
        from eval.budget import search
        from eval.budget_table import budget_table
        from eval.models import Models
        from eval.processes import Processes
        from eval.report.budgets import write_picture

        configs = read_sweep(config, overrides) if config else [make_config(given(overrides))]
        wanted = make_target(_search_of(config), asked)
        targets = [_of_run(wanted, each.method, configs) for each in configs]
        processes = Processes.current()
        models = Models(processes)
        folders = result_folders(configs, out, None if config is None else config.stem, kind="budget-")
        for each, its_target, folder in zip(configs, targets, folders, strict=True):
            with progress(f"budgets on {each.benchmark} -> {folder}", processes.is_main) as update:
                report = search(each, its_target, folder, models, processes, on_record(update))
            if processes.is_main:
                print_table(budget_table(report), WIDTH)
                if (picture := write_picture(report, folder)) is not None:
                    typer.echo(visible(str(picture)))
            if not any(entry["dense"]["samples"] for entry in report["results"]):
                raise typer.Exit(1)


def _of_run(target: Target, methods: Sequence[str], configs: Sequence[RunConfig]) -> Target:
    """Leave out the steps of methods that only other runs of a sweep search; unknown names stay, to be refused."""
    elsewhere = {name for config in configs for name in config.method} - set(methods)
    return replace(target, steps={name: steps for name, steps in target.steps.items() if name not in elsewhere})


def _judge(records: list[Path], target: Target, out: Path | None, others: Mapping[str, Any]) -> None:
    from eval.budget_records import judge
    from eval.budget_table import RESULT, budget_table
    from eval.report.budgets import write_picture

    if others:
        raise EvalError(f"{', '.join(others)}: not allowed with --records, whose runs are over")
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
    report = judge(records, target, None if out is None else out / RESULT)
    print_table(budget_table(report), WIDTH)
    if out is not None and (picture := write_picture(report, out)) is not None:
        typer.echo(visible(str(picture)))


def make_target(in_file: Mapping[str, Any], asked: Mapping[str, Any]) -> Target:
    """Return what a search must reach: the command line's settings, else the file's, else 98 % of the score.

    Raises
    ------
    EvalError
        A name is unknown, or a value is not allowed.
    """
    from eval.findings import Target

    known = [field.name for field in fields(Target)]
    for name in in_file:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise EvalError(f"search: {name!r} is unknown{hint}; known: {', '.join(known)}")
    now = given(dict(asked))
    criteria = ("target", "divergence")
    kept = {name: value for name, value in in_file.items() if name not in criteria or not set(criteria) & now.keys()}
    chosen = {**kept, **now}
    if not set(criteria) & chosen.keys():
        chosen["target"] = 0.98
    if not isinstance(chosen.get("steps", {}), dict):
        raise EvalError(f"search: steps={chosen['steps']!r} is not allowed: a mapping of methods to lists of numbers")
    return Target(**chosen)


def _search_of(config: Path | None) -> dict[str, Any]:
    found = {} if config is None else read_yaml(config).get("search", {})
    if not isinstance(found, dict):
        raise EvalError(f"{config}: search={found!r} is not allowed: a mapping")
    return found
