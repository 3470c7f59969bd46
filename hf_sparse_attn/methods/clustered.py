"""The clustered tokens of a layer: a prefix that rows share, or the first tokens of each row, where they lie."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from hf_sparse_attn.methods.base import Selection

if TYPE_CHECKING:
    from hf_sparse_attn.cache.layer import SparseLayer


class Context(NamedTuple):
    """The clustered tokens of a layer, and where the exact tokens after them begin."""

    keys: torch.Tensor
    """[batch or 1, kv_heads, capacity, head_dim]."""
    values: torch.Tensor
    start: torch.Tensor
    """int32 [batch]: position of each row's first clustered token in ``keys``."""
    tail_start: torch.Tensor
    """int32 [batch]: position of the first token after them in ``layer.keys``."""
    clusters: dict[str, Any]
    """``centroids``, ``cluster_sizes``, ``run_starts``, ``run_clusters``, ``threshold``; see ``clusters.index``."""
    token_order: torch.Tensor | None
    """int32 [batch, kv_heads, capacity], if the keys are not stored in cluster order."""

    def operands(
        self, layer: SparseLayer, run_indices: torch.Tensor, run_counts: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Return the tensors that attention to chosen runs and the layer's tail takes after the query."""
        context = (self.keys, self.values, self.start, self.clusters["run_starts"], run_indices, run_counts)
        return *context, layer.keys, layer.values, self.tail_start, layer.seq_end


def context_of(layer: SparseLayer) -> Context:
    """Return the clustered tokens of a layer: its prefix, or the first tokens of its rows."""
    prefix = layer.prefix
    if prefix is not None:
        start = prefix.metadata["context_start"]
        return Context(prefix.keys, prefix.values, start, layer.seq_start, prefix.metadata, None)
    index = layer.metadata
    tail_start = layer.seq_start + index["context_lengths"]
    return Context(layer.keys, layer.values, layer.seq_start, tail_start, index, index["token_order"])


def row_keys(layer: SparseLayer, row: int, tokens: int) -> torch.Tensor:
    """Return the first keys of a row, [kv_heads, tokens, head_dim]."""
    start = int(layer.seq_start[row])
    keys: torch.Tensor = layer.keys[row, :, start : start + tokens]
    return keys


def known_queries(layers: Sequence[SparseLayer], row: int) -> int:
    """Return how many of a row's last queries every layer keeps."""
    kept = [layer.prompt_queries for layer in layers]
    return min(0 if queries is None else int(queries.counts[row]) for queries in kept)


def index_bytes(index: dict[str, torch.Tensor]) -> int:
    """Bytes of a row's index that every decode step reads: centroids of the highest level, sizes, parents and runs."""
    centroids = index.get("coarse_centroids", index["centroids"])
    whole = (*(index[name] for name in ("cluster_sizes", "run_starts", "run_clusters")), index.get("coarse_sizes"))
    whole += (index.get("parents"),)
    return sum(part.numel() * part.element_size() for part in (centroids, *whole) if part is not None)


def store(layer: SparseLayer, row: int, tokens: int, index: dict[str, torch.Tensor]) -> None:
    """Write a row's index into the layer's metadata, whose tensors have room for more."""
    metadata = layer.metadata
    metadata["context_lengths"][row] = tokens
    metadata["index_bytes"][row] = index_bytes(index)
    metadata["cluster_sizes"][row].zero_()
    metadata["run_starts"][row].fill_(tokens)  # absent runs have no tokens
    for name, tensor in index.items():
        metadata[name][(row, *(slice(size) for size in tensor.shape))] = tensor


def tokens_read(layer: SparseLayer, context: Context, run_indices: torch.Tensor, run_counts: torch.Tensor) -> Selection:
    """Return the tokens of the chosen runs, and those after the context, as a selection of single tokens."""
    batch, kv_heads = run_counts.shape
    starts, lengths = context.clusters["run_starts"], layer.row_lengths().tolist()
    if layer.prefix is None:
        order, clustered = layer.metadata["token_order"], layer.metadata["context_lengths"].tolist()
    else:
        order, clustered = context.clusters["token_order"], [layer.prefix.tokens] * batch
        lengths = [layer.prefix.tokens + length for length in lengths]
    rows = []
    for row in range(batch):
        tail = torch.arange(clustered[row], lengths[row], dtype=torch.int32, device=starts.device)
        for head in range(kv_heads):
            runs = run_indices[row, head, : int(run_counts[row, head])].long()
            begins, ends = starts[row, head][runs].tolist(), starts[row, head][runs + 1].tolist()
            slots = [slot for begin, end in zip(begins, ends, strict=True) for slot in range(begin, end)]
            chosen = order[row, head][torch.tensor(slots, dtype=torch.long, device=starts.device)]
            rows.append(torch.cat((chosen.sort().values, tail)))
    counts = torch.tensor([len(tokens) for tokens in rows], dtype=torch.int32, device=starts.device)
    indices = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-1)
    return Selection(indices.view(batch, kv_heads, -1), counts.view(batch, kv_heads), 1)
