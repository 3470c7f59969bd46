"""Text measures shared by several benchmarks: normalised words, F1 and ROUGE-L."""

from __future__ import annotations

import logging
import re
import string
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from rouge import Rouge

_ARTICLE = re.compile(r"\b(?:a|an|the)\b")
_DROP_ASCII_PUNCTUATION = str.maketrans("", "", string.punctuation)

# The CJK punctuation that LongBench and InfiniteBench drop, as code points. Others are kept, such as the opening double
# angle bracket U+300A.
_CJK_PUNCTUATION = [
    *(0x2013, 0x2014, 0x2018, 0x2019, *range(0x201B, 0x2020), 0x2026, 0x2027),
    *(*range(0x3001, 0x3004), *range(0x300B, 0x3012), *range(0x3014, 0x3020), 0x3030, 0x303E, 0x303F, 0xFE4F),
    *(*range(0xFF01, 0xFF0E), 0xFF0F, *range(0xFF1A, 0xFF21), *range(0xFF3B, 0xFF41), *range(0xFF5B, 0xFF65)),
]
_DROP_PUNCTUATION = {**_DROP_ASCII_PUNCTUATION, **dict.fromkeys(_CJK_PUNCTUATION)}

# Python's default. The official scorers run under it and count a text that overflows it as 0.
_RECURSION_LIMIT = 1000


def cut(text: str) -> Iterator[str]:
    """Cut a Chinese text into words with jieba, imported here because its dictionary loads slowly."""
    import jieba

    jieba.setLogLevel(logging.WARNING)  # silences its dictionary messages on stderr
    yield from jieba.cut(text)


def words(text: str) -> list[str]:
    """Return the words of an English text: lower case, without ASCII punctuation and articles."""
    return _ARTICLE.sub(" ", text.lower().translate(_DROP_ASCII_PUNCTUATION)).split()


def characters(text: str) -> list[str]:
    """Return the characters of a Chinese text: lower case, without punctuation and blanks."""
    return list("".join(text.lower().translate(_DROP_PUNCTUATION).split()))


def words_zh(text: str) -> list[str]:
    """Return the words of a Chinese text, segmented by jieba and normalised like ``characters``."""
    normalised = ("".join(characters(word)) for word in cut(text))
    return [word for word in normalised if word]


def f1(prediction: Sequence[str], reference: Sequence[str]) -> float:
    """Return the F1 of two bags of tokens."""
    shared = (Counter(prediction) & Counter(reference)).total()
    # Equal to the harmonic mean of shared / len(prediction) and shared / len(reference).
    return 2 * shared / (len(prediction) + len(reference)) if shared else 0.0


def rouge_l(prediction: str, reference: str) -> float:
    """Return the ROUGE-L F of the ``rouge`` package, on words between blanks and sentences between full stops.

    Returns 0 where that package fails, as in LongBench: for texts without a word, and for sentences so long (about a
    thousand words) that its recursion overflows.
    """
    if min(_longest_sentence(prediction), _longest_sentence(reference)) >= _RECURSION_LIMIT:
        return 0.0  # would overflow, but only after a table of all pairs of words has filled the memory
    # A new thread has an empty stack, so the score does not depend on the caller's depth.
    with ThreadPoolExecutor(max_workers=1) as thread:
        scores = thread.submit(Rouge(metrics=["rouge-l"]).get_scores, prediction, reference)
        try:
            return float(scores.result()[0]["rouge-l"]["f"])
        except (ValueError, RecursionError):
            return 0.0


def rouge_l_zh(prediction: str, reference: str) -> float:
    """Return ``rouge_l`` on words segmented by jieba."""
    return rouge_l(" ".join(cut(prediction)), " ".join(cut(reference)))


def _longest_sentence(text: str) -> int:
    return max(len(sentence.split()) for sentence in text.split("."))
