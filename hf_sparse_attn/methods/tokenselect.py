"""TokenSelect: single tokens chosen by soft vote, for decoding and prefill, beyond the trained length."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from hf_sparse_attn_kernels import mean_query, select_tokens, sparse_prefill

from hf_sparse_attn.methods.base import Selection, SparseMethod
from hf_sparse_attn.methods.sharded_votes import select_tokens_together
from hf_sparse_attn.rope import check_rope, decoder_rotary, max_positions, rotated

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from hf_sparse_attn.cache.layer import SparseLayer

VOTES = ("soft", "head", "logits")
PAPER_K = 2048


class TokenSplit(NamedTuple):
    """A token budget split into first, chosen and last tokens."""

    first: int
    chosen: int
    last: int


@dataclass(frozen=True)
class TokenSelect(SparseMethod):
    """Read the tokens that the heads vote for, packed into contiguous positions (TokenSelect, arXiv 2411.02886).

    Keys are cached before RoPE. The candidates are the tokens between the first ``n_init`` and the last ``n_local``.
    Every query head votes with its softmax of q.k over them, without 1/sqrt(d). Votes are summed over all heads of the
    layer, and every head reads the ``k`` tokens with the most (head soft vote, section 4.2). For the vote, the query is
    rotated as if every candidate were ``n_local`` tokens away. Selected tokens get contiguous positions, so none lies
    beyond the trained ones, however long the context is.

    Prefill runs in chunks of ``chunk_size`` tokens. Each chunk attends to itself and to one selection, chosen by its
    mean query. A decode step reuses the last selection while its query stays close to the one that chose it (Selection
    Cache, section 4.3).

    Parameters
    ----------
    token_budget
        Cached tokens that a decode step reads, k + n_init + n_local. Given instead of ``k``, it leaves
        token_budget - n_init - n_local tokens to the vote. If n_init + n_local exceeds half of it, they shrink in
        proportion to half. The fields keep what was given; :attr:`split` has what a step reads.
    k
        Tokens chosen by vote; the paper's value is 2048.
    n_init
        First tokens, always read; the paper's value is 128.
    n_local
        Last tokens, always read, including the current one; in prefill, the last ones before the chunk. At least 1; the
        paper's value is 512.
    chunk_size
        Tokens of the prefill that share a selection; the paper's value is 512. The selection shrinks if it and the
        chunk together exceed the trained positions.
    selection_cache_threshold
        The paper's theta: minimum cosine between a step's query, over all heads, and the one that chose the last
        selection, for the selection to be reused. 1 selects at every step.
    pool_size
        Width, an odd number, of a max-pooling of the votes over neighbouring tokens; 0 for none, as in the paper. The
        released code tunes it per task.
    vote
        ``"soft"`` (default), or one of the alternatives in the paper's table 4: ``"logits"`` sums q.k over the heads;
        ``"head"`` counts the heads that have the token among their own top k.

    Notes
    -----
    All layers are sparse: ``dense_layers`` must be 0, since a dense layer would leave the trained positions. The budget
    counts tokens whose K and V are read. The candidates' keys, which the vote reads, count as metadata.
    """

    name: ClassVar[str] = "tokenselect"
    summary: ClassVar[str] = "top-k tokens by a soft vote of all heads, positions by slot"
    paper: ClassVar[str] = "arXiv 2411.02886"
    sparse_phases: ClassVar[tuple[str, ...]] = ("prefill", "decode")
    rotates_keys: ClassVar[bool] = True
    needs_mask: ClassVar[bool] = False
    extends_positions: ClassVar[bool] = True
    counts: ClassVar[tuple[str, ...]] = ("selections_kept", "selections")
    """Times that a row reused a selection, and times that it needed one, summed over layers and steps."""

    token_budget: int | None = None  # type: ignore[assignment]  # set to k + n_init + n_local by __post_init__
    k: int = PAPER_K
    n_init: int = 128
    n_local: int = 512
    chunk_size: int = 512
    selection_cache_threshold: float = 0.9
    pool_size: int = 0
    vote: str = "soft"

    def __post_init__(self) -> None:
        """Check the hyperparameters.

        Raises
        ------
        TypeError
            A value must be a number, or a whole number, and is not.
        ValueError
            A value is out of range, or a ``k`` other than the default and ``token_budget`` contradict each other.
        """
        self._check_types()
        self._check_numbers("selection_cache_threshold")
        self._require("k", self.k >= 1, "at least 1")
        self._require("n_init", self.n_init >= 0, "0 or more")
        self._require("n_local", self.n_local >= 1, "at least 1: the current token")
        self._require("chunk_size", self.chunk_size >= 1, "at least 1")
        self._require("selection_cache_threshold", -1 <= self.selection_cache_threshold <= 1, "between -1 and 1")
        is_window = self.pool_size > 0 and self.pool_size % 2 == 1
        self._require("pool_size", self.pool_size == 0 or is_window, "0, or an odd number of neighbours")
        self._require("vote", self.vote in VOTES, f"one of {', '.join(VOTES)}")
        if self.token_budget is None:
            object.__setattr__(self, "token_budget", self._sum)
        super().__post_init__()
        self._require("token_budget", self._tokens >= 2, "at least 2: the current token and a chosen one")
        if self.k != PAPER_K and self.token_budget != self._sum:
            raise ValueError(
                f"{self.name}: k={self.k} and token_budget={self.token_budget} contradict each other, since k + n_init "
                f"+ n_local = {self._sum}; give one of the two"
            )

    @property
    def _sum(self) -> int:
        return self.k + self.n_init + self.n_local

    @property
    def _tokens(self) -> int:
        """``token_budget``, which is set."""
        assert self.token_budget is not None
        return self.token_budget

    @property
    def split(self) -> TokenSplit:
        """First, chosen and last tokens of a decode step; their sum is ``token_budget``."""
        if self._tokens == self._sum:
            return TokenSplit(self.n_init, self.k, self.n_local)
        return self._split(self._tokens)

    def _split(self, tokens: int) -> TokenSplit:
        """Split ``tokens``, at least 2, so that at least half are chosen."""
        always = self.n_init + self.n_local
        room = min(always, tokens // 2)
        first = room * self.n_init // always
        return TokenSplit(first, tokens - room, room - first)

    def check_model(self, model: PreTrainedModel) -> None:
        """Check that the model's positions can be assigned by slot.

        Raises
        ------
        ValueError
            The budget exceeds the trained positions, or the RoPE variant is not supported.
        """
        config = model.config
        positions = max_positions(config)
        if self._tokens > positions:
            split = self.split
            raise ValueError(
                f"{self.name}: k + n_init + n_local = {split.chosen} + {split.first} + {split.last} = "
                f"{self._tokens} must be at most the model's {positions} positions "
                f"(max_position_embeddings={config.max_position_embeddings})"
            )
        check_rope(config, decoder_rotary(model), self.name)

    def prefill_chunk(self, positions: int) -> int | None:
        """Tokens per chunk of a prefill: at most half of the positions, which leaves half for the selection."""
        return min(self.chunk_size, max(1, positions // 2))

    def rope_slots(self, positions: int) -> int:
        """Slots that a chunk and its selection may take."""
        return min(positions, self._tokens + self.chunk_size)

    def init_metadata(self, layer: SparseLayer) -> dict[str, torch.Tensor]:
        """Allocate the Selection Cache under the names of the op's arguments; empty if the threshold is 1.

        ``cached_query`` [batch, q_heads, head_dim] in the keys' dtype, ``cached_tokens`` int32 [batch, k],
        ``cached_valid`` int32 [batch].
        """
        if self.selection_cache_threshold >= 1:
            return {}
        keys, batch = layer.keys, layer.keys.shape[0]
        return {
            "cached_query": keys.new_zeros(batch, layer.q_heads, keys.shape[3]),
            "cached_tokens": torch.zeros(batch, self.split.chosen, dtype=torch.int32, device=keys.device),
            "cached_valid": torch.zeros(batch, dtype=torch.int32, device=keys.device),
        }

    def update_metadata(self, layer: SparseLayer, num_new: int) -> None:
        """Drop the cached selection after a prompt, which brings new candidates."""
        if num_new > 1:
            self.crop_metadata(layer)

    def crop_metadata(self, layer: SparseLayer) -> None:
        """Drop the cached selection, whose tokens may be gone."""
        if layer.metadata:
            layer.metadata["cached_valid"].zero_()

    def select(self, query: torch.Tensor, layer: SparseLayer, scale: float) -> Selection:
        """Select by vote, or reuse the last selection; see :meth:`SparseMethod.select` for the arguments."""
        rope, split = layer.rope, self.split
        voting = rotated(query, rope.cos[split.last], rope.sin[split.last]).to(query.dtype)
        block_indices, block_counts = self._select(
            layer,
            voting,
            layer.seq_end,
            max_tokens=self._tokens,
            sink_tokens=split.first,
            recent_tokens=split.last,
            threshold=float(self.selection_cache_threshold),
            counter=layer.counter.totals,
            reuse_counter=layer.counter.own,
            **layer.metadata,
        )
        return Selection(block_indices, block_counts, block_size=1)

    def _select(
        self, layer: SparseLayer, voting: torch.Tensor, seq_end: torch.Tensor, **arguments: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Select by the votes of all heads for a query [batch, q_heads, head_dim]; the op's other arguments by name."""
        rows = (voting, layer.keys, layer.seq_start, seq_end)
        arguments |= {"vote": self.vote, "pool_size": self.pool_size}
        if layer.head_shard.is_whole:
            return select_tokens(*rows, finished=layer.finished, **arguments)
        return select_tokens_together(*rows, shard=layer.head_shard, **arguments)

    def prefill(self, query: torch.Tensor, layer: SparseLayer, scale: float, mask: torch.Tensor | None) -> torch.Tensor:
        """Attend from a chunk to one selection of the tokens before it and, causally, to itself.

        See :meth:`SparseMethod.prefill` for the arguments. The chunk's mean query selects (section 4.2); its token i is
        rotated to position ``n_local + i``. A prompt within the budget is prefilled densely.
        """
        if self.covers(layer.length - layer.least_padding):
            return super().prefill(query, layer, scale, mask)
        queries, slots = query.shape[2], layer.rope.cos.shape[0]
        block_indices, block_counts = self._select_for_chunk(query, layer, slots - queries)
        output, lse = sparse_prefill(
            query,
            layer.keys,
            layer.values,
            block_indices,
            block_counts,
            layer.seq_start,
            layer.seq_end,
            scale=scale,
            **layer.rotations,
        )
        return layer.with_sinks(output, lse)

    def _select_for_chunk(
        self, query: torch.Tensor, layer: SparseLayer, free_slots: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Select at most ``free_slots`` of the tokens before a chunk."""
        batch, _, queries, _ = query.shape
        cached = layer.length - layer.least_padding - queries  # of the longest row
        if cached <= 0:
            nothing = torch.full((batch, 1, 1), -1, dtype=torch.int32, device=query.device)
            return nothing, torch.zeros_like(nothing[..., 0])
        budget = min(self._tokens, free_slots)
        split = self.split if budget == self._tokens else self._split(budget)
        if cached <= budget:
            budget, split = cached, TokenSplit(0, cached, 0)
        # Rows that have tokens before the chunk have no padding in it, so the mean covers tokens only.
        voting = mean_query(query, *layer.rope, first_slot=split.last)
        return self._select(
            layer,
            voting,
            layer.seq_end - queries,
            max_tokens=budget,
            sink_tokens=split.first,
            recent_tokens=split.last,
        )
