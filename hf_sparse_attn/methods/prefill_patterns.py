"""The sparse patterns of MInference: what the queries of one KV head attend to, and how much of the attention it is.

All places are counted from a row's first token, so left padding never shifts blocks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from hf_sparse_attn.methods.head_patterns import A_SHAPE, VERTICAL_SLASH, HeadPattern

LAST_QUERIES = 64
"""Queries that estimate vertical lines and slashes."""
SINK_COLUMNS = 30
"""First tokens that are always among the vertical lines."""


class Pattern(NamedTuple):
    """The keys that the queries of a KV head attend to, causally."""

    columns: torch.Tensor
    """bool [batch, group, tokens]: single tokens, for all queries."""
    blocks: torch.Tensor
    """bool [batch, group, query blocks, key blocks]."""


class HeadView:
    """Queries and keys of one KV head, with the attention weights of its last queries.

    Parameters
    ----------
    query
        [batch, group, queries, head_dim], of the rows' last tokens.
    keys
        [batch, length, head_dim].
    seq_start
        int [batch]: position of each row's first token in ``keys``; the rows end together.
    scale
        Factor on q.k.
    block_size
        Tokens in a block.
    """

    def __init__(
        self, query: torch.Tensor, keys: torch.Tensor, seq_start: torch.Tensor, scale: float, block_size: int
    ) -> None:
        device, queries = query.device, query.shape[2]
        self.query, self.scale, self.block_size = query, scale, block_size
        self.lengths = keys.shape[1] - seq_start.long()
        """int64 [batch]: tokens of each row."""
        key_blocks, query_blocks = -(-keys.shape[1] // block_size), (queries + 2 * block_size - 2) // block_size
        place = torch.arange(key_blocks * block_size, device=device)
        self.is_key = place < self.lengths[:, None]
        """bool [batch, tokens], tokens a multiple of the block size."""
        position = (place + seq_start[:, None]).where(self.is_key, -1)
        self.keys = _taken(keys[:, None], position).to(torch.promote_types(query.dtype, torch.float32))
        """[batch, 1, tokens, head_dim], by places; zeros after the row."""
        self.first_block = (self.lengths - queries).clamp_min(0) // block_size
        """int64 [batch]: block of each row's first query."""
        block = self.first_block[:, None] + torch.arange(query_blocks, device=device)
        self.distance = block[:, :, None] - torch.arange(key_blocks, device=device)
        """int64 [batch, query blocks, key blocks]: blocks from a block of queries back to a block of keys."""
        self.is_causal = ((self.distance >= 0) & (block * block_size < self.lengths[:, None])[:, :, None])[:, None]
        """bool [batch, 1, query blocks, key blocks]: blocks with keys that a query of the block may see."""
        last = min(LAST_QUERIES, queries)
        self.last_place = self.lengths[:, None] - last + torch.arange(last, device=device)
        """int64 [batch, last queries]: places of the last queries; negative for padding."""
        self.weights = self._last_weights(place)
        """[batch, group, last queries, tokens]: their attention weights; zeros for padding."""
        self.weight_blocks: torch.Tensor = self.weights.unflatten(3, (-1, block_size))  # type: ignore[no-untyped-call]
        """[batch, group, last queries, key blocks, block_size]: the same."""
        self.block_weights = self.weight_blocks.sum(4)
        """[batch, group, last queries, key blocks]: their sums."""

    def _last_weights(self, place: torch.Tensor) -> torch.Tensor:
        is_query = (self.last_place >= 0)[:, None, :, None]
        query = self.query[:, :, -self.last_place.shape[1] :].to(self.keys.dtype).masked_fill(~is_query, 0)
        seen = is_query & (place <= self.last_place[:, :, None])[:, None]
        scores = (query @ self.keys.transpose(2, 3) * self.scale).masked_fill(~seen, -torch.inf)
        return scores.softmax(-1).masked_fill(~seen, 0)

    def verticals(self) -> torch.Tensor:
        """Return each token's weight, summed over the last queries, [batch, group, tokens]; -inf after the row."""
        return self.weights.sum(2).masked_fill(~self.is_key[:, None], -torch.inf)

    def slashes(self) -> torch.Tensor:
        """Return the weight at each distance from a query back, summed over the last queries, [batch, group, tokens].

        -inf for distances that the row does not have.
        """
        key = self.last_place[:, :, None] - torch.arange(self.weights.shape[3], device=self.weights.device)
        index = key.clamp_min(0)[:, None].expand_as(self.weights)
        total = self.weights.gather(3, index).masked_fill((key < 0)[:, None], 0).sum(2)
        return total.masked_fill(~self.is_key[:, None], -torch.inf)

    def diagonals(self, by_distance: torch.Tensor) -> torch.Tensor:
        """Reduce values of single distances, [batch, group, tokens], to those of blocks, by their maximum.

        A block of queries and the d-th block of keys before it have pairs of tokens at 2 * block_size - 1 distances:
        less than a block more or less than d blocks.
        """
        blocks = by_distance.unflatten(2, (-1, self.block_size))  # type: ignore[no-untyped-call]
        nearer = blocks[:, :, :-1, 1:].amax(3)
        values: torch.Tensor = blocks.amax(3)
        values[:, :, 1:] = torch.maximum(values[:, :, 1:], nearer)
        return values

    def along(self, diagonals: torch.Tensor) -> torch.Tensor:
        """Return the blocks on chosen diagonals, bool [batch, group, key blocks], as those of a :class:`Pattern`."""
        batch, group, key_blocks = diagonals.shape
        index = self.distance.clamp(0, key_blocks - 1).flatten(1)[:, None].expand(-1, group, -1)
        return diagonals.gather(2, index).view(batch, group, -1, key_blocks) & self.is_causal

    def pooled_scores(self) -> torch.Tensor:
        """Return q.k of the mean query and the mean key of blocks, [batch, group, query blocks, key blocks]."""
        size, queries = self.block_size, self.query.shape[2]
        slots = self.distance.shape[1] * size
        place = self.first_block[:, None] * size + torch.arange(slots, device=self.query.device)
        index = place - self.lengths[:, None] + queries
        own = (index >= 0) & (index < queries)
        taken = _taken(self.query, index.where(own, -1)).to(self.weights.dtype)
        means = _mean(taken, own, size)
        return means @ _mean(self.keys, self.is_key, size).transpose(2, 3) * self.scale

    def coverage(self, pattern: Pattern) -> torch.Tensor:
        """Return the weight of the last queries on what a pattern computes, [batch, group], summed over them."""
        in_block = self.last_place.clamp_min(0) // self.block_size - self.first_block[:, None]
        index = in_block.clamp_min(0)[:, None, :, None].expand(-1, pattern.blocks.shape[1], -1, pattern.blocks.shape[3])
        computed = pattern.blocks.gather(2, index)
        columns = pattern.columns.unflatten(2, (-1, self.block_size))  # type: ignore[no-untyped-call]
        beside = (self.weight_blocks * columns[:, :, None]).sum(4)
        total: torch.Tensor = torch.where(computed, self.block_weights, beside).sum((2, 3))
        return total


def a_shape(view: HeadView, sinks: int, diagonals: int) -> Pattern:
    """Attend to the first tokens and to the last ``diagonals`` blocks, the query's own included."""
    batch, group, _, tokens = view.weights.shape
    at = torch.arange(tokens, device=view.weights.device)
    columns = ((at < sinks) & view.is_key)[:, None].expand(batch, group, tokens)
    return Pattern(columns, ((view.distance < diagonals)[:, None] & view.is_causal).expand(-1, group, -1, -1))


def vertical_slash(view: HeadView, verticals: int, diagonals: torch.Tensor) -> Pattern:
    """Attend to the tokens of the largest weights, and to chosen diagonals, bool [batch, group, key blocks]."""
    weights = view.verticals()
    at = torch.arange(weights.shape[2], device=weights.device)
    weights = weights.masked_fill((at < SINK_COLUMNS) & view.is_key[:, None], torch.inf)
    return Pattern(largest(weights, verticals), view.along(diagonals))


def block_sparse(view: HeadView, blocks: int) -> Pattern:
    """Attend to the blocks of the highest scores of mean query and mean key; the query's own is one of them."""
    scores = view.pooled_scores().masked_fill(~view.is_causal, -torch.inf)
    scores = scores.masked_fill((view.distance == 0)[:, None], torch.inf)
    columns = torch.zeros_like(view.weights[:, :, 0], dtype=torch.bool)
    return Pattern(columns, largest(scores, blocks))


def of_budget(view: HeadView, token_budget: int) -> list[Pattern]:
    """Return candidates that all compute at most ``token_budget`` keys for a query: an A-shape, three, and blocks.

    Three divide the budget between vertical lines and slashes. Slashes are whole diagonals of blocks here, those with
    the largest weight at a single distance.
    """
    size = view.block_size
    sinks = min(size, token_budget // 8, token_budget - size)
    found = [a_shape(view, sinks, (token_budget - sinks) // size)]
    slashes = _with_local(view.slashes(), size)
    by_diagonal = view.diagonals(slashes)
    for eighths in (1, 4, 7):
        verticals = min(token_budget * eighths // 8, token_budget - size)
        chosen = largest(by_diagonal, (token_budget - verticals) // size)
        found.append(vertical_slash(view, verticals, chosen))
    return [*found, block_sparse(view, token_budget // size)]


def of_file(view: HeadView, pattern: HeadPattern) -> Pattern:
    """Return what a pattern of a file computes, with its least sizes as in the released code."""
    size = view.block_size
    if pattern.kind == A_SHAPE:
        return a_shape(view, pattern.first, 1 + -(-(pattern.second - 1) // size))
    if pattern.kind == VERTICAL_SLASH:
        slashes = _with_local(view.slashes(), 100)
        chosen = view.diagonals(largest(slashes, max(pattern.second, 50)).to(view.weights.dtype)) > 0
        return vertical_slash(view, max(pattern.first, SINK_COLUMNS), chosen)
    return block_sparse(view, pattern.first)


def largest(scores: torch.Tensor, number: int) -> torch.Tensor:
    """Return where the ``number`` largest values above -inf of the last dimension are, of equal ones the first."""
    number = max(0, min(number, scores.shape[-1]))
    order = scores.argsort(dim=-1, descending=True, stable=True)[..., :number]
    chosen = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, order, True)
    return chosen & (scores > -torch.inf)


def _with_local(slashes: torch.Tensor, nearest: int) -> torch.Tensor:
    """Return weights by distance with those of the nearest tokens infinite: these are always chosen."""
    at = torch.arange(slashes.shape[2], device=slashes.device)
    return slashes.masked_fill((at < nearest) & (slashes > -torch.inf), torch.inf)


def _taken(states: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Gather [batch, heads, n, head_dim] at [batch, m]; zeros where the index is negative."""
    heads, head_dim = states.shape[1], states.shape[3]
    at = index.clamp_min(0)[:, None, :, None].expand(-1, heads, -1, head_dim)
    return states.gather(2, at).masked_fill((index < 0)[:, None, :, None], 0)


def _mean(states: torch.Tensor, exists: torch.Tensor, size: int) -> torch.Tensor:
    """Return the mean of each block of [batch, heads, n, head_dim], over the tokens that exist, [batch, n]."""
    counts = exists.unflatten(1, (-1, size)).sum(2).clamp_min(1)  # type: ignore[no-untyped-call]
    sums = states.unflatten(2, (-1, size)).sum(3)  # type: ignore[no-untyped-call]
    means: torch.Tensor = sums / counts[:, None, :, None]
    return means
