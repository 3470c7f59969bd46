"""How Quest's released code (mit-han-lab/Quest 01c1623) splits a prompt: the end is fed token by token."""

from __future__ import annotations

from typing import TYPE_CHECKING

from eval.prompts import Parts, encode_apart, in_chat_template

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LONGBENCH_CHARS = 100
"""Most characters of a LongBench prompt's end, chat template included, that are fed token by token."""
_MARKS = {
    **dict.fromkeys(("qasper", "hotpotqa"), "Question:"),
    **dict.fromkeys(("multifieldqa_en", "gov_report"), "Now,"),
    "triviaqa": "Answer the question",
    "narrativeqa": "Do not provide",
}
"""Words from whose last place on a task's prompt is fed token by token, if that is less."""


def split_longbench(tokenizer: PreTrainedTokenizerBase, task: str, text: str, *, chat: bool) -> Parts:
    """Split a LongBench prompt as ``evaluation/LongBench/pred.py`` does, and encode its parts one by one."""
    wrapped = in_chat_template(tokenizer, text) if chat else text
    mark = wrapped.rfind(_MARKS[task]) if task in _MARKS else -1
    return encode_apart(tokenizer, wrapped, min(LONGBENCH_CHARS, len(wrapped) - max(0, mark)), chat=chat)
