"""Comparison of patched with stock models that have real weights, on a text longer than their sliding windows.

``python -m tests.real_weights MODEL ...`` takes what ``load_model`` takes, and adds a row of each model to
docs/real_weights.json, from which docs/compatibility.md has its table.
"""

from __future__ import annotations

import json
import platform
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from hf_sparse_attn import METHODS
from hf_sparse_attn.cli.files import file_sha256
from hf_sparse_attn.cli.models import ALIASES, load_model
from hf_sparse_attn.cli.passkey import make_passkey
from hf_sparse_attn.patch.families import FAMILIES
from tests.compared import COVERED, NEW_TOKENS, answer
from tests.families import Workload, covering, left_padded, top_k

RESULTS = Path(__file__).parents[1] / "docs/real_weights.json"
TOKENS = (640, 560)
"""Of each row; a sliding window of Gemma 3 has 512."""
COVERING_BUDGET, SPARSE_BUDGET = 1024, 128


def workload_of(tokenizer: Any) -> Workload:
    """Return two left-padded rows of text, each with a passkey and the question for it."""
    passkeys = [make_passkey(tokenizer, length, depth=0.4, seed=length) for length in TOKENS]
    rows = [[*passkey.material_ids, *passkey.question_ids] for passkey in passkeys]
    longest = max(map(len, rows)) + NEW_TOKENS
    return Workload(left_padded(rows), longest, COVERING_BUDGET, SPARSE_BUDGET)


def results_of(model: PreTrainedModel, workload: Workload) -> dict[str, Any]:
    """Return the checks' results for a model in float64."""
    layers = DynamicCache(config=model.config).layers
    rotation = FAMILIES[model.config.model_type].rotation
    results: dict[str, Any] = {
        "model_type": model.config.model_type,
        "layers": len(layers),
        "sliding_window_layers": sum(type(layer) is not DynamicLayer for layer in layers),
        "tokens": [int(row.sum()) for row in workload.prompts["attention_mask"]],
        "oracle_topk": answer(top_k, model, workload),
    }
    for name in COVERED:
        refused = METHODS[name].rotates_keys and rotation
        results[name] = f"refused: {refused}" if refused else answer(partial(covering, workload=workload), model, name)
    return results


def main(names: list[str]) -> None:
    """Check the models and add their results to the file."""
    transformers.logging.set_verbosity_error()
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for name in names:
        model, tokenizer = load_model(name, dtype=torch.float64, device="cpu")
        row = results_of(model, workload_of(tokenizer))
        path = Path(name)
        sha256 = ALIASES[name].sha256 if name in ALIASES else file_sha256(path) if path.is_file() else None
        title = ALIASES[name].filename if name in ALIASES else path.name
        versions = {"torch": torch.__version__.partition("+")[0], "transformers": transformers.__version__}
        results[title] = {**row, "sha256": sha256, "machine": platform.machine(), **versions}
        print(title, row, flush=True)
        RESULTS.write_text(json.dumps(dict(sorted(results.items())), indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
