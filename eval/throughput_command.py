"""``python -m eval throughput``: batched decode throughput, dense and patched."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from eval.options import (
    BudgetOption,
    DeviceOption,
    DtypeOption,
    KVStorageOption,
    MethodOption,
    ParameterOption,
    check_output,
    harness_errors,
)
from eval.terminal import WIDTH, progress
from hf_sparse_attn.cli.terminal import integers, parse_settings, print_table, words


def throughput(
    shape: Annotated[str, typer.Option(help="Architecture to time, with random weights and a filled cache.")],
    context: Annotated[int, typer.Option(help="Tokens of each request's prompt.")],
    batch: Annotated[int, typer.Option(help="Maximum number of requests decoded together.")] = 8,
    method: MethodOption = "quest",
    token_budget: BudgetOption = None,
    parameter: ParameterOption = None,
    new_tokens: Annotated[int, typer.Option(help="Tokens of each answer.")] = 64,
    requests: Annotated[int | None, typer.Option(help="Number of requests.", show_default="four full batches")] = None,
    rate: Annotated[
        float | None, typer.Option(help="Mean requests per second (Poisson).", show_default="all at the start")
    ] = None,
    kv_storage: KVStorageOption = "device",
    seed: Annotated[int, typer.Option(help="Seed of weights, cache, prompts and arrivals.", min=0, max=2**63 - 1)] = 0,
    out: Annotated[Path | None, typer.Option(help="JSON file to write as well.")] = None,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
) -> None:
    """Measure tokens per second and the time between tokens of batched requests, dense and with each method."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    with harness_errors():
        check_output(out)
        from eval.speed import save
        from eval.throughput import ThroughputConfig, measure_throughput
        from eval.throughput_table import throughput_table

        config = ThroughputConfig(
            shape=shape,
            context=context,
            batch=batch,
            method=words("--method", method),
            token_budget=integers("--token-budget", token_budget),
            parameters=parse_settings("--parameter", parameter or []),
            new_tokens=new_tokens,
            requests=requests,
            rate=rate,
            dtype=dtype,
            device=device,
            seed=seed,
            kv_storage=kv_storage,
        )
        with progress(f"throughput of {shape}", is_shown=True) as update:
            report = measure_throughput(config, lambda what: update(0, 1, what))
        print_table(throughput_table(report), WIDTH)
        if out is not None:
            save(report, out)
