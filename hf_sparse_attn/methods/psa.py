"""Progressive Sparse Attention: each query reads blocks, best first, until what is left cannot matter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from hf_sparse_attn_kernels import append_and_attend_progressively, append_and_rank, progressive_decode

from hf_sparse_attn.methods.base import Selection, SelectionSize
from hf_sparse_attn.methods.microbatches import attend_in_microbatches
from hf_sparse_attn.methods.paged import PagedMethod

if TYPE_CHECKING:
    from hf_sparse_attn.cache.layer import SparseLayer

METADATA = ("cuboid_mean", "minmax", "representative")
RESTS = ("least", "last")


@dataclass(frozen=True)
class PSA(PagedMethod):
    """Read blocks until the estimated rest is small (Progressive Sparse Attention, arXiv 2503.00392, section 4).

    A step ranks the blocks of each KV head by a score from metadata, and attends to them in microbatches, best first.
    After each it compares what it has read with an estimate of what it has not: with ``A_i`` the sum of ``exp(q.k)``
    over the tokens of block i, ``AS_acc`` the sum of ``A_i`` over the blocks read, and ``AS_min`` the least of them,

        P = AS_acc / (AS_acc + AS_min * blocks_left)

    estimates the share of the attention weight that was read. The step stops once P exceeds ``threshold`` for every
    query head of the group. So each layer, KV head, row and step finds its own budget. Prefill stays dense.

    Parameters
    ----------
    token_budget
        Maximum cached tokens that a KV head reads per step, in whole blocks. None, as in the paper, for no maximum.
    threshold
        Share of the attention weight to read, by the estimate P, in (0, 1]. The paper uses 0.95 and 0.98. 1 reads
        every block, as dense attention does.
    block_size
        Tokens in a block: a power of two. The paper's value is 32.
    microbatch
        Blocks that are read between two tests. Smaller ones stop closer to the threshold and test more often.
    metadata
        Where a block's score comes from. ``"cuboid_mean"`` (default, as in the paper) is the box around the block's
        keys of ArkVale, ``"minmax"`` Quest's; ``"representative"`` is the mean of a few of its keys, after InfLLM.
    sink_tokens
        The blocks of the first ``sink_tokens`` tokens are always read, right after the newest block. The paper's value
        is 0: it reads them if they score high. Attention sinks often score low, and ``AS_acc`` needs their weight.
    group_reduce
        Reduction of the scores of the query heads that share a KV head, for the ranking only; see
        :class:`~hf_sparse_attn.Quest`.
    bounds_dtype
        Precision of the metadata: ``"int8"`` (default), or ``"model"`` for the model's dtype.
    dense_layers
        Number of first layers that attend to the whole cache; the paper has none.
    rest
        What each block that is left is taken to weigh. ``"least"`` (default, as in the paper) is ``AS_min``, which one
        block may make small by chance. ``"last"`` is the least mean weight that a microbatch had, without the blocks
        that are always read: the last microbatch shows best what the next ones weigh.
    offload
        Keep K and V in host memory, beside a pool of blocks on the device. A keyword argument, as the next two.
    gpu_cache_tokens
        Tokens of each layer and KV head that the pool has room for on average, in all rows together.
    eviction
        How blocks make room for others in the pool: ``"lru"``, the least recently used first, or ``"fifo"``.

    Notes
    -----
    The newest block is always read, first. Until it is full its sum is left out of ``AS_min``: it is small because the
    block is short.
    """

    name: ClassVar[str] = "psa"
    summary: ClassVar[str] = "blocks, best first, until the estimated rest is small"
    paper: ClassVar[str] = "arXiv 2503.00392"
    counts: ClassVar[tuple[str, ...]] = ("blocks_read", "blocks_cached")

    token_budget: int | None = None  # type: ignore[assignment]  # None: no maximum
    threshold: float = 0.95
    block_size: int = 32
    microbatch: int = 8
    metadata: str = "cuboid_mean"
    sink_tokens: int = 16
    group_reduce: str = "softmax"
    bounds_dtype: str = "int8"
    dense_layers: int = 0
    rest: str = "least"

    def __post_init__(self) -> None:
        """Check the hyperparameters; errors as of :class:`SparseMethod`."""
        self._check_types()
        self._check_numbers("threshold")
        self._require("threshold", 0 < self.threshold <= 1, "above 0 and at most 1")
        self._require_page_size("block_size")
        self._require("microbatch", self.microbatch >= 1, "at least 1 block")
        self._require("metadata", self.metadata in METADATA, f"one of {', '.join(METADATA)}")
        self._require("rest", self.rest in RESTS, " or ".join(map(repr, RESTS)))
        self._require("sink_tokens", self.sink_tokens >= 0, "0 or more")
        if self.token_budget is not None:
            least = (self.sink_blocks + 1) * self.block_size
            self._require(
                "token_budget",
                self.token_budget >= least,
                f"None, or at least {least}: the newest block and the first sink_tokens={self.sink_tokens}, "
                f"in blocks of {self.block_size}",
            )
        self._require_scoring()
        self._require("dense_layers", self.dense_layers >= 0, "0 or more")
        self._require_offload()

    @property
    def _page_size(self) -> int:
        return self.block_size

    @property
    def _pages_at_once(self) -> tuple[int, str]:
        two = 2 * self.microbatch  # the second is loaded while the first is attended to
        if self.max_blocks is not None and self.max_blocks <= two:
            return self.max_blocks - 1, "token_budget without the newest"
        return two, "two microbatches"

    @property
    def selection_size(self) -> SelectionSize:
        """Size of a step's selection: blocks, whose number each step finds while it reads them."""
        return SelectionSize(self.block_size, None)

    @property
    def _statistic(self) -> str:
        return self.metadata

    @property
    def max_blocks(self) -> int | None:
        """Maximum number of blocks that a KV head reads per step; None for no maximum."""
        return None if self.token_budget is None else self.token_budget // self.block_size

    @property
    def sink_blocks(self) -> int:
        """Number of first blocks, which are always read."""
        return -(-self.sink_tokens // self.block_size)

    def covers(self, length: int) -> bool:
        """Whether a step would read all blocks of ``length`` tokens whatever they hold.

        They fit into one microbatch, or the threshold is 1; and into the budget, if there is one.
        """
        blocks = -(-length // self.block_size)
        within_budget = self.max_blocks is None or blocks <= self.max_blocks
        return within_budget and (self.threshold == 1 or blocks <= self.microbatch)

    def decode(
        self, query: torch.Tensor, layer: SparseLayer, new_key: torch.Tensor, new_value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Append, rank and attend until the rest is small in one op, or attend apart from it.

        See :meth:`SparseMethod.decode` for the arguments.
        """
        newest = layer.newest
        tensors = (query, new_key, new_value, newest.keys, newest.values)
        ranking: dict[str, Any] = {
            "seq_start": newest.seq_start,
            "seq_end": newest.seq_end,
            "page_size": self.block_size,
            "max_blocks": self._most_blocks(layer),
            "sink_blocks": self.sink_blocks,
            "recent_blocks": 1,
            "scale": scale,
            "group_reduce": self.group_reduce,
            "num_pages": layer.max_blocks(self.block_size),
            "counter": layer.counter.totals,
            "statistic": self._statistic,
            **layer.metadata,
        }
        if layer.keeps_rows and type(self)._attend_progressively is PSA._attend_progressively:
            options = ranking | self._reading
            output, lse, block_order, read_counts = append_and_attend_progressively(
                *tensors, **options, finished=layer.finished
            )
            output = layer.with_sinks(output, lse)
        else:
            block_order, block_counts = append_and_rank(*tensors, **ranking)
            output, read_counts = self._attend_progressively(query, layer, block_order, block_counts, scale)
        self._count_blocks(layer, read_counts)
        if layer.is_recorded:
            layer.note(self._selection(block_order, read_counts))
        return output

    @property
    def _reading(self) -> dict[str, Any]:
        """How the ops read blocks in order of rank."""
        return {"microbatch": self.microbatch, "threshold": float(self.threshold), "rest": self.rest}

    def _attend_progressively(
        self,
        query: torch.Tensor,
        layer: SparseLayer,
        block_order: torch.Tensor,
        block_counts: torch.Tensor,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the output, and the blocks read, int32 [batch, kv_heads]."""
        parameters: dict[str, Any] = {
            "block_size": self.block_size,
            "scale": scale,
            "forced_blocks": self.sink_blocks + 1,  # a row with fewer reads them all
            **self._reading,
        }
        if self.offload:
            return attend_in_microbatches(query, layer, block_order, **parameters)
        rows = layer.present_rows
        output, lse, read_counts = progressive_decode(
            query,
            rows.keys,
            rows.values,
            block_order,
            block_counts,
            rows.seq_start,
            rows.seq_end,
            counter=layer.counter.totals,
            finished=layer.finished,
            **parameters,
        )
        return layer.with_sinks(output, lse), read_counts

    def _most_blocks(self, layer: SparseLayer) -> int:
        """Upper bound on the blocks that a KV head reads, with room for those that are always read."""
        if self.max_blocks is not None:
            return self.max_blocks  # even if the capacity is less: comparing the two would be a guard of compiled steps
        return max(self.sink_blocks + 1, layer.max_blocks(self.block_size))

    def _count_blocks(self, layer: SparseLayer, read_counts: torch.Tensor) -> None:
        blocks = (layer.row_lengths() + self.block_size - 1) // self.block_size  # [batch]
        layer.counter.own += torch.stack([read_counts.sum(), blocks.sum() * read_counts.shape[1]])

    def _selection(self, block_order: torch.Tensor, read_counts: torch.Tensor) -> Selection:
        """Sort the first ``read_counts`` [batch, kv_heads] blocks of ``block_order`` [batch, kv_heads, n]."""
        ranks = torch.arange(block_order.shape[2], device=block_order.device)
        absent = torch.iinfo(block_order.dtype).max
        indices = block_order.masked_fill(ranks >= read_counts.unsqueeze(2), absent).sort(dim=2).values
        return Selection(indices.masked_fill(indices == absent, -1), read_counts, self.block_size)
