"""Measure dense attention and any number of methods on the same prompts."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from hf_sparse_attn.cli.memory import PeakMemory
from hf_sparse_attn.cli.progress import Stages
from hf_sparse_attn.cli.timed import timed_generate

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from hf_sparse_attn.cli.passkey import Passkey
    from hf_sparse_attn.methods import SparseMethod


@dataclass(frozen=True)
class Run:
    """One prompt answered by one side.

    ``kv_fraction`` is None if no token was decoded, and ``found`` if the prompt hides nothing.
    """

    answer: str
    token_ids: tuple[int, ...]
    prefill_seconds: float
    decode_seconds: float
    decode_steps: int
    kv_fraction: float | None = 1.0
    found: bool | None = None


@dataclass
class Side:
    """The runs of one side, dense or patched."""

    runs: list[Run] = field(default_factory=list)
    peak_memory_bytes: int = 0

    def summary(self) -> dict[str, Any]:
        """Return means over the runs; ``kv_fraction`` and ``ms_per_token`` are None if nothing was decoded."""
        steps = sum(run.decode_steps for run in self.runs)
        seconds = sum(run.decode_seconds for run in self.runs)
        found = [run.found for run in self.runs if run.found is not None]
        read = [run.kv_fraction for run in self.runs if run.kv_fraction is not None]
        return {
            **({"found": sum(found)} if found else {}),
            "kv_fraction": statistics.fmean(read) if read else None,
            "prefill_seconds": statistics.fmean(run.prefill_seconds for run in self.runs),
            "ms_per_token": 1000 * seconds / steps if steps else None,
            "peak_memory_bytes": self.peak_memory_bytes,
        }


class Work(Protocol):
    """The prompts of a comparison."""

    @property
    def unit(self) -> str:
        """Noun for one prompt."""

    @property
    def new_tokens(self) -> int:
        """Maximum length of an answer in tokens."""

    @property
    def prompts(self) -> Sequence[Sequence[int]]:
        """Token ids of each prompt."""

    @property
    def decode_steps(self) -> int:
        """Maximum number of decode steps per prompt."""

    @property
    def settings(self) -> dict[str, Any]:
        """Facts about all prompts, for the JSON output."""

    @property
    def facts(self) -> list[dict[str, Any]]:
        """Facts about each prompt, for the JSON output."""

    @property
    def drawn(self) -> str:
        """Description of the first prompt, which the picture shows."""

    @property
    def needle(self) -> range | None:
        """Tokens of the first prompt to mark in a picture."""

    def run(self, model: PreTrainedModel, index: int, is_patched: bool, on_step: Callable[[], None]) -> Run:
        """Answer one prompt, calling ``on_step`` after each forward pass."""


@dataclass(frozen=True)
class PasskeyWork:
    """Passkey haystacks; questions and answers take one forward pass per token."""

    tokenizer: PreTrainedTokenizerBase
    passkeys: Sequence[Passkey]
    depths: Sequence[float]
    new_tokens: int
    unit: str = "passkey"

    @property
    def prompts(self) -> list[list[int]]:
        """Haystack followed by question."""
        return [[*passkey.material_ids, *passkey.question_ids] for passkey in self.passkeys]

    @property
    def decode_steps(self) -> int:
        """Decode steps of the question and the answer."""
        return len(self.passkeys[0].question_ids) + self.new_tokens - 1

    @property
    def settings(self) -> dict[str, Any]:
        """Length of the haystacks."""
        return {"passkey_tokens": len(self.passkeys[0].material_ids)}

    @property
    def facts(self) -> list[dict[str, Any]]:
        """Depth and key of each passkey."""
        pairs = zip(self.depths, self.passkeys, strict=True)
        return [{"depth": depth, "expected": passkey.answer} for depth, passkey in pairs]

    @property
    def drawn(self) -> str:
        """Key, depth and length of the first passkey."""
        passkey = self.passkeys[0]
        return f"passkey {passkey.answer} at depth {self.depths[0]:g} of {len(passkey.material_ids):,} tokens"

    @property
    def needle(self) -> range | None:
        """Tokens of the first passkey's needle."""
        return self.passkeys[0].needle

    def run(self, model: PreTrainedModel, index: int, is_patched: bool, on_step: Callable[[], None]) -> Run:
        """Answer one passkey's question."""
        from transformers import DynamicCache

        from hf_sparse_attn import SparseCache
        from hf_sparse_attn.cli.passkey import answer_passkey

        cache = SparseCache.for_model(model) if is_patched else DynamicCache(config=model.config)
        passkey = self.passkeys[index]
        answer = answer_passkey(model, self.tokenizer, passkey, cache, self.new_tokens, on_step)
        return Run(
            answer.text,
            answer.token_ids,
            answer.prefill_seconds,
            answer.decode_seconds,
            answer.decode_steps,
            _kv_fraction(model, answer.decode_steps, is_patched),
            passkey.found_in(answer.text),
        )


@dataclass(frozen=True)
class PromptWork:
    """One prompt, answered by ``generate()`` without compilation."""

    tokenizer: PreTrainedTokenizerBase
    input_ids: Sequence[int]
    new_tokens: int
    unit: str = "prompt"

    @property
    def prompts(self) -> list[Sequence[int]]:
        """The only prompt."""
        return [self.input_ids]

    @property
    def decode_steps(self) -> int:
        """Decode steps of the answer; the prefill yields its first token."""
        return self.new_tokens - 1

    @property
    def settings(self) -> dict[str, Any]:
        """Length of the prompt."""
        return {"prompt_tokens": len(self.input_ids)}

    @property
    def facts(self) -> list[dict[str, Any]]:
        """One empty entry: a plain prompt has no facts."""
        return [{}]

    @property
    def drawn(self) -> str:
        """Length of the prompt."""
        return f"a prompt of {len(self.input_ids):,} tokens"

    @property
    def needle(self) -> range | None:
        """None, since nothing is hidden."""
        return None

    def run(self, model: PreTrainedModel, index: int, is_patched: bool, on_step: Callable[[], None]) -> Run:
        """Answer the prompt, calling ``on_step`` with every token."""
        import torch

        batch = torch.tensor([list(self.input_ids)], device=model.device)
        output = timed_generate(model, batch, torch.ones_like(batch), self.new_tokens, on_step)
        new_ids = output.new_ids[0].tolist()
        decode_steps = len(new_ids) - 1
        text = self.tokenizer.decode(new_ids, skip_special_tokens=True).strip()
        times = (output.first_token_seconds, output.decode_seconds)
        return Run(text, tuple(new_ids), *times, decode_steps, _kv_fraction(model, decode_steps, is_patched))


def _kv_fraction(model: PreTrainedModel, decode_steps: int, is_patched: bool) -> float | None:
    """Return the share of dense attention's bytes that the decode steps have read; None if there was none."""
    from hf_sparse_attn import sparse_attention_stats

    if decode_steps == 0:
        return None
    return sparse_attention_stats(model).kv_fraction if is_patched else 1.0


def run_side(model: PreTrainedModel, method: SparseMethod | None, name: str, work: Work, progress: Stages) -> Side:
    """Answer every prompt, with dense attention if ``method`` is None; the model ends unpatched."""
    from hf_sparse_attn import sparse_attention

    side = Side()
    count = len(work.prompts)
    patched = nullcontext() if method is None else sparse_attention(model, method)
    with progress.stage(name, count, work.unit) as (on_step, on_prompt), patched:
        with PeakMemory(model.device) as memory:
            for index in range(count):
                side.runs.append(work.run(model, index, method is not None, on_step))
                on_prompt()
        side.peak_memory_bytes = memory.peak_bytes
    return side
