"""Oracle top-k against its definition: no choice of as many tokens holds more attention."""

import pytest
import torch

from hf_sparse_attn import OracleTopK, patch_model
from tests.methods.coded import generate_watched
from tests.models import make_model

pytestmark = pytest.mark.usefixtures("exact")

GREEDY = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0, "disable_compile": True}
PROMPT, BUDGET = 63, 24


def best_by_sorting(queries, keys, group_reduce):
    """The tokens that a KV head reads, of [group, d] queries and [n, d] keys, one head and one token after another."""
    scores = [[float(query @ key) * len(query) ** -0.5 for key in keys] for query in queries]
    if group_reduce == "softmax":
        scores = [torch.tensor(row, dtype=torch.float64).softmax(0).tolist() for row in scores]
    combine = max if group_reduce == "max" else sum
    totals = [combine(column) for column in zip(*scores, strict=True)]
    return sorted(sorted(range(len(keys)), key=lambda token: -totals[token])[:BUDGET])


@pytest.mark.parametrize("group_reduce", ["softmax", "mean", "max"])
@pytest.mark.parametrize("head_dim", [16, 80])
@torch.inference_mode()
def test_every_step_reads_the_tokens_with_the_highest_scores(group_reduce, head_dim, monkeypatch):
    starts = [0, 17]
    method = OracleTopK(token_budget=BUDGET, group_reduce=group_reduce)
    steps, record, stats = generate_watched(monkeypatch, method, head_dim, PROMPT, starts, GREEDY)
    layer, kv_heads, scored = steps.layer, 2, 0
    is_newest_read = []
    for row, start in enumerate(starts):
        for step, query in enumerate(steps.queries):
            end = PROMPT + 1 + step
            scored += (end - start) * kv_heads
            for head in range(kv_heads):
                queries = query[row].unflatten(0, (kv_heads, -1))[head]
                keys = layer.keys[row, head, start:end].double()
                reads = record.reads(1, step, row)[head, start - end :].cpu().nonzero().flatten().tolist()
                assert reads == best_by_sorting(queries.cpu(), keys.cpu(), group_reduce)
                is_newest_read.append(reads[-1] == end - start - 1)
    assert len(steps.queries) == GREEDY["max_new_tokens"] - 1
    assert not all(is_newest_read)  # nothing is read in any case
    assert stats.layers[1].metadata_bytes == scored * head_dim * layer.keys.element_size()
    assert stats.layers[1].tokens_read == len(steps.queries) * len(starts) * kv_heads * BUDGET


@pytest.mark.parametrize(
    ("parameters", "error", "message"),
    [
        ({"token_budget": 0}, ValueError, "oracle_topk: token_budget must be at least 1, got 0"),
        ({"token_budget": 2.5}, TypeError, "token_budget must be a whole number, got 2.5"),
        ({"group_reduce": "sum"}, ValueError, "group_reduce must be one of softmax, mean, max, got 'sum'"),
        ({"dense_layers": -1}, ValueError, "oracle_topk: dense_layers must be 0 or more, got -1"),
    ],
)
def test_bad_arguments_are_named(parameters, error, message):
    with pytest.raises(error, match=message):
        patch_model(make_model("llama"), "oracle_topk", **parameters)
