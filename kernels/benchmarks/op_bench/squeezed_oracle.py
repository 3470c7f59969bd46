"""Oracles of Squeezed Attention's results: weights in float64, attention to the chosen tokens in float32."""

from __future__ import annotations

import math

import torch

from op_bench.oracle import ROUNDINGS, Mismatch, attention, check_output
from op_bench.squeezed_workload import SqueezedLayer
from op_bench.token_oracle import chunk_attention
from op_bench.workload import DTYPE

QUERIES_AT_ONCE = 64
"""Number of queries whose weights are held in float64 at a time."""


def cluster_weights(layer: SqueezedLayer) -> tuple[torch.Tensor, float]:
    """Return the clusters' mean weights, float64 [batch, kv_heads, clusters], and the largest absolute score."""
    context, queries = layer.context, layer.queries
    group, scale, largest = layer.shape.group, layer.shape.head_dim**-0.5, 0.0
    weights = torch.zeros(context.cluster_sizes.shape, dtype=torch.float64, device=queries.device)
    for row in range(layer.shape.batch):
        for head in range(layer.shape.kv_heads):
            centroids = context.centroids[row, head].double().T * scale
            masses = context.cluster_sizes[row, head].double().log()
            own = queries[row, head * group : (head + 1) * group].flatten(0, 1)
            for some in torch.split(own, QUERIES_AT_ONCE):
                scores = some.double() @ centroids
                largest = max(largest, float(scores.abs().max()))
                total = (scores + masses).logsumexp(dim=1, keepdim=True)
                weights[row, head] += (scores - total).exp().sum(dim=0) / len(own)
    return weights, largest


def check_weights(found: torch.Tensor, layer: SqueezedLayer) -> None:
    """Raise unless the weights are right up to ``ROUNDINGS`` roundings of the scores in float32."""
    if "weights" not in layer.expected:
        weights, largest = cluster_weights(layer)
        layer.expected |= {"weights": weights, "largest": torch.tensor(largest)}
    truth, largest = layer.expected["weights"], float(layer.expected["largest"])
    allowed = math.expm1(2 * ROUNDINGS * torch.finfo(torch.float32).eps * (1 + largest))
    error = float((found.double() / truth - 1).abs().max())
    if not error <= allowed:  # NaN is an error too
        raise Mismatch(f"centroid_weights: off by {error:.2e} of a weight, allowed {allowed:.2e}")


def check_runs(indices: torch.Tensor, counts: torch.Tensor, weights: torch.Tensor, layer: SqueezedLayer) -> None:
    """Raise unless the chosen runs are those whose clusters' ``weights`` exceed the threshold, and the window's."""
    context = layer.context
    clusters = context.run_clusters.long()
    above = weights.gather(2, clusters.clamp(min=0)) > layer.threshold[:, None, None]
    chosen = (context.run_starts.diff(dim=2) > 0) & (above | (clusters < 0))
    if not torch.equal(counts, chosen.sum(dim=2).int()):
        raise Mismatch("selection: wrong counts")
    runs = torch.arange(chosen.shape[2], device=chosen.device)
    expected = torch.where(chosen, runs, len(runs)).sort(dim=2)[0]
    expected = expected.masked_fill(expected == len(runs), -1)
    if not torch.equal(indices.long(), expected):
        wrong = int((indices != expected).sum())
        raise Mismatch(f"selection: {wrong} of {expected.numel()} places differ")


def chosen_tokens(
    indices: torch.Tensor, counts: torch.Tensor, layer: SqueezedLayer, row: int, head: int
) -> torch.Tensor:
    """Return the positions that a row and KV head reads: the chosen runs' and the tail's."""
    starts = layer.context.run_starts[row, head].long()
    runs = indices[row, head, : int(counts[row, head])].long()
    lengths = starts[runs + 1] - starts[runs]
    first = (starts[runs] - (lengths.cumsum(0) - lengths)).repeat_interleave(lengths)
    tail = torch.arange(layer.choice_length, layer.shape.length, device=starts.device)
    return torch.cat((first + torch.arange(len(first), device=starts.device), tail))


def check_attention(found: torch.Tensor, indices: torch.Tensor, counts: torch.Tensor, layer: SqueezedLayer) -> None:
    """Raise unless ``found`` is attention to the chosen runs and, causally, to the tail."""
    attend, group = attention if layer.shape.queries == 1 else chunk_attention, layer.shape.group
    truth, rough = (torch.empty(found.shape, device=found.device) for _ in range(2))
    for row in range(layer.shape.batch):
        for head in range(layer.shape.kv_heads):
            tokens = chosen_tokens(indices, counts, layer, row, head)
            k, v = (buffer[row, head, tokens][None, None] for buffer in (layer.keys, layer.values))
            heads = slice(head * group, (head + 1) * group)
            for out, dtype in ((truth, torch.float32), (rough, DTYPE)):
                out[row, heads] = attend(layer.query[row : row + 1, heads], k, v, dtype)[0]
    check_output(found, truth, rough)


def token_counts(counts: torch.Tensor, indices: torch.Tensor, layer: SqueezedLayer) -> tuple[int, int]:
    """Return the tokens read, and the tokens that dense attention reads, over rows and KV heads."""
    pairs = layer.shape.batch * layer.shape.kv_heads
    used = torch.arange(indices.shape[2], device=indices.device) < counts[..., None]
    lengths = layer.context.run_starts.diff(dim=2).gather(2, indices.clamp(min=0).long())
    tail = layer.shape.length - layer.choice_length
    return int(lengths[used].sum()) + pairs * tail, pairs * layer.shape.length
