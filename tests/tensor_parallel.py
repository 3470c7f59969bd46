"""Runs of tensor-parallel groups: ``python -m tests.tensor_parallel FOLDER`` starts two processes, then four.

Each process loads its part of the models in the folder, and writes what it found to ``rank_R_of_N.json`` there.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch._dynamo.utils import counters
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel
from transformers.distributed import DistributedConfig

from hf_sparse_attn import (
    METHODS,
    DecodeAhead,
    SelfSpeculation,
    SparseCache,
    SparseMethod,
    calibrate_channels,
    patch_model,
    prepare_context,
    sparse_attention,
    sparse_attention_stats,
)
from hf_sparse_attn.patch import fused as fusing
from hf_sparse_attn.patch import one_shot, tensor_parallel
from hf_sparse_attn.patch.combinations import Combinations
from hf_sparse_attn.patched import get_patch, is_patched, patched_method
from tests.compared import compile_config
from tests.families import tiny_model
from tests.models import FAMILIES, SPARSE, make_model

KV_HEADS = 4
VOCABULARY = 100
OVERRIDES = {"num_attention_heads": 8, "num_key_value_heads": KV_HEADS, "num_hidden_layers": 3}
PROMPT = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
ON_EVERY_FAMILY = ("quest", "tokenselect", "duo_attention")


def files(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the hyperparameters that name per-head files, by the case that they belong to."""
    return {
        "double_sparsity-file": {"calibration": str(folder / "channels.json")},
        "minference-file": {"patterns": str(folder / "patterns.json"), "block_size": 16},
        "duo_attention-file": {"heads": str(folder / "heads.tsv"), "sink_tokens": 4},
    }


HEADS = ((0.9, 0.1, 0.8, 0.2), (0.1, 0.1, 0.9, 0.9), (0.6, 0.4, 0.4, 0.4))
"""Of each layer and KV head, from 0, for streaming, to 1, for retrieval."""
VARIANTS: dict[str, dict[str, Any]] = {
    "tokenselect-head": {"vote": "head", "pool_size": 3},
    "tokenselect-logits": {"vote": "logits", "selection_cache_threshold": 1},
    "tokenselect-reuse": {"selection_cache_threshold": 0.2},
    "tova-per-head": {"per_head": True},
    "squeezed-levels": {**SPARSE["squeezed"], "levels": 2, "coarse_clusters": 0.05},
    "duo_attention-heads": {"heads": HEADS, "sink_tokens": 4},
}
"""Cases beside each method's own."""
GATHERED = ("olmo2", "phi3")
"""Model types whose plan gathers the keys of all heads."""
DIVIDED = ("gpt_neox", *{"laguna"} & set(CONFIG_MAPPING))
"""Model types whose plan divides the heads of one projection of all states, or layers of different numbers of heads."""
WITH_SINKS = tuple({"granite_swa"} & set(CONFIG_MAPPING))
"""Model types whose plan divides the attention sinks with the heads."""
FOUR = ["llama-tokenselect", "llama-squeezed", "llama-duo_attention-file", "qwen3-quest"]
"""Cases of four processes, with a KV head each."""


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
        model = make_model(family, dtype=torch.float64, vocab_size=VOCABULARY, **OVERRIDES)
        model.cpu().save_pretrained(folder / family)
    for model_type in (*GATHERED, *DIVIDED):
        dense = {"mlp_layer_types": ["dense"] * 3}  # experts as they run here do not take float64
        tiny_model(model_type, vocab_size=VOCABULARY, **dense).save_pretrained(folder / model_type)
    for model_type in WITH_SINKS:
        model = tiny_model(model_type, vocab_size=VOCABULARY)
        for layer in model.model.layers:
            layer.self_attn.sinks.data += torch.arange(4)
        model.save_pretrained(folder / model_type)
    odd = {**OVERRIDES, "num_attention_heads": 6, "num_key_value_heads": 3}
    make_model("llama", dtype=torch.float64, vocab_size=VOCABULARY, **odd).cpu().save_pretrained(folder / "three-heads")
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
    """Return two prompts, the second one shorter.

    No token comes twice: in the first layer equal tokens have equal keys before RoPE, and so equal votes, whose order
    would depend on the order in which the heads are added up.
    """
    generator = torch.Generator().manual_seed(3)
    ids = torch.stack([torch.randperm(VOCABULARY - 2, generator=generator)[:90] + 2 for _ in range(2)])
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
        found[name] = attempt(partial(generated, models[family], method))
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


def by_plan(folder: Path) -> dict[str, Any]:
    """Return what Quest generates with a model that ``tp_plan`` divides over all processes."""
    model = AutoModelForCausalLM.from_pretrained(folder / "llama", dtype=torch.float64, tp_plan="auto")
    return generated(model.eval(), sparse("quest"))


def beams(model: PreTrainedModel) -> Any:
    """Return the tokens of a beam search."""
    with sparse_attention(model, "quest", token_budget=48):
        return model.generate(**prompts(), **PROMPT, num_beams=3)[:, 90:].tolist()


def turns(model: PreTrainedModel) -> Any:
    """Return the tokens after a second turn, in a cache that the first one filled."""
    with sparse_attention(model, sparse("tokenselect")):
        cache = SparseCache.for_model(model, max_cache_len=160)
        ids = prompts()["input_ids"][:1]
        first = model.generate(ids, attention_mask=torch.ones_like(ids), **PROMPT, past_key_values=cache)
        second = torch.cat([first, ids[:, 20:60]], dim=1)
        mask = torch.ones_like(second)
        return model.generate(second, attention_mask=mask, **PROMPT, past_key_values=cache)[:, 100:].tolist()


def static(model: PreTrainedModel) -> Any:
    """Return the tokens of a static cache that ``generate()`` makes."""
    with sparse_attention(model, sparse("tova")):
        return model.generate(**prompts(), **PROMPT, cache_implementation="static")[:, 90:].tolist()


def compiled(model: PreTrainedModel) -> Any:
    """Return the tokens of compiled steps, of a method that exchanges nothing and of one whose steps exchange votes."""
    config, found = compile_config(), []
    for method in map(sparse, ("quest", "tokenselect")):
        torch._dynamo.reset()
        counters.clear()
        with sparse_attention(model, method):
            tokens = model.generate(**prompts(), **PROMPT, compile_config=config)[:, 90:].tolist()
        found.append([tokens, counters["stats"]["unique_graphs"]])
    return found


def looked_up(model: PreTrainedModel) -> Any:
    """Return the tokens of assisted decoding, which crops the cache."""
    with sparse_attention(model, sparse("tokenselect")):
        ids = prompts()["input_ids"][:1, :45].repeat(1, 2)
        mask = torch.ones_like(ids)
        return model.generate(ids, attention_mask=mask, **PROMPT, prompt_lookup_num_tokens=4)[:, 90:].tolist()


def sampled(model: PreTrainedModel) -> Any:
    """Return tokens drawn with one seed."""
    torch.manual_seed(1)
    with sparse_attention(model, sparse("h2o")):
        return model.generate(**prompts(), **{**PROMPT, "do_sample": True})[:, 90:].tolist()


def on_host(model: PreTrainedModel) -> Any:
    """Return the tokens with keys and values in host memory."""
    with sparse_attention(model, "quest", kv_storage="host", token_budget=48, dense_layers=1):
        return model.generate(**prompts(), **PROMPT)[:, 90:].tolist()


def offloaded(model: PreTrainedModel) -> Any:
    """Return the tokens with blocks of keys and values that are loaded from host memory."""
    with sparse_attention(model, "psa", token_budget=48, block_size=8, microbatch=2, offload=True, gpu_cache_tokens=64):
        return model.generate(**prompts(), **PROMPT)[:, 90:].tolist()


def speculated(model: PreTrainedModel) -> Any:
    """Return the tokens of sparse drafts and dense verification."""
    with sparse_attention(model, "quest", token_budget=48, dense_layers=1):
        ids = prompts()["input_ids"][:1]
        mask = torch.ones_like(ids)
        speculation = SelfSpeculation(draft_tokens=3)
        return model.generate(ids, attention_mask=mask, **PROMPT, custom_generate=speculation)[:, 90:].tolist()


def ahead(model: PreTrainedModel) -> Any:
    """Return the tokens of steps that are launched before the host knows the tokens of the step before."""
    with sparse_attention(model, sparse("tokenselect")):
        return model.generate(**prompts(), **PROMPT, custom_generate=DecodeAhead())[:, 90:].tolist()


def forked(model: PreTrainedModel) -> Any:
    """Return the tokens of forks for other methods, after one prefill."""
    with sparse_attention(model, "full"):
        cache = make_cache(model, keep_queries=8)
        ids = prompts()["input_ids"][:1]
        model(ids[:, :-1], past_key_values=cache)
    found = []
    for method in (sparse("duo_attention", {"heads": HEADS, "sink_tokens": 4}), sparse("squeezed"), sparse("tova")):
        with sparse_attention(model, method):
            mask = torch.ones_like(ids)
            tokens = model.generate(ids, attention_mask=mask, **PROMPT, past_key_values=cache.fork(method))
            found.append(tokens[:, 90:].tolist())
    return found


def make_cache(model: PreTrainedModel, keep_queries: int) -> SparseCache:
    """Create a cache that keeps queries, for a patched model."""
    found = get_patch(model)
    return SparseCache(model.config, found.method, keep_queries=keep_queries, head_shard=found.head_shard)


def of_plans(folder: Path, processes: int) -> dict[str, Any]:
    """Return the tokens of models with other plans, and whether every process has all KV heads."""
    found = {}
    for model_type in (*GATHERED, *DIVIDED, *WITH_SINKS):
        model = load(folder, model_type, processes)
        with sparse_attention(model, "quest", token_budget=48):
            tokens = model.generate(**prompts(), **PROMPT)[:, 90:].tolist()
            found[model_type] = {"tokens": tokens, "is_whole": get_patch(model).head_shard.is_whole}
    return found


@torch.no_grad()
def sums(model: PreTrainedModel, rank: int) -> dict[str, Any]:
    """Return, for a kernel that adds up and for what may hinder it, whether logits stay equal and how often it adds."""
    obstacles: dict[str, dict[str, Any]] = {
        "by a kernel": {},
        "unreachable": {"_place": lambda device: {"host": "one", "device": str(rank), "reached": "01"[rank]}},
        "unreserved": {"_allocate": (allocated, not_supported)[rank]},
        "unmapped": {"_mapped": (mapped, not_supported)[rank]},
    }
    ids, found = prompts()["input_ids"], {}
    with sparse_attention(model, "quest", token_budget=48):
        for form, tokens in {"": ids, ", one row": ids[:1, -1:]}.items():
            expected = model(tokens).logits
            for name, obstacle in obstacles.items():
                found[name + form] = summed(model, tokens, expected, obstacle)
            found["recording" + form] = summed(model, tokens, expected, {}, is_recorded=True)
    return found


def summed(
    model: PreTrainedModel,
    ids: torch.Tensor,
    expected: torch.Tensor,
    obstacle: dict[str, Any],
    is_recorded: bool = False,
) -> dict[str, Any]:
    """Return whether fused parts compute the expected logits twice, and what a stand-in for the kernel made of it."""
    rank, count, with_addend = torch.distributed.get_rank(), 0, 0

    def add_up(tensor: torch.Tensor, *others: Any, rank: int, addend: Any, combined: Any) -> None:
        nonlocal count, with_addend
        count += 1
        torch.distributed.all_reduce(tensor)
        if combined is not None:
            with_addend += 1
            combined.copy_(tensor + addend)

    stand_ins = {
        "_is_served": lambda tensor, group: True,
        "_place": lambda device: {"host": "one", "device": str(rank), "reached": "10"[rank]},
        "_allocate": allocated,
        "_mapped": mapped,
        "one_shot_all_reduce": add_up,
        "_memory": {},
    }
    with ExitStack() as stack:
        stack.enter_context(patch.multiple(one_shot, **{**stand_ins, **obstacle}))
        stack.enter_context(patch("torch.cuda.is_current_stream_capturing", return_value=is_recorded))
        stack.enter_context(patch.object(fusing, "BACKEND", "eager"))
        combinations, logits = Combinations(), []
        for _ in range(2):
            with fusing.fused(model, combinations):
                logits.append(model(ids).logits)
    are_equal = all(torch.equal(each, expected) for each in logits)
    return {"logits are equal": are_equal, "sums": count, "with addend": with_addend}


def allocated(ranks: Any, device: torch.device) -> torch.Tensor:
    """Stand in for memory that can be mapped on other devices."""
    return torch.empty(0)


def mapped(buffer: torch.Tensor, ranks: Any, group: Any) -> one_shot.SharedMemory:
    """Stand in for the memory of all processes."""
    return one_shot.SharedMemory([], torch.empty(0), ranks.rank, held=None)


def not_supported(*arguments: Any) -> Any:
    """Fail, as where a driver does not share memory."""
    raise RuntimeError("not supported")


SCENARIOS = {
    scenario.__name__: scenario
    for scenario in (beams, turns, static, compiled, looked_up, sampled, on_host, offloaded, speculated, ahead, forked)
}


def refusals(folder: Path, model: PreTrainedModel, rank: int) -> dict[str, str]:
    """Return what a process says of what cannot work; none may wait for another one."""
    patching = {
        "other budget": partial(patch_model, model, "quest", token_budget=48 + 16 * rank),
        "other method": partial(patch_model, model, ("quest", "tova")[min(rank, 1)], token_budget=48),
        "bad budget on one rank": partial(patch_model, model, "quest", token_budget=48 if rank != 1 else 0),
        "unknown method": partial(patch_model, model, "guess"),
        "heads": partial(patch_alone, folder, "three-heads"),
    }
    found = {name: attempt(action) for name, action in patching.items()}
    with patch.object(tensor_parallel, "AGREEMENT_TIMEOUT", timedelta(seconds=2)):
        found["missing rank"] = attempt(partial(patch_model, model, "quest")) if rank == 0 else "did not come"
    torch.distributed.barrier()
    if rank != 0:
        attempt(partial(patch_model, model, "guess"))  # it must take part in as many calls as rank 0
    found["is patched"] = str(is_patched(model))
    ids = prompts()["input_ids"][:1]
    found["prepare_context"] = attempt(partial(prepare_context, model, ids, progress=False, window=8))
    found["calibrate_channels"] = attempt(partial(calibrate_channels, model, ids, folder / "unwritten.json"))
    with sparse_attention(model, "quest", token_budget=48):
        arguments = {**PROMPT, "cache_implementation": "static"}
        graph = DecodeAhead(cuda_graph=True)
        found["graph over gloo"] = attempt(partial(model.generate, **prompts(), **arguments, custom_generate=graph))
        cache = SparseCache.for_model(model)
        model(ids, past_key_values=cache)
        found["save"] = attempt(partial(cache.save, folder / "unwritten.safetensors", model))
        found["load"] = attempt(partial(SparseCache.load, folder / "unwritten.safetensors", model))
        whole = SparseCache(model.config, patched_method(model))
        found["cache of all heads"] = attempt(partial(model, ids, past_key_values=whole))
    return found


def patch_alone(folder: Path, name: str) -> None:
    """Patch a model whose heads cannot be divided."""
    patch_model(load(folder, name, torch.distributed.get_world_size()), "quest")


def attempt(action: Callable[[], Any]) -> Any:
    """Return an action's result, or its error as text."""
    try:
        return action()
    except Exception as error:
        traceback.print_exc()
        return f"{type(error).__name__}: {error}"


def run(rank: int, size: int, port: int, folder: Path, names: list[str] | None) -> None:
    """Run the cases of a process, all or some, and write what it found."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
    store = torch.distributed.TCPStore("localhost", port, is_master=False)
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.PrefixStore(f"{size} processes", store), rank=rank, world_size=size
    )
    found: dict[str, Any] = {"tokens": tokens_of(folder, size, names)}
    if names is None:
        model = load(folder, "llama", size)
        found["scenarios"] = {name: attempt(partial(scenario, model)) for name, scenario in SCENARIOS.items()}
        found["sums"] = attempt(partial(sums, model, rank))
        found["refusals"] = refusals(folder, model, rank)
        found["plans"] = of_plans(folder, size)
        found["by plan"] = attempt(partial(by_plan, folder))
    (folder / f"rank_{rank}_of_{size}.json").write_text(json.dumps(found))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    directory = Path(sys.argv[1])
    server = torch.distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    for processes, some in ((2, None), (4, FOUR)):
        # Forked, since each import of torch and Transformers takes seconds.
        arguments = (processes, server.port, directory, some)
        torch.multiprocessing.start_processes(run, arguments, nprocs=processes, start_method="fork")
