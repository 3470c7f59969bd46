"""Split a prompt into a context and the questions that follow it.

The prompt is the document, an empty line, and the question. With a chat template they are one user message: what the
template puts before the document belongs to the context, and what it puts after the question is kept as a note in the
context's file, so that asking needs neither the template nor the document.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

AFTER_QUESTION = "after_question"
"""Note of a context: the text between a question and its answer."""
BEFORE_QUESTION = "\n\n"


def encode_document(tokenizer: PreTrainedTokenizerBase, document: str, chat: bool) -> tuple[list[int], dict[str, str]]:
    """Return the token ids of a context, and its notes for :func:`encode_question`.

    Parameters
    ----------
    tokenizer : PreTrainedTokenizerBase
        The model's.
    document : str
        The text, without white space at its end.
    chat : bool
        Whether to use the chat template.

    Raises
    ------
    ValueError
        The tokenizer has no chat template, or its template changes a message.
    """
    if not chat:
        token_ids = list(tokenizer(document)["input_ids"])
        if token_ids and token_ids[-1] == tokenizer.eos_token_id:
            token_ids.pop()  # some tokenizers end every text
        return token_ids, {AFTER_QUESTION: ""}
    if not tokenizer.chat_template:
        raise ValueError("chat is not possible: the model's tokenizer has no chat template")
    mark = _absent_from(document)
    messages = [{"role": "user", "content": document + BEFORE_QUESTION + mark}]
    prompt = str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    parts = prompt.split(BEFORE_QUESTION + mark)
    if len(parts) != 2 or not parts[0].endswith(document):
        raise ValueError("chat is not possible: the chat template changes or repeats the text of a message")
    context, after_question = parts
    return list(tokenizer(context, add_special_tokens=False)["input_ids"]), {AFTER_QUESTION: after_question}


def encode_question(tokenizer: PreTrainedTokenizerBase, question: str, notes: Mapping[str, str]) -> list[int]:
    """Return the token ids that follow a context, up to the answer."""
    text = BEFORE_QUESTION + question + notes.get(AFTER_QUESTION, "")
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def pad_left(prompts: Sequence[Sequence[int]], pad_id: int) -> tuple[list[list[int]], list[list[int]]]:
    """Return prompts padded to one length, and their masks."""
    longest = max(map(len, prompts))
    missing = [longest - len(prompt) for prompt in prompts]
    padded = [[pad_id] * count + list(prompt) for prompt, count in zip(prompts, missing, strict=True)]
    return padded, [[0] * count + [1] * (longest - count) for count in missing]


def _absent_from(text: str) -> str:
    """Return a word that does not occur in a text."""
    mark = "QUESTION"
    while mark in text:
        mark += "X"
    return mark
