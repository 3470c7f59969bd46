"""The global threshold of Squeezed Attention, and the share of the context that it lets each head read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from hf_sparse_attn_kernels import centroid_weights

from hf_sparse_attn.clusters.calibration import global_threshold
from hf_sparse_attn.head_shard import WHOLE, HeadShard

COARSE_SPARSITY = 0.5
"""Share of the tokens that the coarse level of a hierarchical lookup drops."""
QUERIES_AT_ONCE = 16

Index = dict[str, torch.Tensor]


def thresholds(
    queries: Sequence[torch.Tensor], indices: Sequence[Index], target_sparsity: float, shard: HeadShard = WHOLE
) -> Index:
    """Find the threshold that leaves out a share of the context's tokens (arXiv 2411.09688).

    The threshold is the ``target_sparsity`` quantile of the estimated weights of all clustered tokens, over all layers
    and KV heads. The weights are averaged over the queries, and over the query heads of a group.

    Parameters
    ----------
    queries
        The last queries of the context in each layer, [q_heads, queries, head_dim], scaled as for 1/sqrt(d).
    indices
        Each layer's index; see :mod:`hf_sparse_attn.clusters.index`.
    target_sparsity
        In [0, 1). At 0 the threshold is below every weight.
    shard
        The part of each layer's heads that these are of; the threshold is that of all.

    Returns
    -------
    dict
        ``threshold``, a float32 scalar; for two levels also ``coarse_threshold``, of the coarse clusters.
    """

    def global_of(weights: list[torch.Tensor], sizes: str, share: float) -> torch.Tensor:
        every = [shard.all_gather(layer, dim=1) for layer in weights]
        threshold = global_threshold(every, [shard.all_gather(index[sizes][None], dim=1) for index in indices], share)
        return torch.tensor(threshold, dtype=torch.float32, device=queries[0].device)

    found: Index = {}
    batches = [query[None] for query in queries]
    if "parents" in indices[0]:
        weights = [_weights(query, index, coarse=True) for query, index in zip(batches, indices, strict=True)]
        found["coarse_threshold"] = global_of(weights, "coarse_sizes", min(COARSE_SPARSITY, target_sparsity))
    weights = [
        _weights(query, {**index, **{name: value.to(query.device) for name, value in found.items()}})
        for query, index in zip(batches, indices, strict=True)
    ]
    found["threshold"] = global_of(weights, "cluster_sizes", target_sparsity)
    return found


def shares_read(queries: torch.Tensor, index: Index, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Measure which share of a layer's context each KV head reads.

    Parameters
    ----------
    queries
        [q_heads, queries, head_dim], scaled as for 1/sqrt(d).
    index
        The layer's index with its thresholds.
    tokens
        Tokens of the context, those that are always read included.

    Returns
    -------
    tuple of torch.Tensor
        float32 [kv_heads] each: the share that the queries choose together, as in prefill, and the mean of the shares
        that they choose one by one, as in decode.
    """
    sizes = index["cluster_sizes"]
    always = tokens - sizes.sum(dim=1)

    def share(weights: torch.Tensor) -> torch.Tensor:
        read = torch.where(weights > index["threshold"], sizes, 0).sum(dim=-1) + always
        return read.float() / tokens

    together = share(_weights(queries[None], index)[0])
    one_by_one = [
        share(_weights(part.transpose(0, 1)[:, :, None], index))
        for part in torch.split(queries, QUERIES_AT_ONCE, dim=1)
    ]
    return together, torch.cat(one_by_one).mean(dim=0)


def _weights(queries: torch.Tensor, index: Index, coarse: bool = False) -> torch.Tensor:
    """Return the weights [batch, kv_heads, clusters] of queries [batch, q_heads, queries, head_dim]."""
    batch = len(queries)

    def rows(name: str) -> torch.Tensor:
        return index[name].expand(batch, *index[name].shape)

    if coarse:
        return centroid_weights(queries, rows("coarse_centroids"), rows("coarse_sizes"))
    parents: dict[str, Any] = {}
    if "parents" in index:
        parents = {
            "parents": rows("parents"),
            "parent_weights": _weights(queries, index, coarse=True),
            "parent_threshold": index["coarse_threshold"].expand(batch),
        }
    return centroid_weights(queries, rows("centroids"), rows("cluster_sizes"), **parents)
