"""The benchmarks, by name. To add one, write a class in its own file and add it to ``BENCHMARKS``."""

from __future__ import annotations

from eval.benchmarks.babilong import Babilong
from eval.benchmarks.base import Benchmark, Item, Sample, Setup
from eval.benchmarks.gsm8k import GSM8K
from eval.benchmarks.infinitebench import InfiniteBench
from eval.benchmarks.longanswer import LongAnswer
from eval.benchmarks.longbench import LongBench
from eval.benchmarks.longbench_e import LongBenchE
from eval.benchmarks.longbench_v2 import LongBenchV2
from eval.benchmarks.needle import Needle
from eval.benchmarks.passkey import PasskeyRetrieval
from eval.benchmarks.pg19 import PG19
from eval.benchmarks.prefixqa import PrefixQA
from eval.benchmarks.questpasskey import QuestPasskey
from eval.benchmarks.ruler import Ruler
from eval.benchmarks.scbench import SCBench

BENCHMARKS: dict[str, Benchmark] = {
    benchmark.name: benchmark
    for benchmark in (
        PasskeyRetrieval(),
        QuestPasskey(),
        Needle(),
        Ruler(),
        LongBench(),
        LongBenchE(),
        LongBenchV2(),
        InfiniteBench(),
        Babilong(),
        PG19(),
        LongAnswer(),
        GSM8K(),
        PrefixQA(),
        SCBench(),
    )
}

__all__ = ["BENCHMARKS", "Benchmark", "Item", "Sample", "Setup"]
