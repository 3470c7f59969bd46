"""LongBench's scores as a metric: ``evaluate.load("eval/hf_metrics/longbench.py")``, from the root."""

from __future__ import annotations

# Imports the module, not its class: evaluate.load takes the first metric class that it finds in this file.
from eval.hf_metrics import base


class LongBench(base.BenchmarkMetric):
    """Mean score of one LongBench task, by the benchmark's own measure for it."""

    benchmark = "longbench"
    summary = "LongBench's measure for a task: word F1, ROUGE-L, share of right classes or numbers, or edit similarity."
    citation_text = "Bai et al. (2023). LongBench: A Bilingual, Multitask Benchmark for Long Context Understanding."
    homepage_url = "https://arxiv.org/abs/2308.14508"
