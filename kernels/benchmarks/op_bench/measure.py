"""The run: checks, then times every dense backend and every op, shape by shape."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from op_bench import timing
from op_bench.dense import Backend
from op_bench.entry import Entry, Family, Outputs
from op_bench.results import Record, against_dense, floors_us, over_floor, shape_record
from op_bench.shapes import Settings, Shape

MOST_LAYERS = 32
L2_MULTIPLE = 4
RESERVED_BYTES = 8 << 30
"""Memory left free for the oracles and the L2 flush."""
FULL_BUDGET_MS, QUICK_BUDGET_MS = 40.0, 15.0


class DeviceLostError(Exception):
    """A kernel broke the CUDA context, so nothing can run after it."""


@dataclass(frozen=True)
class Run:
    """Settings shared by all shapes."""

    settings: Settings
    seed: int
    budget_ms: float
    copy_bytes_per_second: float
    device: str = "cuda"
    say: Callable[[str], None] = print


def plan_layers(family: Family, shape: Shape, settings: Settings, free_bytes: int, l2_bytes: int) -> int:
    """Return the number of layers: as many as overflow the L2 cache several times, at least a few, if memory allows."""
    wanted = -(-L2_MULTIPLE * l2_bytes // family.step_bytes(shape, settings))
    fitting = (free_bytes - RESERVED_BYTES) // family.layer_bytes(shape, settings)
    return max(0, min(max(wanted, family.least_layers), MOST_LAYERS, fitting))


def measure_shape(family: Family, shape: Shape, entries: Sequence[Entry], run: Run, report: Record) -> None:
    """Measure entries of a family, and dense backends if an entry is compared with them, and add them to ``report``.

    Raises
    ------
    DeviceLostError
        A kernel broke the CUDA context; the report has everything measured before.
    """
    gc.collect()
    torch.cuda.empty_cache()
    free_bytes, _ = torch.cuda.mem_get_info()
    count = plan_layers(family, shape, run.settings, free_bytes, torch.cuda.get_device_properties(0).L2_cache_size)
    if count == 0:
        needed = (family.layer_bytes(shape, run.settings) + RESERVED_BYTES) / 1e9
        reason = f"needs {needed:.1f} GB, {free_bytes / 1e9:.1f} GB are free"
        run.say(f"{shape.name}: skipped, {reason}")
        report["skipped"].append({"shape": shape_record(shape), "reason": reason})
        return
    device = torch.device(run.device)
    layers, error = _attempt(
        lambda: [family.make_layer(shape, run.settings, device, run.seed + index) for index in range(count)]
    )
    run.say(f"{shape.name}: {count} layers")
    # Families share shapes, and with them dense attention.
    dense = [record for record in report["dense"] if record["shape"]["name"] == shape.name]
    if layers and not dense and any(entry.against_dense for entry in entries):
        dense = [_measure_backend(backend, layers, run) for backend in family.backends(shape)]
        report["dense"] += dense
    measured = [_measure_entry(entry, shape, layers or [], error, run) for entry in entries]
    of_shape = [record for record in [*report["entries"], *measured] if record["shape"]["name"] == shape.name]
    ours = next((record["times"] for record in of_shape if record["op"] == "dense_decode"), None)
    for entry, record in zip(entries, measured, strict=True):
        if entry.against_dense and record["times"]:
            record["against"] = against_dense(record["times"], dense, ours)
    report["entries"] += measured


def check_entry(entry: Entry, layer: Any, impl: str | None = None) -> None:
    """Run an entry once and compare its result with the oracle's.

    Raises
    ------
    oracle.Mismatch
        They differ.
    """
    entry.prepare(layer)
    entry.check(layer, entry.run(layer, impl))


def _measure_entry(entry: Entry, shape: Shape, layers: list[Any], error: str | None, run: Run) -> Record:
    moved = entry.moved_bytes(shape, run.settings)
    record: Record = {
        "op": entry.op,
        "variant": entry.variant,
        "shape": shape_record(shape),
        "layers": len(layers),
        "bytes": moved,
        "floor_us": floors_us(moved, run.copy_bytes_per_second),
        "times": None,
        "over_floor": None,
        "against": None,
        "error": error,
    }
    if layers:
        step = partial(_timed, lambda layer: entry.run(layer, None), entry.prepare, entry.check, layers, run)
        record["times"], record["error"] = _attempt(step)
    if record["times"]:
        record["over_floor"] = over_floor(record["times"], record["floor_us"])
        details, record["error"] = _attempt(lambda: entry.details(layers))
        record |= details or {}
    _say(entry.name, record, run)
    return record


def _measure_backend(backend: Backend, layers: list[Any], run: Run) -> Record:
    def check(layer: Any, outputs: Outputs) -> None:
        backend.check(outputs[0], layer)

    step = partial(_timed, lambda layer: (backend.run(layer),), lambda layer: None, check, layers, run)
    times, error = _attempt(step)
    record = {"backend": backend.name, "shape": shape_record(layers[0].shape), "times": times, "error": error}
    _say(backend.name, record, run)
    return record


def _timed(
    step: Callable[[Any], Outputs],
    prepare: Callable[[Any], None],
    check: Callable[[Any, Outputs], None],
    layers: list[Any],
    run: Run,
) -> Record:
    """Check a step run eagerly, in a graph, and in a graph of all layers; time both graphs."""
    prepare(layers[0])
    check(layers[0], step(layers[0]))

    graph, outputs = timing.capture(lambda: step(layers[0]))
    _check_replay(graph, outputs, layers[0], prepare, check)
    replay = timing.time_replay(graph, run.budget_ms)
    del graph, outputs

    graph, all_outputs = timing.capture(lambda: [step(layer) for layer in layers])
    _check_replay(graph, all_outputs[-1], layers[-1], prepare, check)
    return {"replay": replay, "layers": timing.time_layers(graph, len(layers), 3 * run.budget_ms)}


def _check_replay(
    graph: torch.cuda.CUDAGraph,
    outputs: Outputs,
    layer: Any,
    prepare: Callable[[Any], None],
    check: Callable[[Any, Outputs], None],
) -> None:
    prepare(layer)
    for output in outputs:
        output.fill_(float("nan") if output.is_floating_point() else -7)
    graph.replay()
    torch.cuda.synchronize()
    check(layer, outputs)


def _attempt(measure: Callable[[], Any]) -> tuple[Any, str | None]:
    """Return the result or the error, so that one failure does not end the run."""
    error: str | None = None
    result = None
    try:
        result = measure()
    except Exception as raised:
        error = "".join(traceback.format_exception_only(raised)).strip()[:1000]
    if error is not None:
        gc.collect()
        try:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        except Exception as raised:
            raise DeviceLostError(error) from raised
    return result, error


def _say(name: str, record: Record, run: Run) -> None:
    times = record["times"]
    if times is None:
        run.say(f"  {name:32} {record['error']}")
        return
    over = record.get("over_floor")
    floors = f"  {over['layers']['nominal']:5.2f} x floor" if over else ""
    run.say(
        f"  {name:32} replay {times['replay']['median']:9.2f} us  layers {times['layers']['median']:9.2f} us{floors}"
    )
