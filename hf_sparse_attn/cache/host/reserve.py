"""Host memory of a forward pass, allocated and pinned before its first layer runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from hf_sparse_attn.cache.host.memory import host_bytes
from hf_sparse_attn.cache.host.room import check_host_room
from hf_sparse_attn.cache.host.storage import GrowingHostStorage, HostStorage

if TYPE_CHECKING:
    from hf_sparse_attn.cache.layer import SparseLayer


def reserve_first(
    layers: Sequence[SparseLayer], shape: Sequence[int], dtype: torch.dtype, devices: Sequence[torch.device]
) -> None:
    """Allocate the buffers of layers without tokens for the first pass over them; all of them, or none.

    Layers whose buffers, of an earlier use, serve again keep them. Others free theirs first.

    Parameters
    ----------
    layers
        The layers.
    shape
        That of the keys of the pass: batch, kv_heads, tokens, head_dim.
    dtype
        Their dtype. If other tokens come after all, their layer allocates by itself.
    devices
        The device of each of the model's layers.

    Raises
    ------
    RuntimeError
        Host memory does not suffice, or cannot be pinned.
    """
    waiting: list[tuple[HostStorage, torch.device]] = []
    for layer in layers:
        is_ready = layer.is_initialized and layer.keys.shape[0] == shape[0] and layer.capacity >= shape[2]
        if is_ready or devices[layer.layer_idx].type == "meta":  # weights that are loaded when the layer runs
            continue
        assert isinstance(layer.storage, HostStorage)
        layer.discard()
        layer.storage.release()
        waiting.append((layer.storage, devices[layer.layer_idx]))
    if not waiting:
        return
    needed = sum(storage.first_bytes(shape, dtype) for storage, _ in waiting)
    check_host_room(needed, waiting[0][0].first_capacity(shape[2]))
    try:
        for storage, device in waiting:
            storage.reserve_first(shape, dtype, device)
    except BaseException:
        for storage, _ in waiting:
            storage.drop_reserved()
        raise


def grow(layers: Sequence[SparseLayer], length: int) -> None:
    """Enlarge the buffers of layers that hold tokens, so that rows of ``length`` tokens fit.

    The tokens stay as they are if it fails, in buffers of either size.

    Raises
    ------
    RuntimeError
        Host memory does not suffice, or cannot be pinned.
    """
    growing = [layer for layer in layers if layer.capacity < length and isinstance(layer.storage, GrowingHostStorage)]
    needed = most = 0  # bytes allocated once the layers before are done, and at most
    for layer in growing:
        assert isinstance(layer.storage, GrowingHostStorage)
        batch, kv_heads, held, head_dim = layer.keys.shape
        capacity = layer.storage.capacity_for(length)
        needed += host_bytes((batch, kv_heads, capacity, head_dim), layer.keys.dtype)
        most = max(most, needed)
        if not layer.storage.shared_tokens:
            needed -= host_bytes(layer.keys.shape, layer.keys.dtype)
    if growing:
        check_host_room(most, capacity, replaced=held)
    for layer in growing:
        layer.reserve(length)
