import pytest
import torch
from hf_sparse_attn_kernels import _tuning as tuning
from hf_sparse_attn_kernels import append_and_rank, page_bounds, rank_blocks

from tests.ops.helpers import (
    IMPLS,
    POISON,
    check_schema,
    dequantized,
    device,
    empty_bounds,
    grid,
    int32,
    make_rows,
)
from tests.ops.pages.steps import new_tokens, prefilled, scores_by_parts

FORCED = {"sink_blocks": 1, "recent_blocks": 1}


def _composed(*arguments, impl, page_size, forced, **options):
    """The op as its parts."""
    scores = scores_by_parts(*arguments, impl=impl, page_size=page_size, **options)
    return rank_blocks(scores, *arguments[-2:], block_size=page_size, impl=impl, **forced)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(
    ("lengths", "int8", "page_size", "kv_heads", "group", "head_dim", "dtype", "group_reduce", "statistic"),
    [
        ([0, 15, 63], False, 16, 2, 1, 64, torch.float32, "softmax", "minmax"),
        ([200, 131], True, 16, 1, 3, 128, torch.bfloat16, "softmax", "minmax"),
        ([100, 0, 37], False, 8, 1, 7, 80, torch.float16, "mean", "minmax"),
        ([50, 30], True, 1, 2, 2, 16, torch.float32, "max", "minmax"),
        ([300], False, 32, 1, 9, 256, torch.bfloat16, "softmax", "minmax"),
        ([200, 131], True, 32, 1, 3, 128, torch.bfloat16, "softmax", "cuboid_mean"),
        ([100, 0, 37], False, 8, 1, 7, 80, torch.float16, "mean", "representative"),
        grid([100, 0, 37], False, 8, 1, 7, 80, torch.bfloat16, "max", "cuboid_mean"),
        grid([200, 131], False, 16, 1, 3, 128, torch.bfloat16, "softmax", "minmax"),
        grid([300], True, 32, 1, 9, 256, torch.bfloat16, "softmax", "minmax"),
    ],
)
@pytest.mark.parametrize("forced", [FORCED, grid({"sink_blocks": 2, "recent_blocks": 3, "max_blocks": 9})])
def test_equals_its_parts(
    impl, int8, lengths, page_size, kv_heads, group, head_dim, dtype, group_reduce, statistic, forced
):
    shape = {"kv_heads": kv_heads, "group": group, "head_dim": head_dim, "dtype": dtype}
    rows, bounds = prefilled(lengths, int8, page_size, statistic, **shape)
    keys, values = rows.keys.clone(), rows.values.clone()
    expected_bounds = {name: tensor.clone() for name, tensor in bounds.items()}
    options = {"page_size": page_size, "group_reduce": group_reduce, "scale": 0.3, "statistic": statistic}
    for step in range(2):  # 15 to 17 tokens, over the end of a page
        end = rows.end + step + 1
        query, new_key, new_value = new_tokens(rows, step)
        order, counts = append_and_rank(
            query, new_key, new_value, rows.keys, rows.values, seq_start=rows.start, seq_end=end, impl=impl,
            **bounds, **options, **forced,
        )  # fmt: skip
        arguments = (query, new_key, new_value, keys, values, expected_bounds, rows.start, end)
        expected = _composed(*arguments, impl=impl, forced=forced, **options)
        assert order.dtype == counts.dtype == torch.int32
        assert torch.equal(counts, expected[1])
        assert torch.equal(order, expected[0])
        # Bit for bit, including memory that was never written.
        pairs = ((rows.keys, keys), (rows.values, values), *((bounds[name], expected_bounds[name]) for name in bounds))
        for written, exact in pairs:
            torch.testing.assert_close(written, exact, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("int8", [False, True])
def test_is_the_order_of_the_scores_in_float64(impl, int8):
    """All pages, by Quest's formula and a softmax over the pages of each head, from the bounds after the step."""
    rows, bounds = prefilled([333, 63, 17], int8, group=3, head_dim=80)
    end = rows.end + 1
    query, new_key, new_value = new_tokens(rows, 0)
    order, counts = append_and_rank(
        query, new_key, new_value, rows.keys, rows.values, seq_start=rows.start, seq_end=end, page_size=16, impl=impl,
        **bounds, **FORCED,
    )  # fmt: skip
    lower, upper = dequantized(bounds) if int8 else (bounds["page_min"].double(), bounds["page_max"].double())
    for row, length in enumerate((334, 64, 18)):
        pages = -(-length // 16)
        for head in range(2):
            q = query[row, 3 * head : 3 * head + 3].double()[:, None]  # [group, 1, head_dim]
            corners = torch.maximum(q * lower[row, head, :pages], q * upper[row, head, :pages])
            shares = (corners.sum(2) * 80**-0.5).log_softmax(1).logsumexp(0)
            assert counts[row, head] == pages
            found = order[row, head]
            assert found[pages:].eq(-1).all()
            found = found[:pages].long()
            assert found.sort()[0].tolist() == list(range(pages))
            assert found[:2].tolist() == [pages - 1, 0]
            assert (shares[found[2:]].diff() <= 1e-5).all()


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("max_blocks", [None, 90, grid(400)])
@pytest.mark.parametrize("group_reduce", ["softmax", grid("max")])
def test_spans_are_merged(group, max_blocks, group_reduce):
    """Pages of one token, many of them alike, in spans and at once."""
    rows = make_rows([300, 130, 5, 0], kv_heads=1, group=group, head_dim=16)
    for row, length in enumerate(rows.lengths):
        first = 3 * row
        rows.keys[row, :, first + length // 5 : first + length // 2] = rows.keys[row, :, first : first + 1]
    bounds = empty_bounds(rows, 1, int8=True)
    sequence = {"seq_start": rows.start, "seq_end": rows.end}
    page_bounds(rows.keys, page_size=1, num_new=10_000, impl="reference", **sequence, **bounds)
    ranked = []
    for span in (512, 128):
        with tuning.forced(rank={"span": span}):
            ranked.append(
                append_and_rank(
                    *new_tokens(rows, 0), rows.keys, rows.values, page_size=1, sink_blocks=4, max_blocks=max_blocks,
                    group_reduce=group_reduce, impl="triton", **sequence, **bounds,
                )
            )  # fmt: skip
    assert all(map(torch.equal, *ranked))
    order, counts = ranked[0]
    assert counts.flatten().tolist() == [min(length, max_blocks or 300) for length in rows.lengths]
    for row, count in enumerate(counts.flatten().tolist()):
        assert order[row, 0, :count].unique().numel() == count
        assert order[row, 0, count:].eq(-1).all()


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize(
    ("group_reduce", "statistic"),
    [
        ("softmax", "minmax"),
        ("mean", "minmax"),
        ("max", "minmax"),
        ("softmax", "cuboid_mean"),
        ("softmax", "representative"),
    ],
)
def test_implementations_rank_the_same(int8, group_reduce, statistic):
    rows, bounds = prefilled([333, 20, 0], int8, statistic=statistic, group=3)
    ranked, states = [], []
    for impl in IMPLS:
        state = {name: tensor.clone() for name, tensor in bounds.items()}
        buffers = {"keys": rows.keys.clone(), "values": rows.values.clone()}
        counter = torch.zeros(4, dtype=torch.int64, device=device)
        for step in range(2):
            end = torch.where(rows.end > rows.start, rows.end + step + 1, rows.end)
            ranked.append(
                append_and_rank(
                    *new_tokens(rows, step), seq_start=rows.start, seq_end=end, page_size=16, statistic=statistic,
                    group_reduce=group_reduce, impl=impl, counter=counter, **buffers, **state, **FORCED,
                )
            )  # fmt: skip
        states.append(state | buffers | {"counter": counter})
    for first, second in zip(ranked[:2], ranked[2:], strict=True):
        assert torch.equal(first[0], second[0])
        assert torch.equal(first[1], second[1])
    for name in states[0]:
        torch.testing.assert_close(states[0][name], states[1][name], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("num_pages", [None, 3])
def test_counter_adds_the_bytes_scored(impl, int8, num_pages):
    rows, bounds = prefilled([40, 15, 0, 16, 1], int8, kv_heads=3, dtype=torch.bfloat16)
    end = torch.where(rows.end > rows.start, rows.end + 1, rows.end)
    counter = torch.tensor([5, 6, 7, 8], device=device)
    append_and_rank(
        *new_tokens(rows, 0), rows.keys, rows.values, seq_start=rows.start, seq_end=end, page_size=16,
        counter=counter, num_pages=num_pages, impl=impl, **bounds,
    )  # fmt: skip
    row_pages = [-(-length // 16) for length in (41, 16, 17, 2)]
    expected = 7 + 3 * sum(pages * (2 * 64 + 1) + 64 if int8 else pages * 2 * 64 * 2 for pages in row_pages)
    assert counter.tolist() == [5, 6, expected, 8]


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("int8", [False, True])
def test_rows_without_tokens_write_nothing(impl, int8):
    rows = make_rows([20, 9])
    bounds = empty_bounds(rows, 16, int8=int8)
    keys = rows.keys.clone()
    order, counts = append_and_rank(
        *new_tokens(rows, 0), rows.keys, rows.values, seq_start=int32([7, 8]), seq_end=int32([7, 0]), page_size=16,
        impl=impl, **bounds,
    )  # fmt: skip
    assert (order == -1).all()
    assert (counts == 0).all()
    torch.testing.assert_close(rows.keys, keys, rtol=0, atol=0, equal_nan=True)
    assert all(((tensor == POISON) if int8 else tensor.isnan()).all() for tensor in bounds.values())


def _arguments():
    rows, bounds = prefilled([20], int8=False)
    query, new_key, new_value = new_tokens(rows, 0)
    tensors = {"query": query, "new_key": new_key, "new_value": new_value, "keys": rows.keys, "values": rows.values}
    return {**tensors, "seq_start": rows.start, "seq_end": rows.end + 1, "page_size": 16, **bounds}


def test_schema():
    check_schema("append_and_rank", _arguments())
    check_schema("append_and_rank", _arguments() | {"max_blocks": 7, "num_pages": 1})


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"recent_blocks": 0}, ValueError, r"recent_blocks=0; allowed: an int of at least 1"),
        ({"sink_blocks": 2}, ValueError, r"sink_blocks=2 and recent_blocks=1; allowed: together at most max_blocks=2"),
        ({"max_blocks": 0}, ValueError, r"max_blocks=0; allowed: an int of at least 1"),
        ({"page_size": 12}, ValueError, r"page_size=12; allowed: a power of two"),
        ({"num_pages": 9}, ValueError, r"num_pages=9; allowed: None, or 1 to max_pages=2"),
        ({"group_reduce": "sum"}, ValueError, r"group_reduce='sum'; allowed"),
        ({"statistic": "mean"}, ValueError, r"statistic='mean'; allowed: 'minmax', 'cuboid_mean', 'representative'"),
        ({"new_key": torch.zeros(1, 2, 32)}, ValueError, r"new_key has shape \[1, 2, 32\]; allowed"),
        ({"values": torch.zeros(1, 2, 3, 64)}, ValueError, r"values has shape \[1, 2, 3, 64\]; allowed"),
        ({"counter": torch.zeros(4)}, TypeError, r"counter has dtype torch.float32; allowed: torch.int64"),
    ],
)
def test_errors_name_the_argument(change, error, message):
    change = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in change.items()}
    with pytest.raises(error, match=message):
        append_and_rank(**(_arguments() | change))
