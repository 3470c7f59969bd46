import pytest
import torch
from hf_sparse_attn_kernels import _tuning as tuning
from hf_sparse_attn_kernels import append_and_select, page_bounds, select_blocks

from tests.ops.helpers import IMPLS, POISON, device, empty_bounds, grid, int32, make_rows
from tests.ops.pages.steps import new_tokens, prefilled, scores_by_parts

BUDGET = {"max_blocks": 5, "sink_blocks": 1, "recent_blocks": 1}


def _composed(*arguments, impl, page_size, **options):
    """The op as its parts."""
    scores = scores_by_parts(*arguments, impl=impl, page_size=page_size, **options)
    return select_blocks(scores, *arguments[-2:], block_size=page_size, impl=impl, **BUDGET)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(
    ("lengths", "int8", "page_size", "kv_heads", "group", "head_dim", "dtype", "group_reduce", "statistic"),
    [
        ([0, 14, 15, 63], False, 16, 2, 1, 64, torch.float32, "softmax", "minmax"),
        ([200, 131], True, 16, 1, 3, 128, torch.bfloat16, "softmax", "minmax"),
        ([100, 0, 37], False, 8, 1, 7, 80, torch.float16, "mean", "minmax"),
        ([50, 30], True, 1, 2, 2, 16, torch.float32, "max", "minmax"),
        ([300], False, 32, 1, 9, 256, torch.bfloat16, "softmax", "minmax"),
        ([200, 131], True, 32, 1, 3, 128, torch.bfloat16, "softmax", "cuboid_mean"),
        ([100, 0, 37], False, 8, 1, 7, 80, torch.float16, "mean", "representative"),
        grid([100, 0, 37], False, 8, 1, 7, 80, torch.bfloat16, "max", "cuboid_mean"),
        grid([200, 131], True, 32, 1, 3, 128, torch.float16, "softmax", "representative"),
        grid([0, 14, 15, 63], True, 16, 2, 1, 64, torch.float32, "softmax", "minmax"),
        grid([200, 131], False, 16, 1, 3, 128, torch.bfloat16, "softmax", "minmax"),
        grid([100, 0, 37], True, 8, 1, 7, 80, torch.float16, "mean", "minmax"),
        grid([50, 30], False, 1, 2, 2, 16, torch.float32, "max", "minmax"),
        grid([300], True, 32, 1, 9, 256, torch.bfloat16, "softmax", "minmax"),
    ],
)
def test_equals_its_parts(impl, int8, lengths, page_size, kv_heads, group, head_dim, dtype, group_reduce, statistic):
    shape = {"kv_heads": kv_heads, "group": group, "head_dim": head_dim, "dtype": dtype}
    rows, bounds = prefilled(lengths, int8, page_size, statistic, **shape)
    keys, values = rows.keys.clone(), rows.values.clone()
    expected_bounds = {name: tensor.clone() for name, tensor in bounds.items()}
    options = {"page_size": page_size, "group_reduce": group_reduce, "scale": 0.3, "statistic": statistic}
    for step in range(2):  # 15 to 17 tokens, over the end of a page
        end = rows.end + step + 1
        query, new_key, new_value = new_tokens(rows, step)
        indices, counts = append_and_select(
            query, new_key, new_value, rows.keys, rows.values, seq_start=rows.start, seq_end=end, impl=impl,
            **bounds, **options, **BUDGET,
        )  # fmt: skip
        arguments = (query, new_key, new_value, keys, values, expected_bounds, rows.start, end)
        expected = _composed(*arguments, impl=impl, **options)
        assert indices.dtype == counts.dtype == torch.int32
        assert torch.equal(counts, expected[1])
        assert torch.equal(indices, expected[0])
        # Bit for bit, including memory that was never written.
        pairs = ((rows.keys, keys), (rows.values, values), *((bounds[name], expected_bounds[name]) for name in bounds))
        for written, exact in pairs:
            torch.testing.assert_close(written, exact, rtol=0, atol=0, equal_nan=True)


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
def test_implementations_choose_the_same(int8, group_reduce, statistic):
    rows, bounds = prefilled([333, 20, 0], int8, statistic=statistic, group=3)
    chosen, states = [], []
    for impl in IMPLS:
        state = {name: tensor.clone() for name, tensor in bounds.items()}
        buffers = {"keys": rows.keys.clone(), "values": rows.values.clone()}
        counter = torch.zeros(4, dtype=torch.int64, device=device)
        for step in range(2):
            end = torch.where(rows.end > rows.start, rows.end + step + 1, rows.end)
            chosen.append(
                append_and_select(
                    *new_tokens(rows, step), seq_start=rows.start, seq_end=end, page_size=16, group_reduce=group_reduce,
                    statistic=statistic, impl=impl, counter=counter, **buffers, **state, **BUDGET,
                )
            )  # fmt: skip
        states.append(state | buffers | {"counter": counter})
    for first, second in zip(chosen[:2], chosen[2:], strict=True):
        assert torch.equal(first[0], second[0])
        assert torch.equal(first[1], second[1])
    for name in states[0]:
        torch.testing.assert_close(states[0][name], states[1][name], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("int8", [False, True])
def test_a_row_from_its_first_token_on(impl, int8):
    rows = make_rows([0, 0], head_dim=16)
    rows.keys, rows.values = (torch.full((2, 2, 16, 16), float("nan"), device=device) for _ in range(2))
    bounds = empty_bounds(rows, 4, int8=int8)
    tokens = []
    for length in range(1, 10):
        query, new_key, new_value = new_tokens(rows, length)
        tokens.append(new_key)
        indices, counts = append_and_select(
            query, new_key, new_value, rows.keys, rows.values, seq_start=rows.start, seq_end=rows.start + length,
            page_size=4, impl=impl, **bounds, **BUDGET,
        )  # fmt: skip
        pages = -(-length // 4)
        assert (counts == pages).all()
        assert indices.tolist() == [[list(range(pages)) + [-1] * (5 - pages)] * 2] * 2
        for row in range(2):
            start = 3 * row
            assert torch.equal(rows.keys[row, :, start : start + length], torch.stack(tokens, dim=2)[row])
    expected = empty_bounds(rows, 4, int8=int8)
    for length in range(1, 10):  # the channels' range is that of the first token
        now = {"seq_start": rows.start, "seq_end": rows.start + length}
        page_bounds(rows.keys, page_size=4, num_new=1, impl="reference", **now, **expected)
    for name, tensor in bounds.items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("num_pages", [None, 3])
def test_counter_adds_the_bytes_scored(impl, int8, num_pages):
    rows, bounds = prefilled([40, 15, 0, 16, 1], int8, kv_heads=3, dtype=torch.bfloat16)
    end = torch.where(rows.end > rows.start, rows.end + 1, rows.end)
    counter = torch.tensor([5, 6, 7, 8], device=device)
    append_and_select(
        *new_tokens(rows, 0), rows.keys, rows.values, seq_start=rows.start, seq_end=end, page_size=16, counter=counter,
        num_pages=num_pages, impl=impl, **bounds, **BUDGET,
    )  # fmt: skip
    expected = 7
    for length in (41, 16, 0, 17, 2):
        for _ in range(3):
            for _ in range(-(-length // 16)):
                expected += 2 * 64 + 1 if int8 else 2 * 64 * 2
            expected += 64 if int8 and length > 0 else 0
    assert counter.tolist() == [5, 6, expected, 8]


def test_more_spans_of_pages_than_one_tile_holds(monkeypatch):
    """As of 640K tokens in pages of 16, with a smaller tile."""
    step = pytest.importorskip("hf_sparse_attn_kernels.pages.step")
    monkeypatch.setattr(step, "ONE_TILE_LIMIT", 128)
    rows, bounds = prefilled([3000, 2700], False, group=2, page_size=1)
    chosen = []
    for impl in IMPLS:
        own = {name: tensor.clone() for name, tensor in bounds.items()}
        buffers = {"keys": rows.keys.clone(), "values": rows.values.clone()}
        with tuning.forced(select={"two_levels_from": 1}):
            chosen.append(
                append_and_select(
                    *new_tokens(rows, 0), seq_start=rows.start, seq_end=rows.end + 1, page_size=1, max_blocks=20,
                    recent_blocks=1, impl=impl, **buffers, **own,
                )
            )  # fmt: skip
    first, *others = chosen
    assert [newest in first[0][row, 0] for row, newest in enumerate((3000, 2700))] == [True, True]
    for other in others:
        assert torch.equal(other[0], first[0])
        assert torch.equal(other[1], first[1])


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("int8", [False, True])
def test_rows_without_tokens_write_nothing(impl, int8):
    rows = make_rows([20, 9])
    bounds = empty_bounds(rows, 16, int8=int8)
    keys = rows.keys.clone()
    indices, counts = append_and_select(
        *new_tokens(rows, 0), rows.keys, rows.values, seq_start=int32([7, 8]), seq_end=int32([7, 0]), page_size=16,
        impl=impl, **bounds, **BUDGET,
    )  # fmt: skip
    assert (indices == -1).all()
    assert (counts == 0).all()
    torch.testing.assert_close(rows.keys, keys, rtol=0, atol=0, equal_nan=True)
    assert all(((tensor == POISON) if int8 else tensor.isnan()).all() for tensor in bounds.values())


@pytest.mark.skipif(device.type != "cpu", reason="needs row ends that the host knows")
def test_an_end_beyond_the_capacity_leaves_the_whole_batch_unwritten():
    rows, bounds = prefilled([20, 9], int8=False)
    arguments = {"keys": rows.keys, "values": rows.values, "seq_start": rows.start, **bounds}
    before = {name: tensor.clone() for name, tensor in arguments.items()}
    ends, limit = int32([21, rows.capacity + 1]), rows.capacity
    query, new_key, new_value = new_tokens(rows, 0)
    message = rf"seq_end={limit + 1} of row 1 is beyond the capacity; allowed: at most {limit}"
    with pytest.raises(ValueError, match=message):
        append_and_select(
            query, new_key, new_value, seq_end=ends, page_size=16, impl="reference", **arguments, **BUDGET
        )
    for name, tensor in arguments.items():
        torch.testing.assert_close(tensor, before[name], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"recent_blocks": 0}, ValueError, r"recent_blocks=0; allowed: an int of at least 1"),
        ({"sink_blocks": 5}, ValueError, r"sink_blocks=5 and recent_blocks=1; allowed: together at most max_blocks=5"),
        ({"page_size": 12}, ValueError, r"page_size=12; allowed: a power of two"),
        ({"page_size": 8}, ValueError, r"max_pages=2 of page_min; allowed: at least 4"),
        ({"num_pages": 9}, ValueError, r"num_pages=9; allowed: None, or 1 to max_pages=2"),
        ({"num_pages": 2.0}, ValueError, r"num_pages=2.0; allowed: None, or 1 to max_pages=2"),
        ({"num_pages": True}, ValueError, r"num_pages=True; allowed"),
        ({"num_pages": "x"}, ValueError, r"num_pages='x'; allowed"),
        ({"scale": "x"}, TypeError, r"scale='x' has type str; allowed: a number or None"),
        ({"group_reduce": "sum"}, ValueError, r"group_reduce='sum'; allowed"),
        ({"new_key": torch.zeros(1, 2, 32)}, ValueError, r"new_key has shape \[1, 2, 32\]; allowed"),
        ({"new_value": torch.zeros(1, 2, 64).half()}, TypeError, r"new_value has dtype torch.float16; allowed"),
        ({"values": torch.zeros(1, 2, 3, 64)}, ValueError, r"values has shape \[1, 2, 3, 64\]; allowed"),
        ({"counter": torch.zeros(4)}, TypeError, r"counter has dtype torch.float32; allowed: torch.int64"),
        ({"counter": torch.zeros(3).long()}, ValueError, r"counter has shape \[3\]; allowed: \[4\]"),
        ({"page_exponent": torch.zeros(1, 2, 2).char()}, ValueError, r"page_exponent is given; allowed: None"),
    ],
)
def test_errors_name_the_argument(change, error, message):
    rows, bounds = prefilled([20], int8=False)
    query, new_key, new_value = new_tokens(rows, 0)
    arguments = {
        "query": query,
        "new_key": new_key,
        "new_value": new_value,
        "keys": rows.keys,
        "values": rows.values,
        "seq_start": rows.start,
        "seq_end": rows.end + 1,
        "page_size": 16,
        **bounds,
        **BUDGET,
    }
    change = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in change.items()}
    with pytest.raises(error, match=message):
        append_and_select(**(arguments | change))
