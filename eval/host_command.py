"""``python -m eval host-profile``: the host's part of a token, and what the first compiled call is spent on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from eval.options import (
    BudgetOption,
    DeviceOption,
    DtypeOption,
    MethodOption,
    ParameterOption,
    check_output,
    harness_errors,
)
from eval.terminal import WIDTH, progress
from hf_sparse_attn.cli.terminal import integers, parse_settings, print_table, words


def host_profile(
    shape: Annotated[str, typer.Option(help="Architecture to profile, with random weights and a filled cache.")],
    context: Annotated[int, typer.Option(help="Tokens before the first new one.")],
    method: MethodOption = "quest",
    token_budget: BudgetOption = None,
    parameter: ParameterOption = None,
    layers: Annotated[int | None, typer.Option(help="Number of layers.", show_default="the shape's")] = None,
    new_tokens: Annotated[int, typer.Option(help="Tokens that each run generates.")] = 32,
    backend: Annotated[str, typer.Option(help="Compiler of the graph: inductor, aot_eager or eager.")] = "inductor",
    module_guards: Annotated[
        bool, typer.Option(help="Check before each compiled step that the modules are as they were.")
    ] = True,
    seed: Annotated[int, typer.Option(help="Seed of weights, cache and prompt.", min=0, max=2**63 - 1)] = 0,
    out: Annotated[Path | None, typer.Option(help="JSON file to write as well.")] = None,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
) -> None:
    """Break down the host's time per token: uncompiled steps, compiled steps, and the first compiled call."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    with harness_errors():
        check_output(out)
        from eval.host_profile import HostConfig, profile_host
        from eval.host_table import host_tables
        from eval.speed import save

        config = HostConfig(
            shape=shape,
            context=context,
            method=words("--method", method),
            token_budget=integers("--token-budget", token_budget),
            parameters=parse_settings("--parameter", parameter or []),
            layers=layers,
            new_tokens=new_tokens,
            backend=backend,
            module_guards=module_guards,
            dtype=dtype,
            device=device,
            seed=seed,
        )
        names = ["dense", *(each.name for each in config.methods())]
        with progress(f"host's part of {shape}", is_shown=True) as update:
            done = iter(range(len(names)))
            report = profile_host(config, lambda name: update(next(done), len(names), name))
            update(len(names), len(names), None)
        for table in host_tables(report):
            print_table(table, WIDTH)
        if out is not None:
            save(report, out)
