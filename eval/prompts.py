"""Tokens of a prompt: middle truncation, chat template, and the split between material and question."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Parts = tuple[list[int], list[int]]
"""Tokens of a prompt's material and of its question."""


class CutPrompt(NamedTuple):
    """A prompt that was cut in the middle if it was too long."""

    material_ids: list[int]
    question_ids: list[int]
    truncated: bool


def truncate_middle(
    tokenizer: PreTrainedTokenizerBase, text: str, max_tokens: int, *, decode_once: bool = False
) -> str:
    """Keep the first and last ``max_tokens // 2`` tokens of a text; return a short text unchanged.

    The result may encode to slightly more or fewer tokens.

    Parameters
    ----------
    tokenizer : PreTrainedTokenizerBase
        The model's tokenizer.
    text : str
        The text.
    max_tokens : int
        Most tokens to keep.
    decode_once : bool
        Whether the tokens of both halves are decoded together, as by InfiniteBench and LongBench v2, or each half
        apart, as by LongBench. The texts may differ where the halves meet.
    """
    token_ids = tokenizer(text, truncation=False)["input_ids"]
    if len(token_ids) <= max_tokens:
        return text
    half = max_tokens // 2
    halves = [token_ids[:half], token_ids[len(token_ids) - half :]]
    decoded = [halves[0] + halves[1]] if decode_once else halves
    return "".join(tokenizer.decode(ids, skip_special_tokens=True) for ids in decoded)


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    question_chars: int,
    *,
    chat: bool = False,
    answer_prefix: str = "",
) -> Parts:
    """Encode a prompt in two parts whose concatenation is exactly the encoding of the whole prompt.

    Parameters
    ----------
    tokenizer : PreTrainedTokenizerBase
        The model's tokenizer.
    text : str
        The prompt.
    question_chars : int
        Number of last characters of ``text`` that are the question; the rest is material.
    chat : bool
        Whether to wrap the text in the tokenizer's chat template, as one user message.
    answer_prefix : str
        The beginning of the answer; follows the chat template (RULER).

    Returns
    -------
    tuple of list of int
        Material and question. The question has at least one token, the material may be empty.

    Raises
    ------
    ValueError
        The text has a lone surrogate, or the chat template leaves it out or changes it.
    """
    text.encode()  # raises on a lone surrogate, which the tokenizer's own error would not name
    if chat:
        wrapped = in_chat_template(tokenizer, text)
        message = text if text in wrapped else text.strip()  # some templates strip the message
        if message not in wrapped:
            raise ValueError("the tokenizer's chat template leaves out the message, or changes it")
        stripped_tail = 0 if message == text else len(text) - len(text.rstrip())
        question_start = wrapped.rindex(message) + len(message) - max(0, question_chars - stripped_tail)
    else:
        wrapped = text
        question_start = len(text) - question_chars
    encoded = tokenizer(wrapped + answer_prefix, add_special_tokens=not chat, return_offsets_mapping=True)
    token_ids = _without_end(tokenizer, encoded["input_ids"], chat)
    starts = (i for i, (_, end) in enumerate(encoded["offset_mapping"]) if end > question_start)
    cut = max(0, min(next(starts, len(token_ids)), len(token_ids) - 1))
    return token_ids[:cut], token_ids[cut:]


def encode_apart(tokenizer: PreTrainedTokenizerBase, text: str, question_chars: int, *, chat: bool = False) -> Parts:
    """Encode the last characters of a prompt apart from the rest, as Quest's released code does.

    Parameters
    ----------
    tokenizer, text
        As for :func:`encode_prompt`; the text is already in the chat template if there is one.
    question_chars : int
        Number of last characters that are the question.
    chat : bool
        Whether the text has the special tokens of a chat template, so that the tokenizer adds none.

    Returns
    -------
    tuple of list of int
        Material, with the tokenizer's special tokens, and question, without them.
    """
    text.encode()
    start = max(0, len(text) - question_chars)
    material_ids = tokenizer(text[:start], add_special_tokens=not chat)["input_ids"]
    question_ids = tokenizer(text[start:], add_special_tokens=False)["input_ids"]
    return _without_end(tokenizer, material_ids, chat), list(question_ids)


def encode_within(
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    split: Callable[[str], Parts],
    max_tokens: int | None,
    cut: int | None = None,
    *,
    decode_once: bool = False,
) -> CutPrompt:
    """Encode a prompt, cut in the middle so that it fits.

    Parameters
    ----------
    tokenizer : PreTrainedTokenizerBase
        The model's tokenizer.
    text : str
        The prompt.
    split : callable
        Returns the material and the question of a text, such as :func:`encode_prompt`.
    max_tokens : int or None
        Most tokens of the whole prompt, as ``split`` returns it; None for no limit.
    cut : int, optional
        Tokens to which the text alone is cut first, before ``split`` adds a chat template: the official codes' rule.
    decode_once : bool
        As for :func:`truncate_middle`.

    Raises
    ------
    ValueError
        ``max_tokens`` leaves no room for the text, or the text has a lone surrogate.
    """
    text.encode()
    body = text if cut is None else truncate_middle(tokenizer, text, cut, decode_once=decode_once)
    room = max_tokens
    while True:
        fitting = body if room is None else truncate_middle(tokenizer, body, room, decode_once=decode_once)
        material_ids, question_ids = split(fitting)
        excess = 0 if max_tokens is None else len(material_ids) + len(question_ids) - max_tokens
        if room is None or excess <= 0:
            return CutPrompt(material_ids, question_ids, truncated=fitting != text)
        # The chat template takes some tokens, and the joined halves may encode to slightly more than they had.
        room = min(room, len(tokenizer(fitting)["input_ids"])) - excess
        if room < 2:
            raise ValueError(f"max_tokens={max_tokens} leaves no room for the text in the chat template")


def in_chat_template(tokenizer: PreTrainedTokenizerBase, message: str) -> str:
    """Return a user's message in the tokenizer's chat template, up to where the answer begins."""
    wrapped: str = tokenizer.apply_chat_template(
        [{"role": "user", "content": message}], add_generation_prompt=True, tokenize=False
    )
    return wrapped


def _without_end(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], chat: bool) -> list[int]:
    """Leave out the end token that some tokenizers append to every text."""
    return list(ids[:-1] if ids and not chat and ids[-1] == tokenizer.eos_token_id else ids)
