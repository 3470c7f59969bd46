"""`sparse_decode` with RoPE by slot, and with one selection for all KV heads."""

import pytest
import torch
from hf_sparse_attn_kernels import _tuning as tuning
from hf_sparse_attn_kernels import sparse_decode

from tests.ops.helpers import IMPLS, allowed_error, device, grid, make_rows, rope_table, rotate


def _step(lengths, most, *, shared=True, **options):
    """Rows, a random selection of at most `most` tokens with the row's own as the last, and RoPE's table."""
    rows = make_rows(lengths, **options)
    batch, kv_heads, _, head_dim = rows.keys.shape
    generator = torch.Generator().manual_seed(1)
    heads = 1 if shared else kv_heads
    indices = torch.full((batch, heads, most), -1, dtype=torch.int32)
    counts = torch.zeros(batch, heads, dtype=torch.int32)
    for row, length in enumerate(lengths):
        for head in range(heads):
            count = min(length, max(1, most - head - 2 * row))  # another number for every row and head
            chosen = torch.randperm(max(0, length - 1), generator=generator)[: max(0, count - 1)].sort()[0].tolist()
            indices[row, head, :count] = torch.tensor([*chosen, length - 1][:count])
            counts[row, head] = count
    return rows, indices.to(device), counts.to(device), rope_table(most, head_dim)


def _eager(rows, indices, counts, rope, dtype):
    """Plain attention of each query head over its tokens, every step rounded to `dtype`."""
    batch, q_heads, head_dim = rows.query.shape
    group = q_heads // rows.keys.shape[1]
    out = torch.zeros(batch, q_heads, head_dim, device=device, dtype=dtype)
    lse = torch.full((batch, q_heads), float("-inf"), device=device, dtype=dtype)
    for row in range(batch):
        for head in range(q_heads):
            listed = min(head // group, indices.shape[1] - 1)
            count = counts[row, listed].item()
            if count == 0:
                continue
            tokens = rows.start[row] + indices[row, listed, :count]
            k, v = (buffer[row, head // group, tokens].to(dtype) for buffer in (rows.keys, rows.values))
            q = rows.query[row, head].to(dtype)
            if rope:
                k, q = rotate(k, torch.arange(count), **rope), rotate(q, counts[row, listed] - 1, **rope)
            scores = (k @ q) * head_dim**-0.5
            out[row, head] = scores.softmax(dim=0) @ v
            lse[row, head] = scores.logsumexp(dim=0)
    return out, lse


def _decode(rows, indices, counts, rope, **options):
    arguments = (rows.query, rows.keys, rows.values, indices, counts, rows.start, rows.end)
    return sparse_decode(*arguments, block_size=1, **rope, **options)


@pytest.mark.parametrize(
    ("lengths", "most", "shared", "rope", "kv_heads", "group", "head_dim", "dtype"),
    [
        ([1, 15, 16, 63, 0], 20, True, True, 2, 1, 64, torch.float32),
        ([200, 40], 65, False, True, 2, 3, 80, torch.bfloat16),
        ([300, 90], 111, True, True, 1, 7, 128, torch.float16),
        ([300, 90], 111, True, False, 3, 7, 128, torch.bfloat16),
        ([50], 30, True, True, 3, 1, 16, torch.float32),  # one tile, so one split
        ([77, 40], 70, False, True, 2, 2, 256, torch.bfloat16),
    ],
)
def test_error_is_bounded_by_the_eager_error(lengths, most, shared, rope, kv_heads, group, head_dim, dtype):
    rows, *selection, table = _step(
        lengths, most, shared=shared, kv_heads=kv_heads, group=group, head_dim=head_dim, dtype=dtype
    )
    table = table if rope else {}
    exact, exact_lse = _eager(rows, *selection, table, torch.float64)
    eager, eager_lse = _eager(rows, *selection, table, dtype)
    chosen = exact_lse > float("-inf")
    allowed_lse = 2 * (eager_lse.double() - exact_lse)[chosen].abs().max().item() + 1e-5
    for impl in IMPLS:
        out, lse = _decode(rows, *selection, table, impl=impl)
        allowed = allowed_error(eager, exact, head_dim, impl)
        assert (out.double() - exact).abs().max().item() <= allowed, impl
        assert (lse.double() - exact_lse)[chosen].abs().max().item() <= allowed_lse, impl
        assert (out[~chosen] == 0).all()
        assert (lse[~chosen] == float("-inf")).all()


@pytest.mark.parametrize("shared", [False, True])
def test_reference_is_exact_in_float64(shared):
    rows, *rest = _step([100, 40], 30, shared=shared, group=3, dtype=torch.float64)
    torch.testing.assert_close(
        _decode(rows, *rest, impl="reference"), _eager(rows, *rest, torch.float64), rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize("impl", IMPLS)
def test_a_shared_selection_equals_the_same_one_for_every_head(impl):
    rows, indices, counts, rope = _step([100, 40], 30, kv_heads=3, group=2)
    results = []
    for heads in (1, 3):
        counter = torch.zeros(4, dtype=torch.int64, device=device)
        selection = (indices.expand(-1, heads, -1), counts.expand(-1, heads))
        results.append((_decode(rows, *selection, rope, counter=counter, impl=impl), counter))
    (shared, shared_counter), (separate, separate_counter) = results
    assert all(map(torch.equal, shared, separate))
    assert torch.equal(shared_counter, separate_counter)
    assert shared_counter.tolist() == [3 * counts.sum().item(), 3 * 140, 0, 1]


@pytest.mark.parametrize("impl", IMPLS)
def test_nothing_but_the_selected_tokens_is_read(impl):
    rows, indices, counts, rope = _step([90, 61], 30, group=3)
    expected = _decode(rows, indices, counts, rope, impl=impl)
    for row, length in enumerate(rows.lengths):
        for token in set(range(length)) - set(indices[row, 0, : counts[row, 0].item()].tolist()):
            rows.keys[row, :, 3 * row + token] = float("nan")
            rows.values[row, :, 3 * row + token] = float("inf")
    assert all(map(torch.equal, _decode(rows, indices, counts, rope, impl=impl), expected))


@pytest.mark.parametrize("impl", IMPLS)
@torch.no_grad()
def test_compiled_is_one_node_with_the_results_of_an_eager_call(impl):
    torch._dynamo.reset()
    rows, *rest = _step([40, 5], 9, group=2)
    compiled = torch.compile(_decode, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(rows, *rest, impl=impl), _decode(rows, *rest, impl=impl))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"rope_cos": None}, ValueError, r"rope_cos is None; allowed: a tensor, because rope_sin is one"),
        ({"rope_sin": None}, ValueError, r"rope_sin is None; allowed: a tensor, because rope_cos is one"),
        ({"block_size": 2}, ValueError, r"block_size=2; allowed with rope_cos: 1"),
        ({"rope_cos": torch.zeros(5, 32)}, ValueError, r"slots=5 of rope_cos; allowed: at least max_blocks=6"),
        ({"rope_cos": torch.zeros(6, 64)}, ValueError, r"rope_cos has shape \[6, 64\]; allowed"),
        ({"rope_sin": torch.zeros(6, 32).half()}, TypeError, r"rope_sin has dtype torch.float16; allowed"),
        ({"rope_sin": torch.zeros(32, 6).T}, ValueError, r"rope_sin has strides \[1, 6\]; allowed: contiguous"),
        ({"block_indices": torch.zeros(1, 3, 6).int()}, ValueError, r"block_indices has shape \[1, 3, 6\]; allowed"),
        ({"block_counts": torch.ones(1, 2).int()}, ValueError, r"block_counts has shape \[1, 2\]; allowed"),
    ],
)
def test_errors_name_the_argument(change, error, message):
    rows, indices, counts, rope = _step([20], 6)
    arguments = {
        "query": rows.query, "keys": rows.keys, "values": rows.values, "block_indices": indices,
        "block_counts": counts, "seq_start": rows.start, "seq_end": rows.end, "block_size": 1, **rope,
    }  # fmt: skip
    change = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in change.items()}
    with pytest.raises(error, match=message):
        sparse_decode(**(arguments | change))


@pytest.mark.parametrize(
    ("candidate", "merge_apart"),
    [
        (candidate, merge_apart) if at % 2 == merge_apart else grid(candidate, merge_apart)
        for at, candidate in enumerate(tuning.CANDIDATES["rope_decode"])
        for merge_apart in (0, 1)
    ],
)
def test_no_launch_choice_changes_a_result(candidate, merge_apart):
    step = _step([300, 90], 111, kv_heads=2, group=7, head_dim=64)
    expected = _decode(*step, impl="reference")
    with tuning.forced(rope_decode={**candidate, "merge_apart": merge_apart}):
        actual = _decode(*step, impl="triton")
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
