"""Passkey retrieval: find a five-digit number hidden in filler text."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hf_sparse_attn.cli.greedy import answer, end_of_sequence_ids, prefill

if TYPE_CHECKING:
    from transformers import Cache, PreTrainedModel, PreTrainedTokenizerBase

FILLER = (
    "The sea is calm.",
    "The wind is low.",
    "The day is long.",
    "We sail on.",
    "Out and home again.",
)
_ENCODED_AT_ONCE = 64  # a fast tokenizer spreads them over threads
_INTRODUCTION = "Somewhere in the text below a pass key is hidden. Find it and remember it.\n\n"
_NEEDLE = "\n\nThe pass key is {key}. Remember it. {key} is the pass key.\n\n"
_QUESTION = "\n\nWhat is the pass key? The pass key is"


@dataclass(frozen=True)
class Passkey:
    """One tokenized haystack and its question.

    Parameters
    ----------
    material_ids : tuple of int
        Introduction and filler, including the needle.
    question_ids : tuple of int
        The question and the beginning of its answer.
    answer : str
        The five digits.
    needle : range
        Position of the needle in ``material_ids``.
    """

    material_ids: tuple[int, ...]
    question_ids: tuple[int, ...]
    answer: str
    needle: range

    def found_in(self, text: str) -> bool:
        """Return whether a model's answer contains the key."""
        return self.answer in text


@dataclass(frozen=True)
class PasskeyAnswer:
    """A model's answer, with its times.

    Parameters
    ----------
    text : str
        The decoded answer, without special tokens.
    token_ids : tuple of int
        The answer's tokens, without the end-of-sequence token.
    prefill_seconds : float
        Time of the material's prefill.
    decode_seconds : float
        Time of the question and the answer.
    decode_steps : int
        Number of forward passes that ``decode_seconds`` covers.
    """

    text: str
    token_ids: tuple[int, ...]
    prefill_seconds: float
    decode_seconds: float
    decode_steps: int


def make_passkey(
    tokenizer: PreTrainedTokenizerBase,
    num_tokens: int,
    depth: float,
    seed: int,
    filler: Sequence[str] | None = None,
) -> Passkey:
    """Hide a five-digit key in repeated filler.

    The prompt is plain text without a chat template. It ends right before the key, so that base and instruction models
    can both complete it.

    Parameters
    ----------
    tokenizer : PreTrainedTokenizerBase
        The model's.
    num_tokens : int
        Exact length of the material; the filler's last sentence is cut to fit.
    depth : float
        Position of the needle in the filler, from 0 (start) to 1 (end), moved to the nearest sentence boundary.
    seed : int
        Seed of the key.
    filler : sequence of str, optional
        Sentences to repeat. Default: ``FILLER``.

    Returns
    -------
    Passkey

    Raises
    ------
    ValueError
        If ``depth`` is out of range, the filler is empty, or ``num_tokens`` leaves no room for the needle.
    """
    if not 0.0 <= depth <= 1.0:
        raise ValueError(f"depth={depth} is not allowed: from 0 (start of the filler) to 1 (its end)")

    def encode(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    sentences = FILLER if filler is None else filler
    if not any(sentence.strip() for sentence in sentences):
        raise ValueError(f"filler={filler!r} has no tokens; at least one sentence is needed")
    key = str(random.Random(seed).randrange(10_000, 100_000))
    head = list(tokenizer(_INTRODUCTION)["input_ids"])  # with the tokenizer's own first token, if it has one
    if tokenizer.eos_token_id is not None and head[-1:] == [tokenizer.eos_token_id]:
        head.pop()
    needle = encode(_NEEDLE.format(key=key))
    room = num_tokens - len(head) - len(needle)
    if room < 0:
        raise ValueError(
            f"num_tokens={num_tokens} is too small: introduction and needle take {len(head) + len(needle)} tokens"
        )
    hay: list[int] = []
    boundaries = [0]
    encoded = encode_endlessly(tokenizer, sentences)
    while len(hay) < room:
        hay += next(encoded)
        boundaries.append(min(len(hay), room))
    hay = hay[:room]
    cut = min(boundaries, key=lambda boundary: abs(boundary - depth * room))
    return Passkey(
        material_ids=(*head, *hay[:cut], *needle, *hay[cut:]),
        question_ids=tuple(encode(_QUESTION)),
        answer=key,
        needle=range(len(head) + cut, len(head) + cut + len(needle)),
    )


def encode_endlessly(tokenizer: PreTrainedTokenizerBase, sentences: Sequence[str]) -> Iterator[list[int]]:
    """Yield the tokens of each sentence, preceded by a space, in an endless cycle."""
    endless = (f" {sentence}" for sentence in itertools.cycle(sentences))
    while True:
        batch = list(itertools.islice(endless, _ENCODED_AT_ONCE))
        yield from tokenizer(batch, add_special_tokens=False)["input_ids"]


def answer_passkey(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    passkey: Passkey,
    cache: Cache,
    max_new_tokens: int = 8,
    on_step: Callable[[], None] | None = None,
) -> PasskeyAnswer:
    """Answer a passkey's question greedily.

    The material is prefilled in one forward pass. The question follows token by token, so that methods with sparse
    decoding apply to the question as well as to the answer.

    Parameters
    ----------
    model : PreTrainedModel
        Patched or not.
    tokenizer : PreTrainedTokenizerBase
        The model's.
    passkey : Passkey
        See ``make_passkey``.
    cache : Cache
        Empty: ``DynamicCache(config=model.config)``, or ``SparseCache.for_model(model)`` for a patched model.
    max_new_tokens : int
        Upper bound for the answer, at least 1.
    on_step : callable, optional
        Called after each forward pass.

    Returns
    -------
    PasskeyAnswer

    Raises
    ------
    ValueError
        If ``max_new_tokens`` is below 1.
    """
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens={max_new_tokens} is not allowed: at least 1")  # before any work
    prefill_seconds = prefill(model, cache, passkey.material_ids)
    if on_step is not None:
        on_step()
    given = answer(
        model,
        cache,
        passkey.question_ids,
        max_new_tokens,
        stop_ids=end_of_sequence_ids(model, tokenizer),
        on_step=on_step,
    )
    return PasskeyAnswer(
        text=tokenizer.decode(given.token_ids, skip_special_tokens=True).strip(),
        token_ids=given.token_ids,
        prefill_seconds=prefill_seconds,
        decode_seconds=given.first_token_seconds + given.decode_seconds,
        decode_steps=given.question_steps + given.decode_steps,
    )
