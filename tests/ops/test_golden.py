"""Vectors computed by Quest's released code (arXiv 2406.10774), reproduced by the ops."""

import json
from pathlib import Path

import pytest
import torch
from hf_sparse_attn_kernels import page_bounds, page_scores, select_blocks
from safetensors.torch import load_file

from tests.ops.helpers import IMPLS, device, int32

GOLDEN = Path(__file__).parents[3] / "shared" / "golden"


@pytest.fixture(scope="module")
def vectors():
    if not (GOLDEN / "selection.safetensors").exists():
        pytest.skip(f"shared/ data absent: no golden vectors at {GOLDEN}")
    layouts = json.loads((GOLDEN / "selection.json").read_text())
    return load_file(GOLDEN / "selection.safetensors"), layouts


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("name", ["quest0", "quest1", "quest2", "quest3"])
def test_quest_scores_and_pages(vectors, name, impl):
    tensors, layouts = vectors
    page_size, budget = layouts[name]["page_size"], layouts[name]["token_budget"]
    keys = tensors[f"{name}.keys"].to(device)  # [1, heads, length, head_dim]
    query = tensors[f"{name}.query"].to(device)[:, :, 0]
    heads, length, head_dim = keys.shape[1:]
    pages = -(-length // page_size)
    start, end = int32([0]), int32([length])

    page_min = torch.full((1, heads, pages, head_dim), float("nan"), device=device)
    page_max = page_min.clone()
    page_bounds(keys, page_min, page_max, start, end, page_size=page_size, num_new=length, impl=impl)
    scores = page_scores(
        query, page_min, page_max, start, end, page_size=page_size, scale=1.0, group_reduce="mean", impl=impl
    )
    expected = tensors[f"{name}.page_scores"].to(device)[:, :, 0]
    torch.testing.assert_close(scores, expected, rtol=1e-5, atol=1e-4)

    max_blocks = min(max(3, min(length, budget) // page_size), pages)
    indices, counts = select_blocks(scores, start, end, block_size=page_size, max_blocks=max_blocks, impl=impl)
    assert (counts == max_blocks).all()
    selected = torch.zeros(1, heads, pages, dtype=torch.bool, device=device).scatter_(2, indices.long(), True)
    mask = selected.repeat_interleave(page_size, dim=2)[..., :length]
    assert torch.equal(mask, tensors[f"{name}.token_mask"].to(device)[:, :, 0].bool())
