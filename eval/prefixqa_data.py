"""Makes the data of prefixqa: contexts with their questions, from SQuAD's articles or from LongBench's examples."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eval.benchmarks.longbench import as_list
from eval.benchmarks.prefixqa import FILENAME, check_context, spread
from eval.errors import EvalError
from eval.examples import read_jsonl
from eval.sources import SQUAD, find, read_json
from eval.store import encode_record, write_lines


def make_prefixqa(
    out: Path,
    sources: Sequence[Path] = (),
    least_questions: int = 2,
    longest: int | None = None,
    most_questions: int | None = None,
) -> list[dict[str, Any]]:
    """Write a file for ``--data-dir``, one context with its questions a line, and return the contexts.

    Parameters
    ----------
    out : Path
        The file, named ``prefixqa.jsonl``. Its folder is created.
    sources : sequence of Path
        Files in SQuAD's format (``.json``) or with LongBench's examples (``.jsonl``), in this order; empty for the
        development set of SQuAD 2.0, found or fetched as for RULER.
    least_questions : int
        Contexts with fewer questions are left out.
    longest : int, optional
        Keep this many contexts, those with the most characters, in the order of the sources; None keeps all.
    most_questions : int, optional
        Keep this many of a context's questions, evenly spread over them; None keeps all.

    Raises
    ------
    EvalError
        A source is missing or malformed, a number is not allowed, no context has enough questions, or the file cannot
        be written.
    """
    if out.name != FILENAME:
        raise EvalError(f"out={str(out)!r} is not allowed: a file named {FILENAME}, which the benchmark looks for")
    if least_questions < 1:
        raise EvalError(f"least_questions={least_questions!r} is not allowed: at least 1")
    if longest is not None and longest < 1:
        raise EvalError(f"longest={longest!r} is not allowed: at least 1, or None for all contexts")
    if most_questions is not None and most_questions < 1:
        raise EvalError(f"most_questions={most_questions!r} is not allowed: at least 1, or None for all questions")
    paths = list(sources) or [find(SQUAD, None)]
    if len(set(paths)) != len(paths):
        raise EvalError(f"sources={list(map(str, paths))} has duplicate entries")
    found = [entry for path in paths for entry in _read(path)]
    contexts = [entry for entry in found if len(entry["questions"]) >= least_questions]
    if not contexts:
        most = max((len(entry["questions"]) for entry in found), default=0)
        raise EvalError(
            f"no context of {', '.join(map(str, paths))} has least_questions={least_questions} questions or more; "
            f"the most is {most}"
        )
    by_length = sorted(range(len(contexts)), key=lambda index: len(contexts[index]["context"]), reverse=True)
    contexts = [contexts[index] for index in sorted(by_length[:longest])]
    for entry in contexts:
        asked = entry["questions"]
        entry["questions"] = [asked[place] for place in spread(len(asked), most_questions)]
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_lines(out, map(encode_record, contexts))
    except OSError as error:
        raise EvalError(f"{out} cannot be written: {error}") from error
    return contexts


def _read(path: Path) -> list[dict[str, Any]]:
    readers = {".json": squad_contexts, ".jsonl": longbench_contexts}
    if path.suffix not in readers:
        raise EvalError(f"{path} is not allowed: a .json file in SQuAD's format, or a .jsonl file of LongBench")
    return readers[path.suffix](path)


def squad_contexts(path: Path) -> list[dict[str, Any]]:
    """Read articles in SQuAD's format, version 1 or 2: an article's paragraphs are the context of its questions.

    Questions without an answer are left out, as are articles without a question.

    Raises
    ------
    EvalError
        The file cannot be read, or is not in SQuAD's format.
    """
    content = read_json(path)
    contexts = []
    try:
        for article in content["data"]:  # type: ignore[index]  # other content raises TypeError
            questions = [
                {"question": entry["question"].strip(), "answers": list(dict.fromkeys(_texts(entry["answers"])))}
                for paragraph in article["paragraphs"]
                for entry in paragraph["qas"]
                if not entry.get("is_impossible", False)
            ]
            context = "\n".join(paragraph["context"] for paragraph in article["paragraphs"])
            contexts.append({"title": article.get("title", ""), "context": context, "questions": questions})
    except (AttributeError, KeyError, TypeError) as error:
        raise EvalError(f"{path} is not in SQuAD's format: {type(error).__name__} {error}") from error
    contexts = [entry for entry in contexts if entry["questions"]]
    for entry in contexts:
        check_context(entry, f"{path}: article {entry['title']!r}")
    return contexts


def longbench_contexts(path: Path) -> list[dict[str, Any]]:
    """Group LongBench's examples by context: those with exactly the same context are its questions.

    Raises
    ------
    EvalError
        The file cannot be read, or an example is malformed; the message names file and line.
    """
    by_context: dict[str, list[dict[str, Any]]] = {}

    def group(example: dict[str, Any], place: str) -> None:
        question = {"question": example["input"].strip(), "answers": as_list(example["answers"], f"{place}: answers")}
        check_context({"context": example["context"], "questions": [question]}, place)
        by_context.setdefault(example["context"], []).append(question)

    read_jsonl(path, ("context", "input", "answers"), group)
    return [{"context": context, "questions": questions} for context, questions in by_context.items()]


def _texts(answers: Any) -> list[str]:
    return [answer["text"] for answer in answers]
