"""Makes the data of prefixqa: contexts with their questions, from SQuAD's articles or from LongBench's rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eval.benchmarks.longbench import as_list
from eval.benchmarks.prefixqa import FILENAME, check_row
from eval.errors import EvalError
from eval.examples import read_jsonl
from eval.sources import SQUAD, find, read_json
from eval.store import encode_record, write_lines


def make_prefixqa(
    out: Path, sources: Sequence[Path] = (), least_questions: int = 2, longest: int | None = None
) -> list[dict[str, Any]]:
    """Write a file for ``--data-dir``, one context with its questions a line, and return its rows.

    Parameters
    ----------
    out : Path
        The file, named ``prefixqa.jsonl``. Its folder is created.
    sources : sequence of Path
        Files in SQuAD's format (``.json``) or with LongBench's rows (``.jsonl``), in this order; empty for SQuAD 2.0's
        development set, found or fetched as for RULER.
    least_questions : int
        Contexts with fewer questions are left out.
    longest : int, optional
        Keep this many contexts, those with the most characters, in the order of the sources; None keeps all.

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
    paths = list(sources) or [find(SQUAD, None)]
    found = [row for path in paths for row in _read(path)]
    rows = [row for row in found if len(row["questions"]) >= least_questions]
    if not rows:
        most = max((len(row["questions"]) for row in found), default=0)
        raise EvalError(
            f"no context of {', '.join(map(str, paths))} has least_questions={least_questions} questions or more; "
            f"the most is {most}"
        )
    by_length = sorted(range(len(rows)), key=lambda index: len(rows[index]["context"]), reverse=True)
    rows = [rows[index] for index in sorted(by_length[:longest])]
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_lines(out, map(encode_record, rows))
    except OSError as error:
        raise EvalError(f"{out} cannot be written: {error}") from error
    return rows


def _read(path: Path) -> list[dict[str, Any]]:
    readers = {".json": squad_rows, ".jsonl": longbench_rows}
    if path.suffix not in readers:
        raise EvalError(f"{path} is not allowed: a .json file in SQuAD's format, or a .jsonl file of LongBench")
    return readers[path.suffix](path)


def squad_rows(path: Path) -> list[dict[str, Any]]:
    """Read articles in SQuAD's format, version 1 or 2: an article's paragraphs are the context of its questions.

    Questions without an answer are left out, as are articles without a question.

    Raises
    ------
    EvalError
        The file cannot be read, or is not in SQuAD's format.
    """
    content = read_json(path)
    rows = []
    try:
        for article in content["data"]:  # type: ignore[index]  # other content raises TypeError
            questions = [
                {"question": entry["question"].strip(), "answers": list(dict.fromkeys(_texts(entry["answers"])))}
                for paragraph in article["paragraphs"]
                for entry in paragraph["qas"]
                if not entry.get("is_impossible", False)
            ]
            context = "\n".join(paragraph["context"] for paragraph in article["paragraphs"])
            rows.append({"title": article.get("title", ""), "context": context, "questions": questions})
    except (AttributeError, KeyError, TypeError) as error:
        raise EvalError(f"{path} is not in SQuAD's format: {type(error).__name__} {error}") from error
    rows = [row for row in rows if row["questions"]]
    for row in rows:
        check_row(row, f"{path}: article {row['title']!r}")
    return rows


def longbench_rows(path: Path) -> list[dict[str, Any]]:
    """Group LongBench's rows by context: rows with exactly the same context are its questions.

    Raises
    ------
    EvalError
        The file cannot be read, or a row is malformed; the message names file and line.
    """
    by_context: dict[str, list[dict[str, Any]]] = {}

    def group(row: dict[str, Any], place: str) -> None:
        question = {"question": row["input"].strip(), "answers": as_list(row["answers"], f"{place}: answers")}
        check_row({"context": row["context"], "questions": [question]}, place)
        by_context.setdefault(row["context"], []).append(question)

    read_jsonl(path, ("context", "input", "answers"), group)
    return [{"context": context, "questions": questions} for context, questions in by_context.items()]


def _texts(answers: Any) -> list[str]:
    return [answer["text"] for answer in answers]
