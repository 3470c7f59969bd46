"""``python -m eval lossless``: speed of lossless decoding, and the share of drafts that dense attention keeps."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from eval.options import (
    BudgetOption,
    ContextsOption,
    DeviceOption,
    DtypeOption,
    MethodOption,
    ModelOption,
    ParameterOption,
    ShapeOption,
    check_output,
    harness_errors,
)
from eval.terminal import WIDTH, progress
from hf_sparse_attn.cli.terminal import integers, parse_settings, print_table, words


def lossless(
    context: ContextsOption,
    model: ModelOption = None,
    shape: ShapeOption = None,
    method: MethodOption = "quest",
    token_budget: BudgetOption = None,
    draft_tokens: Annotated[str, typer.Option(help="Tokens drafted before each dense pass, comma-separated.")] = "4,8",
    parameter: ParameterOption = None,
    new_tokens: Annotated[int, typer.Option(help="Tokens that each run generates.")] = 128,
    prompts: Annotated[int, typer.Option(help="Prompts of each context.")] = 1,
    repeats: Annotated[int, typer.Option(help="Timed runs of each side and prompt.")] = 3,
    yarn: Annotated[
        float | None,
        typer.Option(help="Factor by which YaRN extends the model's trained length.", show_default="none"),
    ] = None,
    data_dir: Annotated[
        Path | None,
        typer.Option(help="Folder with books (*.txt) whose beginnings are the prompts.", show_default="random tokens"),
    ] = None,
    limit_seconds: Annotated[
        float | None, typer.Option(help="Seconds after which no further run begins.", show_default="no limit")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of weights, cache and random prompts.", min=0, max=2**63 - 1)] = 0,
    out: Annotated[Path | None, typer.Option(help="JSON file to write as well, after each side.")] = None,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
) -> None:
    """Time lossless decoding beside dense generate(), after comparing their tokens. Prints a line after each side.

    Exits with 1 if tokens differ from dense attention's in float32 or float64, after everything else was measured.
    """
    from transformers.utils import logging

    logging.set_verbosity_error()
    with harness_errors():
        check_output(out)
        from eval.lossless import measure_lossless
        from eval.lossless_config import LosslessConfig
        from eval.lossless_table import lossless_table, side_line
        from eval.speed import save

        config = LosslessConfig(
            model=model,
            shape=shape,
            contexts=integers("--context", context),
            method=words("--method", method),
            token_budget=integers("--token-budget", token_budget),
            draft_tokens=integers("--draft-tokens", draft_tokens),
            parameters=parse_settings("--parameter", parameter or []),
            new_tokens=new_tokens,
            prompts=prompts,
            repeats=repeats,
            yarn=yarn,
            data_dir=data_dir,
            limit_seconds=limit_seconds,
            dtype=dtype,
            device=device,
            seed=seed,
        )

        def keep(report: dict[str, Any], context: int, side: dict[str, Any]) -> None:
            typer.echo(side_line(context, side))
            if out is not None:
                save(report, out)

        with progress(f"lossless decoding of {model or shape}", is_shown=True) as update:
            report = measure_lossless(
                config,
                lambda what, done, total: update(done, total, what),
                keep,
            )
        if out is not None:
            save(report, out)
        print_table(lossless_table(report), WIDTH)
    if any(side["is_wrong"] for entry in report["results"] for side in entry["sides"]):
        raise typer.Exit(1)
