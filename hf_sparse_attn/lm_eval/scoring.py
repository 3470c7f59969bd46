"""Log-likelihoods of continuations, decoded token by token so that sparse decoding applies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from hf_sparse_attn.cache.cache import SparseCache
from hf_sparse_attn.cache_argument import CACHE

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Continuation:
    """Tokens to feed for a continuation: its context, and the continuation without its last token.

    Continuations of one context that differ only in their last token are equal here.

    Parameters
    ----------
    inputs : tuple of int
        The tokens.
    prefill : int
        Number of tokens in the first forward pass, fewer than all. The others are fed one per step.
    scored_from : int
        Index of the first token whose prediction is scored: the context's last.
    """

    inputs: tuple[int, ...]
    prefill: int
    scored_from: int

    @property
    def steps(self) -> int:
        """Number of tokens fed one per step."""
        return len(self.inputs) - self.prefill


def feed(
    model: PreTrainedModel,
    cache: SparseCache,
    input_ids: torch.Tensor,
    mask: torch.Tensor,
    positions: torch.Tensor,
    keep: int = 1,
) -> torch.Tensor:
    """Feed left-padded tokens after a cache and return the logits of the last ones, [rows, keep, vocabulary].

    Parameters
    ----------
    model : PreTrainedModel
        Patched.
    cache : SparseCache
        Holds the earlier tokens; updated.
    input_ids, positions : torch.Tensor
        int64 [rows, tokens]; positions without padding.
    mask : torch.Tensor
        int64 [rows, cached + new tokens], 0 for padding.
    keep : int
        Number of tokens whose logits are computed.
    """
    logits: torch.Tensor = model(
        input_ids=input_ids,
        attention_mask=mask,
        position_ids=positions,
        use_cache=True,
        logits_to_keep=keep,
        **{CACHE: cache},
    ).logits
    return logits


class Scorer:
    """Scores continuations under a patched model, a batch at a time.

    Parameters
    ----------
    model : PreTrainedModel
        Patched.
    pad_token_id : int
        Padding on the left of shorter contexts; never attended to.
    softmax_dtype : torch.dtype, optional
        Dtype of the log-probabilities. Default: that of the logits.
    """

    def __init__(self, model: PreTrainedModel, pad_token_id: int, softmax_dtype: torch.dtype | None = None) -> None:
        self.model, self.pad_token_id, self.softmax_dtype = model, pad_token_id, softmax_dtype

    @torch.no_grad()
    def score(
        self, batch: Sequence[Continuation], last_tokens: Sequence[Sequence[int]]
    ) -> list[list[tuple[float, bool]]]:
        """Return each continuation's log-likelihood in nats and whether it is greedy, for each of its last tokens.

        A context shared by several continuations is prefilled once. Finished rows leave the batch.
        """
        order = sorted(range(len(batch)), key=lambda row: -batch[row].steps)
        rows = [batch[index] for index in order]
        tally = _Tally(rows, [last_tokens[index] for index in order], self.model.device)
        cache, mask = self._prefill(rows, tally)
        for step in range(rows[0].steps):
            active = sum(row.steps > step for row in rows)
            if active < len(mask):
                cache.batch_select_indices(torch.arange(active))
                mask = mask[:active]
            mask = torch.cat([mask, mask.new_ones(active, 1)], dim=1)
            fed = [row.inputs[row.prefill + step] for row in rows[:active]]
            positions = [row.prefill + step for row in rows[:active]]
            log_probabilities = self._log_probabilities(cache, self._column(fed), mask, self._column(positions), keep=1)
            tally.add(log_probabilities[:, 0], positions)
        scores = tally.finish()
        return [scores[order.index(row)] for row in range(len(batch))]

    def _prefill(self, rows: Sequence[Continuation], tally: _Tally) -> tuple[SparseCache, torch.Tensor]:
        """Prefill every row; return the cache and its mask, int64 [rows, tokens]."""
        cache = SparseCache.for_model(self.model)
        contexts = [row.inputs[: row.prefill] for row in rows]
        width = max(map(len, contexts))
        device = self.model.device
        if width == 0:
            return cache, torch.ones(len(rows), 0, dtype=torch.long, device=device)
        distinct = list(dict.fromkeys(contexts))
        padded = [[self.pad_token_id] * (width - len(context)) + list(context) for context in distinct]
        lengths = torch.tensor([[len(context)] for context in distinct], device=device)
        positions = torch.arange(width, device=device) - (width - lengths)
        mask = (positions >= 0).long()
        scored = max(row.prefill - row.scored_from for row in rows)
        input_ids = torch.tensor(padded, device=device)
        log_probabilities = self._log_probabilities(cache, input_ids, mask, positions.clamp(min=0), keep=max(scored, 1))
        places = torch.tensor([distinct.index(context) for context in contexts], device=device)
        for back in range(scored, 0, -1):
            tally.add(log_probabilities[places, -back], [row.prefill - back for row in rows])
        if len(distinct) < len(rows):
            cache.batch_select_indices(places)
        return cache, mask[places]

    def _log_probabilities(
        self, cache: SparseCache, input_ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, keep: int
    ) -> torch.Tensor:
        """Feed tokens and return the log-probabilities after the last ``keep``, [rows, keep, vocabulary]."""
        logits = feed(self.model, cache, input_ids, mask, positions, keep)
        return torch.nn.functional.log_softmax(logits, dim=-1, dtype=self.softmax_dtype)

    def _column(self, values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, device=self.model.device)[:, None]


class _Tally:
    """Running sums of the rows' scores, on the device.

    Parameters
    ----------
    rows : sequence of Continuation
        By descending number of steps.
    last_tokens : sequence of sequences of int
        Candidates for each row's last token.
    device : torch.device
        Device of the log-probabilities.
    """

    def __init__(
        self, rows: Sequence[Continuation], last_tokens: Sequence[Sequence[int]], device: torch.device
    ) -> None:
        self.rows, self.last_tokens, self.device = rows, last_tokens, device
        self.sums = torch.zeros(len(rows), dtype=torch.float64, device=device)
        self.greedy = torch.ones(len(rows), dtype=torch.bool, device=device)
        self.ends: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Log-likelihood and greediness for each last token of the finished rows, last row first."""

    def add(self, log_probabilities: torch.Tensor, positions: Sequence[int]) -> None:
        """Add the first rows' log-probabilities, [rows, vocabulary], at these indices of their inputs."""
        active = list(zip(self.rows, positions, strict=False))
        is_scored = [row.scored_from <= at < len(row.inputs) - 1 for row, at in active]
        targets = [row.inputs[at + 1] if scored else 0 for (row, at), scored in zip(active, is_scored, strict=True)]
        target = torch.tensor(targets, device=self.device)
        counts = torch.tensor(is_scored, device=self.device)
        best = log_probabilities.argmax(dim=-1)
        found = log_probabilities.gather(1, target[:, None])[:, 0].double()
        self.sums[: len(active)] += found.where(counts, 0)
        self.greedy[: len(active)] &= (best == target) | ~counts
        for index in reversed(range(len(active))):
            row, at = active[index]
            if at < len(row.inputs) - 1:
                break
            last = torch.tensor(self.last_tokens[index], device=self.device)
            log_probability = self.sums[index] + log_probabilities[index, last]
            self.ends.append((log_probability, self.greedy[index] & (best[index] == last)))

    def finish(self) -> list[list[tuple[float, bool]]]:
        """Return the rows' scores, waiting for the device."""
        return [list(zip(sums.tolist(), greedy.tolist(), strict=True)) for sums, greedy in reversed(self.ends)]
