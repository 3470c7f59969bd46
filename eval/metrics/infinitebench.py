"""InfiniteBench's scores (arXiv 2402.13718). Tasks with a single answer use the first reference."""

from __future__ import annotations

import re
from collections.abc import Sequence

from eval.errors import EvalError
from eval.metrics import text
from eval.metrics.references import Scorer, as_number

_RETRIEVAL_MARKS = ("\n", ":", '"', "'", ".", ",", "?", "!", "{", "}")
_CHOICE_MARKS = ("\n", '"', "'", ".", ",", "?", "!", "{", "}")
_CODE_RUN_MARKS = ("\n", ".", "`", "'", '"', ":")
_CODE_DEBUG_MARKS = ("\n", "`", "'", '"', "-", "*", "Option", "option")

# Phrases that may announce an answer, in the order of the search.
_CHOICE_ANNOUNCEMENTS = ("answer is:", "answer:", "answer is", "option is")
_CODE_DEBUG_ANNOUNCEMENTS = ("answer is:", "is:", "answer:", "correct option is:")


def first_integer(prediction: str, references: list[str], _: Sequence[str]) -> float:
    """Return whether the first run of digits is the reference, leading zeros included."""
    found = re.search(r"[0-9]+", prediction)
    return float(found is not None and found[0] == references[0])


def word(prediction: str, references: list[str], _: Sequence[str]) -> float:
    """Return whether the reference is one of the prediction's words."""
    return float(references[0] in _blank(prediction, _RETRIEVAL_MARKS).split())


def upper_case_word(prediction: str, references: list[str], _: Sequence[str]) -> float:
    """Return whether the reference, a name in capitals, is one of the prediction's words; False if it has two words."""
    return float(references[0] in _blank(prediction, _RETRIEVAL_MARKS).upper().split())


def summary(prediction: str, references: list[str], _: Sequence[str]) -> float:
    """Return the ROUGE-Lsum F."""
    from rouge_score.rouge_scorer import RougeScorer  # loads nltk, which no other task needs

    # Newlines separate sentences, words are not stemmed: the defaults of the `rouge` metric of `evaluate`.
    scorer = RougeScorer(["rougeLsum"])
    return float(max(scorer.score(reference, prediction)["rougeLsum"].fmeasure for reference in references))


def qa(prediction: str, references: list[str], _: Sequence[str]) -> float:
    """Return the best F1 over normalised words."""
    return max(text.f1(text.words(prediction), text.words(reference)) for reference in references)


def qa_zh(prediction: str, references: list[str], _: Sequence[str]) -> float:
    """Return the best F1 over characters."""
    return max(text.f1(text.characters(prediction), text.characters(reference)) for reference in references)


def choice(prediction: str, references: list[str], _: Sequence[str]) -> float:
    """Return whether the chosen option is one of the references, which are the right option's text and letter.

    A capital A to D at the very beginning decides; else the whole prediction, if it is a reference; else the text after
    the first announcement found; else the first word that consists of consecutive option letters.
    """
    prediction = prediction.strip()
    if not prediction:
        return 0.0
    if prediction[0] in "ABCD":
        return float(prediction[0] in references)
    if prediction in references:
        return 1.0
    prediction = _squeeze(_blank(prediction, _CHOICE_MARKS))
    answer = _announced(prediction, _CHOICE_ANNOUNCEMENTS)
    if answer is not None:
        return float(answer.startswith(tuple(references)))
    letters = next((word for word in prediction.split() if word in "ABCD"), None)
    return float(letters in references)


def code_debug(prediction: str, references: list[str], _: Sequence[str]) -> float:
    """Return whether the option at the very beginning, or after the first announcement found, is the right one.

    Raises
    ------
    EvalError
        The references are not exactly two, a function name and a letter.
    """
    if len(references) < 2:
        raise EvalError(f"references={references!r} must be the function's name and the option's letter")
    name, letter = references[:2]
    prediction = prediction.strip()
    if prediction.startswith((f"{letter}.", f"{letter}:")):
        return 1.0
    answer = _announced(_squeeze(_blank(prediction, _CODE_DEBUG_MARKS)), _CODE_DEBUG_ANNOUNCEMENTS)
    return float(answer is not None and answer.startswith((name, letter)))


def code_run(prediction: str, references: list[str], _: Sequence[str]) -> float:
    """Return whether the last word is the right integer."""
    wanted = as_number(references[0])
    last = _blank(prediction, _CODE_RUN_MARKS).split()[-1:]
    try:
        return float([int(word) for word in last] == [wanted])
    except ValueError:
        return 0.0


def math_find(prediction: str, references: list[str], _: Sequence[str]) -> float:
    """Return whether the first number is the right one.

    Numbers are compared by value, for any type of reference. The official scorer fails if the reference is a whole
    number and the prediction has a decimal point.
    """
    wanted = as_number(references[0])
    found = re.search(r"\d+(?:\.\d+)?", prediction)
    return float(found is not None and as_number(found[0]) == wanted)


def math_calc(prediction: str, references: list[str], _: Sequence[str]) -> float:
    """Return the share of intermediate results before the first wrong or missing one."""
    wanted = [as_number(reference) for reference in references]
    found = [as_number(digits) for digits in re.findall(r"[0-9]+", prediction)]
    right = 0
    while right < min(len(wanted), len(found)) and found[right] == wanted[right]:
        right += 1
    return right / len(wanted)


def _blank(prediction: str, marks: Sequence[str]) -> str:
    for mark in marks:
        prediction = prediction.replace(mark, " ")
    return prediction


def _squeeze(prediction: str) -> str:
    return re.sub(" {2,}", " ", prediction)


def _announced(prediction: str, announcements: Sequence[str]) -> str | None:
    """Return the text after the first announcement and the character that follows it; None without an announcement."""
    for announcement in announcements:
        _, found, rest = prediction.partition(announcement)
        if found:
            return rest[1:]
    return None


SCORERS: dict[str, Scorer] = {
    "passkey": first_integer,
    "number_string": first_integer,
    "kv_retrieval": word,
    "longbook_sum_eng": summary,
    "longbook_choice_eng": choice,
    "longbook_qa_eng": qa,
    "longbook_qa_chn": qa_zh,
    "longdialogue_qa_eng": upper_case_word,
    "math_find": math_find,
    "math_calc": math_calc,
    "code_run": code_run,
    "code_debug": code_debug,
}
