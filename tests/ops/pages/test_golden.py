"""Vectors computed by the released code of Quest (arXiv 2406.10774) and ArkVale, reproduced by the ops."""

import pytest
import torch
from hf_sparse_attn_kernels import page_bounds, page_scores, select_blocks

from tests.ops.helpers import IMPLS, device, golden, int32


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(("name", "page_size", "budget"), [("quest0", 16, 64), ("quest2", 32, 128), ("quest3", 16, 16)])
def test_quest_scores_and_pages(name, page_size, budget, impl):
    tensors = golden(name)
    keys = tensors["keys"]  # [1, heads, length, head_dim]
    query = tensors["query"][:, :, 0]
    heads, length, head_dim = keys.shape[1:]
    pages = -(-length // page_size)
    start, end = int32([0]), int32([length])

    page_min = torch.full((1, heads, pages, head_dim), float("nan"), device=device)
    page_max = page_min.clone()
    page_bounds(keys, page_min, page_max, start, end, page_size=page_size, num_new=length, impl=impl)
    scores = page_scores(
        query, page_min, page_max, start, end, page_size=page_size, scale=1.0, group_reduce="mean", impl=impl
    )
    expected = tensors["page_scores"][:, :, 0]
    torch.testing.assert_close(scores, expected, rtol=1e-5, atol=1e-4)

    max_blocks = min(max(3, min(length, budget) // page_size), pages)
    indices, counts = select_blocks(scores, start, end, block_size=page_size, max_blocks=max_blocks, impl=impl)
    assert (counts == max_blocks).all()
    selected = torch.zeros(1, heads, pages, dtype=torch.bool, device=device).scatter_(2, indices.long(), True)
    mask = selected.repeat_interleave(page_size, dim=2)[..., :length]
    assert torch.equal(mask, tensors["token_mask"][:, :, 0].bool())


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("name", ["cuboid_mean0", "cuboid_mean1"])
def test_arkvale_bounds_and_scores(name, impl):
    tensors = golden(name)
    _, pages, page_size, heads, head_dim = tensors["keys"].shape
    keys = tensors["keys"].flatten(1, 2).transpose(1, 2)  # [1, heads, length, head_dim]
    rows = {"seq_start": int32([0]), "seq_end": int32([pages * page_size]), "page_size": page_size, "impl": impl}
    page_min = torch.full((1, heads, pages, head_dim), float("nan"), device=device)
    page_max = page_min.clone()
    page_bounds(keys, page_min, page_max, num_new=pages * page_size, statistic="cuboid_mean", **rows)
    torch.testing.assert_close(page_min.transpose(1, 2), tensors["lower"], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(page_max.transpose(1, 2), tensors["upper"], rtol=1e-5, atol=1e-5)
    scores = page_scores(tensors["query"], page_min, page_max, scale=1.0, group_reduce="mean", **rows)
    torch.testing.assert_close(scores.transpose(1, 2), tensors["scores_per_head"], rtol=1e-5, atol=1e-4)
