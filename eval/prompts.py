"""Tokens of a prompt: middle truncation, chat template, and the split between material and question."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def truncate_middle(tokenizer: PreTrainedTokenizerBase, text: str, max_tokens: int) -> str:
    """Keep the first and last ``max_tokens // 2`` tokens of a text, as LongBench and InfiniteBench do.

    Returns short texts unchanged. The halves are decoded separately and joined, so the result may encode to slightly
    more or fewer tokens.
    """
    token_ids = tokenizer(text, truncation=False)["input_ids"]
    if len(token_ids) <= max_tokens:
        return text
    half = max_tokens // 2
    halves = (token_ids[:half], token_ids[len(token_ids) - half :])
    return "".join(tokenizer.decode(ids, skip_special_tokens=True) for ids in halves)


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    question_chars: int,
    *,
    chat: bool = False,
    answer_prefix: str = "",
    max_tokens: int | None = None,
) -> tuple[list[int], list[int]]:
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
    max_tokens : int, optional
        Maximum tokens of the whole prompt, chat template and answer prefix included. ``text`` is cut in the middle to
        fit.

    Returns
    -------
    tuple of list of int
        Material and question. The question has at least one token, the material may be empty.

    Raises
    ------
    ValueError
        ``max_tokens`` leaves no room for the text, or the text has a lone surrogate.
    """
    text.encode()  # raises on a lone surrogate, which the tokenizer's own error would not name
    room = max_tokens
    while True:
        body = text if room is None else truncate_middle(tokenizer, text, room)
        material, question = _split(tokenizer, body, question_chars, chat, answer_prefix)
        excess = 0 if max_tokens is None else len(material) + len(question) - max_tokens
        if room is None or excess <= 0:
            return material, question
        # The chat template takes some tokens, and the joined halves may encode to slightly more than they had.
        room = min(room, len(tokenizer(body)["input_ids"])) - excess
        if room < 2:
            raise ValueError(f"max_tokens={max_tokens} leaves no room for the text in the chat template")


def _split(
    tokenizer: PreTrainedTokenizerBase, text: str, question_chars: int, chat: bool, answer_prefix: str
) -> tuple[list[int], list[int]]:
    if chat:
        # The template adds the special tokens; some templates strip the message.
        message = text.strip()
        wrapped = tokenizer.apply_chat_template(
            [{"role": "user", "content": message}], add_generation_prompt=True, tokenize=False
        )
        stripped_tail = len(text) - len(text.rstrip())
        question_start = wrapped.rindex(message) + len(message) - max(0, question_chars - stripped_tail)
    else:
        wrapped = text
        question_start = len(text) - question_chars
    encoded = tokenizer(wrapped + answer_prefix, add_special_tokens=not chat, return_offsets_mapping=True)
    token_ids = list(encoded["input_ids"])
    if token_ids and not chat and token_ids[-1] == tokenizer.eos_token_id:
        token_ids.pop()  # some tokenizers append an end token to every text
    starts = (i for i, (_, end) in enumerate(encoded["offset_mapping"]) if end > question_start)
    cut = max(0, min(next(starts, len(token_ids)), len(token_ids) - 1))
    return token_ids[:cut], token_ids[cut:]
