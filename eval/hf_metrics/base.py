"""The common part of the metrics: everything except their benchmark and their texts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, TypedDict

import datasets
import evaluate

from eval.errors import EvalError
from eval.metrics import check_task, reference_texts, score, tasks

_INPUTS = """
Args:
    predictions: list of str, what the model wrote.
    references: list with the right answers of each prediction: a str, an int, a float, or a list of these.
    task: str, the task that all predictions belong to; one of {tasks}.
    all_classes: list of str, the names of all classes, for tasks that classify.

Returns:
    score: float from 0 to 1, the mean over the predictions.
    scores: list of float, one for each prediction.
"""


class Scores(TypedDict):
    """The result of ``compute``."""

    score: float
    scores: list[float]


class BenchmarkMetric(evaluate.Metric):  # type: ignore[misc]  # evaluate has no types
    """Metric that applies ``eval.metrics.score`` to many predictions of one task. Subclasses name the benchmark."""

    benchmark: ClassVar[str]
    summary: ClassVar[str]
    citation_text: ClassVar[str]
    homepage_url: ClassVar[str]

    def compute(self, *, predictions: Any = None, references: Any = None, **kwargs: Any) -> Scores | None:
        """Score the given predictions, together with those added before.

        Parameters
        ----------
        predictions : sequence of str, optional
            The model's answer.
        references : sequence, optional
            For each prediction a str, an int, a float, or a list of these.
        **kwargs
            ``task`` (required) and ``all_classes``, as in ``eval.metrics.score``.

        Returns
        -------
        Scores or None
            None in every process but the first.

        Raises
        ------
        EvalError
            Unknown task, or a reference of a wrong type for the task.
        """
        check_task(self.benchmark, kwargs.get("task"))
        result: Scores | None = super().compute(predictions=predictions, references=references, **kwargs)
        return result

    def add_batch(self, *, predictions: Any = None, references: Any = None, **kwargs: Any) -> None:
        """Keep predictions and references for ``compute``."""
        super().add_batch(predictions=predictions, references=self._as_lists(references), **kwargs)

    def add(self, *, prediction: Any = None, reference: Any = None, **kwargs: Any) -> None:
        """Keep one prediction and its references for ``compute``."""
        super().add(prediction=prediction, reference=reference_texts(self.benchmark, reference), **kwargs)

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=self.summary,
            citation=self.citation_text,
            homepage=self.homepage_url,
            inputs_description=_INPUTS.format(tasks=", ".join(tasks(self.benchmark))),
            # One type serves all tasks and mixed references, since `score` also reads numbers from texts.
            features=datasets.Features(
                predictions=datasets.Value("string"), references=datasets.Sequence(datasets.Value("string"))
            ),
            reference_urls=[self.homepage_url],
        )

    def _compute(
        self,
        predictions: Sequence[str],
        references: Sequence[list[str]],
        task: str,
        all_classes: Sequence[str] | None = None,
    ) -> Scores:
        pairs = zip(predictions, references, strict=True)
        scores = [score(self.benchmark, task, prediction, answers, all_classes) for prediction, answers in pairs]
        if not scores:
            raise EvalError("predictions=[] has no mean score; at least one prediction is needed")
        return Scores(score=sum(scores) / len(scores), scores=scores)

    def _as_lists(self, references: Iterable[Any] | None) -> list[list[str]] | None:
        return None if references is None else [reference_texts(self.benchmark, each) for each in references]
