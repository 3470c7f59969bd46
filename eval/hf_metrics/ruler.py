"""RULER's scores as a metric: ``evaluate.load("eval/hf_metrics/ruler.py")``, from the root."""

from __future__ import annotations

# Imports the module, not its class: evaluate.load takes the first metric class that it finds in this file.
from eval.hf_metrics import base


class RULER(base.BenchmarkMetric):
    """Mean score of one RULER task, by the benchmark's own measure for it."""

    benchmark = "ruler"
    summary = "Share of the references that the prediction contains; for questions, whether it contains one."
    citation_text = "Hsieh et al. (2024). RULER: What's the Real Context Size of Your Long-Context Language Models?"
    homepage_url = "https://arxiv.org/abs/2404.06654"
