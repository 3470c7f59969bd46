"""One layer's buffers for Squeezed Attention: a clustered context in the order of its clusters, and a tail."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import hf_sparse_attn_kernels as ops
import torch
from hf_sparse_attn_kernels.runs import MAX_RUN

from op_bench.shapes import Settings, Shape
from op_bench.workload import DTYPE

LEAST_SPREAD, MOST_SPREAD = 0.3, 1.5
"""Standard deviation of q.k / sqrt(head_dim) over the clusters, of the first and the last KV head.

Heads whose scores spread more have more clusters above one threshold, about five times as many at these two.
"""
SIMILARITY = 0.8
"""Expected cosine of two queries of a prefill. Their mean weights would hardly differ if they were independent."""


@dataclass
class Context:
    """A clustered context of one row, or of all rows: slots in the order of the clusters, then the window."""

    centroids: torch.Tensor
    """[contexts, kv_heads, clusters, head_dim]."""
    cluster_sizes: torch.Tensor
    """int32 [contexts, kv_heads, clusters]."""
    run_starts: torch.Tensor
    """int32 [contexts, kv_heads, runs + 1]."""
    run_clusters: torch.Tensor
    """int32 [contexts, kv_heads, runs]; -1 for the window's runs."""

    def expand(self, batch: int) -> Context:
        """Return views for all rows."""
        return Context(*(tensor.expand(batch, *tensor.shape[1:]) for tensor in vars(self).values()))


@dataclass
class SqueezedLayer:
    """Tensors that a step or a prefill of one layer reads. Context and tail lie in the same buffers."""

    shape: Shape
    settings: Settings
    query: torch.Tensor
    """[batch, q_heads, head_dim], or [batch, q_heads, queries, head_dim] for a prefill."""
    keys: torch.Tensor
    """[batch, kv_heads, length, head_dim]."""
    values: torch.Tensor
    context: Context
    seq_start: torch.Tensor
    """int32 [batch]: position of the context's first token."""
    tail_start: torch.Tensor
    """int32 [batch]: position of the first token after the context."""
    seq_end: torch.Tensor
    counter: torch.Tensor
    """int64 [4], added to by the ops."""
    threshold: torch.Tensor
    """float32 [batch]: weight that a cluster must exceed to be read."""
    weights: torch.Tensor
    """float32 [batch, kv_heads, clusters]."""
    run_indices: torch.Tensor
    run_counts: torch.Tensor
    expected: dict[str, torch.Tensor] = field(default_factory=dict)
    """Results that checks computed once."""

    @property
    def choice_length(self) -> int:
        """Tokens of a row to choose from."""
        return self.settings.context_length(self.shape)

    @property
    def queries(self) -> torch.Tensor:
        """The queries as [batch, q_heads, queries, head_dim]."""
        return self.query if self.query.dim() == 4 else self.query[:, :, None]


def squeezed_layer_bytes(shape: Shape, settings: Settings) -> int:
    """Return the bytes of a layer's buffers."""
    contexts = shape.kv_heads * (1 if shape.shared else shape.batch)
    clusters = settings.num_clusters(shape)
    vectors = contexts * (2 * shape.length + clusters) * shape.head_dim
    queries = shape.batch * shape.q_heads * shape.queries * shape.head_dim
    tables = contexts * (clusters + 2 * round(expected_runs(shape, settings)))
    chosen = shape.batch * shape.kv_heads * (clusters + round(expected_runs(shape, settings)))
    return (vectors + queries) * DTYPE.itemsize + 4 * (tables + chosen)


def expected_runs(shape: Shape, settings: Settings) -> float:
    """Return the mean number of runs of a KV head: a cluster's size is geometrically distributed."""
    per_cluster = 1 / (1 - (1 - settings.clusters) ** MAX_RUN)
    return settings.num_clusters(shape) * per_cluster + -(-settings.window // MAX_RUN)


def make_squeezed_layer(
    shape: Shape, settings: Settings, device: torch.device, seed: int = 0, impl: str | None = None
) -> SqueezedLayer:
    """Create a layer of random clusters, whose threshold leaves ``settings.sparsity`` of the clustered tokens out.

    Raises
    ------
    ValueError
        No token would be clustered.
    """
    if settings.context_length(shape) <= settings.window:
        raise ValueError(f"length={shape.length}; allowed: more tokens before the tail than window={settings.window}")
    generator = torch.Generator(device).manual_seed(seed)
    contexts = 1 if shape.shared else shape.batch
    size = (contexts, shape.kv_heads, shape.length, shape.head_dim)
    keys, values = (torch.randn(size, dtype=DTYPE, device=device, generator=generator) for _ in range(2))
    context = _cluster(keys, shape, settings, generator).expand(shape.batch)
    query = _queries(shape, device, generator)
    start = torch.zeros(shape.batch, dtype=torch.int32, device=device)
    queries = query if shape.queries > 1 else query[:, :, None]
    weights = ops.centroid_weights(queries, context.centroids, context.cluster_sizes, impl=impl)
    threshold = _threshold(weights, context.cluster_sizes, settings.sparsity).repeat(shape.batch)
    run_indices, run_counts = ops.select_runs(
        weights, context.cluster_sizes, context.run_starts, context.run_clusters, threshold, impl=impl
    )
    return SqueezedLayer(
        shape,
        settings,
        query,
        keys=keys.expand(shape.batch, -1, -1, -1),
        values=values.expand(shape.batch, -1, -1, -1),
        context=context,
        seq_start=start,
        tail_start=torch.full_like(start, settings.context_length(shape)),
        seq_end=torch.full_like(start, shape.length),
        counter=torch.zeros(4, dtype=torch.int64, device=device),
        threshold=threshold,
        weights=weights,
        run_indices=run_indices,
        run_counts=run_counts,
    )


def _queries(shape: Shape, device: torch.device, generator: torch.Generator) -> torch.Tensor:
    """Create a query of each row and head, or those of a prefill, which point in similar directions."""
    size = (shape.batch, shape.q_heads, shape.queries, shape.head_dim)
    query = torch.randn(size, dtype=DTYPE, device=device, generator=generator)
    if shape.queries == 1:
        return query[:, :, 0].contiguous()
    return math.sqrt(1 - SIMILARITY) * query + math.sqrt(SIMILARITY) * query[:, :, :1]


def _cluster(keys: torch.Tensor, shape: Shape, settings: Settings, generator: torch.Generator) -> Context:
    """Move the keys of each cluster to a centre of their own, in place, and index the clusters."""
    clustered, count = settings.context_length(shape) - settings.window, settings.num_clusters(shape)
    spreads = torch.linspace(LEAST_SPREAD, MOST_SPREAD, shape.kv_heads).tolist()
    centroids = keys.new_empty((*keys.shape[:2], count, shape.head_dim))
    sizes = torch.empty(centroids.shape[:3], dtype=torch.int32, device=keys.device)
    for row in range(keys.shape[0]):
        for head, spread in enumerate(spreads):
            # A random choice of the clusters' ends makes their sizes geometrically distributed, none of them 0.
            ends = torch.rand(clustered - 1, device=keys.device, generator=generator).topk(count - 1)[1] + 1
            bounds = torch.cat((ends.new_zeros(1), ends.sort()[0], ends.new_full((1,), clustered)))
            own_sizes = bounds.diff()
            centres = torch.randn(count, shape.head_dim, dtype=DTYPE, device=keys.device, generator=generator)
            members = keys[row, head, :clustered]
            members += (spread * centres).repeat_interleave(own_sizes, dim=0)
            centroids[row, head] = torch.segment_reduce(members.float(), "mean", lengths=own_sizes)
            sizes[row, head] = own_sizes
    return Context(centroids, sizes, *_runs(sizes, settings.window))


def _runs(sizes: torch.Tensor, window: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cut clusters of ``sizes`` [contexts, kv_heads, clusters] and the window after them into runs."""
    count = sizes.shape[2]
    segments = torch.cat((sizes, torch.full_like(sizes[..., :1], window)), dim=2).long()
    runs = -(-segments // MAX_RUN)
    most = int(runs.sum(dim=2).max())
    run_starts = segments.sum(dim=2, keepdim=True).int().repeat(1, 1, most + 1)  # absent runs have no slots
    run_clusters = torch.full_like(run_starts[..., :most], -1)
    for row in range(sizes.shape[0]):
        for head in range(sizes.shape[1]):
            of_segment = runs[row, head]
            segment = torch.arange(count + 1, device=sizes.device).repeat_interleave(of_segment)
            within = torch.arange(len(segment), device=sizes.device) - (of_segment.cumsum(0) - of_segment)[segment]
            first = (segments[row, head].cumsum(0) - segments[row, head])[segment]
            run_starts[row, head, : len(segment)] = first + MAX_RUN * within
            run_clusters[row, head, : len(segment)] = torch.where(segment < count, segment, -1)
    return run_starts, run_clusters


def _threshold(weights: torch.Tensor, sizes: torch.Tensor, sparsity: float) -> torch.Tensor:
    """Return a weight between two clusters' that leaves ``sparsity`` of all tokens out, float32 [1]."""
    order = weights.flatten().argsort(descending=True)
    tokens = sizes.flatten()[order].cumsum(0)
    chosen = int((tokens <= (1 - sparsity) * int(tokens[-1])).sum())
    return weights.flatten()[order[max(chosen - 1, 0) : chosen + 1]].mean(dim=0, keepdim=True)
