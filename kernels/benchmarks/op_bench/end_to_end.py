"""The end-to-end part: ``eval.speed`` on an architecture with random weights, with few imports."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from op_bench.results import ResultsError, file_stem

QUEST_BUDGET = "2048"
"""Budget of the measured target; other methods have their own default."""


def run_end_to_end(options: argparse.Namespace, root: Path) -> int:
    """Time ``generate()``, dense and patched, and write the report; return the exit status.

    Raises
    ------
    ResultsError
        A needed package is not installed, or an option is invalid.
    """
    sys.path.insert(1, str(root))
    try:
        from transformers.utils import logging

        from eval.errors import EvalError
        from eval.speed import SpeedConfig, measure_model, save
        from eval.speed_shapes import SHAPES, build_model
    except ImportError as error:
        raise ResultsError(f"--end-to-end needs transformers and its dependencies: {error}") from error
    logging.set_verbosity_error()
    device = torch.device("cuda", torch.cuda.current_device())
    methods = tuple(options.method.split(","))
    budgets = options.token_budget or (QUEST_BUDGET if methods == ("quest",) else None)
    others = "".join(f"-{name}" for name in methods if name != "quest")
    stem = f"{options.model_shape}{others}-{file_stem(torch.cuda.get_device_name(device))}"
    out = options.out or root / "eval" / "results" / "speed" / f"{stem}.json"
    report: dict[str, Any] = {}
    try:
        config = SpeedConfig(
            shape=options.model_shape,
            contexts=_numbers(options.context),
            method=methods,
            token_budget=_numbers(budgets) if budgets else (),
            repeats=options.repeats,
            dtype="bfloat16",
            device="cuda",
        )
        model = build_model(SHAPES[options.model_shape], torch.bfloat16, device, config.seed)
        for count, context in enumerate(config.contexts, start=1):
            measured = measure_model(model, replace(config, contexts=(context,)), _say)
            report = measured | {"results": [*report.get("results", []), *measured["results"]]}
            report["settings"]["contexts"] = list(config.contexts[:count])
            save(report, out)  # after every context, so that a later failure loses nothing
    except EvalError as error:
        raise ResultsError(str(error)) from error
    for result in report["results"]:
        for side in result["sides"]:
            ratio = f"  {side['ratio']['tpot']:.2f}x {side['ratio']['tpot_against']}" if side["ratio"] else ""
            first_run = f", first run {side['first_run_extra_seconds']:.0f} s longer"
            if side["tokens_in_common"] is not None:
                first_run += f", first {side['tokens_in_common']} tokens as uncompiled"
            memory = f"{side['memory_ratio']:.3f} of weights and dense K/V"
            tpot = side["tpot_ms"]["median"]
            print(f"{result['context']:>8} {side['name']:32} {tpot:8.2f} ms a token, {memory}{first_run}{ratio}")
    print(f"wrote {out}")
    return 0


def _say(what: str, done: int, total: int) -> None:
    print(f"[{done + 1}/{total}] {what}", flush=True)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))
