"""RULER's question answering: a question's own paragraphs among paragraphs of other questions."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from eval import sources
from eval.benchmarks.ruler.prompt import Draft, Order, Prompt
from eval.data_files import remembered
from eval.errors import EvalError


@dataclass(frozen=True)
class _Question:
    text: str
    answers: tuple[str, ...]
    own: tuple[int, ...]
    """Indices of the documents that are always in the prompt."""
    related: tuple[int, ...] = ()
    """Documents of the same article, which are the first distractors."""


@dataclass(frozen=True)
class _Corpus:
    documents: list[str]
    questions: list[_Question]


def question_count(dataset: str, data_dir: Path | None) -> int:
    """Return the number of questions of a data set.

    Raises
    ------
    EvalError
        The data set's file is missing or malformed.
    """
    return len(_corpus(dataset, data_dir).questions)


def draft(order: Order) -> Draft:
    """Draft question number ``order.index`` of the data set; the unit is a document."""
    corpus = _corpus(order.args["dataset"], order.data_dir)
    question, rng = corpus.questions[order.index], order.rng
    taken = {*question.own, *question.related}
    others = [i for i in range(len(corpus.documents)) if i not in taken]
    ranked = [
        *question.own,
        *rng.sample(question.related, len(question.related)),
        *rng.sample(others, len(others)),
    ]
    shuffle_seed = rng.getrandbits(64)

    def render(size: int) -> Prompt:
        shown = ranked[:size]
        Random(shuffle_seed).shuffle(shown)
        texts = (f"Document {place}:\n{corpus.documents[i]}" for place, i in enumerate(shown, start=1))
        return order.template.fill("\n\n".join(texts), query=question.text)

    return Draft(render, len(question.own), step=4, references=list(question.answers), largest=len(ranked))


@remembered
def _corpus(dataset: str, data_dir: Path | None) -> _Corpus:
    readers = {"squad": (sources.SQUAD, _read_squad), "hotpotqa": (sources.HOTPOTQA, _read_hotpotqa)}
    source, read = readers[dataset]
    path = sources.find(source, data_dir)
    content = sources.read_json(path)
    try:
        corpus = read(content)
    except (KeyError, TypeError, ValueError) as error:
        raise EvalError(f"{path} is not in the format of {source.name}: {type(error).__name__} {error}") from error
    if not corpus.questions:
        raise EvalError(f"{path} has no question with an answer")
    return corpus


def _read_squad(content: Any) -> _Corpus:
    articles = [article["paragraphs"] for article in content["data"]]
    documents = sorted({paragraph["context"] for paragraphs in articles for paragraph in paragraphs})
    number = {text: i for i, text in enumerate(documents)}
    questions = []
    for paragraphs in articles:
        article = dict.fromkeys(number[paragraph["context"]] for paragraph in paragraphs)
        for paragraph in paragraphs:
            own = number[paragraph["context"]]
            related = tuple(i for i in article if i != own)
            questions += [
                _Question(entry["question"], _answers(answer["text"] for answer in entry["answers"]), (own,), related)
                for entry in paragraph["qas"]
                if not entry["is_impossible"]
            ]
    return _Corpus(documents, questions)


def _read_hotpotqa(content: Any) -> _Corpus:
    contexts = [[f"{title}\n{''.join(sentences)}" for title, sentences in entry["context"]] for entry in content]
    documents = sorted({text for context in contexts for text in context})
    number = {text: i for i, text in enumerate(documents)}
    questions = [
        _Question(entry["question"], (entry["answer"],), tuple(dict.fromkeys(number[text] for text in context)))
        for entry, context in zip(content, contexts, strict=True)
    ]
    return _Corpus(documents, questions)


def _answers(texts: Any) -> tuple[str, ...]:
    return tuple(dict.fromkeys(texts))
