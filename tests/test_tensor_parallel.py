"""Tensor parallelism over gloo: the tokens are those of one process, and what cannot work fails on every rank."""

import copy
import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import transformers
from hf_sparse_attn_kernels import select_tokens
from packaging.version import Version
from transformers import CompileConfig
from transformers.generation import GenerationMode

from hf_sparse_attn import METHODS, SparseCache, patch_model
from hf_sparse_attn.head_shard import WHOLE, HeadShard
from hf_sparse_attn.methods.sharded_votes import select_tokens_together
from hf_sparse_attn.patch.generation import _may_compile
from hf_sparse_attn.patched import get_patch
from tests import tensor_parallel as worker
from tests.models import make_model

ROOT = Path(__file__).parents[1]
TWO = [*(f"llama-{name}" for name in METHODS), *(f"llama-{name}" for name in worker.VARIANTS)]


def start(folder):
    """Start the processes, which see no CUDA device."""
    paths = [str(ROOT), str(ROOT / "kernels/torch-ext"), *filter(None, [os.environ.get("PYTHONPATH")])]
    settings = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-m", "tests.tensor_parallel", str(folder)]
    log = (folder / "log").open("w")
    return subprocess.Popen(command, cwd=ROOT, env={**os.environ, **settings}, stdout=log, stderr=subprocess.STDOUT)


def found_by(folder, processes):
    return [json.loads((folder / f"rank_{rank}_of_{processes}.json").read_text()) for rank in range(processes)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tensor-parallel")
    worker.write_models(folder)
    return folder


@pytest.fixture(scope="module")
def runs(folder):
    """The results of two and four processes, and of one."""
    process = start(folder)
    alone = {"tokens": worker.tokens_of(folder, 1)}
    model = worker.load(folder, "llama", 1)
    alone["scenarios"] = {name: scenario(model) for name, scenario in worker.SCENARIOS.items()}
    alone["plans"] = worker.of_plans(folder, 1)
    assert process.wait(timeout=300) == 0, (folder / "log").read_text()[-4000:]
    return {1: alone, 2: found_by(folder, 2), 4: found_by(folder, 4)}


def check_case(runs, processes, name):
    check_ranks([rank["tokens"][name] for rank in runs[processes]], runs[1]["tokens"][name])


def check_ranks(ranks, alone):
    assert [rank["tokens"] for rank in ranks] == [alone["tokens"]] * len(ranks)
    for count in ("kv_bytes", "dense_bytes"):  # each rank counts its own heads
        assert sum(rank[count] for rank in ranks) == alone[count]


@pytest.mark.parametrize("name", [*TWO, *(f"llama-{name}" for name in worker.files(Path()))])
def test_tokens_are_those_of_one_process(runs, name):
    check_case(runs, 2, name)


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "mistral"])
@pytest.mark.parametrize("name", worker.ON_EVERY_FAMILY)
def test_tokens_of_other_families(runs, family, name):
    check_case(runs, 2, f"{family}-{name}")


def test_tp_plan_divides_as_a_distributed_config_does(runs):
    ranks = [rank["by plan"] for rank in runs[2]]
    if Version(transformers.__version__) < Version("5.17"):  # where only DistributedConfig divides a model
        assert all("unexpected keyword argument 'tp_plan'" in rank for rank in ranks)
    else:
        check_ranks(ranks, runs[1]["tokens"]["llama-quest"])


def test_methods_are_sparse(runs):
    alone = runs[1]
    everything = {"full", "minference", "ntk", "self_extend"}  # in decode steps
    for name in set(METHODS) - everything:
        found = alone["tokens"][f"llama-{name}"]
        assert found["kv_bytes"] < 0.9 * found["dense_bytes"]
    assert alone["tokens"]["llama-tokenselect-reuse"]["counts"]["selections_kept"] > 0


@pytest.mark.parametrize("model_type", worker.GATHERED)
def test_models_whose_processes_have_all_heads(runs, model_type):
    for rank in runs[2]:
        assert rank["plans"][model_type] == runs[1]["plans"][model_type]
        assert rank["plans"][model_type]["is_whole"]


@pytest.mark.parametrize("model_type", [*worker.DIVIDED, *worker.WITH_SINKS])
def test_heads_and_sinks_that_are_divided(runs, model_type):
    for rank in runs[2]:
        assert rank["plans"][model_type] == {**runs[1]["plans"][model_type], "is_whole": False}


@pytest.mark.parametrize("scenario", worker.SCENARIOS)
def test_scenarios(runs, scenario):
    for rank in runs[2]:
        assert rank["scenarios"][scenario] == runs[1]["scenarios"][scenario]


def test_sums_of_fused_steps_by_a_kernel(runs):
    """A stand-in for the kernel, which needs two GPUs: all sums of two passes reach it, and torch makes none.

    The second pass knows what is added to the sums.
    """
    sums = 2 * worker.OVERRIDES["num_hidden_layers"]
    expected = {"logits are equal": True, "sums": 2 * sums, "with addend": sums}
    by_torch = {**expected, "sums": 0, "with addend": 0}
    found = {"by a kernel": expected, **dict.fromkeys(("unreachable", "unreserved", "unmapped", "recording"), by_torch)}
    for rank in runs[2]:
        assert rank["sums"] == {key + form: value for form in ("", ", one row") for key, value in found.items()}


@pytest.mark.parametrize(
    ("what", "error"),
    [
        ("other budget", "ranks must be patched alike, but method is Quest("),
        ("other method", "on rank 0 and TOVA("),
        ("unknown method", "unknown method 'guess'"),
        ("heads", "does not divide the model's 3 KV heads; allowed: 1, 3"),
        ("prepare_context", "prepare_context is not supported under tensor parallelism"),
        ("calibrate_channels", "calibrate_channels is not supported under tensor parallelism"),
        ("save", "SparseCache.save is not supported under tensor parallelism"),
        ("load", "SparseCache.load is not supported under tensor parallelism"),
        ("graph over gloo", "cuda_graph=True needs the NCCL backend under tensor parallelism, got 'gloo'"),
        ("cache of all heads", "create it with SparseCache.for_model(model)"),
    ],
)
def test_refusal_on_every_rank(runs, what, error):
    for rank in runs[2]:
        assert rank["refusals"][what].startswith("ValueError: ")
        assert error in rank["refusals"][what]


def test_a_rank_that_cannot_patch_tells_the_others(runs):
    ranks = runs[2]
    own = "ValueError: quest: token_budget must be at least 1, got 0"
    assert [rank["refusals"]["bad budget on one rank"] for rank in ranks] == [
        f"ValueError: rank 1 could not patch its part of the model: {own}",
        own,
    ]


def test_a_missing_rank_is_an_error(runs):
    ranks = runs[2]
    assert ranks[0]["refusals"]["missing rank"].startswith(
        "RuntimeError: rank 1 of 2 did not come within 2 s: every rank must call patch_model"
    )
    assert all(rank["refusals"]["is patched"] == "False" for rank in ranks)


@pytest.mark.parametrize("name", worker.FOUR)
def test_four_processes(runs, name):
    check_case(runs, 4, name)


@pytest.mark.parametrize("pool_size", [0, 3])
@pytest.mark.parametrize("vote", ["soft", "logits", "head"])
def test_votes_choose_as_the_op_does(vote, pool_size):
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    keys, query = normal(3, 4, 100, 16), normal(3, 8, 16)
    starts, ends = torch.tensor([0, 21, 60], dtype=torch.int32), torch.tensor([90, 90, 90], dtype=torch.int32)
    budget = {"max_tokens": 48, "sink_tokens": 5, "recent_tokens": 19, "vote": vote, "pool_size": pool_size}

    def caches():
        names = {"cached_query": torch.zeros_like(query), "cached_tokens": torch.zeros(3, 24, dtype=torch.int32)}
        counts = {"counter": torch.zeros(4, dtype=torch.int64), "reuse_counter": torch.zeros(2, dtype=torch.int64)}
        return {**names, "cached_valid": torch.zeros(3, dtype=torch.int32), **counts}

    own, op = caches(), caches()
    for step in range(4):
        query = query + 0.4 * normal(*query.shape)
        found = select_tokens_together(query, keys, starts, ends + step, shard=WHOLE, **budget, threshold=0.9, **own)
        expected = select_tokens(query, keys, starts, ends + step, **budget, threshold=0.9, **op)
        for actual, wanted in zip((*found, *own.values()), (*expected, *op.values()), strict=True):
            torch.testing.assert_close(actual, wanted, rtol=0, atol=0)
    assert 0 < own["reuse_counter"][0] < own["reuse_counter"][1]


def test_steps_are_compiled_where_asked_for():
    model = make_model("llama")
    patch_model(model, "quest")
    decides = partial(_may_compile, model, model.generation_config, GenerationMode.GREEDY_SEARCH)
    assert decides()
    get_patch(model).head_shard = HeadShard(rank=0, size=2)
    assert not decides()
    model.generation_config.compile_config = CompileConfig()
    assert decides()


def test_heads_that_something_else_has_divided_are_refused():
    model = make_model("llama")
    cache = SparseCache(model.config)
    half = torch.zeros(1, 1, 5, 16)
    with pytest.raises(ValueError, match=r"layer 0 gets keys of 1 KV heads, but .* says 2, 2 in this process"):
        cache.update(half, half, 0)


def test_head_shard():
    shard = HeadShard(rank=1, size=2)
    assert shard.own((0, 3, 4, 7), 4) == (0, 3)
    assert shard.own(None, 4) is None
    assert shard.slice(("a", "b", "c", "d")) == ("c", "d")
    assert shard.slice(torch.arange(8).view(1, 8), dim=1).tolist() == [[4, 5, 6, 7]]
    assert WHOLE.own((0, 3), 4) == (0, 3)
    assert copy.deepcopy(shard) is shard
    with pytest.raises(ValueError, match=r"saving is not supported .* rank 1 of 2"):
        shard.require_whole("saving")
