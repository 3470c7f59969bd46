"""Launch choices by shape: measured once, stored in `tuned.json`, looked up by the launchers.

Calling an op never times anything. The choice depends on shapes alone, so results do not change from run to run and
compiling a model costs no search. `python kernels/benchmarks/run.py --tune` measures the choices and writes the file.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from itertools import product
from math import log2
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch

TUNED = Path(__file__).parent / "tuned.json"
SHAPE = ("pairs", "group", "head_dim", "tokens")
"""Dimensions of a choice: batch * KV heads, query heads per KV head, head_dim, and capacity in tokens."""
_dimensions = itemgetter(*SHAPE)

DEFAULTS: dict[str, dict[str, int]] = {
    # Pages in a tile, programs for each multiprocessor, warps in a program.
    "score": {"block_p": 64, "per_multiprocessor": 3, "warps": 4},
    # Pages from which the selection has two levels, and pages that a program reduces over the group.
    "select": {"two_levels_from": 2049, "reduced": 512, "warps": 4},
    # Most blocks that one program sorts, a power of two, and warps in a program.
    "rank": {"span": 1024, "warps": 4},
    # Tokens in a tile, programs for each multiprocessor, warps in a program, tiles in flight, and whether a separate
    # launch merges the splits, which is faster for many splits or a large group. Blocks of one token, and RoPE by slot,
    # have their own.
    "sparse_decode": {"block_n": 64, "per_multiprocessor": 2, "warps": 4, "stages": 3, "merge_apart": 0},
    "token_decode": {"block_n": 64, "per_multiprocessor": 4, "warps": 4, "stages": 3, "merge_apart": 1},
    "rope_decode": {"block_n": 32, "per_multiprocessor": 4, "warps": 2, "stages": 2, "merge_apart": 1},
    "dense_decode": {"block_n": 64, "per_multiprocessor": 2, "warps": 4, "stages": 3, "merge_apart": 0},
    # Tokens in a tile, tokens that a program attends to before it looks whether more are needed (a microbatch at most),
    # programs for each multiprocessor, warps in a program, and tiles in flight.
    "progressive_decode": {"block_n": 64, "ticket": 128, "per_multiprocessor": 2, "warps": 4, "stages": 3},
    # Tokens in a tile, programs for each multiprocessor, warps in a program, tiles in flight, and waves of programs: in
    # several, shares are smaller, so that a program that starts late delays the end less.
    "runs_decode": {"block_n": 64, "per_multiprocessor": 2, "warps": 4, "stages": 3, "waves": 1},
    # Tokens in a tile, programs for each multiprocessor, warps in a program, and tiles in flight; for scores by the
    # greatest estimate of a group, and for those by softmax, which keep every estimate.
    "code_scan": {"block_t": 256, "per_multiprocessor": 8, "warps": 2, "stages": 3},
    "softmax_scan": {"block_t": 256, "per_multiprocessor": 8, "warps": 2, "stages": 3},
    # Blocks of the scan in CUDA C++ for each multiprocessor, or 0 for Triton's, as on devices that were not measured.
    "bit_scan": {"per_multiprocessor": 0},
    # Threads in a block of the first of two launches in CUDA C++ that choose tokens, or 0 for what follows, which also
    # serves what they do not: blocks in the cluster of each row and KV head, or 0 for Triton's two launches, as on
    # devices that were not measured; threads in a block.
    "token_choice": {"keep": 0, "cluster": 0, "threads": 512},
    # Blocks in the cluster of each row and KV head, or 0 for separate launches, as on devices that were not measured;
    # threads in a block. For Quest's step, for KeyCodes', and for PSA's, which has not been measured.
    "cluster_step": {"cluster": 0, "threads": 512},
    "code_step": {"cluster": 0, "threads": 512},
    "progressive_step": {"cluster": 0, "threads": 512},
}


def _attention_candidates(*values: tuple[int, int, int, int, int]) -> list[dict[str, int]]:
    names = ("block_n", "per_multiprocessor", "warps", "stages", "merge_apart")
    return [dict(zip(names, candidate, strict=True)) for candidate in values]


CANDIDATES: dict[str, list[dict[str, int]]] = {
    "score": [
        {"block_p": block_p, "per_multiprocessor": per_multiprocessor, "warps": warps}
        for block_p, per_multiprocessor, warps in (
            (64, 3, 4),
            (64, 6, 4),
            (128, 2, 4),
            (128, 2, 8),
            (32, 6, 4),
            (32, 8, 2),
        )
    ],
    "select": [
        {"two_levels_from": two_levels_from, "reduced": reduced, "warps": warps}
        for two_levels_from, reduced, warps in ((8193, 512, 8), (1025, 512, 4), (1025, 512, 2), (1025, 256, 4))
    ],
    "rank": [
        {"span": span, "warps": warps}
        for span, warps in (
            (1024, 4),
            (1024, 8),
            (512, 4),
            (512, 8),
            (256, 2),
            (256, 4),
            (2048, 8),
            (2048, 16),
            (4096, 16),
        )
    ],
    "sparse_decode": _attention_candidates(
        (128, 1, 4, 3, 0),
        (128, 1, 4, 3, 1),
        (64, 4, 4, 3, 0),
        (64, 2, 4, 4, 0),
        (64, 2, 4, 4, 1),
        (64, 3, 4, 3, 1),
        (64, 8, 4, 1, 1),
        (64, 8, 4, 2, 1),
        (32, 4, 4, 4, 0),
        (32, 4, 4, 4, 1),
        (32, 5, 2, 3, 1),
        (32, 8, 4, 1, 1),
    ),
    "token_decode": _attention_candidates(
        (128, 1, 4, 3, 1),
        (64, 2, 4, 4, 1),
        (64, 3, 4, 3, 0),
        (64, 4, 4, 3, 1),
        (64, 8, 4, 1, 1),
        (32, 4, 4, 4, 0),
        (32, 4, 4, 4, 1),
        (32, 5, 2, 3, 1),
        (32, 8, 4, 1, 1),
        (32, 8, 2, 1, 1),
        (16, 8, 2, 1, 1),
    ),
    "dense_decode": _attention_candidates(
        (128, 2, 4, 3, 0), (128, 2, 8, 3, 0), (128, 1, 4, 3, 1), (128, 2, 4, 3, 1), (128, 2, 8, 3, 1), (64, 8, 4, 1, 1)
    ),
    "rope_decode": _attention_candidates(
        (32, 4, 2, 2, 1), (32, 4, 4, 2, 1), (32, 8, 4, 1, 1), (32, 8, 2, 1, 1), (64, 4, 4, 1, 1)
    ),
    "progressive_decode": [
        {
            "block_n": block_n,
            "ticket": ticket,
            "per_multiprocessor": per_multiprocessor,
            "warps": warps,
            "stages": stages,
        }
        for block_n, ticket, per_multiprocessor, warps, stages in (
            (64, 64, 2, 4, 1),
            (64, 64, 4, 4, 1),
            (64, 128, 2, 4, 3),
            (64, 128, 3, 4, 3),
            (64, 256, 2, 4, 3),
            (64, 256, 2, 4, 4),
            (64, 256, 2, 8, 4),
            (32, 128, 4, 4, 4),
            (32, 256, 4, 4, 4),
            (32, 256, 4, 2, 4),
            (128, 128, 2, 8, 1),
            (128, 256, 1, 8, 3),
        )
    ],
    "runs_decode": [
        {"block_n": block_n, "per_multiprocessor": per_multiprocessor, "warps": warps, "stages": stages, "waves": waves}
        for block_n, per_multiprocessor, warps, stages in (
            (64, 2, 4, 3),
            (64, 2, 4, 4),
            (64, 3, 2, 3),
            (32, 4, 4, 3),
            (32, 4, 4, 4),
        )
        for waves in (1, 2, 4)
    ],
    "code_scan": [
        {"block_t": block_t, "per_multiprocessor": per_multiprocessor, "warps": warps, "stages": stages}
        for block_t, per_multiprocessor, warps, stages in (
            (256, 8, 2, 3),
            (256, 8, 2, 4),
            (256, 12, 2, 3),
            (256, 12, 1, 3),
            (256, 16, 1, 3),
            (128, 16, 1, 4),
            (128, 24, 1, 3),
            (128, 24, 1, 4),
            (64, 32, 1, 4),
            (128, 12, 2, 4),
            (256, 4, 4, 3),
            (512, 4, 4, 3),
            (512, 6, 4, 3),
            (512, 2, 4, 4),
            (1024, 2, 8, 3),
        )
    ],
    "softmax_scan": [
        {"block_t": block_t, "per_multiprocessor": per_multiprocessor, "warps": warps, "stages": stages}
        for block_t, per_multiprocessor, warps, stages in (
            (128, 16, 1, 3),
            (128, 24, 1, 3),
            (128, 32, 1, 3),
            (128, 24, 1, 4),
            (128, 16, 2, 3),
            (256, 8, 2, 3),
            (256, 12, 2, 3),
            (256, 16, 2, 3),
            (256, 8, 4, 3),
            (512, 4, 4, 3),
            (512, 6, 4, 3),
            (512, 8, 4, 2),
            (512, 4, 8, 3),
            (1024, 2, 8, 3),
            (1024, 3, 8, 3),
        )
    ],
    "bit_scan": [{"per_multiprocessor": per_multiprocessor} for per_multiprocessor in (0, 4, 8, 12, 16, 24)],
    "token_choice": [
        {"cluster": cluster, "threads": threads, "keep": keep}
        for cluster, threads, keep in (
            (0, 512, 0),
            *((cluster, 512, 0) for cluster in (16, 8, 4, 2)),
            *((cluster, 1024, 0) for cluster in (16, 8, 4, 2)),
            (0, 512, 512),
            (0, 512, 1024),
        )
    ],
    "cluster_step": [
        {"cluster": cluster, "threads": threads}
        for cluster, threads in (*product((2, 3, 4, 5, 8, 12, 16), (256, 512)), (0, 512))
    ],
    "code_step": [
        {"cluster": cluster, "threads": threads}
        for cluster, threads in (*product((2, 3, 4, 8, 12, 16), (256, 512)), (0, 512))
    ],
    "progressive_step": [
        {"cluster": cluster, "threads": threads}
        for cluster, threads in (*product((2, 4, 8, 12, 16), (256, 512)), (0, 512))
    ],
}

_forced: dict[str, dict[str, int]] = {}


def choice(op: str, device: torch.device, **shape: int) -> dict[str, int]:
    """Return the choice of the nearest shape measured on such a device; `shape` gives `SHAPE` by name."""
    return _forced.get(op) or _nearest(op, device, _dimensions(shape))


@contextmanager
def forced(**choices: dict[str, int]) -> Iterator[None]:
    """Force the choice of ops, by name, for every shape inside the `with` block, to measure or test it."""
    before = dict(_forced)
    _forced.update({op: DEFAULTS[op] | config for op, config in choices.items()})
    try:
        yield
    finally:
        _forced.clear()
        _forced.update(before)


@lru_cache(maxsize=1024)
def _nearest(op: str, device: torch.device, shape: tuple[int, ...]) -> dict[str, int]:
    measured = _measured(device).get(op, [])
    if not measured:
        return DEFAULTS[op]

    def distance(entry: dict[str, Any]) -> float:
        return sum(abs(log2(entry["shape"][name] / size)) for name, size in zip(SHAPE, shape, strict=True))

    chosen: dict[str, int] = min(measured, key=distance)["choice"]
    return chosen


@lru_cache
def _measured(device: torch.device) -> dict[str, list[dict[str, Any]]]:
    if device.type != "cuda" or not TUNED.exists():
        return {}
    major, minor = torch.cuda.get_device_capability(device)
    entries: dict[str, list[dict[str, Any]]] = json.loads(TUNED.read_text()).get(f"{major}.{minor}", {})
    return entries


def forget() -> None:
    """Drop cached choices, so that the next look-up reads the file again."""
    _nearest.cache_clear()
    _measured.cache_clear()
