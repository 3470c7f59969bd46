"""What every process of a tensor-parallel group runs: ``torchrun --nproc-per-node 2 -m tests.tensor_parallel FOLDER``.

Each process loads its part of the models in the folder, and writes what it found to ``rank_R.json`` there.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.distributed import DistributedConfig

from hf_sparse_attn import METHODS, SparseMethod, sparse_attention, sparse_attention_stats
from tests.models import FAMILIES, SPARSE, make_model, random_ids

KV_HEADS = 4
OVERRIDES = {"num_attention_heads": 8, "num_key_value_heads": KV_HEADS, "num_hidden_layers": 3, "vocab_size": 100}
PROMPT = {"max_new_tokens": 10, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
ON_EVERY_FAMILY = ("quest", "tokenselect", "duo_attention")


def files(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the hyperparameters that name per-head files, by the case that they belong to."""
    return {
        "double_sparsity-file": {"calibration": str(folder / "channels.json")},
        "minference-file": {"patterns": str(folder / "patterns.json"), "block_size": 16},
        "duo_attention-file": {"heads": str(folder / "heads.tsv"), "sink_tokens": 4},
    }


VARIANTS: dict[str, dict[str, Any]] = {
    "tokenselect-head": {"vote": "head", "pool_size": 3},
    "tokenselect-logits": {"vote": "logits", "selection_cache_threshold": 1},
    "tokenselect-reuse": {"selection_cache_threshold": 0.2},
    "tova-per-head": {"per_head": True},
    "squeezed-levels": {**SPARSE["squeezed"], "levels": 2, "coarse_clusters": 0.05},
    "duo_attention-heads": {"heads": ((0.9, 0.1, 0.8, 0.2), (0.1, 0.1, 0.9, 0.9), (0.6, 0.4, 0.4, 0.4)), "sink_tokens": 4},
}
"""Cases beside each method's own."""


def cases(folder: Path) -> dict[str, tuple[str, SparseMethod]]:
    """Return the family and the method of each case."""
    found = {f"llama-{name}": ("llama", sparse(name)) for name in METHODS}
    for family in FAMILIES:
        found |= {f"{family}-{name}": (family, sparse(name)) for name in ON_EVERY_FAMILY}
    for name, hyperparameters in {**VARIANTS, **files(folder)}.items():
        found[f"llama-{name}"] = ("llama", sparse(name.partition("-")[0], hyperparameters))
    return found


def sparse(name: str, hyperparameters: dict[str, Any] | None = None) -> SparseMethod:
    """Create a method that leaves most of some hundred tokens out."""
    chosen = SPARSE.get(name, {}) if hyperparameters is None else hyperparameters
    if name in ("double_sparsity", "quest"):
        chosen = {**chosen, "dense_layers": 1}
    return METHODS[name](**{"token_budget": 48, **chosen})


def write_models(folder: Path) -> None:
    """Write a random model of every family, and files that say something of each head."""
    for family in FAMILIES:
        make_model(family, dtype=torch.float64, **OVERRIDES).cpu().save_pretrained(folder / family)
    generator = torch.Generator().manual_seed(2)
    layers = range(OVERRIDES["num_hidden_layers"])
    orders = [[torch.randperm(16, generator=generator).tolist() for _ in range(8)] for _ in layers]
    entries = {f"model.layers.{layer}.self_attn.qk_proj": orders[layer] for layer in layers}
    (folder / "channels.json").write_text(json.dumps(entries))
    kinds = (["stream_llm", 16, 16], ["vertical_and_slash", 8, 2], ["block_sparse", 2, 1])
    patterns = [{str(head): [*kinds[(head + layer) % 3], 1.0] for head in range(8)} for layer in layers]
    (folder / "patterns.json").write_text(json.dumps(patterns))
    (folder / "heads.tsv").write_text("0.9\t0.1\t0.8\t0.2\n0.1\t0.1\t0.9\t0.9\n0.1\t0.2\t0.1\t0.2\n")


def load(folder: Path, family: str, processes: int) -> PreTrainedModel:
    """Load this process's part of a model, or all of it."""
    parallel = {} if processes == 1 else {"distributed_config": DistributedConfig(tp_size=processes)}
    return AutoModelForCausalLM.from_pretrained(folder / family, dtype=torch.float64, **parallel).eval()


def prompts() -> dict[str, torch.Tensor]:
    """Return two prompts, the second one shorter."""
    ids = random_ids(2, 90, seed=3).cpu()
    mask = torch.ones_like(ids)
    ids[1, :21] = mask[1, :21] = 0
    return {"input_ids": ids, "attention_mask": mask}


def tokens_of(folder: Path, processes: int, names: list[str] | None = None) -> dict[str, Any]:
    """Return the tokens of every case, or of some, and the bytes that its steps read."""
    models: dict[str, PreTrainedModel] = {}
    found: dict[str, Any] = {}
    for name, (family, method) in cases(folder).items():
        if names is not None and name not in names:
            continue
        if family not in models:
            models[family] = load(folder, family, processes)
        found[name] = attempt(generated, models[family], method)
    return found


def generated(model: PreTrainedModel, method: SparseMethod) -> dict[str, Any]:
    """Return a case's tokens and the bytes that its steps read."""
    with sparse_attention(model, method):
        tokens = model.generate(**prompts(), **PROMPT)
        stats = sparse_attention_stats(model)
    return {
        "tokens": tokens[:, 90:].tolist(),
        "kv_bytes": stats.kv_bytes,
        "dense_bytes": stats.dense_bytes,
        "counts": stats.method_counts,
    }


def attempt(action: Callable[..., Any], *arguments: Any) -> Any:
    """Return an action's result, or its error as text."""
    try:
        return action(*arguments)
    except Exception as error:
        traceback.print_exc()
        return f"{type(error).__name__}: {error}"


def main(folder: Path, names: list[str]) -> None:
    """Run the cases in this process, and write what it found."""
    torch.distributed.init_process_group("gloo")
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    found = {"tokens": tokens_of(folder, size, names or None)}
    (folder / f"rank_{rank}_of_{size}.json").write_text(json.dumps(found))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
