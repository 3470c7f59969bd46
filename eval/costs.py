"""The cost of a sample, and the machine that it was measured on."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

import torch

from hf_sparse_attn import SparseCache, sparse_attention_stats

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Reads:
    """Reads of one sample's single-token steps; all None without such steps."""

    kv_bytes: int | None = None
    metadata_bytes: int | None = None
    dense_bytes: int | None = None
    """Dense attention's reads in the same steps."""
    kv_fraction: float | None = None
    realised_budget: float | None = None
    """Tokens whose K and V a row's KV head read in a step, mean over the layers that the method makes sparse."""
    selection_hit_rate: float | None = None
    """Share of selections reused from an earlier step; None if the method reuses none, or needed none."""


def dense_reads(cache: SparseCache, steps: int) -> Reads:
    """Return dense attention's reads in the last ``steps`` steps: all tokens cached at each step."""
    if steps == 0:
        return Reads()
    end = cache.length
    lengths = range(end - steps + 1, end + 1)
    total = 0
    for layer in cache.layers:
        token_bytes = layer.keys.shape[1] * (layer.keys.shape[-1] + layer.values.shape[-1]) * layer.keys.element_size()
        window = layer.sliding_window if layer.is_sliding else end
        total += token_bytes * sum(min(length, window) for length in lengths)
    return Reads(total, 0, total, 1.0, sum(lengths) / steps)


def sparse_reads(model: PreTrainedModel, cache: SparseCache) -> Reads:
    """Return a patched model's counters for the cache that it used last."""
    stats = sparse_attention_stats(model)
    if stats.decode_steps == 0:
        return Reads()
    per_layer = [
        counted.tokens_read / (counted.decode_steps * layer.keys.shape[0] * layer.storage.kv_heads)
        for layer_idx, (counted, layer) in enumerate(zip(stats.layers, cache.layers, strict=True))
        if layer_idx >= cache.method.dense_layers and not layer.is_sliding
    ]
    selections = stats.method_counts.get("selections", 0)
    return Reads(
        kv_bytes=stats.kv_bytes,
        metadata_bytes=stats.metadata_bytes,
        dense_bytes=stats.dense_bytes,
        kv_fraction=stats.kv_fraction,
        realised_budget=sum(per_layer) / len(per_layer),
        selection_hit_rate=stats.method_counts["selections_kept"] / selections if selections else None,
    )


def traffic_per_step(model: PreTrainedModel) -> dict[str, float]:
    """Return what a patched, offloaded model moved for the cache that it used last, per decode step.

    ``pool_hits`` is the share of the blocks read that the device held already; ``bytes_loaded`` and ``stall_ms``, the
    time for which the model waited for loads, are sums over the layers.
    """
    stats = sparse_attention_stats(model)
    return {
        "pool_hits": stats.hit_rate,
        "bytes_loaded": stats.loaded_per_step,
        "stall_ms": 1e3 * stats.stall_seconds / max(stats.decode_steps, 1),
    }


def link_rate(traffic: Mapping[str, float], milliseconds: float) -> float:
    """Return the mean GB/s over the link: what a step loads, over the time between tokens.

    The link rests while a step does anything else, so it is faster than that while it loads.
    """
    return traffic["bytes_loaded"] / milliseconds / 1e6


def device_name(device: torch.device) -> str:
    """Return the GPU's name, or the number of CPU cores that the process may use."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{platform.machine()} CPU, {cores} cores"


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that the measured code uses."""
    found = {"python": platform.python_version()}
    for package in ("torch", "transformers", "triton", "hf-sparse-attn"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    found["torch"] = torch.__version__
    return found
