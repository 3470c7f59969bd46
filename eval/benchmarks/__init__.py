"""The benchmarks, by name. To add one, write a class in its own file and add it to ``BENCHMARKS``."""

from __future__ import annotations

from eval.benchmarks.base import Benchmark, Item, Sample, Setup
from eval.benchmarks.infinitebench import InfiniteBench
from eval.benchmarks.longanswer import LongAnswer
from eval.benchmarks.longbench import LongBench
from eval.benchmarks.needle import Needle
from eval.benchmarks.passkey import PasskeyRetrieval
from eval.benchmarks.pg19 import PG19
from eval.benchmarks.prefixqa import PrefixQA
from eval.benchmarks.questpasskey import QuestPasskey
from eval.benchmarks.ruler import Ruler

BENCHMARKS: dict[str, Benchmark] = {
    benchmark.name: benchmark
    for benchmark in (
        PasskeyRetrieval(),
        QuestPasskey(),
        Needle(),
        Ruler(),
        LongBench(),
        InfiniteBench(),
        PG19(),
        LongAnswer(),
        PrefixQA(),
    )
}

__all__ = ["BENCHMARKS", "Benchmark", "Item", "Sample", "Setup"]
