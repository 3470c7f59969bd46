"""Files that say which KV heads are retrieval heads, in the format that DuoAttention publishes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from hf_sparse_attn.methods.parameter_file import FileState, state_of, text_of

Values = tuple[tuple[float, ...], ...]
"""Of every layer and KV head: from 0, for a streaming head, to 1, for a retrieval head."""
SLACK = 0.01
"""How far outside numbers may lie, which are then clipped: training leaves some a little below 0."""


def read_values(path: str) -> Values:
    """Read the values of every layer and KV head.

    Parameters
    ----------
    path
        Text: a line of tab-separated numbers from 0 to 1 for each layer, one for each KV head. Numbers less than
        :data:`SLACK` outside are clipped, as in the published files.

    Raises
    ------
    FileNotFoundError
        There is no such file.
    ValueError
        The file has another format, or a number is out of range, or ``path`` has characters that no path may have.
    """
    return _read(path, state_of("heads", path))


@lru_cache(maxsize=4)
def _read(path: str, state: FileState) -> Values:
    """Read a file; ``state`` is its present one, so that a new file is read anew."""
    lines = text_of("heads", path).splitlines()
    try:
        values = [[float(entry) for entry in line.split("\t")] for line in lines if line.strip()]
    except ValueError as error:
        raise ValueError(f"heads={path!r} must have tab-separated numbers, one line per layer: {error}") from error
    return checked(values, f"heads={path!r}")


def checked(values: Any, name: str) -> Values:
    """Return rows of numbers, a sequence or a tensor [layers, kv_heads], as tuples.

    Raises
    ------
    TypeError
        These are not rows of numbers.
    ValueError
        The rows differ in length, or a number is not between 0 and 1. ``name`` stands for them in the message.
    """
    rows = values.tolist() if hasattr(values, "tolist") else values
    is_rows = isinstance(rows, Sequence) and all(isinstance(row, Sequence) and not isinstance(row, str) for row in rows)
    if not is_rows or not all(isinstance(value, (int, float)) for row in rows for value in row):
        raise TypeError(f"{name} must be a path, or numbers [layers, kv_heads], got {values!r}")
    if not rows or not rows[0] or len({len(row) for row in rows}) != 1:
        sizes = [len(row) for row in rows]
        raise ValueError(f"{name} must have one number per KV head, the same in every layer, got rows of {sizes}")
    outside = [value for row in rows for value in row if not -SLACK <= value <= 1 + SLACK]
    if outside:
        raise ValueError(f"{name} must be between 0 and 1, got {outside[0]}")
    return tuple(tuple(min(max(float(value), 0.0), 1.0) for value in row) for row in rows)


def streaming_heads(values: Values, threshold: float, sparsity: float | None) -> tuple[tuple[int, ...], ...]:
    """Return the KV heads of each layer that stream.

    Parameters
    ----------
    values
        Of all heads.
    threshold
        Heads with smaller values stream.
    sparsity
        Share of the heads that stream, those of the least values, of equal ones the first; replaces ``threshold``. As
        many as there are below this quantile of distinct values.
    """
    every = [(value, layer, head) for layer, row in enumerate(values) for head, value in enumerate(row)]
    if sparsity is None:
        chosen = {place[1:] for place in every if place[0] < threshold}
    else:
        number = len(every) if sparsity >= 1 else math.ceil(sparsity * (len(every) - 1))
        chosen = {place[1:] for place in sorted(every)[:number]}
    return tuple(tuple(head for head in range(len(row)) if (layer, head) in chosen) for layer, row in enumerate(values))
