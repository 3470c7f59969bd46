"""Measures the launch choices of the kernels for each shape, and writes the file that the launchers look up."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import torch
from hf_sparse_attn_kernels import _tuning as tuning
from hf_sparse_attn_kernels.codes import bit_scan
from hf_sparse_attn_kernels.codes import cluster as code_cluster
from hf_sparse_attn_kernels.psa import cluster as psa_cluster
from hf_sparse_attn_kernels.quest import cluster as quest_cluster

from op_bench import cluster_entries, code_step_entries, psa_step_entries
from op_bench.cluster_entries import CLUSTERS, compile_candidates
from op_bench.code_entries import CODES
from op_bench.code_step_entries import CODE_CLUSTERS
from op_bench.entry import Entry, Family
from op_bench.progressive_entries import PROGRESSIVE
from op_bench.psa_step_entries import PSA_CLUSTERS
from op_bench.quest_entries import QUEST
from op_bench.shapes import Settings, Shape
from op_bench.squeezed_entries import SQUEEZED_DECODE
from op_bench.timing import capture, time_layers
from op_bench.token_entries import TOKEN_DECODE

MOST_TOKENS = 1 << 24
"""Tokens of all rows and KV heads together; longer shapes take the choices of the nearest."""
TIMED_WITH: dict[str, tuple[Family, str, str | None]] = {
    "score": (QUEST, "append_and_select", None),
    "select": (QUEST, "append_and_select", None),
    "rank": (PROGRESSIVE, "append_and_rank", None),
    "sparse_decode": (QUEST, "quest_step", None),
    "token_decode": (CODES, "keycodes_step", None),
    "dense_decode": (QUEST, "dense_decode", None),
    "rope_decode": (TOKEN_DECODE, "rope_sparse_decode", None),
    "progressive_decode": (PROGRESSIVE, "progressive_decode", None),
    "runs_decode": (SQUEEZED_DECODE, "squeezed_step", None),
    "code_scan": (CODES, "code_scores", "max"),
    "softmax_scan": (CODES, "keycodes_step", "softmax"),
    "bit_scan": (CODES, "keycodes_step", "softmax"),
    "token_choice": (CODES, "keycodes_step", "softmax"),
    "cluster_step": (CLUSTERS, "cluster_step", "clusters"),
    "code_step": (CODE_CLUSTERS, "code_step", "softmax, clusters"),
    "progressive_step": (PSA_CLUSTERS, "progressive_step", "clusters"),
}
"""The op whose time decides, and its variant; None for the first, or the 8-bit one if there is one.

For attention to a selection it is the whole step: when its programs start depends on the kernel before.
"""
ON_CLUSTERS = {"cluster_step": quest_cluster, "code_step": code_cluster, "progressive_step": psa_cluster}
"""The modules of steps on clusters, by launch; they are timed with the first reduction, softmax."""
FITS: dict[str, Callable[[Any, dict[str, int]], bool]] = {
    "cluster_step": cluster_entries.fits,
    "code_step": code_step_entries.step_fits,
    "progressive_step": psa_step_entries.step_fits,
    "bit_scan": lambda layer, choice: choice["per_multiprocessor"] == 0 or layer.query.shape[-1] == bit_scan.HEAD_DIM,
}
"""Whether a choice serves a layer, by launch; any choice of another launch does."""
SEPARATE_LAUNCHES = {"cluster": 0, "threads": 512}
"""The choice under which a step runs as the launches that are tuned before it."""
AS_FAST = 1.03
"""Separate launches are chosen unless they take this many times as long as the best clusters: times vary."""
FAMILIES = tuple(dict.fromkeys(family for family, *_ in TIMED_WITH.values()))
MOST_BYTES = 24 << 30
LAYERS = 8
BUDGET_MS = 15.0


def tuned_shapes(family: Family) -> list[Shape]:
    """Return the shapes at which a family's launches are measured."""
    shapes = (*family.shapes, *family.more_tuned)
    return [shape for shape in shapes if shape.batch * shape.kv_heads * shape.length <= MOST_TOKENS]


ALL_TUNED_SHAPES = tuple(dict.fromkeys(shape for family in FAMILIES for shape in tuned_shapes(family)))


def chosen_launches(names: Sequence[str]) -> list[str]:
    """Return the named launches in tuning order, or all launches if none is named.

    Raises
    ------
    ValueError
        Unknown launch.
    """
    for name in names:
        if name not in TIMED_WITH:
            raise ValueError(f"--tune --op {name!r}; allowed: {', '.join(TIMED_WITH)}")
    return [launch for launch in TIMED_WITH if not names or launch in names]


def tune(
    device: torch.device,
    shapes: Sequence[Shape],
    launches: Sequence[str],
    say: Callable[[str], None],
    store: Callable[[dict[str, Any]], None] = lambda found: None,
) -> dict[str, Any]:
    """Return the fastest choice of every launch for every shape, measured over several layers in one CUDA graph.

    What was found is stored after every shape, so that a later failure loses nothing.
    """
    found: dict[str, list[dict[str, Any]]] = {launch: [] for launch in launches}
    for launch in ON_CLUSTERS:
        if launch in launches:
            groups = sorted({shape.group for shape in tuned_shapes(TIMED_WITH[launch][0]) if shape in shapes})
            compile_candidates(ON_CLUSTERS[launch], device, product(groups, (0,), tuning.CANDIDATES[launch]))
    for family in FAMILIES:
        of_family = [launch for launch in launches if TIMED_WITH[launch][0] is family]
        for shape in tuned_shapes(family):
            if shape in shapes and of_family:
                for launch, choice in _tune_shape(family, shape, of_family, device, say).items():
                    found[launch].append({"shape": _describe(shape), "choice": choice})
                store(found)
                torch.cuda.empty_cache()
    return found


def write(found: dict[str, Any], device: torch.device) -> None:
    """Write the choices of one kind of device to the package's file; they replace those of the same shapes."""
    tuned = json.loads(tuning.TUNED.read_text()) if tuning.TUNED.exists() else {}
    major, minor = torch.cuda.get_device_capability(device)
    of_device = tuned.setdefault(f"{major}.{minor}", {})
    for launch, measured in found.items():
        shapes = [entry["shape"] for entry in measured]
        kept = [entry for entry in of_device.get(launch, []) if entry["shape"] not in shapes]
        of_device[launch] = sorted(kept + measured, key=lambda entry: sorted(entry["shape"].items()))
    lines = json.dumps(tuned, indent=1, sort_keys=True)
    tuning.TUNED.write_text(lines + "\n", encoding="utf-8")
    tuning.forget()


def _tune_shape(
    family: Family, shape: Shape, launches: Sequence[str], device: torch.device, say: Callable[[str], None]
) -> dict[str, dict[str, int]]:
    """Return the fastest choice of each launch; they are tuned in turn, each with the choices made before."""
    settings = Settings()
    count = max(1, min(LAYERS, MOST_BYTES // family.layer_bytes(shape, settings)))
    layers = [family.make_layer(shape, settings, device, seed) for seed in range(count)]
    best: dict[str, dict[str, int]] = {}
    for launch in launches:
        entry = timed_entry(launch)
        fits = FITS.get(launch, lambda layer, choice: True)
        candidates = [each for each in tuning.CANDIDATES[launch] if fits(layers[0], each)]
        apart = dict.fromkeys(ON_CLUSTERS, SEPARATE_LAUNCHES)
        times = [_time(entry, layers, apart | best | {launch: candidate}) for candidate in candidates]
        best[launch] = _fastest(candidates, times)
        measured = (
            f"{'x'.join(map(str, each.values()))} {time:.1f}" for each, time in zip(candidates, times, strict=True)
        )
        say(f"{shape.name} {launch}, us: {', '.join(measured)}; {best[launch]}")
    return best


def _fastest(candidates: list[dict[str, int]], times: list[float]) -> dict[str, int]:
    """Return the fastest candidate, or separate launches if clusters are hardly faster."""
    if SEPARATE_LAUNCHES in candidates and times[candidates.index(SEPARATE_LAUNCHES)] <= AS_FAST * min(times):
        return SEPARATE_LAUNCHES
    return candidates[min(range(len(times)), key=times.__getitem__)]


def timed_entry(launch: str) -> Entry:
    """Return the benchmark whose time decides about a launch."""
    family, op, variant = TIMED_WITH[launch]
    return next(
        entry
        for entry in family.entries
        if entry.op == op and ("bf16" not in entry.variant if variant is None else entry.variant == variant)
    )


def _describe(shape: Shape) -> dict[str, int]:
    values = (shape.batch * shape.kv_heads, shape.q_heads // shape.kv_heads, shape.head_dim, shape.length)
    return dict(zip(tuning.SHAPE, values, strict=True))


def _time(entry: Entry, layers: list[Any], choices: dict[str, dict[str, int]]) -> float:
    """Return microseconds per layer; infinite if the choice does not fit the device."""
    with tuning.forced(**choices):
        try:
            graph, _ = capture(lambda: [entry.run(layer, None) for layer in layers])
        except RuntimeError as error:
            if "out of resource" not in str(error):
                raise
            return float("inf")
    return time_layers(graph, len(layers), BUDGET_MS)["median"]
