"""The queries of a prompt, which calibrate, centre or evict once it is complete: the last ones, and the mean of all."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch


class PromptQueries(NamedTuple):
    """Queries of its prompts that a layer keeps. Immutable, so that a failed pass is undone by the former object."""

    states: torch.Tensor
    """[batch, q_heads, n, head_dim], the last queries as the attention function got them, the newest last.

    They follow one another: those before a decode step, whose query is not kept, are dropped by the next pass.
    """
    counts: torch.Tensor
    """int32 [batch]: how many of them, counted from the last, belong to the row's tokens and not to padding."""
    total: torch.Tensor
    """[batch, q_heads, head_dim], in float32 or the queries' dtype if that is wider: the sum over all tokens."""
    number: torch.Tensor
    """int32 [batch]: how many tokens the sum is over, padding excluded."""
    scale: float
    """The model's factor on q.k."""
    end: int
    """Tokens per row that the layer held after them, left padding included."""

    @property
    def mean(self) -> torch.Tensor:
        """[batch, q_heads, head_dim]: the mean of each row's queries, 0 in a row without any."""
        return self.total / self.number.clamp_min(1)[:, None, None]

    def cut(self, length: int) -> PromptQueries | None:
        """Return what is left after the rows were cut to ``length`` tokens; None if they are empty.

        The sum stays that of all queries seen: what a row without them would be is not known.
        """
        if length == 0:
            return None
        left = max(0, self.states.shape[2] - max(0, self.end - length))
        counts = (self.counts - (self.states.shape[2] - left)).clamp_min(0)
        return self._replace(states=self.states[:, :, :left], counts=counts, end=min(self.end, length))

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> PromptQueries:
        """Reorder, repeat or choose rows."""
        return self._replace(
            states=change(self.states),
            counts=change(self.counts),
            total=change(self.total),
            number=change(self.number),
        )


def followed_by(
    former: PromptQueries | None,
    query: torch.Tensor,
    row_lengths: torch.Tensor,
    has_padding: bool,
    scale: float,
    most: int,
    end: int,
) -> PromptQueries:
    """Return what to keep of the queries after a pass of a prompt.

    Parameters
    ----------
    former
        What was kept before the pass; None before the first one.
    query
        [batch, q_heads, tokens, head_dim] of the pass.
    row_lengths
        int32 [batch]: tokens of each row, padding excluded.
    has_padding
        Whether any row has left padding.
    scale
        The model's factor on q.k.
    most
        Maximum number of queries to keep.
    end
        Tokens per row after the pass.
    """
    tokens = row_lengths.clamp_max(query.shape[2])
    total = _sum_of_tokens(query, tokens if has_padding else None)
    if former is None:
        return PromptQueries(query[:, :, -most:].clone(), tokens.clamp_max(most), total, tokens, scale, end)
    states, counts = query, tokens
    if former.end + query.shape[2] == end:
        states, counts = torch.cat((former.states, query[:, :, -most:]), dim=2), former.counts + tokens
    total, number = former.total + total, former.number + tokens
    return PromptQueries(states[:, :, -most:].clone(), counts.clamp_max(most), total, number, scale, end)


def _sum_of_tokens(query: torch.Tensor, tokens: torch.Tensor | None) -> torch.Tensor:
    """Sum [batch, q_heads, n, head_dim] over each row's last ``tokens``, int32 [batch]; None for all ``n``."""
    if tokens is not None:
        places = torch.arange(-query.shape[2], 0, device=query.device)
        is_padding = places < -tokens[:, None]
        query = query.masked_fill(is_padding[:, None, :, None], 0)  # padding may hold anything, NaN too
    return query.sum(2, dtype=torch.promote_types(query.dtype, torch.float32))
