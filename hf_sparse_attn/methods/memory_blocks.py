"""InfLLM's context memory: blocks of the past, each known by the tokens that later queries attended to most.

The method is of arXiv 2402.04617, section 3.2. Its two scores are in :func:`represent` and :func:`choose_blocks`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from hf_sparse_attn_kernels import select_blocks

from hf_sparse_attn.methods.base import Selection
from hf_sparse_attn.methods.scores import grouped, row_slots, take_tokens
from hf_sparse_attn.rope import rotated

if TYPE_CHECKING:
    from hf_sparse_attn.cache.layer import SparseLayer

LEAST_BLOCKS = 4
"""Blocks shrink so that at least so many fit into what a budget leaves for them."""
PRODUCTS_AT_ONCE = 1 << 25
"""Products of keys and queries, over all rows and KV heads, that blocks are represented by in one go: 128 MiB."""


class BlockSplit(NamedTuple):
    """A token budget split into first tokens, blocks of the past, and last tokens."""

    first: int
    """First tokens of a row, always read."""
    blocks: int
    """Maximum number of blocks that are chosen."""
    size: int
    """Tokens in a block. The tokens between the last whole block and the local window, fewer than this, are read."""
    last: int
    """Last tokens, the local window, always read."""

    @classmethod
    def of(cls, token_budget: int, n_init: int, n_local: int, block_size: int) -> BlockSplit:
        """Split at least 2 tokens, so that at least a third is for blocks."""
        always = min(n_init + n_local, token_budget * 2 // 3)
        first = always * n_init // (n_init + n_local)
        rest = token_budget - always
        size = min(block_size, max(1, rest // LEAST_BLOCKS))
        return cls(first, (rest + 1) // size - 1, size, always - first)

    def blocks_before(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return how many whole blocks lie before the local window of the last of so many tokens, int64 [batch].

        Block i is the ``size`` tokens from ``first + i * size`` on.
        """
        return (tokens.long() - self.first - self.last).clamp_min(0) // self.size

    def remote_tokens(
        self, chosen: torch.Tensor, blocks: torch.Tensor, end: torch.Tensor, rest: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the tokens to read before the local window: the first, the chosen blocks, and those after all blocks.

        Parameters
        ----------
        chosen
            int64 [batch, n]: chosen blocks, then -1.
        blocks
            int64 [batch]: number of whole blocks.
        end
            int64 [batch]: tokens from here on are in the local window.
        rest
            Upper bound on the tokens after the blocks.

        Returns
        -------
        tuple of torch.Tensor
            int64 [batch, m], counted from the row's first token, and bool [batch, m], whether each is to be read.
        """
        device, batch = chosen.device, len(chosen)
        first = torch.arange(self.first, device=device).expand(batch, -1)
        inside = (self.first + chosen.unsqueeze(2) * self.size + torch.arange(self.size, device=device)).flatten(1)
        after = self.first + blocks.unsqueeze(1) * self.size + torch.arange(rest, device=device)
        tokens = torch.cat((first, inside, after), dim=1)
        is_chosen = (chosen >= 0).repeat_interleave(self.size, dim=1)
        kept = torch.ones_like(first, dtype=torch.bool), is_chosen, torch.ones_like(after, dtype=torch.bool)
        return tokens, torch.cat(kept, dim=1) & (tokens < end.unsqueeze(1))


def as_selection(tokens: torch.Tensor, is_read: torch.Tensor) -> Selection:
    """Return those of the tokens [batch, n] that are read, as one selection for all KV heads."""
    absent = torch.iinfo(torch.int32).max
    indices = tokens.int().masked_fill(~is_read, absent).sort(dim=1).values
    indices = indices.masked_fill(indices == absent, -1)
    return Selection(indices.unsqueeze(1), is_read.sum(1, keepdim=True, dtype=torch.int32), block_size=1)


def allocate_memory(layer: SparseLayer, size: int) -> dict[str, torch.Tensor]:
    """Allocate the context memory of a layer.

    ``queries`` [batch, kv_heads, capacity, head_dim] in the keys' dtype: the sum of the query heads of each group,
    before RoPE; 0 where a query is not known or does not count. ``block_keys`` [batch, kv_heads, blocks, head_dim], in
    the keys' dtype: the mean of the representative keys of each block. ``represented`` int32 [batch]: how many of a
    row's blocks have theirs.
    """
    keys = layer.keys
    batch, kv_heads, capacity, head_dim = keys.shape
    blocks = max(2, -(-capacity // size))  # a compiled step would be specialised to a size of 1
    return {
        "queries": torch.zeros_like(keys),
        "block_keys": keys.new_zeros(batch, kv_heads, blocks, head_dim),
        "represented": keys.new_zeros(batch, dtype=torch.int32),
    }


def represent_up_to(layer: SparseLayer, split: BlockSplit, representatives: int, blocks: torch.Tensor) -> None:
    """Represent the blocks of a prompt that are not represented yet, before ``blocks`` int64 [batch]."""
    represented = layer.metadata["represented"]
    stop = int(blocks.max())
    batch, kv_heads = layer.keys.shape[:2]
    rotations = len(layer.rope[0]) - split.last  # slots that a group's tokens may take
    products = batch * kv_heads * split.size * (split.size + split.last)
    at_once = max(1, min(rotations // split.size, PRODUCTS_AT_ONCE // products))
    for block in range(int(represented.min()), stop, at_once):
        first = torch.full_like(blocks, block)
        represent(layer, split, representatives, first, min(at_once, stop - block))
    represented.copy_(torch.maximum(represented, blocks))


def represent(
    layer: SparseLayer, split: BlockSplit, representatives: int, block: torch.Tensor, number: int = 1
) -> None:
    """Choose the representative tokens of blocks of each row, and store the mean of their keys.

    They are those with the highest representative score r_m (section 3.2): the mean of q.k over the queries after them
    that have them in their local window, as far as these are known; the paper divides by the window's length instead.
    The blocks are ``number`` ones from ``block``, int64 [batch], on.
    """
    (cos, sin), metadata, size = layer.rope, layer.metadata, split.size
    tokens = number * size
    followers = tokens + split.last - 2  # queries after the first token that have one of the blocks' in their window
    start = split.first + block * size
    keys = take_tokens(layer.keys, row_slots(layer, start, tokens))
    seeking = rotated(
        take_tokens(metadata["queries"], row_slots(layer, start + 1, followers)),
        cos[1 : followers + 1],
        sin[1 : followers + 1],
    )
    distance = 1 + torch.arange(followers, device=block.device) - torch.arange(tokens, device=block.device)[:, None]
    meets = (distance > 0) & (distance < split.last) & (seeking != 0).any(3).unsqueeze(2)
    products = rotated(keys, cos[:tokens], sin[:tokens]) @ seeking.transpose(2, 3)
    scores = products.masked_fill(~meets, 0).sum(3) / meets.sum(3).clamp_min(1)  # [batch, kv_heads, tokens]
    scores = scores.reshape(*scores.shape[:2], number, size)
    keys = keys.reshape(*keys.shape[:2], number, size, keys.shape[3])
    best = scores.sort(dim=3, descending=True, stable=True).indices[..., : min(representatives, size)]
    chosen = keys.gather(3, best.unsqueeze(4).expand(*best.shape, keys.shape[4]))
    mean = chosen.mean(3, dtype=scores.dtype).to(keys.dtype)
    stored = block[:, None, None, None] + torch.arange(number, device=block.device)[:, None]
    metadata["block_keys"].scatter_(2, stored.expand_as(mean), mean)


def choose_blocks(query: torch.Tensor, layer: SparseLayer, split: BlockSplit, blocks: torch.Tensor) -> torch.Tensor:
    """Choose, of the first ``blocks`` int64 [batch], those whose representatives score highest over all heads.

    The score is sim(X, B) of section 3.2 up to a factor. ``query`` is [batch, q_heads, head_dim], rotated to the
    distance of remote tokens. Returns int64 [batch, n]: ascending, then -1.
    """
    heads = grouped(query, layer.keys.shape[1]).sum(2)
    most = max(1, layer.max_blocks(split.size))  # a chunk of padding alone has none
    block_keys = layer.metadata["block_keys"][:, :, :most].to(heads.dtype)
    scores = (block_keys @ heads.unsqueeze(3)).squeeze(3).sum(1, keepdim=True)  # [batch, 1, blocks]
    scores = layer.head_shard.all_reduce(scores)
    ends = (blocks * split.size).int()
    indices, _ = select_blocks(scores, torch.zeros_like(ends), ends, block_size=split.size, max_blocks=split.blocks)
    return indices[:, 0].long()
