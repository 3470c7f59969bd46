"""Clusters and runs shared by the tests of the ops on clusters."""

import math
from dataclasses import dataclass

import torch

from tests.ops.helpers import device

NAN = float("nan")


@dataclass
class Lookup:
    """Arguments of `centroid_weights`; those of a coarse level are None without it."""

    query: torch.Tensor
    centroids: torch.Tensor
    cluster_sizes: torch.Tensor
    num_queries: torch.Tensor | None = None
    parents: torch.Tensor | None = None
    parent_weights: torch.Tensor | None = None
    parent_threshold: torch.Tensor | None = None


def make_lookup(
    clusters, *, batch=2, kv_heads=2, group=1, queries=1, head_dim=64, dtype=torch.float32, shared=False, counts=None,
    coarse=0, scale=4.0,
):  # fmt: skip
    """Random clusters, a third of them empty with NaN centroids; strided views, expanded over rows if `shared`.

    `counts` are the queries that count in each row; the others are NaN. With `coarse` clusters of a first level, about
    half of them pass.
    """
    generator = torch.Generator().manual_seed(clusters + queries)
    stored = 1 if shared else batch
    sizes = torch.randint(0, 40, (stored, kv_heads, clusters), generator=generator, dtype=torch.int32)
    sizes[torch.rand(sizes.shape, generator=generator) < 1 / 3] = 0
    sizes[0, 0, clusters // 2] = 7  # at least one is not empty
    # Centroids lie in a longer buffer, whose rest is NaN.
    buffer = torch.randn(stored, kv_heads, clusters + 3, head_dim, generator=generator)
    buffer[:, :, clusters:] = NAN
    buffer[:, :, :clusters][sizes == 0] = NAN
    query = torch.randn(batch, queries, kv_heads * group, head_dim, generator=generator) * scale
    lookup = Lookup(
        query.to(device, dtype).transpose(1, 2),
        buffer.to(device, dtype)[:, :, :clusters].expand(batch, -1, -1, -1),
        sizes.to(device).expand(batch, -1, -1),
    )
    if counts is not None:
        lookup.num_queries = torch.tensor(counts, dtype=torch.int32, device=device)
        for row, count in enumerate(counts):
            lookup.query[row, :, : queries - count] = NAN
    if coarse:
        parents = torch.randint(0, coarse, (stored, kv_heads, clusters), generator=generator, dtype=torch.int32)
        parents[sizes == 0] = 1 << 30
        lookup.parents = parents.to(device).expand(batch, -1, -1)
        lookup.parent_weights = torch.rand(batch, kv_heads, coarse, generator=generator).to(device)
        lookup.parent_threshold = torch.linspace(0.4, 0.6, batch).to(device)
    return lookup


def exact_weights(lookup, scale=None):
    """The weights by their definition: float64 [batch, kv_heads, clusters], one query, head and cluster at a time."""
    batch, q_heads, queries, head_dim = lookup.query.shape
    kv_heads, clusters = lookup.centroids.shape[1:3]
    group = q_heads // kv_heads
    scale = head_dim**-0.5 if scale is None else scale
    weights = torch.zeros(batch, kv_heads, clusters, dtype=torch.float64)
    for row in range(batch):
        counted = queries if lookup.num_queries is None else lookup.num_queries[row].item()
        for head in range(kv_heads):
            sizes = lookup.cluster_sizes[row, head].tolist()
            taking_part = [
                cluster for cluster in range(clusters) if sizes[cluster] > 0 and _passes(lookup, row, head, cluster)
            ]
            if not taking_part:
                continue
            centroids = lookup.centroids[row, head, taking_part].double()
            for query_head in range(head * group, (head + 1) * group):
                for query in range(queries - counted, queries):
                    scores = (centroids @ lookup.query[row, query_head, query].double() * scale).tolist()
                    top = max(scores)
                    exponentials = [math.exp(score - top) for score in scores]
                    keys = zip(exponentials, taking_part, strict=True)
                    total = sum(each * sizes[cluster] for each, cluster in keys)
                    for each, cluster in zip(exponentials, taking_part, strict=True):
                        weights[row, head, cluster] += each / total / (group * counted)
    return weights.to(device)


def _passes(lookup, row, head, cluster):
    if lookup.parents is None:
        return True
    parent = lookup.parents[row, head, cluster]
    return bool(lookup.parent_weights[row, head, parent] > lookup.parent_threshold[row])


@dataclass
class Runs:
    """Arguments of `select_runs` that describe a context."""

    cluster_sizes: torch.Tensor
    run_starts: torch.Tensor
    run_clusters: torch.Tensor


def make_runs(clusters, *, batch=2, kv_heads=2, max_run=4, always=2, absent=3, shared=False, seed=0):
    """Runs of at most `max_run` slots of random clusters, some empty; then runs read always, then absent ones.

    Heads have different numbers of runs. `always` and `absent` count the last two kinds of the head with most runs.
    """
    generator = torch.Generator().manual_seed(seed)
    stored = 1 if shared else batch
    sizes = torch.randint(0, 3 * max_run, (stored, kv_heads, clusters), generator=generator, dtype=torch.int32)
    sizes[torch.rand(sizes.shape, generator=generator) < 0.2] = 0
    lengths, owners = [], []
    for of_head in sizes.flatten(0, 1).tolist():
        runs = [(cluster, min(max_run, size - first)) for cluster, size in enumerate(of_head)
                for first in range(0, size, max_run)]  # fmt: skip
        runs += [(-1, max_run - 1)] * always
        lengths.append([length for _, length in runs])
        owners.append([cluster for cluster, _ in runs])
    most = max(map(len, lengths)) + absent
    run_clusters = torch.full((stored * kv_heads, most), 1 << 30, dtype=torch.int32)  # of absent runs: arbitrary
    run_starts = torch.zeros(stored * kv_heads, most + 1, dtype=torch.int32)
    for pair, (of_head, clusters_of_head) in enumerate(zip(lengths, owners, strict=True)):
        run_clusters[pair, : len(of_head)] = torch.tensor(clusters_of_head, dtype=torch.int32)
        padded = torch.tensor(of_head + [0] * (most - len(of_head)))
        run_starts[pair, 1:] = padded.cumsum(0)
    tensors = (sizes, run_starts.view(stored, kv_heads, -1), run_clusters.view(stored, kv_heads, -1))
    return Runs(*(tensor.to(device).expand(batch, -1, -1) for tensor in tensors))


def chosen_runs(weights, runs, threshold, max_tokens=None):
    """The choice by its definition, one head, bound and run at a time: lists of runs [batch][kv_heads]."""
    return [
        [_of_head(weights, runs, row, head, threshold[row].item(), max_tokens) for head in range(weights.shape[1])]
        for row in range(weights.shape[0])
    ]


def _of_head(weights, runs, row, head, bound, max_tokens):
    of_clusters = weights[row, head].tolist()
    starts, owners = runs.run_starts[row, head].tolist(), runs.run_clusters[row, head].tolist()

    def choose(bound):
        return [
            run for run, owner in enumerate(owners)
            if starts[run + 1] > starts[run] and (owner < 0 or of_clusters[owner] > bound)
        ]  # fmt: skip

    def fits(bound):
        return sum(starts[run + 1] - starts[run] for run in choose(bound)) <= max_tokens

    if max_tokens is not None and not fits(bound):
        higher = sorted(weight for weight in of_clusters if weight > bound)
        bound = next((weight for weight in higher if fits(weight)), math.inf)
    return choose(bound)
