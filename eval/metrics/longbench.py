"""LongBench's scores (arXiv 2308.14508, table 1). The best of several references counts; without any the score is 0."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from difflib import SequenceMatcher

from rapidfuzz import fuzz

from eval.errors import EvalError
from eval.metrics import text
from eval.metrics.references import Scorer

_FIRST_LINE_TASKS = ("trec", "triviaqa", "samsum", "lsht")
_NO_CODE_MARKS = ("`", "#", "//")

_Pair = Callable[[str, str, Sequence[str]], float]


def qa_f1(prediction: str, reference: str, _: Sequence[str]) -> float:
    """Return the F1 over normalised words."""
    return text.f1(text.words(prediction), text.words(reference))


def qa_f1_zh(prediction: str, reference: str, _: Sequence[str]) -> float:
    """Return the F1 over normalised words, segmented by jieba."""
    return text.f1(text.words_zh(prediction), text.words_zh(reference))


def rouge(prediction: str, reference: str, _: Sequence[str]) -> float:
    """Return the ROUGE-L F."""
    return text.rouge_l(prediction, reference)


def rouge_zh(prediction: str, reference: str, _: Sequence[str]) -> float:
    """Return the ROUGE-L F over words segmented by jieba."""
    return text.rouge_l_zh(prediction, reference)


def classification(prediction: str, reference: str, all_classes: Sequence[str]) -> float:
    """Return one over the number of classes that the prediction names, or 0 if the right one is not among them.

    Raises
    ------
    EvalError
        ``all_classes`` is empty.
    """
    if not all_classes:
        raise EvalError("all_classes is empty or missing; it must name all classes, including the reference")
    named = [name for name in all_classes if name in prediction]
    position = 0
    while position < len(named):
        name = named[position]
        if name != reference and name in reference:
            named.remove(name)  # it matched only as a part of the right class's name
        # Advancing after a removal too skips the next class, as the official scorer does.
        position += 1
    return 1.0 / len(named) if reference in named else 0.0


def count(prediction: str, reference: str, _: Sequence[str]) -> float:
    """Return the share of the prediction's numbers that are right."""
    numbers = re.findall(r"\d+", prediction)
    return numbers.count(reference) / len(numbers) if numbers else 0.0


def retrieval(prediction: str, reference: str, _: Sequence[str]) -> float:
    """Return ``count`` for the number after the word for a paragraph in the reference."""
    return count(prediction, _number_after("Paragraph ", reference), ())


def retrieval_zh(prediction: str, reference: str, _: Sequence[str]) -> float:
    """Return ``retrieval`` for references in Chinese."""
    return count(prediction, _number_after("段落", reference), ())


def code_similarity(prediction: str, reference: str, _: Sequence[str]) -> float:
    """Return the edit similarity, in whole hundredths, of the first predicted line without comment or fence marks.

    The official code has this metric where the package python-Levenshtein is installed.
    """
    return round(fuzz.ratio(_first_code_line(prediction), reference)) / 100


def code_similarity_difflib(prediction: str, reference: str, _: Sequence[str]) -> float:
    """Return the metric that the official code has in place of ``code_similarity`` without python-Levenshtein."""
    code = _first_code_line(prediction)
    if code == reference:
        return 1.0
    if not code or not reference:
        return 0.0
    return round(100 * SequenceMatcher(None, code, reference).ratio()) / 100


def _first_code_line(prediction: str) -> str:
    lines = prediction.lstrip("\n").split("\n")
    return next((line for line in lines if not any(mark in line for mark in _NO_CODE_MARKS)), "")


def _number_after(word: str, reference: str) -> str:
    found = re.search(rf"{word}(\d+)", reference)
    if found is None:
        raise EvalError(f"reference {reference!r} is not allowed for this task: only the form {word + 'N'!r}")
    return found[1]


def _scorer(task: str, score_pair: _Pair) -> Scorer:
    def best(prediction: str, references: list[str], all_classes: Sequence[str]) -> float:
        if task in _FIRST_LINE_TASKS:
            prediction = prediction.lstrip("\n").split("\n")[0]
        return max((score_pair(prediction, reference, all_classes) for reference in references), default=0.0)

    return best


_PAIR_SCORERS: dict[str, _Pair] = {
    "narrativeqa": qa_f1,
    "qasper": qa_f1,
    "multifieldqa_en": qa_f1,
    "multifieldqa_zh": qa_f1_zh,
    "hotpotqa": qa_f1,
    "2wikimqa": qa_f1,
    "musique": qa_f1,
    "dureader": rouge_zh,
    "gov_report": rouge,
    "qmsum": rouge,
    "multi_news": rouge,
    "vcsum": rouge_zh,
    "trec": classification,
    "triviaqa": qa_f1,
    "samsum": rouge,
    "lsht": classification,
    "passage_count": count,
    "passage_retrieval_en": retrieval,
    "passage_retrieval_zh": retrieval_zh,
    "lcc": code_similarity,
    "repobench-p": code_similarity,
}
SCORERS: dict[str, Scorer] = {task: _scorer(task, score_pair) for task, score_pair in _PAIR_SCORERS.items()}
_NOT_IN_E = ("narrativeqa", "musique", "qmsum", "multifieldqa_zh", "dureader", "vcsum", "lsht", "passage_retrieval_zh")
E_SCORERS: dict[str, Scorer] = {task: scorer for task, scorer in SCORERS.items() if task not in _NOT_IN_E}
"""The scores of LongBench-E, which has some of the tasks."""
_CODE_SCORERS = {"levenshtein": code_similarity, "difflib": code_similarity_difflib}
NAMED_SCORERS: dict[str, dict[str, Scorer]] = {
    task: {name: _scorer(task, score_pair) for name, score_pair in _CODE_SCORERS.items()}
    for task in ("lcc", "repobench-p")
}
"""The metrics of tasks that have several, the one of ``SCORERS`` first."""
