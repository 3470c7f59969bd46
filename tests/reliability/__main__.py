"""``python -m tests.reliability``: inject faults, decode for long, watch kernels, and write what happened as JSON."""

from __future__ import annotations

import json
import os
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRITON_INTERPRET", "1")

import torch
import typer
from hf_sparse_attn_kernels import use_impl

from eval.costs import device_name, versions
from eval.store import write_json
from hf_sparse_attn import METHODS
from tests.models import DEVICE
from tests.reliability.runner import run_faults
from tests.reliability.sanitizer import TOOLS, check, op_tests, with_run
from tests.reliability.soak import soak as run_soak

RESULTS = Path(__file__).with_name("results")
app = typer.Typer(help=__doc__, add_completion=False)


def machine() -> dict[str, Any]:
    """Return the machine and the versions of a measurement."""
    date = datetime.now(timezone.utc).date().isoformat()
    return {"device": device_name(torch.device(DEVICE)), "versions": versions(), "date": date}


@app.command()
def faults(
    method: Annotated[str, typer.Option(help="Methods, comma-separated.")] = ",".join(METHODS),
    lines: Annotated[int, typer.Option(help="Lines of the library at which each call fails.")] = 10,
    seed: Annotated[int, typer.Option(help="Seed of the choice of lines.")] = 0,
    out: Annotated[Path, typer.Option(help="The file to write.")] = RESULTS / "faults.json",
) -> None:
    """Let calls, operations and writes fail at lines of the library, and count what their caches do next."""
    report = {"machine": machine(), "settings": {"lines": lines, "seed": seed}, "counts": [], "harm": []}
    with use_impl("reference"), torch.inference_mode():
        for name in method.split(","):
            counts, harm = run_faults(name, lines, seed)
            report["counts"] += counts
            report["harm"] += harm
            typer.echo(f"{name}: {sum(row['cases'] for row in counts)} cases, {len(harm)} with harm")
            write_json(out, report)
    raise typer.Exit(1 if report["harm"] else 0)


@app.command()
def soak(
    method: Annotated[str, typer.Option(help="The method.")] = "quest",
    tokens: Annotated[int, typer.Option(help="Tokens to decode in each row.")] = 100_000,
    chat_tokens: Annotated[int, typer.Option(help="Tokens of a chat.")] = 2_000,
    checks: Annotated[int, typer.Option(help="Places at which logits are compared with a new cache's.")] = 10,
    minutes: Annotated[float, typer.Option(help="Stop after this time.")] = 60.0,
    out: Annotated[Path | None, typer.Option(help="The file.", show_default="results/soak-METHOD.json")] = None,
) -> None:
    """Decode over one cache, with crop, reorder, fork and reset in turns, and sample memory and logits."""
    with use_impl("reference"):
        report = {"machine": machine(), **run_soak(method, tokens, chat_tokens, checks, 60 * minutes)}
    write_json(out or RESULTS / f"soak-{method}.json", report)
    figures = {name: report[name] for name in ("tokens", "seconds", "flat", "checks", "largest_error")}
    typer.echo(str(figures))
    raise typer.Exit(0 if report["flat"] and report["largest_error"] < 1e-6 else 1)


@app.command()
def sanitizer(
    logs: Annotated[Path, typer.Option(help="The folder of the logs; what they say already is not run again.")],
    tool: Annotated[str, typer.Option(help="Tools of compute-sanitizer, comma-separated.")] = ",".join(TOOLS),
    file: Annotated[str, typer.Option(help="Files below tests/ops, comma-separated.", show_default="all")] = "",
    jobs: Annotated[int, typer.Option(help="Processes at once.")] = 4,
    parts: Annotated[int, typer.Option(min=1, help="Processes that share the tests of a file.")] = 1,
    minutes: Annotated[float, typer.Option(help="End a process after this time.")] = 30.0,
    out: Annotated[Path, typer.Option(help="The file to write.")] = RESULTS / "sanitizer.json",
) -> None:
    """Run the tests of the kernels under compute-sanitizer on a GPU, and count what it reports.

    Files and tools that have not run keep the rows that the file to write has of them.
    """
    files = file.split(",") if file else op_tests()
    for option, given, known in (("tool", tool.split(","), TOOLS), ("file", files, op_tests())):
        if unknown := set(given) - set(known):
            raise typer.BadParameter(f"{', '.join(sorted(unknown))}: not among {', '.join(known)}", param_hint=option)
    outcomes = check(tool.split(","), files, logs, jobs, 60 * minutes, parts)
    earlier = json.loads(out.read_text(encoding="utf-8"))["runs"] if out.exists() else []
    write_json(out, {"runs": with_run(earlier, machine(), outcomes)})
    harm = [each for each in outcomes if each.reports or each.failed]
    for each in harm:
        typer.echo(f"{each.tool} {each.file}: {each.reports} reports, {each.failed} failed tests; see {logs}")
    typer.echo(f"{len(outcomes)} of {len(files) * len(tool.split(','))} came to an end, {len(harm)} with reports")
    raise typer.Exit(1 if harm else 0)


if __name__ == "__main__":
    app()
