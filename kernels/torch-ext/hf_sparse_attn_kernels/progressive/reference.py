"""Torch references of Progressive Sparse Attention's ops; see `_reference` for the rules of all references."""

import math

import torch
from torch.nn.functional import pad

from .._reference import blank, compute_dtype, count_tokens, rank_blocks, row_lengths, take_tokens

__all__ = ["progressive_decode", "rank_blocks"]

_INF = float("inf")


def progressive_decode(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    block_order: torch.Tensor,
    block_counts: torch.Tensor,
    seq_start: torch.Tensor,
    seq_end: torch.Tensor,
    *,
    block_size: int,
    microbatch: int,
    threshold: float,
    scale: float | None,
    rest: str,
    forced_blocks: int,
    counter: torch.Tensor | None,
    finished: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Reference of `hf_sparse_attn_kernels.progressive_decode`.

    Reads one microbatch, then as many as were read before, until no row needs more.
    """
    batch, kv_heads, capacity, head_dim = keys.shape
    dtype = compute_dtype(query.dtype)
    scale = head_dim**-0.5 if scale is None else scale
    grouped = (query.to(dtype) * scale).reshape(batch * kv_heads, -1, head_dim)
    on_host = block_counts.device.type == "cpu"
    listed = max(1, int(block_counts.max())) if on_host else block_order.shape[2]
    microbatches = -(-listed // microbatch)

    # A slot without a block points past every row.
    slots = torch.arange(microbatches * microbatch, device=query.device)
    blocks = pad(block_order.long(), (0, max(0, len(slots) - block_order.shape[2])))[..., : len(slots)]
    blocks = blocks.masked_fill(slots >= block_counts[..., None], capacity)
    length = row_lengths(seq_start, seq_end)
    tokens = (blocks[..., None] * block_size + torch.arange(block_size, device=query.device)).flatten(2)
    absent = tokens >= length[:, None, None]  # [batch, kv_heads, tokens]
    # An absent token reads the first one listed instead; its score is masked, its value blank.
    positions = torch.where(absent, tokens[..., :1], tokens) + seq_start[:, None, None]
    is_left_out = (blocks + 1) * block_size > length[:, None, None]  # of the estimate of the rest
    if rest == "last":
        is_left_out |= slots < forced_blocks

    search = _Search(block_counts, _num_blocks(seq_start, seq_end, block_size), microbatch, threshold, rest)
    scores = grouped.new_empty((batch, kv_heads, grouped.shape[1], 0))
    first, last = 0, 1 if on_host else microbatches
    while first < microbatches and not (on_host and search.is_over()):
        span = slice(first * microbatch * block_size, last * microbatch * block_size)
        (k,) = take_tokens((keys,), positions[..., span])
        new = grouped.bmm(k.to(dtype).flatten(0, 1).transpose(1, 2)).view(batch, kv_heads, -1, k.shape[2])
        new.masked_fill_(absent[:, :, None, span], -_INF)
        sums = new.view(*new.shape[:3], last - first, microbatch, block_size).logsumexp(dim=5)
        left_out = is_left_out[..., first * microbatch : last * microbatch]
        search.add(sums, left_out.reshape(batch, kv_heads, 1, last - first, microbatch), first)
        scores = torch.cat((scores, new), dim=3)
        first, last = last, min(microbatches, 2 * last)

    read_counts = search.read_counts()
    if on_host:
        slots = slots[: max(1, int(read_counts.max()))]
    span = slice(0, len(slots) * block_size)
    unread = absent[..., span] | (slots >= read_counts[..., None]).repeat_interleave(block_size, dim=2)
    if counter is not None:
        count_tokens(counter, (~unread).sum(), length, kv_heads)
    scores = scores[..., span].masked_fill_(unread[:, :, None], -_INF)
    weights = scores.softmax(dim=3).flatten(0, 1)
    (v,) = take_tokens((values,), torch.where(unread, positions[..., :1], positions[..., span]))
    # Without a token the softmax is NaN.
    out = weights.bmm(blank(v, unread).to(dtype).flatten(0, 1)).view(batch, kv_heads, -1, head_dim)
    out.masked_fill_(unread.all(dim=2)[:, :, None, None], 0.0)
    return out.view(query.shape).to(query.dtype), scores.logsumexp(dim=3).view(query.shape[:2]), read_counts


class _Search:
    """The first microbatch after which each row and KV head has read enough, from the sums of the blocks, in order."""

    def __init__(
        self, block_counts: torch.Tensor, num_blocks: torch.Tensor, microbatch: int, threshold: float, rest: str
    ) -> None:
        self.block_counts, self.num_blocks, self.microbatch, self.rest = block_counts, num_blocks, microbatch, rest
        # P > threshold, with P = 1 / (1 + least * left / total), in logarithms: total > odds + least + left
        self.log_odds = math.log(threshold) - math.log1p(-threshold) if threshold < 1 else _INF
        self.total: torch.Tensor | None = None  # log-sum-exp of all blocks, [batch, kv_heads, group, 1]
        self.least: torch.Tensor | None = None  # of a block, or of a microbatch's mean
        self.seen = 0
        self.needed = -(-block_counts.long() // microbatch)  # microbatches, until fewer are known to be enough

    def add(self, sums: torch.Tensor, is_left_out: torch.Tensor, first: int) -> None:
        """Add blocks of log-sum-exp `sums` [batch, kv_heads, group, microbatches, microbatch], from `first` on.

        The estimate of the rest leaves out `is_left_out` [batch, kv_heads, 1, microbatches, microbatch].
        """
        total = sums.logsumexp(dim=4)
        if self.rest == "least":
            least = sums.masked_fill(is_left_out, _INF).amin(dim=4)
        else:
            counted = (~is_left_out).sum(dim=4)
            least = sums.masked_fill(is_left_out, -_INF).logsumexp(dim=4) - counted.to(sums.dtype).log()
            least.masked_fill_(counted == 0, _INF)
        if self.total is not None and self.least is not None:
            total, least = torch.cat((self.total, total), dim=3), torch.cat((self.least, least), dim=3)
        total, least = total.logcumsumexp(dim=3), least.cummin(dim=3)[0]
        self.total, self.least = total[..., -1:], least[..., -1:]
        count = sums.shape[3]
        read = (torch.arange(first, first + count, device=sums.device) + 1) * self.microbatch
        left = (self.num_blocks[:, None] - read).clamp_(min=0).to(sums.dtype).log()[:, None, None]
        enough = (total[..., -count:] > self.log_odds + least[..., -count:] + left).all(dim=2)
        here = torch.where(enough.any(dim=2), first + 1 + enough.int().argmax(dim=2), self.needed)
        self.needed = torch.minimum(self.needed, here)
        self.seen = first + count

    def is_over(self) -> bool:
        """Return whether no row needs blocks beyond those added. Waits for a device."""
        return self.total is not None and int(self.needed.max()) <= self.seen

    def read_counts(self) -> torch.Tensor:
        """Return the number of blocks that each row and KV head reads."""
        return torch.minimum(self.needed * self.microbatch, self.block_counts).int()


def _num_blocks(seq_start: torch.Tensor, seq_end: torch.Tensor, block_size: int) -> torch.Tensor:
    """Return the number of blocks of each row, [batch]."""
    return (row_lengths(seq_start, seq_end) + (block_size - 1)) // block_size
