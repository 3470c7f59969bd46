"""Benchmarks of the kernels and of ``generate()``; ``python kernels/benchmarks/run.py --help``.

Needs torch, triton and a CUDA device. The end-to-end part also needs transformers. ``--overview`` needs no device, but
matplotlib.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
from op_bench import ROOT, results
from op_bench.headline import update_readme
from op_bench.measure import FULL_BUDGET_MS, QUICK_BUDGET_MS, DeviceLostError, Run, measure_shape
from op_bench.overview import write_overview
from op_bench.registry import FAMILIES, family_shapes, matching_entries
from op_bench.shapes import Settings, matching_shapes
from op_bench.timing import copy_bytes_per_second, host_copy_bytes_per_second

SEED = 0
RESULTS = ROOT / "kernels" / "benchmarks" / "results"


def parser() -> argparse.ArgumentParser:
    """Build the command line."""
    cli = argparse.ArgumentParser(description="Check every op, then time it and dense attention in the same run.")
    cli.add_argument("--op", action="append", default=[], metavar="NAME", help="only this op; repeatable")
    cli.add_argument(
        "--shape", action="append", default=[], metavar="TEXT", help="only shapes whose name contains this"
    )
    cli.add_argument("--quick", action="store_true", help="few shapes, short runs; writes nothing without --out")
    cli.add_argument("--out", type=Path, help="JSON file (default for a whole run: results/<device>.json)")
    cli.add_argument("--update", action="store_true", help="keep the JSON file's other entries")
    cli.add_argument("--compare", type=Path, metavar="OLD", help="compare with old results; exit 1 if slower")
    cli.add_argument("--margin", type=float, default=results.MARGIN, help="fraction by which slower counts as noise")
    cli.add_argument("--force", action="store_true", help="compare results of different devices")
    cli.add_argument("--end-to-end", action="store_true", help="time generate() instead; see --model-shape")
    cli.add_argument("--model-shape", default="llama-3.1-8b", help="architecture, with random weights")
    cli.add_argument("--context", default="8192,32768,131072", help="tokens, comma-separated")
    cli.add_argument("--method", default="quest", help="methods of generate(), comma-separated")
    cli.add_argument("--token-budget", help="tokens read per step, comma-separated (default: Quest 2048)")
    cli.add_argument("--repeats", type=int, default=3, help="timed runs of generate() of each side")
    cli.add_argument(
        "--tune", action="store_true", help="measure the launch choices of --op and --shape, store them, and exit"
    )
    cli.add_argument("--overview", action="store_true", help="rewrite README's picture and table, and exit")
    return cli


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status: 0, 1 if an op failed or is slower, 2 for a usage error."""
    options = parser().parse_args(arguments)
    command = _without_out(["python", "kernels/benchmarks/run.py", *(sys.argv[1:] if arguments is None else arguments)])
    try:
        if options.overview:
            update_readme(ROOT / "README.md", ROOT)
            for path in (ROOT / "README.md", *write_overview(ROOT)):
                print(f"wrote {path}")
            return 0
        if not torch.cuda.is_available():
            raise results.ResultsError("the benchmarks need a CUDA device, but torch finds none")
        if options.tune:
            from op_bench.tune import ALL_TUNED_SHAPES, chosen_launches, tune, write

            device = torch.device("cuda", torch.cuda.current_device())
            chosen = matching_shapes(ALL_TUNED_SHAPES, options.shape), chosen_launches(options.op)
            tune(device, *chosen, lambda line: print(line, flush=True), lambda found: write(found, device))
            return 0
        if options.end_to_end:
            from op_bench.end_to_end import run_end_to_end

            return run_end_to_end(options, ROOT)
        return run_kernels(options, command)
    except (results.ResultsError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _without_out(command: Sequence[str]) -> str:
    """Return the command for the results record, without its output path."""
    kept = [word for at, word in enumerate(command) if "--out" not in (word.split("=")[0], command[at - 1])]
    return " ".join(kept)


def run_kernels(options: argparse.Namespace, command: str) -> int:
    """Measure the ops; see :func:`main`."""
    entries = matching_entries(options.op)
    shapes = matching_shapes(family_shapes(entries, quick=options.quick), options.shape)
    device = torch.cuda.get_device_name()
    old = results.read(options.compare) if options.compare else None
    if old:
        results.check_device(old, device, options.force)
    is_whole = not (options.quick or options.op or options.shape)
    out = options.out or (RESULTS / f"{results.file_stem(device)}.json" if is_whole or options.update else None)
    kept = results.read(out) if out and options.update else None
    if kept:
        results.check_device(kept, device, force=False)

    warnings.filterwarnings("ignore", category=UserWarning)  # SDPA lists at length the kernels that cannot run
    settings = Settings()
    copy, host_copy = copy_bytes_per_second(), host_copy_bytes_per_second()
    rates = f"{copy / 1e12:.2f} TB/s, read and written, and {host_copy / 1e9:.1f} GB/s from pinned memory"
    print(f"{device}: copies {rates}", flush=True)
    run = Run(
        settings,
        SEED,
        QUICK_BUDGET_MS if options.quick else FULL_BUDGET_MS,
        copy,
        say=lambda line: print(line, flush=True),
    )
    report: results.Record = {
        "machine": results.machine_record(
            device, {"copy_bytes_per_second": copy, "host_copy_bytes_per_second": host_copy}, command, ROOT
        ),
        "settings": {**vars(settings), "dtype": "bfloat16", "seed": SEED},
        "entries": [],
        "dense": [],
        "skipped": [],
    }
    whole = results.merged(kept, report) if kept else report  # fails before any work if they cannot be merged
    lost: str | None = None
    started: set[str] = set()
    planned = [(family, shape) for family in FAMILIES for shape in family.shapes_of(quick=options.quick)]
    for family, shape in planned:
        chosen = [entry for entry in entries if entry in family.entries]
        if not chosen or shape not in shapes:
            continue
        if family.name not in started:
            started.add(family.name)
            family.setup()
        try:
            measure_shape(family, shape, chosen, run, report)
        except DeviceLostError as error:
            lost = f"{shape.name}: {error}"
        whole = results.merged(kept, report) if kept else report
        if out:
            results.write(whole, out)  # after every shape, so that a later failure loses nothing
        if lost:
            break
    if out:
        print(f"wrote {out}")
    return _conclude(report, old, options, lost)


def _conclude(report: results.Record, old: results.Record | None, options: argparse.Namespace, lost: str | None) -> int:
    failed = [entry for entry in report["entries"] if entry["error"]]
    for entry in failed:
        print(f"FAILED {' '.join(results.entry_key(entry))}: {entry['error']}", file=sys.stderr)
    if lost:
        print(f"FAILED, and broke the CUDA context: {lost}", file=sys.stderr)
    slower = 0
    if old:
        lines, slower = results.compare(old, report, options.margin)
        print("\n".join(lines))
        print(f"{slower} slower by more than {options.margin:.0%}")
    return int(bool(failed or lost or slower))


if __name__ == "__main__":
    sys.exit(main())
