"""Records: the fields of one sample and one variant, scored and checked."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from eval import metrics
from eval.benchmarks import Item, Sample
from eval.config import RunConfig
from eval.engine import Variant
from eval.record_check import check_record
from eval.store import encode_record

MEASURED = (
    "prediction",
    "perplexity",
    "divergence",
    "divergence_max",
    "top_agreement",
    "divergence_by_position",
    "nll_by_position",
    "prompt_tokens",
    "question_tokens",
    "new_tokens",
    "kv_bytes",
    "metadata_bytes",
    "dense_bytes",
    "kv_fraction",
    "realised_budget",
    "selection_hit_rate",
    "prefill_seconds",
    "context_seconds",
    "first_token_seconds",
    "ttft_seconds",
    "tpot_ms",
    "peak_memory_bytes",
    "peak_memory_measures",
)
"""Fields that are null in the record of a failed sample."""


def make_record(config: RunConfig, item: Item, variant: Variant, measured: dict[str, Any]) -> dict[str, Any]:
    """Return the record of one sample and variant, scored if the sample was answered."""
    measured = dict(measured)
    sample: Sample | None = measured.pop("sample", None)
    error = measured["error"]
    score = scores = None
    is_scored = sample is not None and sample.references is not None and measured.get("prediction") is not None
    if error is None and is_scored:
        assert sample is not None
        answered = (config.benchmark, item.task, measured["prediction"], sample.references, sample.all_classes)
        try:
            score, scores = metrics.score(*answered), metrics.named_scores(*answered)
        except Exception as raised:  # a scoring failure is an error of this sample only
            error = f"{type(raised).__name__}: {raised}"
    parameters = asdict(variant.method)
    return _recordable(
        {
            "benchmark": config.benchmark,
            "task": item.task,
            "sample_id": item.sample_id,
            "length": item.length,
            "depth": item.depth,
            "categories": dict(item.categories) or None,
            "method": variant.method.name,
            "token_budget": variant.token_budget,
            "variant": variant.name,
            "parameters": {name: value if _fits("", value) else repr(value) for name, value in parameters.items()},
            "question": config.question,
            "score": score,
            "scores": scores,
            "references": None if sample is None else sample.references,
            "truncated": None if sample is None else sample.truncated,
            **dict.fromkeys(MEASURED),
            **measured,
            "error": error,
        }
    )


def _recordable(record: dict[str, Any]) -> dict[str, Any]:
    """Return the record, or that of a failed sample if a value cannot be stored, such as a perplexity of NaN."""
    unfit = {name: value for name, value in record.items() if not _fits(name, value)}
    if not unfit:
        return record
    named = ", ".join(f"{name}={value!r:.60}" for name, value in unfit.items())
    return {
        **record,
        **dict.fromkeys(unfit),
        "score": None,
        "error": record["error"] or f"ValueError: {named} cannot be stored",
    }


def _fits(name: str, value: Any) -> bool:
    """Return whether a value can be stored; without a name, as a part of a field."""
    try:
        encode_record({name: value})
        if name:
            check_record({name: value}, required=())
    except (TypeError, ValueError):
        return False
    return True
