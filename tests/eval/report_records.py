"""Invented records of every kind that a run can write, with numbers that are easy to check by hand."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hf_sparse_attn.methods import make_method

HOSTILE = "</td></table><script>document.title='broken'</script><img src=x onerror=alert(1)> & \u2028 more"
COLUMNS: list[tuple[str, int | None]] = [("full", None), ("quest", 256), ("quest", 1024), ("window", 256)]


def record(benchmark: str, task: str, sample: int, method: str, budget: int | None, **fields: Any) -> dict[str, Any]:
    """Create a record; ``fields`` replace its defaults."""
    length = fields.get("length")
    tokens = length or 3000
    fraction = 1.0 if budget is None else min(1.0, 1.25 * budget / tokens)
    defaults: dict[str, Any] = {
        "benchmark": benchmark,
        "task": task,
        "sample_id": f"{task}-{sample}",
        "length": length,
        "depth": None,
        "method": method,
        "token_budget": budget,
        "parameters": {} if budget is None else {"page_size": 16},
        "question": "decode",
        "score": 1.0,
        "prediction": "forty-two",
        "references": ["forty-two"],
        "error": None,
        "prompt_tokens": tokens,
        "question_tokens": 12,
        "new_tokens": 20,
        "kv_bytes": int(1e6 * fraction),
        "metadata_bytes": 0,
        "dense_bytes": 1_000_000,
        "kv_fraction": fraction,
        "realised_budget": budget or float(tokens),
        "prefill_seconds": tokens / 8000,
        "ttft_seconds": tokens / 6000 + (0 if budget is None else 0.05),
        "tpot_ms": 20 + tokens * fraction / 200,
        "peak_memory_bytes": 2**30 + tokens * 2**12,
        "peak_memory_measures": "CUDA allocator",
        "perplexity": None,
        "nll_by_position": None,
        "divergence_by_position": None,
        "model": "example/model-1b",
        "dtype": "bfloat16",
        "device": "Example GPU",
        "versions": {"torch": "2.13.0", "transformers": "5.16.0"},
        "seed": 0,
        "protocol": benchmark,
        "protocol_sha256": "ab" * 32,
    }
    return defaults | fields


def failed(benchmark: str, task: str, sample: int, method: str, budget: int | None, error: str) -> dict[str, Any]:
    """Create the record of a failed sample, without measurements."""
    keep = {"benchmark", "task", "sample_id", "method", "token_budget", "parameters", "question"}
    keep |= {"model", "dtype", "device", "versions", "seed", "protocol", "protocol_sha256"}
    complete = record(benchmark, task, sample, method, budget)
    return {name: value if name in keep else None for name, value in complete.items()} | {"error": error}


def longbench_records() -> list[dict[str, Any]]:
    """Two tasks of four samples; quest 256 loses one sample and fails on another."""
    records = []
    for task, dense_scores in (("hotpotqa", (1.0, 1.0, 0.5, 0.0)), ("qasper", (0.4, 0.6, 0.2, 0.0))):
        for method, budget in COLUMNS:
            for sample, dense_score in enumerate(dense_scores):
                score = dense_score * {256: 0.5, 1024: 0.9}.get(budget or 0, 1.0)
                prediction = HOSTILE if (method, sample) == ("quest", 0) else "forty-two"
                records.append(record("longbench", task, sample, method, budget, score=score, prediction=prediction))
    records[4] = records[4] | {"score": 0.0}
    records[7] = failed("longbench", "hotpotqa", 3, "quest", 256, f"RuntimeError: out of memory {HOSTILE}")
    return records


def needle_records(lengths: Sequence[int] = (1024, 2048, 4096)) -> list[dict[str, Any]]:
    """Dense finds every needle; the others lose those that are early, the more the longer the text."""
    records = []
    for length in lengths:
        for depth_index in range(5):
            for method, budget in COLUMNS:
                depth = depth_index / 4
                found = budget is None or depth * budget * 8 >= length / 2
                fields = {"length": length, "depth": depth, "score": float(found)}
                records.append(record("needle", "needle", depth_index, method, budget, **fields))
    return records


def pg19_records() -> list[dict[str, Any]]:
    """Two books: perplexities 8 and 32 for dense (geometric mean 16), twice that for the others."""
    records = []
    for sample, perplexity in enumerate((8.0, 32.0)):
        for method, budget in COLUMNS:
            factor = 1.0 if budget is None else 2.0
            positions = [[position, 3.0 - position / 4000 + factor / 10] for position in range(250, 3000, 250)]
            fields = {"score": None, "perplexity": perplexity * factor, "nll_by_position": positions, "tpot_ms": 30.0}
            records.append(record("pg19", "pg19", sample, method, budget, prediction="", references=None, **fields))
    return records


def write_runs(directory: Path) -> Path:
    """Three runs: one plain, one in folders below, one whose parts are not merged."""
    needles = needle_records()
    write_records(directory / "longbench" / "rows.jsonl", longbench_records())
    write_records(directory / "synthetic" / "needle" / "rows-00000.jsonl", needles[::2])
    write_records(directory / "synthetic" / "needle" / "rows-00001.jsonl", needles[1::2])
    write_records(directory / "pg19" / "rows.jsonl", pg19_records())
    (directory / "longbench" / "config.json").write_text('{"benchmark": "longbench", "limit": 4}\n', encoding="utf-8")
    return directory


def write_records(path: Path, records: Sequence[dict[str, Any]]) -> None:
    """One JSON object a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records), encoding="utf-8")


METHOD_NAMES = (
    "quest",
    "double_sparsity",
    "h2o",
    "infllm",
    "keycodes",
    "oracle_topk",
    "snapkv",
    "streaming_llm",
    "tokenselect",
    "tova",
)


def ten_methods(benchmark: str = "needle") -> list[dict[str, Any]]:
    """Create records of ten methods with their real parameters, baselines included, Quest in two variants."""
    chosen = [(make_method("full"), None)]
    for name in METHOD_NAMES:
        others: tuple[dict[str, Any], ...] = ({}, {"bounds_dtype": "model"}) if name == "quest" else ({},)
        for budget in (256, 1024):
            chosen += [(make_method(name, token_budget=budget, **other), budget) for other in others]
    records = []
    for place, (method, budget) in enumerate(chosen):
        parameters = {each.name: getattr(method, each.name) for each in dataclasses.fields(method)}
        for length in (2000, 4000, 8000):
            for depth_index, depth in enumerate((0.1, 0.5, 0.9)):
                score = 1.0 if budget is None else ((place * 7 + depth_index * 3 + length // 1000) % 11) / 10
                fields: dict[str, Any] = {"length": length, "depth": depth, "score": score, "parameters": parameters}
                if budget is not None:
                    fields |= {
                        "divergence": 0.3 / place,
                        "divergence_by_position": [[at, 0.3 / place + at / 9000] for at in (0, 250, 500)],
                        "kv_fraction": budget / length * (0.6 + 0.04 * place),
                        "tpot_ms": 20 + place + length / 400,
                    }
                records.append(record(benchmark, "book", depth_index, method.name, budget, **fields))
    return records
