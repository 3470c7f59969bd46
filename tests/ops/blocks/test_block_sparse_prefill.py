"""Attention of blocks of queries to blocks of keys and to columns, against plain attention query by query."""

import pytest
import torch
from hf_sparse_attn_kernels import block_sparse_prefill, dense_decode

from tests.ops.helpers import IMPLS, allowed_error, check_schema, device, int32, make_rows


def _lists(chosen, width):
    """Pad lists to one width, the rest -1."""
    return [[*each, *[-1] * (width - len(each))] for each in chosen]


def _prompt(lengths, queries, block_size, *, columns=True, seed=0, group=1, share=0.5, **options):
    """Rows, their last tokens' queries, and random blocks and columns of every query head."""
    rows = make_rows(lengths, group=group, seed=seed, **options)
    batch, kv_heads, _, head_dim = rows.keys.shape
    generator = torch.Generator().manual_seed(seed + 1)
    query = torch.randn(batch, queries, kv_heads * group, head_dim, generator=generator)
    query_blocks = (queries + 2 * block_size - 2) // block_size
    most = -(-max(lengths) // block_size) + 1
    blocks, counts, singles = [], [], []
    for row, length in enumerate(lengths):
        query[row, : max(0, queries - length)] = float("nan")
        for head in range(kv_heads * group):
            for place in range(query_blocks):
                last = max(0, length - queries) // block_size + place
                order = torch.randperm(last + 1, generator=generator).tolist()
                chosen = sorted(block for block in order[: int(share * last) + head % 2] if block < most)
                blocks.append(chosen)
                counts.append(len(chosen))
            singles.append(torch.randperm(max(length, 1), generator=generator)[: length // 5].tolist())
    rows.query = query.to(device, rows.keys.dtype).transpose(1, 2)
    heads = (batch, kv_heads * group)
    lists = {
        "block_indices": int32(_lists(blocks, most)).view(*heads, query_blocks, most),
        "block_counts": int32(counts).view(*heads, query_blocks),
    }
    if columns:
        width = max(1, *(len(each) for each in singles))
        lists["columns"] = int32(_lists(singles, width)).view(*heads, width)
        lists["column_counts"] = int32([len(each) for each in singles]).view(heads)
    return rows, lists


def _seen(lists, row, head, place, query_block, block_size, window):
    """The tokens that one query attends to, from the definition."""
    count = lists["block_counts"][row, head, query_block].item()
    blocks = lists["block_indices"][row, head, query_block, :count].tolist()
    tokens = {block * block_size + at for block in blocks for at in range(block_size)}
    tokens = {token for token in tokens if window is None or place - token < window}
    if "columns" in lists:
        tokens |= set(lists["columns"][row, head, : lists["column_counts"][row, head].item()].tolist())
    return sorted(token for token in tokens if token <= place)


def _eager(rows, lists, block_size, dtype, window=None, scale=None):
    """Outputs and log-sum-exps of plain attention of each query to the tokens that it sees, rounded to `dtype`."""
    batch, q_heads, queries, head_dim = rows.query.shape
    out = torch.zeros(batch, q_heads, queries, head_dim, device=device, dtype=dtype)
    lse = torch.full((batch, q_heads, queries), float("-inf"), device=device, dtype=dtype)
    for row, length in enumerate(rows.lengths):
        for head in range(q_heads):
            kv = head // (q_heads // rows.keys.shape[1])
            for index in range(max(0, queries - length), queries):
                place = length - queries + index
                query_block = place // block_size - max(0, length - queries) // block_size
                tokens = _seen(lists, row, head, place, query_block, block_size, window)
                if not tokens:
                    continue
                at = [rows.start[row].item() + token for token in tokens]
                k, v = (buffer[row, kv, at].to(dtype) for buffer in (rows.keys, rows.values))
                scores = (k @ rows.query[row, head, index].to(dtype)) * (head_dim**-0.5 if scale is None else scale)
                out[row, head, index] = scores.softmax(dim=0) @ v
                lse[row, head, index] = scores.logsumexp(dim=0)
    return out, lse


def _prefill(rows, lists, block_size, **options):
    return block_sparse_prefill(
        rows.query, rows.keys, rows.values, seq_start=rows.start, seq_end=rows.end, block_size=block_size,
        **lists, **options,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("lengths", "queries", "block_size", "columns", "window", "kv_heads", "group", "head_dim", "dtype"),
    [
        ([63, 1, 40, 0], 37, 16, True, None, 1, 3, 64, torch.float32),
        ([111, 63], 50, 32, True, None, 2, 1, 80, torch.bfloat16),
        ([111], 111, 64, True, 30, 1, 3, 80, torch.float16),
        ([70, 45], 20, 16, False, None, 2, 2, 128, torch.bfloat16),
        ([70, 33], 70, 32, False, 17, 1, 2, 33, torch.float32),
        ([40], 33, 16, True, 9, 1, 1, 256, torch.float32),
        ([60, 20], 1, 16, True, None, 1, 2, 256, torch.bfloat16),
    ],
)
def test_error_is_bounded_by_the_eager_error(
    lengths, queries, block_size, columns, window, kv_heads, group, head_dim, dtype
):
    rows, lists = _prompt(
        lengths, queries, block_size, columns=columns, kv_heads=kv_heads, group=group, head_dim=head_dim, dtype=dtype
    )
    exact, exact_lse = _eager(rows, lists, block_size, torch.float64, window)
    eager, eager_lse = _eager(rows, lists, block_size, dtype, window)
    for impl in IMPLS:
        out, lse = _prefill(rows, lists, block_size, window=window, impl=impl)
        assert (out.dtype, lse.dtype) == (dtype, torch.float32)
        allowed = allowed_error(eager, exact, head_dim, impl)
        assert (out.double() - exact).abs().max().item() <= allowed, impl
        assert torch.equal(lse.isinf(), exact_lse.isinf()), impl
        allowed_lse = allowed_error(eager_lse, exact_lse, head_dim, impl)
        assert (lse.double() - exact_lse).nan_to_num().abs().max().item() <= allowed_lse, impl


@pytest.mark.parametrize("window", [None, 20])
def test_reference_is_exact_in_float64(window, monkeypatch):
    rows, lists = _prompt([100, 40, 9], 70, 16, group=3, dtype=torch.float64)
    exact = _eager(rows, lists, 16, torch.float64, window, scale=0.3)
    options = {"window": window, "scale": 0.3, "impl": "reference"}
    torch.testing.assert_close(_prefill(rows, lists, 16, **options), exact, rtol=1e-12, atol=1e-12)
    monkeypatch.setattr("hf_sparse_attn_kernels.blocks.reference.MAX_SCORES", 20 * 3 * 3 * 111)  # a part at a time
    torch.testing.assert_close(_prefill(rows, lists, 16, **options), exact, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("impl", IMPLS)
def test_a_padded_row_equals_the_row_alone(impl):
    rows, lists = _prompt([60, 9, 80], 35, 16, group=2)
    out, lse = _prefill(rows, lists, 16, impl=impl)
    for row, length in enumerate(rows.lengths):
        begin, own, one = 3 * row, min(length, 35), slice(row, row + 1)
        alone = block_sparse_prefill(
            rows.query[one, :, 35 - own :], *(b[one, :, begin : begin + length] for b in (rows.keys, rows.values)),
            seq_start=int32([0]), seq_end=int32([length]), block_size=16, impl=impl,
            **{name: tensor[one] for name, tensor in lists.items()},
        )  # fmt: skip
        result = (out[one, :, 35 - own :], lse[one, :, 35 - own :])
        torch.testing.assert_close(result, alone, rtol=1e-5, atol=1e-6)
        assert (out[one, :, : 35 - own] == 0).all()
        assert (lse[one, :, : 35 - own] == float("-inf")).all()


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("window", [None, 12])
def test_nothing_that_no_query_sees_is_read(impl, window):
    rows, lists = _prompt([90, 61], 20, 16, group=2, share=0.3)
    expected = _prefill(rows, lists, 16, window=window, impl=impl)
    for row, length in enumerate(rows.lengths):
        for kv in range(2):
            seen = set()
            for place in range(length - 20, length):
                query_block = place // 16 - (length - 20) // 16
                for head in (2 * kv, 2 * kv + 1):
                    seen |= set(_seen(lists, row, head, place, query_block, 16, None))
            for token in set(range(length)) - seen:
                rows.keys[row, kv, 3 * row + token] = float("nan")
                rows.values[row, kv, 3 * row + token] = float("nan")
    assert all(map(torch.equal, _prefill(rows, lists, 16, window=window, impl=impl), expected))


@pytest.mark.parametrize("impl", IMPLS)
def test_all_blocks_are_dense_attention(impl):
    rows, _ = _prompt([70, 41], 1, 16, group=3)
    every = torch.arange(5, dtype=torch.int32, device=device).expand(2, 6, 1, 5).contiguous()
    counts = torch.full((2, 6, 1), 5, dtype=torch.int32, device=device)
    result = _prefill(rows, {"block_indices": every, "block_counts": counts}, 16, impl=impl)
    dense = dense_decode(rows.query[:, :, 0], rows.keys, rows.values, rows.start, rows.end, impl="reference")
    torch.testing.assert_close(tuple(each[:, :, 0] for each in result), dense, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("impl", IMPLS)
def test_large_scores_stay_finite(impl):
    rows, lists = _prompt([70], 30, 16, group=2)
    rows.query = rows.query * 1000
    result = tuple(each.double() for each in _prefill(rows, lists, 16, impl=impl))
    torch.testing.assert_close(result, _eager(rows, lists, 16, torch.float64), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("impl", IMPLS)
@torch.no_grad()
def test_compiled_is_one_node_with_the_results_of_an_eager_call(impl):
    torch._dynamo.reset()
    rows, lists = _prompt([40, 5], 20, 16, group=2)
    compiled = torch.compile(_prefill, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(rows, lists, 16, impl=impl), _prefill(rows, lists, 16, impl=impl))


def test_schema_and_fake_agree_with_a_call():
    rows, lists = _prompt([40, 5], 20, 16, group=2)
    arguments = {"query": rows.query, "keys": rows.keys, "values": rows.values, **lists}
    check_schema("block_sparse_prefill", arguments | {"seq_start": rows.start, "seq_end": rows.end, "block_size": 16})


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"query": torch.zeros(1, 2, 64)}, ValueError, r"query has shape \[1, 2, 64\]; allowed"),
        ({"query": torch.zeros(1, 3, 4, 64)}, ValueError, r"q_heads=3 of query; allowed: a multiple of kv_heads=2"),
        ({"block_size": 8}, ValueError, r"block_size=8; allowed: an int of at least 16"),
        ({"block_size": 48}, ValueError, r"block_size=48; allowed: a power of two"),
        ({"window": 0}, ValueError, r"window=0; allowed: an int of at least 1"),
        ({"columns": None}, ValueError, r"columns is None; allowed: a tensor, because column_counts is one"),
        ({"block_indices": torch.zeros(1, 2, 1, 2).int()}, ValueError, r"query_blocks of block_indices=1; allowed"),
        ({"block_indices": torch.zeros(1, 1, 3, 2).int()}, ValueError, r"block_indices has shape \[1, 1, 3, 2\]"),
        ({"block_counts": torch.zeros(1, 2, 4).int()}, ValueError, r"block_counts has shape \[1, 2, 4\]; allowed"),
        ({"column_counts": torch.zeros(1, 2)}, TypeError, r"column_counts has dtype torch.float32; allowed"),
        ({"seq_end": torch.zeros(1)}, TypeError, r"seq_end has dtype torch.float32; allowed"),
    ],
)
def test_errors_name_the_argument(change, error, message):
    rows, lists = _prompt([30], 20, 16)
    arguments = {
        "query": rows.query, "keys": rows.keys, "values": rows.values, "seq_start": rows.start, "seq_end": rows.end,
        "block_size": 16, **lists,
    }  # fmt: skip
    change = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in change.items()}
    with pytest.raises(error, match=message):
        block_sparse_prefill(**(arguments | change))
