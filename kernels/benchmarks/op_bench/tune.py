"""Measures the launch choices of the kernels, shape by shape, and writes those that the launchers look up."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import torch
from hf_sparse_attn_kernels import _tuning as tuning

from op_bench.entry import Entry
from op_bench.quest_entries import ENTRIES
from op_bench.shapes import DECODE_SHAPES, Settings, Shape
from op_bench.timing import capture, time_layers
from op_bench.workload import Layer, layer_bytes, make_layer

TUNED_SHAPES = tuple(shape for shape in DECODE_SHAPES if shape.batch * shape.kv_heads * shape.length <= 1 << 23)
TIMED_WITH = {
    "score": "append_and_select",
    "select": "append_and_select",
    "sparse_decode": "sparse_decode",
    "dense_decode": "dense_decode",
}
"""The op whose time decides, in its 8-bit variant where it has several."""
MOST_BYTES = 24 << 30
LAYERS = 8
BUDGET_MS = 15.0


def tune(
    device: torch.device, shapes: Sequence[Shape], launches: Sequence[str], say: Callable[[str], None]
) -> dict[str, Any]:
    """Return the fastest choice of every launch for every shape, measured over several layers in one CUDA graph."""
    settings = Settings()
    found: dict[str, list[dict[str, Any]]] = {op: [] for op in launches}
    for shape in shapes:
        count = max(1, min(LAYERS, MOST_BYTES // layer_bytes(shape, settings)))
        layers = [make_layer(shape, settings, device, seed) for seed in range(count)]
        for op in launches:
            candidates = tuning.CANDIDATES[op]
            entry = next(entry for entry in ENTRIES if entry.op == TIMED_WITH[op] and "bf16" not in entry.variant)
            # The two launches of one op are tuned one after the other.
            made_before = {"score": found["score"][-1]["choice"]} if op == "select" and "score" in found else {}
            times = [_time(entry, layers, {**made_before, op: candidate}) for candidate in candidates]
            best = min(range(len(times)), key=times.__getitem__)
            say(f"{shape.name} {op}: {', '.join(f'{time:.1f}' for time in times)} us; {candidates[best]}")
            found[op].append({"shape": _describe(shape), "choice": candidates[best]})
        del layers
        torch.cuda.empty_cache()
    return found


def chosen_launches(names: Sequence[str]) -> list[str]:
    """The launches of those names, in the order in which they are tuned; all of them without any.

    Raises
    ------
    ValueError
        There is no launch of one of the names.
    """
    for name in names:
        if name not in tuning.CANDIDATES:
            raise ValueError(f"--tune --op {name!r}; allowed: {', '.join(tuning.CANDIDATES)}")
    return [op for op in tuning.CANDIDATES if not names or op in names]


def write(found: dict[str, Any], device: torch.device) -> None:
    """Put the choices of one kind of device into the package's file, in place of those it had for the same shapes."""
    tuned = json.loads(tuning.TUNED.read_text()) if tuning.TUNED.exists() else {}
    major, minor = torch.cuda.get_device_capability(device)
    of_device = tuned.setdefault(f"{major}.{minor}", {})
    for op, measured in found.items():
        shapes = [entry["shape"] for entry in measured]
        of_device[op] = [entry for entry in of_device.get(op, []) if entry["shape"] not in shapes] + measured
        of_device[op].sort(key=lambda entry: [entry["shape"][name] for name in tuning.SHAPE])
    lines = json.dumps(tuned, indent=1, sort_keys=True)
    tuning.TUNED.write_text(lines + "\n", encoding="utf-8")
    tuning.forget()


def _describe(shape: Shape) -> dict[str, int]:
    values = (shape.batch * shape.kv_heads, shape.q_heads // shape.kv_heads, shape.head_dim, shape.length)
    return dict(zip(tuning.SHAPE, values, strict=True))


def _time(entry: Entry, layers: list[Layer], choices: dict[str, dict[str, int]]) -> float:
    """Microseconds a layer; infinite where the choice does not fit the device."""
    with tuning.forced(**choices):
        try:
            graph, _ = capture(lambda: [entry.run(layer, None) for layer in layers])
        except RuntimeError as error:
            if "out of resource" not in str(error):
                raise
            return float("inf")
    return time_layers(graph, len(layers), BUDGET_MS)["median"]
