"""Checks of ``kv_storage``, before any work."""

from __future__ import annotations

from hf_sparse_attn.cache.host.memory import available_bytes
from hf_sparse_attn.methods import METHODS, SparseMethod

KV_STORAGES = ("device", "host")


def check_kv_storage(kv_storage: str, method: SparseMethod) -> None:
    """Raise ``ValueError`` unless the method's keys and values can lie there."""
    if kv_storage not in KV_STORAGES:
        raise ValueError(f"kv_storage must be one of {', '.join(map(repr, KV_STORAGES))}, got {kv_storage!r}")
    if kv_storage == "device":
        return
    if method.offloading is not None:
        raise ValueError(
            f"kv_storage='host' and offload=True exclude each other, got both for method {method.name!r}: give one"
        )
    if method.selection_size is None:
        able = [name for name, each in METHODS.items() if each.selection_size is not SparseMethod.selection_size]
        raise ValueError(
            f"kv_storage must be 'device' for method {method.name!r}, got 'host': its decode steps read keys "
            f"that they have not selected; methods that allow 'host': {', '.join(able)}"
        )


def check_host_room(num_bytes: int, tokens: int, replaced: int | None = None) -> None:
    """Raise ``RuntimeError`` if the host has no room for buffers.

    Parameters
    ----------
    num_bytes
        Bytes to allocate while everything that is allocated stays.
    tokens
        Tokens of a row that the buffers hold.
    replaced
        Tokens of a row in the buffers that they replace, which exist until the tokens are copied; None for none.
    """
    left = available_bytes()
    if left is not None and num_bytes > left:
        beside = "" if replaced is None else f" beside the {replaced} that they replace"
        raise RuntimeError(
            f"kv_storage='host': {tokens} tokens take {num_bytes / 2**30:.2f} GiB of host memory{beside}, and "
            f"{left / 2**30:.2f} GiB are left: lower the batch or the context, or use kv_storage='device'"
        )
