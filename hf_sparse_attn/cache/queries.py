"""The last queries of a prompt, which calibrate or evict once it is complete."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch


class RecentQueries(NamedTuple):
    """The last queries of a layer's prompts. Immutable, so that a failed pass is undone by the former object."""

    states: torch.Tensor
    """[batch, q_heads, n, head_dim], as the attention function got them, the newest last."""
    counts: torch.Tensor
    """int32 [batch]: how many of them, counted from the last, belong to the row's tokens and not to padding."""
    scale: float
    """The model's factor on q.k."""
    end: int
    """Tokens per row that the layer held after them, left padding included."""

    def cut(self, length: int) -> RecentQueries | None:
        """Return the queries left after the row was cut to ``length`` tokens; None if none of them is left."""
        surplus = max(0, self.end - length)
        if surplus >= self.states.shape[2]:
            return None
        states = self.states[:, :, : self.states.shape[2] - surplus]
        return self._replace(states=states, counts=(self.counts - surplus).clamp_min(0), end=min(self.end, length))

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> RecentQueries:
        """Reorder, repeat or choose rows."""
        return self._replace(states=change(self.states), counts=change(self.counts))


def followed_by(
    former: RecentQueries | None, query: torch.Tensor, row_lengths: torch.Tensor, scale: float, most: int, end: int
) -> RecentQueries:
    """Return the last queries after a pass of a prompt.

    Parameters
    ----------
    former
        Those before the pass; None before the first one.
    query
        [batch, q_heads, tokens, head_dim] of the pass.
    row_lengths
        int32 [batch]: tokens of each row, padding excluded.
    scale
        The model's factor on q.k.
    most
        Maximum number of queries to keep.
    end
        Tokens per row after the pass.
    """
    tokens = row_lengths.clamp_max(query.shape[2])
    if former is None:
        return RecentQueries(query[:, :, -most:].clone(), tokens.clamp_max(most), scale, end)
    states = torch.cat((former.states, query[:, :, -most:]), dim=2)[:, :, -most:]
    return RecentQueries(states.clone(), (former.counts + tokens).clamp_max(most), scale, end)
