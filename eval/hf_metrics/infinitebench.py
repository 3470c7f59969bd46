"""InfiniteBench's scores as a metric: ``evaluate.load("eval/hf_metrics/infinitebench.py")``, from the root."""

from __future__ import annotations

# Imports the module, not its class: evaluate.load takes the first metric class that it finds in this file.
from eval.hf_metrics import base


class InfiniteBench(base.BenchmarkMetric):
    """Mean score of one InfiniteBench task, by the benchmark's own measure for it."""

    benchmark = "infinitebench"
    summary = (
        "InfiniteBench's measure for a task: exact answer, chosen option, F1 of words or characters, or ROUGE-Lsum."
    )
    citation_text = "Zhang et al. (2024). InfiniteBench: Extending Long Context Evaluation Beyond 100K Tokens."
    homepage_url = "https://arxiv.org/abs/2402.13718"
