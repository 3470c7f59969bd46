"""``python -m eval``: run benchmarks, report results, time a model, and reproduce papers' tables."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from eval.budget_command import budget
from eval.config import DTYPES, make_config, read_sweep
from eval.errors import EvalError
from eval.host_command import host_profile
from eval.lossless_command import lossless
from eval.options import (
    BenchmarkArgument,
    BudgetOption,
    ChatOption,
    ChatTemplateOption,
    ConfigOption,
    ContextsOption,
    CudaGraphOption,
    DataDirOption,
    DeviceOption,
    DtypeOption,
    KVStorageOption,
    LengthsOption,
    LimitOption,
    MeasureOption,
    MethodOption,
    ModelOption,
    ParameterOption,
    ProtocolDirOption,
    QuestionOption,
    SeedOption,
    SettingOption,
    ShapeOption,
    TasksOption,
    check_output,
    given,
    harness_errors,
)
from eval.sweep import run_all
from eval.table_command import table
from eval.terminal import WIDTH, progress
from eval.throughput_command import throughput
from hf_sparse_attn.cli.terminal import integers, one_line, parse_settings, print_table, ranges, visible, words

app = typer.Typer(
    help="Reproduce the papers' tables: accuracy, KV reads and speed of sparse and dense attention.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)
app.command()(budget)
app.command()(table)
app.command()(throughput)
app.command()(lossless)
app.command()(host_profile)


@app.command("list")
def list_benchmarks() -> None:
    """List the benchmarks with their tasks and settings, and the papers' tables."""
    from eval.benchmarks import BENCHMARKS
    from eval.tables import config_names, read_table, table_names

    listing = Table("benchmark", "what it is", "tasks", "settings (--set)", show_lines=True)
    for benchmark in BENCHMARKS.values():
        settings = "\n".join(f"{name}={value}" for name, value in benchmark.options.items())
        listing.add_row(benchmark.name, benchmark.summary, ", ".join(benchmark.tasks), settings)
    print_table(listing, WIDTH)
    tables = table_names()
    bare = ", ".join(name for name in tables if not read_table(name).figures)
    typer.echo(f"tables (python -m eval table NAME): {', '.join(tables)}; without the paper's figures: {bare}")
    others = ", ".join(name for name in config_names() if name not in tables)
    typer.echo(f"other runs (python -m eval run --config eval/configs/NAME.yaml): {others}")


@app.command()
def run(
    benchmark: BenchmarkArgument = None,
    config: ConfigOption = None,
    only: Annotated[
        str | None,
        typer.Option(metavar="NUMBERS", help="Runs of the file, such as 2,5-7.", show_default="all"),
    ] = None,
    tasks: TasksOption = None,
    model: ModelOption = None,
    method: MethodOption = None,
    token_budget: BudgetOption = None,
    parameter: ParameterOption = None,
    lengths: LengthsOption = None,
    limit: LimitOption = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Results folder.", show_default="eval-results/BENCHMARK-MODEL, or the file's name"),
    ] = None,
    seed: SeedOption = None,
    question: QuestionOption = None,
    chat: ChatOption = None,
    chat_template: ChatTemplateOption = None,
    data_dir: DataDirOption = None,
    protocol_dir: ProtocolDirOption = None,
    settings: SettingOption = None,
    measure: MeasureOption = None,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
    cuda_graph: CudaGraphOption = False,
) -> None:
    """Run a benchmark, or all runs of a configuration file, always including dense attention.

    Finished samples are skipped. Options override the file. `accelerate launch -m eval run ...` distributes the
    samples over processes.
    """
    overrides = {
        "benchmark": benchmark,
        "tasks": words("--tasks", tasks),
        "model": model,
        "method": words("--method", method),
        "token_budget": integers("--token-budget", token_budget),
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
        "measure": words("--measure", measure),
        "dtype": dtype,
        "device": device,
        "cuda_graph": cuda_graph or None,
    }
    with harness_errors():
        if only is not None and config is None:
            raise EvalError(f"only={only!r} needs --config: it names runs of a file")
        configs = read_sweep(config, overrides) if config else [make_config(given(overrides))]
        run_all(configs, out, config, ranges("--only", only, len(configs)))


@app.command("make-prefixqa")
def make_prefixqa_file(
    sources: Annotated[
        list[Path] | None,
        typer.Argument(help="SQuAD's .json or LongBench's .jsonl files.", show_default="SQuAD 2.0, dev"),
    ] = None,
    out: Annotated[Path, typer.Option(help="The file to write: DIRECTORY/prefixqa.jsonl.")] = Path("prefixqa.jsonl"),
    least_questions: Annotated[int, typer.Option(help="Leave out contexts with fewer questions.")] = 2,
    longest: Annotated[
        int | None, typer.Option(help="Keep this many contexts, the longest.", show_default="all")
    ] = None,
    most_questions: Annotated[
        int | None, typer.Option(help="Keep this many questions of each context.", show_default="all")
    ] = None,
) -> None:
    """Write prefixqa's data from SQuAD's articles or from LongBench's examples, offline if the files are at hand."""
    from eval.prefixqa_data import make_prefixqa

    with harness_errors():
        contexts = make_prefixqa(out, sources or (), least_questions, longest, most_questions)
        questions = sum(len(entry["questions"]) for entry in contexts)
        typer.echo(one_line(f"{out}: {len(contexts)} contexts, {questions} questions"))


@app.command()
def report(
    directory: Annotated[Path, typer.Argument(help="A results folder, or a folder of them.")],
    out: Annotated[Path | None, typer.Option(help="Output folder.", show_default="DIRECTORY/report")] = None,
) -> None:
    """Write plots and a self-contained HTML page for results folders."""
    from eval.report import write_report

    with harness_errors():
        typer.echo(visible(str(write_report(directory, out))))


@app.command()
def speed(
    context: ContextsOption,
    model: ModelOption = None,
    shape: ShapeOption = None,
    method: MethodOption = "quest",
    token_budget: BudgetOption = None,
    parameter: ParameterOption = None,
    new_tokens: Annotated[int, typer.Option(help="Tokens that each run generates.")] = 32,
    repeats: Annotated[int, typer.Option(help="Timed runs of each side.")] = 5,
    kv_storage: KVStorageOption = "device",
    split_over: Annotated[
        str,
        typer.Option(
            "--split",
            help="How the model is spread over GPUs: 'layers' (device_map='auto'), 'heads' (tensor parallelism, with "
            "torchrun --nproc-per-node N -m eval speed ...).",
        ),
    ] = "none",
    ways: Annotated[
        str | None,
        typer.Option(
            "--way",
            help="How the methods' steps run, comma-separated: compiled, ahead, ahead-fused, graph, fused, uncompiled.",
            show_default="all that the device has",
        ),
    ] = None,
    compile_option: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="Inductor's option for compiled steps, dense ones too; repeatable.",
        ),
    ] = None,
    module_guards: Annotated[
        bool, typer.Option(help="Check before each compiled step that the modules are as they were.")
    ] = True,
    seed: Annotated[int, typer.Option(help="Seed of weights, cache and prompt.", min=0, max=2**63 - 1)] = 0,
    out: Annotated[Path | None, typer.Option(help="JSON file to write as well, after each round.")] = None,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
) -> None:
    """Time generate() dense and patched: medians and quartiles of time to first token and ms per token."""
    from transformers.utils import logging

    from eval.processes import Processes
    from eval.speed import SpeedConfig, measure, save, speed_table
    from eval.split import process_group

    logging.set_verbosity_error()
    with harness_errors(), process_group():
        check_output(out)
        config = SpeedConfig(
            model=model,
            shape=shape,
            contexts=integers("--context", context),
            method=words("--method", method),
            token_budget=integers("--token-budget", token_budget),
            parameters=parse_settings("--parameter", parameter or []),
            new_tokens=new_tokens,
            repeats=repeats,
            dtype=dtype,
            device=device,
            seed=seed,
            kv_storage=kv_storage,
            split=split_over,
            compile_options=parse_settings("--compile-option", compile_option or []),
            module_guards=module_guards,
            **given({"ways": words("--way", ways)}),
        )
        with progress(f"speed of {model or shape}", is_shown=Processes.started().is_main) as update:
            measured = measure(
                config,
                lambda what, done, total: update(done, total, what),
                None if out is None or not Processes.started().is_main else partial(save, path=out),
            )
        if Processes.started().is_main:
            print_table(speed_table(measured), WIDTH)


@app.command("context-speed")
def context_speed(
    shape: Annotated[str, typer.Option(help="Architecture to time, with random weights.")],
    context: Annotated[int, typer.Option(help="Tokens of the fixed context.")],
    question: Annotated[int, typer.Option(help="Tokens of a question.")] = 256,
    new_tokens: Annotated[int, typer.Option(help="Tokens of an answer.")] = 64,
    target_sparsity: Annotated[float, typer.Option(help="Share of the context to leave out.")] = 0.9,
    levels: Annotated[int, typer.Option(help="Levels of the lookup, 1 or 2.")] = 1,
    repeats: Annotated[int, typer.Option(help="Timed questions of each side.")] = 3,
    seed: Annotated[int, typer.Option(help="Seed of weights and tokens.", min=0, max=2**63 - 1)] = 0,
    out: Annotated[Path | None, typer.Option(help="JSON file to write as well.")] = None,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
) -> None:
    """Time questions about a context prepared by Squeezed Attention, beside a stock cache of the same tokens."""
    import torch
    from transformers.utils import logging

    from eval.context_speed import ContextSpeedConfig, measure_context_speed
    from eval.context_table import context_table
    from eval.speed import save
    from hf_sparse_attn import Squeezed
    from hf_sparse_attn.cli.models import resolve_device

    logging.set_verbosity_error()
    with harness_errors():
        check_output(out)
        if dtype is not None and dtype not in DTYPES:
            raise EvalError(f"dtype={dtype!r} is unknown; known: {', '.join(DTYPES)}")
        try:
            method = Squeezed(target_sparsity=target_sparsity, levels=levels)
        except (TypeError, ValueError) as error:
            raise EvalError(str(error)) from error
        config = ContextSpeedConfig(shape, context, question, new_tokens, method, repeats, seed=seed)
        resolved = resolve_device(device)
        precision = getattr(torch, dtype or ("bfloat16" if resolved.type == "cuda" else "float32"))
        with progress(f"questions to {shape}", is_shown=True) as update:
            report = measure_context_speed(config, resolved, precision, lambda what: update(0, 1, what))
        print_table(context_table(report), WIDTH)
        if out is not None:
            save(report, out)
