"""The references read the lengths of CPU tensors, but not of CUDA tensors; results must be the same."""

import pytest
import torch
from hf_sparse_attn_kernels import (
    _reference,
    append_and_rank,
    append_and_select,
    dense_decode,
    page_bounds,
    page_scores,
    select_blocks,
    sparse_decode,
)
from hf_sparse_attn_kernels.attention import reference as attention
from hf_sparse_attn_kernels.pages import reference as pages
from hf_sparse_attn_kernels.pages import reference_bounds as bounds

from tests.ops.helpers import device, empty_bounds, int32, make_rows


@pytest.fixture
def lengths_on_device(monkeypatch):
    """Take the path of tensors whose lengths the host does not know."""
    for module in (_reference, attention, bounds, pages):
        monkeypatch.setattr(module, "host_lengths", lambda start, end: None)


def _run(lengths, int8, dtype, kv_heads, group):
    """Run every op once on new rows; return all outputs and written tensors."""
    rows = make_rows(lengths, kv_heads=kv_heads, group=group, dtype=dtype)
    bounds = empty_bounds(rows, 16, int8=int8)
    row_ends = {"seq_start": rows.start, "seq_end": rows.end}
    options = {"impl": "reference", **row_ends}
    counter = torch.zeros(4, dtype=torch.int64, device=device)
    budget = {"max_blocks": 4, "sink_blocks": 1, "recent_blocks": 1}

    page_bounds(rows.keys, page_size=16, num_new=5, **bounds, **options)
    page_bounds(rows.keys, page_size=16, num_new=1000, **bounds, **options)
    page_bounds(rows.keys, page_size=16, num_new=1, **bounds, **options)
    scores = page_scores(rows.query, page_size=16, **bounds, **options)
    selected = select_blocks(scores, block_size=16, **budget, **options)
    options["seq_end"] = torch.where(rows.end > rows.start, rows.end + 1, rows.end)
    new_key, new_value = (rows.query[:, : kv_heads * group : group].contiguous() + n for n in range(2))
    tokens = (rows.query, new_key, new_value, rows.keys, rows.values)
    chosen = append_and_select(*tokens, page_size=16, counter=counter, **bounds, **budget, **options)
    ranked = append_and_rank(*tokens, page_size=16, counter=counter, **bounds, **options)
    decode = {"counter": counter, **options}
    sparse = sparse_decode(rows.query, rows.keys, rows.values, *chosen, block_size=16, **decode)
    dense = dense_decode(rows.query, rows.keys, rows.values, **decode)
    return [rows.keys, rows.values, *bounds.values(), scores, *selected, *chosen, *ranked, *sparse, *dense, counter]


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize(
    ("lengths", "kv_heads", "group", "dtype"),
    [
        ([0, 1, 14, 15, 16, 150], 2, 1, torch.float32),
        ([120, 120], 1, 3, torch.float64),
        ([0, 0], 1, 2, torch.float32),
    ],
)
def test_without_lengths_on_the_host(request, lengths, kv_heads, group, dtype, int8):
    known = _run(lengths, int8, dtype, kv_heads, group)
    request.getfixturevalue("lengths_on_device")
    for first, second in zip(known, _run(lengths, int8, dtype, kv_heads, group), strict=True):
        torch.testing.assert_close(first, second, rtol=1e-5, atol=1e-5, equal_nan=True)
        assert first.is_floating_point() or torch.equal(first, second)


def test_ties_and_nan_among_rows_of_one_length():
    nan, inf = float("nan"), float("inf")
    scores = torch.tensor(
        [
            [1.0, 2.0, 2.0, 2.0, 0.0, 3.0, 1.0, 1.0],
            [nan, 2.0, 4.0, 5.0, 0.0, 3.0, 1.0, 1.0],
            [-inf, -inf, -inf, -inf, -0.0, 0.0, -inf, -inf],
            [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0],
            [0.0, 9.0, nan, nan, 4.0, 5.0, 5.0, 7.0],
        ],
        device=device,
    )
    expected = [[0, 1, 5, 7], [0, 2, 3, 7], [0, 4, 5, 7], [0, 5, 6, 7], [0, 1, 5, 7]]
    budget = {"max_blocks": 4, "sink_blocks": 1, "recent_blocks": 1}
    for rows in ([0], [1], [2], [3], [4], [0, 1, 2, 3, 4], [0, 1], [3, 3]):
        start, end = int32([2] * len(rows)), int32([10] * len(rows))
        options = {"block_size": 1, "impl": "reference", **budget}
        indices, counts = select_blocks(scores[rows][:, None], start, end, **options)
        assert indices[:, 0].tolist() == [expected[row] for row in rows]
        assert (counts == 4).all()
        assert torch.equal(select_blocks(scores[rows][:, None].double(), start, end, **options)[0], indices)
