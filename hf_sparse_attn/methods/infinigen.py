"""InfiniGen: single tokens chosen by rehearsing a layer's attention with the input of the layer before it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from hf_sparse_attn.methods.base import Selection, SelectionSize, SparseMethod
from hf_sparse_attn.methods.scores import GROUP_REDUCTIONS, grouped, reduce_group, token_scores

if TYPE_CHECKING:
    from hf_sparse_attn.cache.layer import SparseLayer
    from hf_sparse_attn.head_shard import HeadShard

KEY_SHARE = 1e-6
"""Weight of the keys' moments beside the queries', which orders directions that no query has."""


@dataclass(frozen=True)
class InfiniGen(SparseMethod):
    """Read the tokens that score high in a rehearsal with the previous layer's input (InfiniGen, arXiv 2406.19707).

    A layer's query is made from the input of the attention before it, which differs little from its own. Scores are
    estimated by a few columns: queries and keys are rotated by the singular vectors of the prompt's queries, which
    gathers most of a score in few of them. A token is important if its estimate is at least the head's highest less
    ``alpha``. A step reads as many tokens as are important in the mean over the heads (section 4). The prefill and the
    first layer are dense.

    Parameters
    ----------
    token_budget
        Maximum cached tokens that a KV head reads per step. None, as in the paper, for no maximum beside ``max_share``.
    dense_layers
        Number of first layers that attend to the whole cache, at least 1: nothing comes before the first.
    alpha
        How far below a head's highest scaled score an important token's may be, 0 or more; 4 in the authors' scripts.
    max_share
        Maximum share of a row's tokens to read, above 0 and at most 1; the authors' is 0.2.
    channel_share
        Share of the rotated columns that estimates use, above 0 and at most 1; 0.2 in the authors' code.
    calibration_queries
        Last queries of the prompt, whose singular vectors rotate.
    group_reduce
        Reduction of the estimates of the query heads that share a KV head, ``"softmax"``, ``"mean"`` or ``"max"``, as
        in Quest. It orders the tokens; their number comes from each head's own estimates.

    Notes
    -----
    The method is a baseline of accuracy: queries are rehearsed when their layer begins, and nothing is fetched ahead of
    it. No token is read in any case, not even the newest.
    """

    name: ClassVar[str] = "infinigen"
    summary: ClassVar[str] = "tokens near the highest score, rehearsed with the previous layer's input"
    paper: ClassVar[str] = "arXiv 2406.19707"
    rehearses: ClassVar[bool] = True
    appends_metadata: ClassVar[bool] = True

    token_budget: int | None = None  # type: ignore[assignment]  # None: no maximum
    dense_layers: int = 1
    alpha: float = 4.0
    max_share: float = 0.2
    channel_share: float = 0.2
    calibration_queries: int = 256
    group_reduce: str = "softmax"

    def __post_init__(self) -> None:
        """Check the hyperparameters.

        Raises
        ------
        TypeError
            A value must be a number, or a whole number, and is not.
        ValueError
            A value is out of range.
        """
        self._check_types()
        self._check_numbers("alpha", "max_share", "channel_share")
        self._require("token_budget", self.token_budget is None or self.token_budget >= 1, "None, or at least 1")
        self._require("dense_layers", self.dense_layers >= 1, "at least 1: nothing comes before the first layer")
        self._require("alpha", self.alpha >= 0, "0 or more")
        self._require("max_share", 0 < self.max_share <= 1, "above 0 and at most 1")
        self._require("channel_share", 0 < self.channel_share <= 1, "above 0 and at most 1")
        self._require("calibration_queries", self.calibration_queries >= 1, "at least 1")
        self._require("group_reduce", self.group_reduce in GROUP_REDUCTIONS, f"one of {', '.join(GROUP_REDUCTIONS)}")

    def covers(self, length: int) -> bool:
        """Whether a step would read all of ``length`` tokens, whatever their scores."""
        may_read_all = self.token_budget is None or length <= self.token_budget
        return length <= 1 or (self.alpha == math.inf and self.max_share == 1 and may_read_all)

    @property
    def keeps_queries(self) -> int:
        """The queries whose singular vectors rotate."""
        return self.calibration_queries

    @property
    def selection_size(self) -> SelectionSize:
        """Size of a step's selection: single tokens, whose number each step finds."""
        return SelectionSize(1, self.token_budget)

    def init_metadata(self, layer: SparseLayer) -> dict[str, torch.Tensor]:
        """Allocate the columns that estimates use, and every key in them.

        ``columns`` [batch, kv_heads, head_dim, channels], float32 or float64; ``partial_keys`` [batch, kv_heads,
        capacity, channels] in the keys' dtype.
        """
        keys = layer.keys
        batch, kv_heads, capacity, head_dim = keys.shape
        channels = max(1, int(head_dim * self.channel_share))
        dtype = torch.promote_types(keys.dtype, torch.float32)
        return {
            "columns": keys.new_zeros(batch, kv_heads, head_dim, channels, dtype=dtype),
            "partial_keys": keys.new_zeros(batch, kv_heads, capacity, channels),
        }

    def update_metadata(self, layer: SparseLayer, num_new: int) -> None:
        """Write the key of a decode step's token in the columns; :meth:`finish_prompt` writes those of other tokens."""
        if num_new == 1 and layer.lengths.in_step:
            columns, partial_keys = layer.metadata["columns"], layer.metadata["partial_keys"]
            slot = layer.seq_end[:1].long() - 1
            partial = layer.keys.index_select(2, slot).to(columns.dtype) @ columns
            partial_keys.index_copy_(2, slot, partial.to(partial_keys.dtype))

    def finish_prompt(self, layers: Sequence[SparseLayer]) -> None:
        """Find the columns of each row, and write all of its keys in them."""
        for layer in layers:
            columns, partial_keys = layer.metadata["columns"], layer.metadata["partial_keys"]
            for row, start in enumerate(layer.lengths.starts):
                keys = layer.keys[row, :, start : layer.length].to(columns.dtype)
                columns[row] = heaviest_columns(keys, self._known_queries(layer, row), columns.shape[3])
                partial_keys[row, :, start : layer.length] = (keys @ columns[row]).to(partial_keys.dtype)

    def _known_queries(self, layer: SparseLayer, row: int) -> torch.Tensor | None:
        """Return a row's last queries, [kv_heads, n, head_dim]; None if another model cached the tokens."""
        recent = layer.prompt_queries
        known = 0 if recent is None else min(int(recent.counts[row]), self.calibration_queries)
        if recent is None or not known:
            return None
        states = recent.states[row, :, -known:]
        return states.reshape(layer.keys.shape[1], -1, states.shape[2])

    def select(self, query: torch.Tensor, layer: SparseLayer, scale: float) -> Selection:
        """Rehearse, and keep as many tokens as are important; see :meth:`SparseMethod.select`.

        Raises
        ------
        ValueError
            No query was rehearsed: the layer has no patched attention module before it.
        """
        rehearsed = layer.rehearsed_query
        if rehearsed is None:
            raise ValueError(f"{self.name}: layer {layer.layer_idx} has no rehearsed query; use a patched model")
        heads = grouped(rehearsed, layer.keys.shape[1])
        partial = (heads @ layer.metadata["columns"].to(heads.dtype)).flatten(1, 2)
        scores = token_scores(partial, layer.metadata["partial_keys"], layer, scale)
        most = self._most_tokens(scores, layer.row_lengths(), layer.head_shard)
        order = reduce_group(scores, self.group_reduce).sort(dim=2, descending=True, stable=True).indices
        width = order.shape[2] if self.token_budget is None else min(self.token_budget, order.shape[2])
        order = order[..., :width]
        is_read = torch.arange(width, device=order.device) < most[:, None, None]
        counts = most[:, None].expand(-1, order.shape[1])
        return Selection(order.int().masked_fill(~is_read, -1), counts.int().contiguous(), block_size=1)

    def _most_tokens(self, scores: torch.Tensor, lengths: torch.Tensor, shard: HeadShard) -> torch.Tensor:
        """Return how many tokens each row reads, int64 [batch], by estimates [batch, kv_heads, group, tokens]."""
        is_important = (scores >= scores.amax(3, keepdim=True) - self.alpha) & (scores > -math.inf)
        heads = scores.shape[1] * scores.shape[2] * shard.size
        mean = shard.all_reduce(is_important.flatten(1).sum(1)) // heads
        most = (lengths * self.max_share).long()
        if self.token_budget is not None:
            most = most.clamp_max(self.token_budget)
        return torch.minimum(mean, most.clamp_min(1)).clamp_max(lengths.long())

    def metadata_bytes_read(self, layer: SparseLayer) -> torch.Tensor:
        """Bytes of the columns, and of all keys in them."""
        columns: torch.Tensor = layer.metadata["columns"]
        partial_keys: torch.Tensor = layer.metadata["partial_keys"]
        token_bytes = partial_keys[0, :, 0].numel() * partial_keys.element_size()
        column_bytes = columns.numel() * columns.element_size()
        return layer.row_lengths().sum() * token_bytes + column_bytes


def heaviest_columns(keys: torch.Tensor, queries: torch.Tensor | None, channels: int) -> torch.Tensor:
    """Return the rotated columns in which queries and keys are largest.

    The rotation is by the right singular vectors of the queries, those of the keys if there are no queries. A column's
    weight is the mean magnitude of the rotated queries in it and that of the rotated keys.

    Parameters
    ----------
    keys
        [kv_heads, tokens, head_dim]; a row may have none.
    queries
        [kv_heads, n, head_dim], of all query heads of a group, or None.
    channels
        Number of columns.

    Returns
    -------
    torch.Tensor
        float64 [kv_heads, head_dim, channels]: orthonormal columns.
    """
    tokens = max(1, keys.shape[1])
    moments = (keys.transpose(1, 2) @ keys).double() / tokens
    if queries is not None:
        queries = queries.double()
        moments = queries.transpose(1, 2) @ queries / queries.shape[1] + KEY_SHARE * moments
    vectors = torch.linalg.eigh(moments).eigenvectors
    weights = (keys @ vectors.to(keys.dtype)).abs().sum(1, dtype=torch.float64) / tokens
    if queries is not None:
        weights = weights + (queries @ vectors).abs().mean(1)
    chosen = weights.topk(channels, dim=1).indices.sort(dim=1).values
    columns: torch.Tensor = vectors.gather(2, chosen.unsqueeze(1).expand(-1, vectors.shape[1], -1))
    return columns
