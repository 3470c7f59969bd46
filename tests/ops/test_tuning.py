"""Launch choices: which one a shape takes, and that none changes a result."""

import json

import pytest
import torch
from hf_sparse_attn_kernels import _tuning as tuning
from hf_sparse_attn_kernels import append_and_select, dense_decode, page_bounds, sparse_decode

from tests.ops.helpers import device, empty_bounds, grid, make_rows

OWN_TESTS = (
    "cluster_step",
    "code_step",
    "rank",
    "token_decode",
    "rope_decode",
    "runs_decode",
    "progressive_decode",
    "progressive_step",
    "code_scan",
    "softmax_scan",
    "bit_scan",
    "token_choice",
)
"""Launches whose candidates are tested next to the ops."""
CANDIDATES = [
    (op, candidate) if candidate in (candidates[0], candidates[-1]) else grid(op, candidate)
    for op, candidates in tuning.CANDIDATES.items()
    for candidate in candidates
    if op not in OWN_TESTS
]


def _step(lengths, impl, kv_heads=1, group=4, max_blocks=4, finished=None, **options):
    """Selection, sparse and dense attention of one step over long rows."""
    rows = make_rows(lengths, kv_heads=kv_heads, group=group, head_dim=32, **options)
    bounds = empty_bounds(rows, 4, int8=True)
    sequence = {"seq_start": rows.start, "seq_end": rows.end}
    page_bounds(rows.keys, page_size=4, num_new=10_000, impl="reference", **sequence, **bounds)
    last = (rows.end - 1).long()
    batch = torch.arange(len(lengths), device=device)
    token = (buffer[batch, :, last] for buffer in (rows.keys, rows.values))
    blocks, counts = append_and_select(
        rows.query,
        *token,
        rows.keys,
        rows.values,
        page_size=4,
        max_blocks=max_blocks,
        sink_blocks=1,
        recent_blocks=1,
        finished=finished,
        impl=impl,
        **sequence,
        **bounds,
    )
    buffers = (rows.query, rows.keys, rows.values)
    sparse, _ = sparse_decode(
        *buffers, blocks, counts, rows.start, rows.end, block_size=4, finished=finished, impl=impl
    )
    dense, _ = dense_decode(*buffers, rows.start, rows.end, finished=finished, impl=impl)
    return blocks, counts, sparse, dense


@pytest.mark.parametrize(("op", "candidate"), CANDIDATES)
def test_no_choice_changes_a_result(op, candidate):
    expected = _step([150, 61], "reference")
    with tuning.forced(**{op: candidate}):
        blocks, counts, sparse, dense = _step([150, 61], "triton")
    assert torch.equal(blocks, expected[0])
    assert torch.equal(counts, expected[1])
    torch.testing.assert_close(sparse, expected[2], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(dense, expected[3], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("lengths", "max_blocks", "group"),
    [
        ([1000, 3, 250], 4, 3),
        ([777, 16], 9, 1),
        ([260], 2, 3),
        grid([1000, 3, 250], 4, 1),
        grid([777, 16], 9, 3),
        grid([260], 2, 1),
    ],
)
def test_two_levels_select_the_same_as_one(lengths, max_blocks, group):
    options = {"kv_heads": 2, "group": group, "max_blocks": max_blocks}
    expected = _step(lengths, "reference", **options)
    for first in (1, 1 << 20):
        with tuning.forced(select={"two_levels_from": first}):
            blocks, counts, *_ = _step(lengths, "triton", **options)
        assert torch.equal(blocks, expected[0])
        assert torch.equal(counts, expected[1])


def test_two_levels_take_equal_scores_from_the_front():
    rows = make_rows([512], kv_heads=1, group=1, head_dim=32)
    rows.keys[:, :, :512] = 1.0  # every page alike
    bounds = empty_bounds(rows, 4, int8=True)
    sequence = {"seq_start": rows.start, "seq_end": rows.end}
    page_bounds(rows.keys, page_size=4, num_new=512, impl="reference", **sequence, **bounds)
    token = (rows.keys[:, :, 511], rows.values[:, :, 511])
    options = {"page_size": 4, "max_blocks": 6, "recent_blocks": 1, **sequence, **bounds}
    with tuning.forced(select={"two_levels_from": 1}):
        blocks, _ = append_and_select(rows.query, *token, rows.keys, rows.values, impl="triton", **options)
    assert blocks.flatten().tolist() == [0, 1, 2, 3, 4, 127]


def test_programs_are_counted_back_to_zero():
    finished = torch.zeros(2, 1, dtype=torch.int32, device=device)
    _step([300, 150], "triton", finished=finished)
    assert not finished.any()


@pytest.mark.parametrize(
    ("finished", "error", "message"),
    [
        (torch.zeros(2, 1), TypeError, "finished has dtype torch.float32; allowed: torch.int32"),
        (torch.zeros(1, 2, dtype=torch.int32), ValueError, r"finished has shape \[1, 2\]; allowed"),
    ],
)
def test_errors_name_the_argument(finished, error, message):
    with pytest.raises(error, match=message):
        _step([20, 9], "reference", finished=finished.to(device))


def test_nearest_measured_shape_decides(tmp_path, monkeypatch):
    near, far = ({"shape": dict(zip(tuning.SHAPE, shape, strict=True)), "choice": {"warps": warps}}
                 for shape, warps in (((8, 4, 128, 32768), 2), ((32, 1, 64, 1024), 8)))  # fmt: skip
    table = tmp_path / "tuned.json"
    table.write_text(json.dumps({"9.0": {"select": [near, far]}}))
    monkeypatch.setattr(tuning, "TUNED", table)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    tuning.forget()
    try:
        cuda = torch.device("cuda", 0)
        assert tuning.choice("select", cuda, pairs=16, group=4, head_dim=128, tokens=60000) == {"warps": 2}
        assert tuning.choice("select", cuda, pairs=32, group=2, head_dim=64, tokens=2048) == {"warps": 8}
        assert tuning.choice("score", cuda, pairs=16, group=4, head_dim=128, tokens=60000) == tuning.DEFAULTS["score"]
    finally:
        tuning.forget()


def test_table_holds_whole_choices():
    for measured in json.loads(tuning.TUNED.read_text()).values():
        for op, entries in measured.items():
            assert entries
            for entry in entries:
                assert set(entry["shape"]) == set(tuning.SHAPE)
                assert set(entry["choice"]) == set(tuning.DEFAULTS[op])
