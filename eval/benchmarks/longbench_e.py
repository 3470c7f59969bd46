"""LongBench-E (https://arxiv.org/abs/2308.14508, section 3.3): 13 of LongBench's tasks with evenly spread lengths."""

from __future__ import annotations

from typing import Any, ClassVar

from eval.benchmarks.longbench import LongBench

TASKS = (
    "qasper",
    "multifieldqa_en",
    "hotpotqa",
    "2wikimqa",
    "gov_report",
    "multi_news",
    "trec",
    "triviaqa",
    "samsum",
    "passage_count",
    "passage_retrieval_en",
    "lcc",
    "repobench-p",
)


class LongBenchE(LongBench):
    """LongBench's prompts and scores on the examples of LongBench-E, with scores by the context's length in words."""

    name: ClassVar[str] = "longbench_e"
    summary: ClassVar[str] = "LongBench-E: 13 of LongBench's tasks, scores by the context's length"
    tasks: ClassVar[tuple[str, ...]] = TASKS
    default_tasks: ClassVar[tuple[str, ...]] = TASKS
    averages: ClassVar[dict[str, tuple[str, ...]]] = {"mean of the 13 tasks": TASKS}
    suffix: ClassVar[str] = "_e"
    required: ClassVar[tuple[str, ...]] = (*LongBench.required, "length")

    def categories(self, example: dict[str, Any]) -> dict[str, str]:
        """Return the official range of the context's number of words."""
        words = example["length"]
        return {"words": "0-4k" if words < 4000 else "4-8k" if words < 8000 else "8k+"}
