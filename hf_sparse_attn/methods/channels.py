"""Heavy channels: how much each key channel weighs in the scores, files that say so, and labels of few bits."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from hf_sparse_attn.methods.parameter_file import FileState, json_of, state_of

STATISTICS = ("qk", "q", "k")
LABEL_BITS = (2, 4, 8, 16)
MODEL_BITS = 16
"""``label_bits`` of labels that are not quantized: they have the keys' dtype."""


def channel_weights(mean_query: torch.Tensor, mean_key: torch.Tensor, statistic: str) -> torch.Tensor:
    """Return the weight of each channel in the scores of each query head.

    Parameters
    ----------
    mean_query
        [..., q_heads, head_dim]: the mean magnitude of each query channel.
    mean_key
        [..., kv_heads, head_dim]: that of each key channel.
    statistic
        ``"qk"``: the product of the two, which is the mean of ``|q_i k_i|`` over all pairs of a query and a key:
        method 2 of the authors' ``config/offline_calibration.py`` (DoubleSparse b0575e6).
        ``"q"`` or ``"k"``: one of the two alone.

    Returns
    -------
    torch.Tensor
        [..., q_heads, head_dim]; [..., kv_heads, head_dim] for ``"k"``.
    """
    if statistic == "k":
        return mean_key
    if statistic == "q":
        return mean_query
    return mean_query * mean_key.repeat_interleave(mean_query.shape[-2] // mean_key.shape[-2], dim=-2)


def heaviest(weights: torch.Tensor, kv_heads: int, channels: int) -> torch.Tensor:
    """Return the heaviest channels of each KV head, ascending, int64 [..., kv_heads, channels].

    ``weights`` [..., heads, head_dim] are summed over the query heads of a KV head.
    """
    grouped = weights.reshape(*weights.shape[:-2], kv_heads, -1, weights.shape[-1]).sum(-2)
    return grouped.topk(channels, dim=-1).indices.sort(dim=-1).values


def file_key(layer_idx: int, statistic: str) -> str:
    """Return the name of a layer's entry in a file of channels, as the authors of Double Sparsity name it."""
    return f"model.layers.{layer_idx}.self_attn.{statistic}_proj"


def channels_of_file(path: str, layer_idx: int, statistic: str, heads: tuple[int, int], head_dim: int) -> torch.Tensor:
    """Read a layer's channels from a file, the heaviest first, as weights for :func:`heaviest`.

    Parameters
    ----------
    path
        JSON: lists of channels, the heaviest first, for each head, by :func:`file_key`.
    layer_idx, statistic
        The entry.
    heads
        Number of the model's query heads and KV heads. An entry has lists for either.
    head_dim
        Channels of a head.

    Returns
    -------
    torch.Tensor
        float32 [heads, head_dim]: minus the place of each channel, so a group's sum ranks by the mean place.

    Raises
    ------
    OSError
        The file cannot be read.
    ValueError
        The file is not JSON, or has no such entry, or one that is no list of channels, or for other heads or another
        head_dim.
    """
    entries, key = _read(path, state_of("calibration", path)), file_key(layer_idx, statistic)
    if key not in entries:
        raise ValueError(f"calibration={path!r} has no entry {key!r}; calibrate_channels writes one for every layer")
    orders = entries[key]
    if not (isinstance(orders, list) and len(orders) in heads and all(_is_order(order, head_dim) for order in orders)):
        raise ValueError(
            f"calibration={path!r}: {key!r} must list the channels 0 to {head_dim - 1} for each of {heads[0]} query "
            f"heads or {heads[1]} KV heads; it is of another model"
        )
    return -torch.tensor(orders).argsort(dim=1).float()


def _is_order(order: object, head_dim: int) -> bool:
    """Whether a value of a file lists all channels of a head."""
    is_whole = isinstance(order, list) and all(type(channel) is int for channel in order)
    return isinstance(order, list) and is_whole and sorted(order) == list(range(head_dim))


@lru_cache(maxsize=4)
def _read(path: str, state: FileState) -> dict[str, Any]:
    """Read a file of channels; ``state`` is its present one, so that a new file is read anew."""
    entries = json_of("calibration", path)
    if not isinstance(entries, dict):
        raise ValueError(f"calibration={path!r} must be a JSON object of layers, got {type(entries).__name__}")
    return entries


def label_sizes(channels: int, bits: int) -> dict[str, int]:
    """Return the numbers of a token's label, by the names of :func:`make_labels`."""
    return {"labels": channels} if bits == MODEL_BITS else {"labels": channels * bits // 8, "label_range": 2}


def make_labels(values: torch.Tensor, bits: int) -> dict[str, torch.Tensor]:
    """Quantize the values of the heavy channels, [..., channels], token by token, as in ``evaluation/modify_llama.py``.

    Returns
    -------
    dict
        With 16 bits, ``labels``: the values. Else ``labels`` uint8 [..., channels * bits / 8], the first channels in
        the low bits, and ``label_range`` float16 [..., 2]: the least value, and the step between levels, which are
        evenly spaced from the least value to the greatest.
    """
    if bits == MODEL_BITS:
        return {"labels": values}
    values, levels = values.to(torch.promote_types(values.dtype, torch.float32)), (1 << bits) - 1
    limit = torch.finfo(torch.float16).max
    least = values.amin(-1, keepdim=True).clamp(-limit, limit).half()
    step = ((values.amax(-1, keepdim=True) - least) / levels).clamp(0, limit).half()
    codes = ((values - least) / step.to(values.dtype).clamp_min(torch.finfo(torch.float16).tiny)).round()
    codes = codes.nan_to_num(0).clamp(0, levels).to(torch.uint8)  # padding may hold anything
    planes = codes.unflatten(-1, (8 // bits, -1)).unbind(-2)  # type: ignore[no-untyped-call]
    packed = planes[0]
    for number, plane in enumerate(planes[1:], start=1):
        packed = packed | (plane << (number * bits))
    return {"labels": packed, "label_range": torch.cat((least, step), dim=-1)}


def label_values(labels: torch.Tensor, label_range: torch.Tensor | None, bits: int, dtype: torch.dtype) -> torch.Tensor:
    """Return what labels stand for, [..., channels] in ``dtype``."""
    if label_range is None:
        return labels.to(dtype)
    levels = (1 << bits) - 1
    codes = torch.cat([(labels >> shift) & levels for shift in range(0, 8, bits)], dim=-1).to(dtype)
    least, step = label_range.to(dtype).unbind(-1)
    return codes * step.unsqueeze(-1) + least.unsqueeze(-1)
