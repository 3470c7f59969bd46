"""The contents of a context's file, read without a model."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from hf_sparse_attn.context.files import Header, opened, read_layer
from hf_sparse_attn.context.fixed import ContextBudget, first_rows

KEPT = "keys and values"
QUERIES = "queries"
INDEX = "index"
PARTS = {"keys": KEPT, "values": KEPT, "queries": QUERIES}
"""Part of a file by the name of a tensor; the others are the index."""


class FileContents(NamedTuple):
    """Header and sizes of a context's file."""

    header: Header
    dtype: str
    """Dtype of keys and values."""
    kv_heads: int
    clusters: dict[str, int]
    """Clusters of a KV head; with two levels ``coarse_clusters`` too."""
    thresholds: dict[str, float]
    num_bytes: dict[str, int]
    """Bytes of keys and values, of the index, and of the queries that calibrate."""


def read_contents(path: Path) -> FileContents:
    """Read header and sizes of a file, and of its tensors only the thresholds.

    Raises
    ------
    ValueError
        The file is damaged, cut off or no context.
    OSError
        The file cannot be read.
    """
    with opened(path) as (file, header):
        num_bytes: Counter[str] = Counter()
        for name in file.checksums:
            part = PARTS.get(name.rpartition(".")[2], INDEX)
            num_bytes[part] += math.prod(file.shape(name)) * file.dtype(name).itemsize
        names = [name for name in ("coarse_threshold", "threshold") if f"layers.0.{name}" in file.checksums]
        counts = {"coarse_clusters": "coarse_sizes", "clusters": "cluster_sizes"}
        return FileContents(
            header,
            str(file.dtype("layers.0.keys")).removeprefix("torch."),
            file.shape("layers.0.keys")[1],
            {
                count: file.shape(f"layers.0.{name}")[2]
                for count, name in counts.items()
                if f"layers.0.{name}" in file.checksums
            },
            {name: float(file.read(f"layers.0.{name}")) for name in names},
            dict(num_bytes),
        )


def read_budget(path: Path) -> ContextBudget:
    """Compute the share of the context that each KV head reads, as :attr:`FixedContext.budget`, without a model.

    Reads the queries and the index, layer by layer, and neither keys nor values.

    Raises
    ------
    ValueError
        The file is damaged, cut off or no context.
    OSError
        The file cannot be read.
    """
    with opened(path) as (file, header):

        def layers() -> Iterator[tuple[torch.Tensor, dict[str, torch.Tensor]]]:
            for number in range(header.num_layers):
                tensors = read_layer(file, number, without=("keys", "values", "token_order"))
                queries = tensors.pop(QUERIES)
                yield queries, first_rows(tensors)

        return ContextBudget.measure(header.method.target_sparsity, header.num_tokens, layers())
