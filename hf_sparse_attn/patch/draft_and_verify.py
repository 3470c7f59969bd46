"""Rounds of self-speculation over one cache: draft by sparse decode steps, verify by a dense pass."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

import torch

from hf_sparse_attn.patch.answer import Answer
from hf_sparse_attn.patch.pass_graph import PassGraph

if TYPE_CHECKING:
    from transformers.generation.streamers import BaseStreamer


class Draft(NamedTuple):
    """Drafted tokens of every row."""

    tokens: torch.Tensor
    """int64 [batch, drafted]."""
    probabilities: list[torch.Tensor]
    """float32 [batch, vocabulary] for each drafted token; empty for greedy decoding."""


class VerifiedAnswer(Answer):
    """One call of ``generate()``. Between rounds the cache holds every token but the last."""

    def __post_init__(self) -> None:
        """Begin with the prompt."""
        super().__post_init__()
        ends = self.config._eos_token_tensor
        self.ends = None if ends is None or not self.stops_at_eos else ends.to(self.ids.device)
        self.drafted: list[int] = []
        self.accepted: list[int] = []
        self.draft_seconds: list[float] = []
        self.verification_seconds: list[float] = []
        self.kept = self.cache.fed
        """Tokens of the cache that belong to the answer so far."""
        self._verifications: PassGraph | None = None
        """Dense passes over a draft, recorded as a CUDA graph; None to run them otherwise."""

    @property
    def most_tokens(self) -> int:
        """Maximum number of tokens of the whole text, before the prompt is processed."""
        return self.prompt_tokens + self.remaining

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the text up to the prompt's end, left padding included, before the prompt is processed."""
        return self.kept + self._prompt_tokens()

    @property
    def prompt_positions(self) -> int:
        """Positions of the text up to the prompt's end, before it is processed. Waits for the device."""
        positions, mask = self.kwargs.get("position_ids"), self.kwargs.get("attention_mask")
        if positions is not None:
            return int(positions.max()) + 1
        if isinstance(mask, torch.Tensor) and mask.dim() == 2:
            return int((mask != 0).sum(-1).max())
        return self.prompt_tokens

    def check_single_token(self) -> None:
        """Raise ``ValueError`` if the prompt is a single token that cannot be verified; see :meth:`_verify`."""
        room = self.cache.max_cache_len
        if 0 <= room < self.kept + 2 and self.kept and self._prompt_tokens() == self.ids.shape[1] == 1:
            raise ValueError(
                f"input_ids must be the whole text of {self.kept + 1} tokens, or past_key_values have max_cache_len of "
                f"at least {self.kept + 2}, since self-speculation feeds a single token twice or after the one before "
                f"it; got a single token, {self.kept} cached ones and max_cache_len={room}"
            )

    def generate(
        self, draft_tokens: int, longest: int, streamer: BaseStreamer | None, cuda_graph: bool, fuse: bool
    ) -> None:
        """Generate until all rows are finished. If anything fails, cut the cache back to the tokens kept so far.

        A pass that one graph serves is filled up only if it ends within ``longest`` tokens.
        """
        try:
            is_finished = self._commit(self._process_prompt(), None, streamer)
            if cuda_graph:
                self.record_steps(fuse)
                self._verifications = PassGraph(self.cache, self.model, fuse)
            self._extend(self.kwargs, 1)
            while not is_finished:
                room = self.cache.max_cache_len - self.kept - 1 if self.cache.max_cache_len >= 0 else draft_tokens
                started = time.perf_counter()
                draft = self._draft(max(0, min(draft_tokens, self.remaining - 1, room)))
                before = self.generated
                drafted_at = time.perf_counter()
                may_fill_up = room >= draft_tokens and self.kept + 1 + draft_tokens <= longest
                if may_fill_up and self._repeats_verification:
                    logits = self._verify_as_graph(draft.tokens, draft_tokens)
                else:
                    logits = self._verify(draft.tokens)
                is_finished = self._commit(logits, draft, streamer)
                self._extend(self.kwargs, self.generated - before)
                self.draft_seconds.append(drafted_at - started)
                self.verification_seconds.append(time.perf_counter() - drafted_at)
        finally:
            self._cut()
            self.release_windows()

    def _prompt_tokens(self) -> int:
        """Tokens of the prompt that are not cached yet; ``generate()`` takes all tokens or the new ones."""
        embeds, mask = self.kwargs.get("inputs_embeds"), self.kwargs.get("attention_mask")
        if embeds is not None:
            return int(embeds.shape[1]) - self.kept
        tokens = int(self.ids.shape[1])
        length = getattr(self.config, "_mask_length", -1) if mask is None else mask.shape[1]
        return tokens - self.kept if length == tokens else tokens

    def _process_prompt(self) -> torch.Tensor:
        """Return the logits after the prompt, [batch, 1, vocabulary]."""
        if self.kept and self._prompt_tokens() == 1:
            self.cache.activate_past_recording()
            return self._verify(self.ids[:, :0])  # one token would be a sparse decode step
        try:
            logits: torch.Tensor = self.model._prefill(self.ids, self.config, self.kwargs).logits[:, -1:]
        finally:
            self.kept = self.cache.fed
        self.kept -= 1  # _commit counts the last token
        # Rejected tokens must not push older ones out of sliding windows. Before, windows would keep the whole prompt.
        self.cache.activate_past_recording()
        return logits

    @property
    def _repeats_verification(self) -> bool:
        """Whether one graph serves all dense passes, compiled or recorded."""
        is_graph = self.compiles or self._verifications is not None
        return is_graph and self.kwargs.get("position_ids") is not None and self.cache.compiles_verification

    def _draft(self, tokens: int) -> Draft:
        """Draft by decode steps, and remove their tokens from the cache.

        Draft on after the end of all rows: to notice it, the host would wait for the device in every step.
        """
        ids, kwargs, unfinished = self.ids, dict(self.kwargs), self.unfinished
        probabilities = []
        for _ in range(tokens):
            scores = self.processors(ids, self._step(ids, kwargs))
            if self.config.do_sample:
                probabilities.append(scores.softmax(-1))
                chosen = torch.multinomial(probabilities[-1], 1)[:, 0]
            else:
                chosen = scores.argmax(-1)
            chosen = self._padded(chosen, unfinished)
            ids = torch.cat((ids, chosen[:, None]), dim=1)
            self._extend(kwargs, 1)
            if self.ends is not None:
                unfinished = unfinished & ~torch.isin(chosen, self.ends)
        self._cut()
        return Draft(ids[:, self.ids.shape[1] :], probabilities)

    def _verify(self, draft: torch.Tensor) -> torch.Tensor:
        """Feed the last token and a draft in a dense pass; return their logits, [batch, 1 + drafted, vocabulary].

        A pass over a single token would be a decode step. It is fed twice, if there is room, or after the token before.
        """
        ids, kwargs, wanted = torch.cat((self.ids, draft), dim=1), dict(self.kwargs), draft.shape[1] + 1
        first = 0
        if wanted == 1:
            room = self.cache.max_cache_len
            if 0 <= room < self.kept + 2 and self.ids.shape[1] > 1:
                self.cache.crop(-1)
                first = 1
            else:
                ids = torch.cat((ids, ids[:, -1:]), dim=1)
        self._extend(kwargs, ids.shape[1] - self.ids.shape[1])
        tokens = max(wanted, 2)
        inputs = self.model.prepare_inputs_for_generation(ids, next_sequence_length=tokens, **kwargs)
        if "logits_to_keep" in inputs:
            inputs["logits_to_keep"] = tokens
        logits: torch.Tensor = self.model(**inputs, return_dict=True).logits[:, -tokens:]
        return logits[:, first : first + wanted]

    def _verify_as_graph(self, draft: torch.Tensor, draft_tokens: int) -> torch.Tensor:
        """Do as :meth:`_verify`, by one graph for drafts of up to ``draft_tokens`` tokens."""
        missing = draft_tokens - draft.shape[1]  # at the end of an answer; what fills them up is cut off again
        ids = torch.cat((self.ids, draft, self.ids[:, -1:].expand(-1, missing)), dim=1)
        kwargs = dict(self.kwargs)
        self._extend(kwargs, draft_tokens)
        # Transformers makes no mask from one of four dimensions. The row bounds mask: nothing reads this one.
        kwargs["attention_mask"] = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=ids.device)
        inputs = self.model.prepare_inputs_for_generation(ids, next_sequence_length=draft_tokens + 1, **kwargs)
        inputs.pop("logits_to_keep", None)  # all are wanted; a number that differs from a step's would become dynamic
        with self.cache.verifying():
            if self._verifications is not None:
                return self._verifications(inputs)[:, : draft.shape[1] + 1]
            for name in ("input_ids", "position_ids"):  # a step has one token: a further length would become dynamic
                torch._dynamo.mark_static(inputs[name], inputs[name].dim() - 1)
            logits: torch.Tensor = self._compiled(**inputs, return_dict=True).logits
        return logits[:, : draft.shape[1] + 1]

    def _commit(self, logits: torch.Tensor, draft: Draft | None, streamer: BaseStreamer | None) -> bool:
        """Keep tokens until one differs from the draft in any row, and cut the cache; return whether all rows ended.

        ``logits`` are [batch, 1 + drafted, vocabulary]. A row that has ended goes on with padding, in the draft and
        here, as in ``generate()``.
        """
        is_finished, accepted = False, 0
        for place in range(logits.shape[1]):
            self.kept += 1  # the last token was fed in this pass
            raw = self.exact(logits[:, place])
            scores = self.processors(self.ids, raw)
            drafted = None if draft is None or place == draft.tokens.shape[1] else draft.tokens[:, place]
            if not self.config.do_sample or drafted is None or draft is None:
                chosen = self._draw(scores)
            else:
                chosen = speculative_sample(drafted, draft.probabilities[place], scores.softmax(-1))
            chosen = self._append(chosen, scores, raw)
            if streamer is not None:
                streamer.put(chosen.cpu())
            is_accepted = drafted is not None and torch.equal(chosen, drafted)
            accepted += is_accepted
            is_finished = not self.unfinished.any()
            if is_finished or not is_accepted:
                break
        self._cut()
        if draft is not None:
            self.drafted.append(draft.tokens.shape[1])
            self.accepted.append(accepted)
        return is_finished

    def _cut(self) -> None:
        """Remove from the cache what does not belong to the answer; let sliding windows drop old tokens."""
        self.cache.crop(min(0, self.kept - self.cache.fed))


def speculative_sample(
    drafted: torch.Tensor, draft_probabilities: torch.Tensor, probabilities: torch.Tensor
) -> torch.Tensor:
    """Keep a drafted token or replace it, so that the result follows ``probabilities``.

    A token drafted from p is kept with probability min(1, q / p); else one is drawn from max(0, q - p), normalised
    (arXiv 2211.17192, section 2.3).

    Parameters
    ----------
    drafted
        int64 [batch], drawn from ``draft_probabilities``.
    draft_probabilities
        p, float [batch, vocabulary].
    probabilities
        q, of the same shape and dtype.

    Returns
    -------
    torch.Tensor
        int64 [batch].
    """
    p, q = (rows.gather(1, drafted[:, None])[:, 0] for rows in (draft_probabilities, probabilities))
    is_kept = torch.rand_like(p) * p < q
    residual = (probabilities - draft_probabilities).clamp_min(0)
    is_empty = residual.sum(1, keepdim=True) == 0  # p and q agree up to rounding
    replacement = torch.multinomial(torch.where(is_empty, probabilities, residual), 1)[:, 0]
    return torch.where(is_kept, drafted, replacement)
