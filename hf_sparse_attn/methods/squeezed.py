"""Squeezed Attention: the keys of a fixed context, clustered once and looked up by centroid."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from hf_sparse_attn_kernels import centroid_weights, lookup_runs, runs_decode, runs_prefill, select_runs
from hf_sparse_attn_kernels.runs import MAX_RUN

from hf_sparse_attn.clusters.index import add_coarse_level, build_index, mean_keys, siblings_together
from hf_sparse_attn.clusters.kmeans import kmeans, normalised
from hf_sparse_attn.clusters.thresholds import thresholds
from hf_sparse_attn.dense import dense_attention
from hf_sparse_attn.head_shard import WHOLE, HeadShard
from hf_sparse_attn.methods.base import SparseMethod
from hf_sparse_attn.methods.clustered import Context, context_of, known_queries, row_keys, store, tokens_read

if TYPE_CHECKING:
    from hf_sparse_attn.cache.layer import SparseLayer

LEVELS = (1, 2)
GROWTH = 2
"""A growing conversation is clustered anew at the end of a prompt that leaves this many times the clustered tokens
before its last ``window``."""


@dataclass(frozen=True)
class Squeezed(SparseMethod):
    """Read the clusters of the context's keys whose centroids score above a threshold (Squeezed Attention, 2411.09688).

    Offline, the keys of a fixed context after RoPE are clustered per layer and KV head: k-means on normalised keys. A
    cluster's centroid C is the mean of its keys, N their number. Online, a query q estimates the attention weight of
    cluster i's keys, ``S_i = exp(q.C_i / sqrt(d)) / sum_j N_j exp(q.C_j / sqrt(d))``, and reads all keys
    of the clusters whose S exceeds a threshold. One threshold serves all layers and heads: the ``target_sparsity``
    quantile of S over all tokens of the context, as its last ``window`` queries see them. Heads that attend widely then
    read more than heads that attend to few keys. The first ``sink_tokens`` and the last ``window`` tokens of the
    context, and everything after it, are always read.

    :func:`~hf_sparse_attn.prepare_context` prepares a context once for many questions. Without it the prompt is the
    context: it is prefilled densely and clustered when it is complete. The tokens of a question after the context, in
    one pass, share one choice of clusters per KV head, by the mean of their S.

    Parameters
    ----------
    target_sparsity
        Share of the context's keys below the threshold, in [0, 1). 0 reads everything.
    clusters
        Number of clusters, as a share of the clustered tokens; the paper's value is 0.05.
    levels
        1, or 2 for the paper's hierarchical lookup: coarse clusters first, then those within the better half.
    coarse_clusters
        Number of coarse clusters, as a share of the clustered tokens; the paper's value is 0.01.
    window
        Last tokens of the context, which calibrate the threshold and are always read; the paper's value is 100.
    sink_tokens
        First tokens of the context, which are not clustered and always read. The paper's value is 0. Most heads attend
        to the first tokens in every step; in a cluster with other keys they would hide behind its mean, and steps that
        leave them out are far from dense attention's.
    token_budget
        Maximum cached tokens that a KV head reads in a decode step: beyond it, the clusters with the greatest S are
        kept. The first ``sink_tokens`` and last ``window`` tokens of the context and those after it are read in any
        case. None, as in the paper, for no maximum.
    seed
        Seed of the clustering.
    iterations
        Maximum number of k-means iterations.
    batch_tokens
        Tokens of a mini-batch of k-means, for contexts that would take too long; None uses all tokens each time.

    Notes
    -----
    The query heads of a GQA group share keys: S is averaged over them. All layers are sparse. The paper prepares
    contexts for models without GQA, and one row.
    """

    name: ClassVar[str] = "squeezed"
    summary: ClassVar[str] = "clusters of a fixed context's keys, above one global threshold"
    paper: ClassVar[str] = "arXiv 2411.09688"
    sparse_phases: ClassVar[tuple[str, ...]] = ("prefill", "decode")
    needs_mask: ClassVar[bool] = False
    reads_prefix: ClassVar[bool] = True
    appends_metadata: ClassVar[bool] = True

    token_budget: int | None = None  # type: ignore[assignment]  # None: no maximum
    target_sparsity: float = 0.9
    clusters: float = 0.05
    levels: int = 1
    coarse_clusters: float = 0.01
    window: int = 100
    sink_tokens: int = 4
    seed: int = 0
    iterations: int = 20
    batch_tokens: int | None = None

    def __post_init__(self) -> None:
        """Check the hyperparameters; errors as of :class:`SparseMethod`."""
        self._check_types()
        self._check_numbers("target_sparsity", "clusters", "coarse_clusters")
        self._require("target_sparsity", 0 <= self.target_sparsity < 1, "at least 0 and below 1")
        self._require("clusters", 0 < self.clusters <= 1, "above 0 and at most 1: no more clusters than keys")
        self._require("levels", self.levels in LEVELS, "1 or 2")
        self._require(
            "coarse_clusters",
            0 < self.coarse_clusters <= self.clusters,
            f"above 0 and at most clusters={self.clusters}",
        )
        self._require("window", self.window >= 1, "at least 1")
        self._require("sink_tokens", self.sink_tokens >= 0, "0 or more")
        self._require("token_budget", self.token_budget is None or self.token_budget >= 1, "at least 1, or None")
        self._require("dense_layers", self.dense_layers == 0, "0: a layer reads everything if target_sparsity is 0")
        self._require("seed", self.seed >= 0, "0 or more")
        self._require("iterations", self.iterations >= 1, "at least 1")
        self._require("batch_tokens", self.batch_tokens is None or self.batch_tokens >= 1, "at least 1, or None")

    @property
    def keeps_queries(self) -> int:
        """The queries that calibrate the threshold."""
        return self.window

    def covers(self, length: int) -> bool:
        """Whether a row of ``length`` tokens has nothing to leave out."""
        return self.target_sparsity == 0 or length <= self.sink_tokens + self.window

    def num_clusters(self, tokens: int) -> int:
        """Number of clusters for ``tokens`` clustered tokens."""
        return max(1, round(self.clusters * tokens))

    def num_coarse(self, tokens: int) -> int:
        """Number of coarse clusters for ``tokens`` clustered tokens; 0 with one level."""
        return max(1, round(self.coarse_clusters * tokens)) if self.levels == 2 else 0

    def init_metadata(self, layer: SparseLayer) -> dict[str, torch.Tensor]:
        """Allocate the index of a prompt that is clustered in place, and the queries that calibrate it.

        A layer with a prefix has its index there. ``context_lengths`` int32 [batch] counts the tokens from a row's
        first that are clustered; :mod:`hf_sparse_attn.clusters.index` describes the other tensors.
        """
        if layer.prefix is not None:
            return {}
        batch, kv_heads, capacity, head_dim = layer.keys.shape
        # At least 2 of each: a compiled step would be specialised to a size of 1.
        clusters, coarse = max(2, self.num_clusters(capacity)), max(2, self.num_coarse(capacity))
        runs = clusters + capacity // MAX_RUN + 1
        whole = {
            "context_lengths": (batch,),
            "token_order": (batch, kv_heads, capacity),
            "cluster_sizes": (batch, kv_heads, clusters),
            "run_starts": (batch, kv_heads, runs + 1),
            "run_clusters": (batch, kv_heads, runs),
        }
        states = {"centroids": (batch, kv_heads, clusters, head_dim)}
        numbers: dict[str, tuple[int, ...]] = {"threshold": (batch,)}
        if self.levels == 2:
            whole |= {"parents": (batch, kv_heads, clusters), "coarse_sizes": (batch, kv_heads, coarse)}
            states |= {"coarse_centroids": (batch, kv_heads, coarse, head_dim)}
            numbers |= {"coarse_threshold": (batch,)}
        device = layer.keys.device
        return {
            **{name: torch.zeros(shape, dtype=torch.int32, device=device) for name, shape in whole.items()},
            **{name: layer.keys.new_zeros(shape) for name, shape in states.items()},
            **{name: torch.zeros(shape, dtype=torch.float32, device=device) for name, shape in numbers.items()},
            "index_bytes": torch.zeros(batch, dtype=torch.int64, device=device),
        }

    def crop_metadata(self, layer: SparseLayer) -> None:
        """Drop the clusters of rows that have lost clustered tokens; what is left is then read exactly."""
        if layer.prefix is not None:
            return
        kept = (layer.metadata["context_lengths"] <= layer.row_lengths()).int()
        for name in ("context_lengths", "cluster_sizes", "run_starts", "index_bytes"):
            layer.metadata[name].mul_(kept.view(-1, *(1,) * (layer.metadata[name].dim() - 1)))

    def finish_prompt(self, layers: Sequence[SparseLayer]) -> None:
        """Cluster the rows of a prompt, less the last ``window`` tokens, and calibrate the threshold.

        A row that was clustered before is clustered anew once it has grown ``GROWTH``-fold: until then the tokens after
        its clusters are read exactly. So is a row too short for two clusters: the weight of a single one is the same
        for all queries, and equal to the threshold but for rounding.
        """
        first = layers[0]
        lengths = first.row_lengths().tolist()
        if first.prefix is not None or self.covers(max(lengths)):
            return
        clustered = first.metadata["context_lengths"].tolist()
        due = [
            row
            for row, length in enumerate(lengths)
            if length - self.window > max(self.sink_tokens, GROWTH * clustered[row])
            and self.num_clusters(length - self.window - self.sink_tokens) > 1
        ]
        ready = [row for row in due if known_queries(layers, row) >= -(-self.window // 2)]
        if len(ready) < len(due):
            warnings.warn(
                f"squeezed: half of the text's last {self.window} queries are not known, since decode steps generated "
                "its tokens, some were removed, or another model cached them; what is not clustered is read exactly "
                "until another prompt follows",
                stacklevel=2,
            )
        for row in ready:
            tokens = lengths[row] - self.window
            shard = first.head_shard
            indices = [self.cluster(row_keys(layer, row, tokens), shard=shard) for layer in layers]
            queries = [self.observed(layer, row) for layer in layers]
            found = thresholds(queries, indices, self.target_sparsity, shard)
            for layer, index in zip(layers, indices, strict=True):
                store(layer, row, tokens, {**index, **found})

    def observed(self, layer: SparseLayer, row: int) -> torch.Tensor:
        """Return a row's last queries, [q_heads, at most window, head_dim], scaled as for a factor of 1/sqrt(d)."""
        recent = layer.prompt_queries
        if recent is None:
            raise ValueError(f"layer {layer.layer_idx} keeps no queries")
        states = recent.states[row, :, -min(self.window, int(recent.counts[row])) :]
        scaled: torch.Tensor = states * (recent.scale * states.shape[2] ** 0.5)
        return scaled

    def cluster(self, keys: torch.Tensor, recent: int = 0, shard: HeadShard = WHOLE) -> dict[str, torch.Tensor]:
        """Cluster the keys of a layer, but the first ``sink_tokens`` and the last ``recent``, and build their index.

        Parameters
        ----------
        keys
            [kv_heads, tokens, head_dim], after RoPE.
        recent
            Last tokens, which are always read.
        shard
            The part of the layer's heads that ``keys`` are of.

        Returns
        -------
        dict
            The index; see :func:`~hf_sparse_attn.clusters.index.build_index`. Its ``token_order`` ends with the tokens
            that are always read.
        """
        sinks, end = self.sink_tokens, keys.shape[1] - recent
        clustered = keys[:, sinks:end]
        num_clusters, num_coarse = (count(end - sinks) for count in (self.num_clusters, self.num_coarse))
        fit = partial(kmeans, seed=self.seed, iterations=self.iterations, shard=shard)
        labels = fit(normalised(clustered), num_clusters, batch_tokens=self.batch_tokens).labels
        if self.levels == 2:
            centroids = mean_keys(clustered, labels, num_clusters)
            labels, parents = siblings_together(labels, fit(normalised(centroids), num_coarse).labels)
        index = build_index(clustered, labels, num_clusters, always_read=sinks + recent)
        if self.levels == 2:
            index = add_coarse_level(index, parents, num_coarse)
        every = torch.arange(keys.shape[1], dtype=torch.int32, device=keys.device)
        always = torch.cat((every[:sinks], every[end:])).expand(len(keys), -1)
        return {**index, "token_order": torch.cat((index["token_order"] + sinks, always), dim=1)}

    def prefill(self, query: torch.Tensor, layer: SparseLayer, scale: float, mask: torch.Tensor | None) -> torch.Tensor:
        """Attend from a question to the clusters that its tokens choose together, and to what follows the context.

        See :meth:`SparseMethod.prefill` for the arguments. A prompt without a context before it is prefilled densely.
        """
        if layer.prefix is None and (layer.length == query.shape[2] or self.covers(layer.length)):
            return dense_attention(query, layer, scale, mask)
        context = context_of(layer)
        if layer.prefix is None and not bool(layer.metadata["context_lengths"].any()):
            if not query.is_cuda:
                return dense_attention(query, layer, scale, mask)
            # The kernel masks by the row bounds: SDPA would take a mask of all queries and keys.
            run_indices, run_counts = context.clusters["run_clusters"], layer.finished * 0
        else:
            run_indices, run_counts = self._choose_together(query, layer, context, scale)
        out, lse = runs_prefill(
            query,
            *context.operands(layer, run_indices, run_counts),
            token_order=context.token_order,
            scale=scale,
        )
        return layer.with_sinks(out, lse)

    def decode(
        self, query: torch.Tensor, layer: SparseLayer, new_key: torch.Tensor, new_value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Append the token, look the clusters up, and attend to the chosen ones and to what follows the context.

        See :meth:`SparseMethod.decode` for the arguments.
        """
        layer.append(new_key.unsqueeze(2), new_value.unsqueeze(2))
        context = context_of(layer)
        run_indices, run_counts = self._choose(query, layer, context, scale)
        if layer.is_recorded:
            layer.note(tokens_read(layer, context, run_indices, run_counts))
        out, lse = runs_decode(
            query,
            *context.operands(layer, run_indices, run_counts),
            token_order=context.token_order,
            context_lengths=context.clusters["context_lengths"],
            scale=scale,
            counter=layer.counter.totals,
        )
        return layer.with_sinks(out, lse)

    def _choose(
        self, query: torch.Tensor, layer: SparseLayer, context: Context, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose runs for a decode step's queries, [batch, q_heads, head_dim], and count the bytes read for it."""
        index = context.clusters
        run_indices, run_counts, clusters_read = lookup_runs(
            query,
            *self._runs(index),
            **self._parents(query.unsqueeze(2), index, scale, None),
            max_tokens=self._most_tokens(layer, context, new=0),
            scale=scale,
        )
        metadata_bytes = index["index_bytes"].sum()
        if self.levels == 2:  # centroids of dropped coarse clusters are not read
            metadata_bytes = metadata_bytes + clusters_read.sum() * (query.shape[2] * query.element_size())
        layer.counter.count_metadata(metadata_bytes)
        return run_indices, run_counts

    def _choose_together(
        self, query: torch.Tensor, layer: SparseLayer, context: Context, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose runs for a question's queries, [batch, q_heads, queries, head_dim], by the mean of their weights."""
        centroids, cluster_sizes, *runs = self._runs(context.clusters)
        num_queries = layer.row_lengths().clamp_max(query.shape[2]) if layer.lengths.has_padding else None
        parents = self._parents(query, context.clusters, scale, num_queries)
        weights = centroid_weights(query, centroids, cluster_sizes, num_queries=num_queries, scale=scale, **parents)
        most_tokens = self._most_tokens(layer, context, new=query.shape[2])
        run_indices, run_counts = select_runs(weights, cluster_sizes, *runs, max_tokens=most_tokens)
        return run_indices, run_counts

    def _runs(self, index: dict[str, Any]) -> tuple[torch.Tensor, ...]:
        names = ("centroids", "cluster_sizes", "run_starts", "run_clusters", "threshold")
        return tuple(index[name] for name in names)

    def _parents(
        self, query: torch.Tensor, index: dict[str, Any], scale: float, num_queries: torch.Tensor | None
    ) -> dict[str, Any]:
        """Look up the coarse clusters of a hierarchical lookup, for [batch, q_heads, queries, head_dim]."""
        if self.levels == 1:
            return {}
        weights = centroid_weights(
            query, index["coarse_centroids"], index["coarse_sizes"], num_queries=num_queries, scale=scale
        )
        threshold = index["coarse_threshold"]
        return {"parents": index["parents"], "parent_weights": weights, "parent_threshold": threshold}

    def _most_tokens(self, layer: SparseLayer, context: Context, new: int) -> torch.Tensor | None:
        """Tokens of the context that fit into the budget beside those after it, int32 [batch].

        The ``new`` tokens of a question do not count: the budget is that of a decode step.
        """
        if self.token_budget is None:
            return None
        return self.token_budget - (layer.seq_end - context.tail_start - new).clamp_min(0)
