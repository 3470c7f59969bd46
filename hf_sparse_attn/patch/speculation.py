"""Self-speculation: draft tokens by sparse decode steps, and verify them by dense passes over the same cache."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from transformers import SynthIDTextWatermarkLogitsProcessor, UnbatchedClassifierFreeGuidanceLogitsProcessor
from transformers.generation import GenerateDecoderOnlyOutput

from hf_sparse_attn.cache.cache import SparseCache
from hf_sparse_attn.cache_argument import CACHE
from hf_sparse_attn.checks import whole_number
from hf_sparse_attn.methods import SparseMethod
from hf_sparse_attn.patch.answer import check_call
from hf_sparse_attn.patch.draft_and_verify import VerifiedAnswer
from hf_sparse_attn.patch.pass_graph import check_loop, check_recordable
from hf_sparse_attn.patched import patched_method, text_model
from hf_sparse_attn.rope import max_positions, rope_changes

if TYPE_CHECKING:
    from transformers import (
        GenerationConfig,
        LogitsProcessorList,
        PreTrainedConfig,
        PreTrainedModel,
        StoppingCriteriaList,
    )
    from transformers.generation.streamers import BaseStreamer

STATEFUL_PROCESSORS = (UnbatchedClassifierFreeGuidanceLogitsProcessor, SynthIDTextWatermarkLogitsProcessor)
"""Logits processors that remember the calls before: they would count drafts that are rejected."""


@dataclass(frozen=True)
class SpeculationStats:
    """Drafts of one call of ``generate()``."""

    drafted: tuple[int, ...] = ()
    """Tokens per row drafted for each verification; 0 if there was room for one more token only."""
    accepted: tuple[int, ...] = ()
    """How many of them every row kept."""
    generated: int = 0
    """New tokens per row, the prompt's first one included."""
    draft_seconds: tuple[float, ...] = field(default=(), compare=False)
    """Time of the host for each draft, which on CUDA includes the device's if its steps are compiled."""
    verification_seconds: tuple[float, ...] = field(default=(), compare=False)
    """Time of the host from the end of each draft to the choice of the tokens that are kept."""

    @property
    def verifications(self) -> int:
        """Number of dense passes after the prompt."""
        return len(self.drafted)

    @property
    def acceptance_rate(self) -> float:
        """Share of drafted tokens that were kept; 1.0 if none was drafted."""
        return sum(self.accepted) / sum(self.drafted) if any(self.drafted) else 1.0

    @property
    def tokens_per_verification(self) -> float:
        """Mean number of new tokens of a dense pass after the prompt; 1.0 if there was none."""
        return (self.generated - 1) / self.verifications if self.drafted else 1.0


class SelfSpeculation:
    """Lossless decoding: the output of dense attention, drafted by the sparse method that the model is patched with.

    Pass it to ``generate()`` as ``custom_generate``. Each round drafts some tokens by sparse decode steps, removes them
    from the cache, and feeds them again in one dense pass, whose keys and values stay. Greedy decoding gives the tokens
    of the unpatched model, up to rounding: a pass over several tokens may add in another order than a decode step.
    Sampling gives its distribution, by the rejection rule of speculative sampling (Leviathan et al., arXiv 2211.17192,
    algorithm 1). TriForce (arXiv 2404.11912) and MagicDec (arXiv 2408.11049) draft by sparse attention in this way.

    The rows of a batch have one length, so a round keeps the tokens that every row accepts, and one more.

    Parameters
    ----------
    draft_tokens
        Tokens to draft before each verification, at least 1.
    streamer
        Receives the tokens that are kept. ``generate()`` does not hand its own ``streamer`` to a ``custom_generate``:
        give it here instead.
    cuda_graph
        Record drafts' steps and dense passes as two CUDA graphs instead of compiling them, as
        :class:`~hf_sparse_attn.DecodeAhead` does.
    fuse
        Give products of one row a kernel of their own, and with ``cuda_graph`` the model's norms and its RoPE too, as
        there.

    Attributes
    ----------
    stats
        :class:`SpeculationStats` of the last call.

    Raises
    ------
    TypeError
        ``draft_tokens`` is not a whole number.
    ValueError
        ``draft_tokens`` is below 1.

    Examples
    --------
    >>> patch_model(model, "quest", token_budget=1024)
    >>> speculation = SelfSpeculation(draft_tokens=8)
    >>> model.generate(**inputs, max_new_tokens=100, custom_generate=speculation)
    >>> speculation.stats.acceptance_rate
    """

    def __init__(
        self,
        draft_tokens: int = 8,
        streamer: BaseStreamer | None = None,
        *,
        cuda_graph: bool = False,
        fuse: bool = False,
    ) -> None:
        draft_tokens = whole_number("draft_tokens", draft_tokens, 1)
        check_loop(streamer, cuda_graph, fuse)
        self.draft_tokens, self.streamer, self.cuda_graph, self.fuse = draft_tokens, streamer, cuda_graph, fuse
        self.stats = SpeculationStats()

    @torch.no_grad()
    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: torch.Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **model_kwargs: Any,
    ) -> GenerateDecoderOnlyOutput | torch.Tensor:
        """Generate, called by ``generate()``.

        Returns
        -------
        GenerateDecoderOnlyOutput or torch.Tensor
            As ``generate()`` returns without ``custom_generate``; scores and logits are those of the dense passes.

        Raises
        ------
        ValueError
            The model is not patched, or its method does not verify densely or has nothing to draft with; the generation
            mode, an output or a logits processor is not supported; ``max_length`` exceeds the model's positions, or a
            length at which its RoPE changes; a single token is given without the text before it, and the cache has no
            second place for it. With ``cuda_graph``: the model or its cache is not on one CUDA device, or the cache is
            not static. With ``fuse`` alone: steps are not compiled.
        """
        method = patched_method(model)
        check_method(method)
        cache = model_kwargs.get(CACHE)
        if not isinstance(cache, SparseCache):
            raise ValueError(f"use_cache must be True for self-speculation, got {model_kwargs.get('use_cache')}")
        check_call("self-speculation", model, generation_config)
        _check_processors(logits_processor)
        if self.cuda_graph:
            check_recordable(model, input_ids.device, cache)
        if model_kwargs.get("inputs_embeds") is not None and cache.length:
            raise ValueError("inputs_embeds are not supported by self-speculation after cached tokens; give input_ids")
        answer = VerifiedAnswer(
            model, cache, input_ids, logits_processor, stopping_criteria, generation_config, model_kwargs
        )
        longest = _longest(answer, text_model(model).config)
        answer.check_single_token()
        if self.fuse and not self.cuda_graph:
            answer.fuse_steps()
        if self.streamer is not None:
            self.streamer.put(input_ids.cpu())
        try:
            answer.generate(self.draft_tokens, longest, self.streamer, self.cuda_graph, self.fuse)
        finally:
            self.stats = SpeculationStats(
                tuple(answer.drafted),
                tuple(answer.accepted),
                answer.generated,
                tuple(answer.draft_seconds),
                tuple(answer.verification_seconds),
            )
        if self.streamer is not None:
            self.streamer.end()
        return answer.output()


def check_method(method: SparseMethod) -> None:
    """Raise ``ValueError`` if a method cannot draft for dense attention over the same cache."""
    if method.evicts:
        reason = "it evicts tokens, which dense attention would need"
    elif "decode" not in method.sparse_phases:
        reason = "its decode steps read everything, so that a draft costs as much as the answer"
    elif type(method).prefill is not SparseMethod.prefill:
        reason = "its passes over several tokens are sparse too, so that they verify nothing"
    else:
        return
    raise ValueError(f"method {method.name!r} does not support self-speculation: {reason}")


def _longest(answer: VerifiedAnswer, config: PreTrainedConfig) -> int:
    """Return how many tokens a pass may reach, whatever fills it up; raise ``ValueError`` if the text may be longer.

    In Transformers all tokens of a pass get the frequencies of its last one. A decode step gets its own: where the RoPE
    changes with the length, a pass over several tokens could not verify those before the change.
    """
    longest = max_positions(config)
    if answer.most_tokens > longest:
        raise ValueError(
            f"max_new_tokens must leave the text within the model's {longest} positions, since self-speculation "
            f"verifies by passes over several tokens, got a text of up to {answer.most_tokens} tokens"
        )
    changes = rope_changes(config)
    if not changes:
        return longest
    tokens, positions = answer.prompt_tokens, answer.prompt_positions  # these differ by padding, images, or the user's
    least, ahead = min(tokens, positions), max(0, positions - tokens)
    for rope_type, original in changes:
        if rope_type == "longrope" and least > original:
            continue  # changed before the answer, and for good
        if answer.most_tokens + ahead > original:
            or_longer = " or give a longer prompt" if rope_type == "longrope" else ""
            raise ValueError(
                f"max_new_tokens must leave the text within {original} positions{or_longer}, since the frequencies of "
                f"rope_type={rope_type!r} change there, and self-speculation verifies by passes over several tokens, "
                f"which get those of the last one; got a prompt of {least} and a text of up to "
                f"{answer.most_tokens + ahead} positions"
            )
        longest = min(longest, original - ahead)
    return longest


def _check_processors(processors: LogitsProcessorList) -> None:
    for processor in processors:
        if isinstance(processor, STATEFUL_PROCESSORS):
            raise ValueError(
                f"self-speculation does not support {type(processor).__name__}, which remembers the tokens before, "
                "drafted or not"
            )
