"""Methods for tests, which show that the contract suffices for other papers' methods."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import ClassVar

import torch
from hf_sparse_attn_kernels import select_blocks

from hf_sparse_attn.methods import DuoAttention, Quest, Selection, SparseMethod
from hf_sparse_attn.methods.base import SelectionSize


def unrounded(x):
    """Convert to float32, but keep float64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


@dataclass(frozen=True)
class TokenTopK(SparseMethod):
    """Single tokens (block size 1): the ``token_budget`` keys with the largest q.k, summed over the GQA group."""

    name: ClassVar[str] = "toy-token-top-k"
    summary: ClassVar[str] = "exact top-k tokens"
    paper: ClassVar[str] = "none"

    def select(self, query, layer, scale):
        batch, kv_heads, _, head_dim = layer.keys.shape
        positions = layer.seq_start[:, None] + torch.arange(layer.max_blocks(1), device=query.device)
        positions = torch.minimum(positions, layer.seq_end[:, None] - 1).clamp_min(0)
        positions = positions[:, None, :, None].expand(-1, kv_heads, -1, head_dim)
        from_first_token = layer.keys.gather(2, positions.long())
        grouped = unrounded(query.view(batch, kv_heads, -1, head_dim))
        scores = torch.einsum("bhgd,bhtd->bht", grouped, unrounded(from_first_token))
        indices, counts = select_blocks(
            scores, layer.seq_start, layer.seq_end, block_size=1, max_blocks=self.token_budget, recent_blocks=1
        )
        return Selection(indices, counts, 1)


@dataclass(frozen=True)
class MassThreshold(SparseMethod):
    """As many blocks as hold ``threshold`` of the estimated mass: the count differs per head and step."""

    name: ClassVar[str] = "toy-mass-threshold"
    summary: ClassVar[str] = "blocks by mean key, up to a share of the mass"
    paper: ClassVar[str] = "none"

    threshold: float = 1.0
    block_size: int = 8

    def init_metadata(self, layer):
        batch, kv_heads, capacity, head_dim = layer.keys.shape
        blocks = -(-capacity // self.block_size)
        dtype = unrounded(layer.keys[:, :, :0]).dtype
        return {"key_sum": torch.zeros(batch, kv_heads, blocks, head_dim, dtype=dtype, device=layer.keys.device)}

    def update_metadata(self, layer, num_new):
        for row, start in enumerate(layer.seq_start.tolist()):
            first_block = max(layer.length - num_new - start, 0) // self.block_size
            for block in range(first_block, -(-max(layer.length - start, 0) // self.block_size)):
                begin = start + block * self.block_size
                keys = layer.keys[row, :, begin : min(begin + self.block_size, layer.length)]
                layer.metadata["key_sum"][row, :, block] = unrounded(keys).sum(1)

    def crop_metadata(self, layer):
        self.update_metadata(layer, 1)

    def select(self, query, layer, scale):
        batch, kv_heads, _, head_dim = layer.keys.shape
        num_blocks = layer.max_blocks(self.block_size)
        first_tokens = torch.arange(num_blocks, device=query.device) * self.block_size
        held = (layer.row_lengths()[:, None] - first_tokens).clamp(0, self.block_size)  # [batch, blocks]
        means = layer.metadata["key_sum"][:, :, :num_blocks] / held.clamp_min(1)[:, None, :, None]
        grouped = unrounded(query.view(batch, kv_heads, -1, head_dim)).mean(2)
        scores = torch.einsum("bhd,bhnd->bhn", grouped, means) * scale
        mass = (scores + held.log()[:, None]).softmax(-1)
        mass, order = mass.sort(dim=-1, descending=True)
        counts = ((mass.cumsum(-1) - mass) < self.threshold).sum(-1)
        counts = torch.minimum(counts, (held > 0).sum(-1)[:, None])
        ranks = torch.arange(num_blocks, device=query.device)
        indices = order.masked_fill(ranks >= counts[..., None], -1)
        return Selection(indices.int(), counts.int(), self.block_size)


@dataclass(frozen=True)
class MassThresholdInHostMemory(MassThreshold):
    """The same with ``kv_storage="host"``: a prompt's sums come from ``layer.rows``."""

    name: ClassVar[str] = "toy-mass-threshold-in-host-memory"

    @property
    def selection_size(self):
        return SelectionSize(self.block_size, None)

    def update_metadata(self, layer, num_new):
        super().update_metadata(
            layer
            if num_new == 1
            else SimpleNamespace(
                keys=layer.rows.keys,
                seq_start=layer.seq_start,
                length=layer.length,
                metadata=layer.metadata,
            ),
            num_new,
        )


@dataclass(frozen=True)
class UnboundedQuest(Quest):
    """Quest, as if its selections had no maximum size: steps read them straight from host memory."""

    name: ClassVar[str] = "toy-unbounded-quest"

    @property
    def selection_size(self):
        return SelectionSize(self.page_size, None)


@dataclass(frozen=True)
class Window(SparseMethod):
    """StreamingLLM's pattern: the first block and the last ones, for any query (arXiv 2309.17453)."""

    name: ClassVar[str] = "toy-window"
    summary: ClassVar[str] = "attention sinks and a sliding window"
    paper: ClassVar[str] = "arXiv 2309.17453"

    block_size: int = 16

    def select(self, query, layer, scale):
        batch, kv_heads = layer.keys.shape[:2]
        scores = torch.zeros(batch, kv_heads, layer.max_blocks(self.block_size), device=query.device)
        max_blocks = self.token_budget // self.block_size
        indices, counts = select_blocks(
            scores,
            layer.seq_start,
            layer.seq_end,
            block_size=self.block_size,
            max_blocks=max_blocks,
            sink_blocks=1,
            recent_blocks=max_blocks - 1,
        )
        return Selection(indices, counts, self.block_size)


@dataclass(frozen=True)
class SmallNorm(SparseMethod):
    """The prompt's tokens whose keys have the smallest norms, ranked once when it ends (arXiv 2406.11430).

    Tokens after the prompt have rank 0, so they are read first. Only ``finish_prompt`` writes the metadata.
    """

    name: ClassVar[str] = "toy-small-norm"
    summary: ClassVar[str] = "tokens by the norm of their keys, ranked when the prompt ends"
    paper: ClassVar[str] = "arXiv 2406.11430"

    def init_metadata(self, layer):
        return {"norm": unrounded(layer.keys.new_zeros(layer.keys.shape[:3]))}  # [batch, kv_heads, capacity]

    def crop_metadata(self, layer):
        layer.metadata["norm"][:, :, layer.length :] = 0

    def finish_prompt(self, layers):
        for layer in layers:
            layer.metadata["norm"][:, :, : layer.length] = unrounded(layer.keys[:, :, : layer.length]).norm(dim=-1)

    def select(self, query, layer, scale):
        positions = layer.seq_start[:, None] + torch.arange(layer.max_blocks(1), device=query.device)
        positions = torch.minimum(positions, layer.seq_end[:, None] - 1).clamp_min(0).long()
        norms = layer.metadata["norm"]
        scores = -norms.gather(2, positions[:, None].expand(-1, norms.shape[1], -1))
        indices, counts = select_blocks(
            scores, layer.seq_start, layer.seq_end, block_size=1, max_blocks=self.token_budget, recent_blocks=1
        )
        return Selection(indices, counts, 1)


@dataclass(frozen=True)
class Recent(SparseMethod):
    """The last ``token_budget`` tokens, by its own ``decode`` without a selection."""

    name: ClassVar[str] = "toy-recent"
    summary: ClassVar[str] = "the last tokens"
    paper: ClassVar[str] = "none"
    counts: ClassVar[tuple[str, ...]] = ("rows_cut", "rows_whole")

    def decode(self, query, layer, new_key, new_value, scale):
        layer.append(new_key.unsqueeze(2), new_value.unsqueeze(2))
        lengths = layer.row_lengths()
        cut = (lengths > self.token_budget).sum()
        layer.counter.own += torch.stack([cut, len(lengths) - cut])
        ranks = torch.arange(min(self.token_budget, layer.max_blocks(1)), device=query.device)
        counts = lengths.clamp_max(self.token_budget)[:, None]  # one choice for all KV heads
        indices = (lengths[:, None] - counts + ranks).masked_fill(ranks >= counts, -1)
        return self.attend(query, layer, Selection(indices[:, None].int(), counts.int(), 1), scale)


@dataclass(frozen=True)
class FirstHeadStreams(DuoAttention):
    """In every layer the first KV head streams, whatever the model; the others keep everything."""

    name: ClassVar[str] = "toy-first-head-streams"
    summary: ClassVar[str] = "one streaming head in each layer"
    paper: ClassVar[str] = "none"

    def evicting_heads(self, layer_idx):
        return (0,)
