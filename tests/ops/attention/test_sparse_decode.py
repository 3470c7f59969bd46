import pytest
import torch
from hf_sparse_attn_kernels import _reference, select_blocks, sparse_decode
from hf_sparse_attn_kernels import _tuning as tuning

from tests.ops.helpers import IMPLS, allowed_error, device, grid, int32, make_rows


def _selection(rows, block_size, max_blocks, *, empty=True):
    """Random blocks, another number for every row and head; with `empty`, none for the last head of the last row."""
    batch, kv_heads = rows.keys.shape[:2]
    width = max(1, -(-max(rows.lengths) // block_size))
    scores = torch.randn(batch, kv_heads, width, generator=torch.Generator().manual_seed(1)).to(device)
    indices, counts = select_blocks(
        scores, rows.start, rows.end, block_size=block_size, max_blocks=max_blocks, recent_blocks=1, impl="reference"
    )
    head = torch.arange(kv_heads, device=device)
    counts = torch.where(counts > head, counts - head, counts).int()
    if empty:
        counts[-1, -1] = 0
    slots = torch.arange(max_blocks, device=device)
    return indices.masked_fill(slots >= counts[..., None], -1), counts


def _eager(rows, indices, counts, block_size, dtype):
    """Plain attention of each query head over its tokens, every step rounded to `dtype`."""
    batch, q_heads, head_dim = rows.query.shape
    kv_heads = rows.keys.shape[1]
    out = torch.zeros(batch, q_heads, head_dim, device=device, dtype=dtype)
    lse = torch.full((batch, q_heads), float("-inf"), device=device, dtype=dtype)
    for row in range(batch):
        for head in range(q_heads):
            kv = head // (q_heads // kv_heads)
            start, end = rows.start[row].item(), rows.end[row].item()
            blocks = indices[row, kv, : counts[row, kv].item()].tolist()
            tokens = [start + block * block_size + i for block in blocks for i in range(block_size)]
            tokens = [token for token in tokens if token < end]
            if tokens:
                k, v = (buffer[row, kv, tokens].to(dtype) for buffer in (rows.keys, rows.values))
                scores = (k @ rows.query[row, head].to(dtype)) * head_dim**-0.5
                out[row, head] = scores.softmax(dim=0) @ v
                lse[row, head] = scores.logsumexp(dim=0)
    return out, lse


@pytest.mark.parametrize(
    ("lengths", "block_size", "max_blocks", "kv_heads", "group", "head_dim", "dtype"),
    [
        ([1, 15, 16, 17, 63, 0], 16, 3, 2, 1, 64, torch.float32),
        ([1, 15, 16, 17, 63], 1, 20, 1, 3, 80, torch.bfloat16),
        ([63, 17, 200], 32, 4, 2, 7, 128, torch.float16),
        ([1000, 333], 16, 16, 2, 8, 64, torch.bfloat16),
        ([200, 77], 16, 6, 1, 9, 256, torch.float32),
        ([200, 77], 32, 4, 1, 4, 256, torch.bfloat16),
        ([1000], 1, 256, 1, 3, 96, torch.float32),
        ([50, 21], 5, 7, 2, 1, 16, torch.float16),
        ([40, 33], 16, 2, 12, 1, 32, torch.float32),  # more programs than the device is said to hold: one split
    ],
)
def test_error_is_bounded_by_the_eager_error(lengths, block_size, max_blocks, kv_heads, group, head_dim, dtype):
    rows = make_rows(lengths, kv_heads=kv_heads, group=group, head_dim=head_dim, dtype=dtype)
    indices, counts = _selection(rows, block_size, max_blocks)
    exact, exact_lse = _eager(rows, indices, counts, block_size, torch.float64)
    eager, _ = _eager(rows, indices, counts, block_size, dtype)
    for impl in IMPLS:
        out, lse = sparse_decode(
            rows.query,
            rows.keys,
            rows.values,
            indices,
            counts,
            rows.start,
            rows.end,
            block_size=block_size,
            impl=impl,
        )
        assert out.dtype == dtype
        assert lse.dtype == torch.float32
        allowed = allowed_error(eager, exact, head_dim, impl)
        assert (out.double() - exact).abs().max().item() <= allowed, impl
        torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=1e-5)
        assert (out[-1, -1] == 0).all()
        assert lse[-1, -1].item() == float("-inf")


CANDIDATES = tuning.CANDIDATES["token_decode"]


@pytest.mark.parametrize(
    "candidate",
    [each if each in (CANDIDATES[0], CANDIDATES[-1]) else grid(each) for each in CANDIDATES],
    ids=lambda candidate: "-".join(map(str, candidate.values())),
)
def test_no_launch_choice_changes_the_attention_to_single_tokens(candidate):
    rows = make_rows([150, 61], kv_heads=1, group=3, head_dim=32)
    arguments = (rows.query, rows.keys, rows.values, *_selection(rows, 1, 111), rows.start, rows.end)
    with tuning.forced(token_decode=candidate):
        found = sparse_decode(*arguments, block_size=1, impl="triton")
    expected = sparse_decode(*arguments, block_size=1, impl="reference")
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_reference_is_exact_in_float64():
    rows = make_rows([100, 40], group=3, dtype=torch.float64)
    indices, counts = _selection(rows, 16, 4)
    arguments = (rows.query, rows.keys, rows.values, indices, counts, rows.start, rows.end)
    out = sparse_decode(*arguments, block_size=16, impl="reference")
    torch.testing.assert_close(out, _eager(rows, indices, counts, 16, torch.float64), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("heads", [1, 3], ids=["shared", "a head"])
def test_kv_heads_may_be_views_of_one(impl, heads):
    rows = make_rows([100, 40], kv_heads=1, group=6)
    keys, values = (buffer.expand(-1, 3, -1, -1) for buffer in (rows.keys, rows.values))
    indices, counts = (each.expand(-1, heads, *each.shape[2:]).contiguous() for each in _selection(rows, 4, 9))
    of_copies, of_views = (
        sparse_decode(rows.query, *buffers, indices, counts, rows.start, rows.end, block_size=4, impl=impl)
        for buffers in ((keys.contiguous(), values.contiguous()), (keys, values))
    )
    torch.testing.assert_close(of_views, of_copies, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("splits", [1, 2], ids=lambda splits: f"{splits} splits")
def test_nan_is_not_hidden(impl, splits):
    rows = make_rows([300, 40], kv_heads=2, group=3)
    rows.query[1, 0] = float("nan")
    indices, counts = _selection(rows, 16, 19 if splits == 2 else 2, empty=False)
    out, lse = sparse_decode(
        rows.query, rows.keys, rows.values, indices, counts, rows.start, rows.end, block_size=16, impl=impl
    )
    assert out[1, 0].isnan().all()
    assert lse[1, 0].isnan()
    assert out[0].isfinite().all()
    assert lse[0].isfinite().all()
    assert out[1, 1:].isfinite().all()


@pytest.mark.parametrize("impl", IMPLS)
def test_a_padded_row_equals_the_row_alone(impl):
    rows = make_rows([60, 45, 80], kv_heads=2, group=3)
    indices, counts = _selection(rows, 16, 3, empty=False)
    options = {"block_size": 16, "scale": 0.3, "impl": impl}
    out, lse = sparse_decode(rows.query, rows.keys, rows.values, indices, counts, rows.start, rows.end, **options)
    for row, length in enumerate(rows.lengths):
        begin = 3 * row
        keys, values = (buffer[row : row + 1, :, begin : begin + length] for buffer in (rows.keys, rows.values))
        one = slice(row, row + 1)
        alone = sparse_decode(
            rows.query[one], keys, values, indices[one], counts[one], int32([0]), int32([length]), **options
        )
        torch.testing.assert_close((out[one], lse[one]), alone, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("impl", IMPLS)
def test_large_scores_stay_finite(impl):
    rows = make_rows([300], kv_heads=1, group=2)
    indices, counts = _selection(rows, 16, 8, empty=False)
    query = rows.query * 1000
    arguments = (query, rows.keys, rows.values, indices, counts, rows.start, rows.end)
    out, lse = sparse_decode(*arguments, block_size=16, impl=impl)
    rows.query = query
    exact, exact_lse = _eager(rows, indices, counts, 16, torch.float64)
    torch.testing.assert_close(out.double(), exact, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("impl", IMPLS)
def test_nothing_but_the_selected_tokens_is_read(impl):
    rows = make_rows([90, 61], kv_heads=2, group=3)
    indices, counts = _selection(rows, 16, 3)
    arguments = (rows.query, rows.keys, rows.values, indices, counts, rows.start, rows.end)
    expected = sparse_decode(*arguments, block_size=16, impl=impl)
    for row in range(2):
        for head in range(2):
            chosen = indices[row, head, : counts[row, head].item()].tolist()
            for block in set(range(6)) - set(chosen):
                begin = 3 * row + 16 * block
                rows.keys[row, head, begin : begin + 16] = float("nan")
                rows.values[row, head, begin : begin + 16] = float("inf")
    assert all(map(torch.equal, sparse_decode(*arguments, block_size=16, impl=impl), expected))


@pytest.mark.parametrize("impl", IMPLS)
def test_a_block_beyond_the_row_reads_no_nan(impl):
    rows = make_rows([40, 90])
    results = []
    for blocks in ([5, 0, 2], [0, 2]):  # of the first row; block 5 is beyond it
        indices = int32(blocks).expand(2, 2, -1).contiguous()
        counts = int32([len(blocks), 0])[:, None].expand(2, 2).contiguous()
        arguments = (rows.query, rows.keys, rows.values, indices, counts, rows.start, rows.end)
        results.append(sparse_decode(*arguments, block_size=16, impl=impl))
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("block_size", [1, 16])
def test_counter_adds_the_tokens_read(impl, block_size):
    rows = make_rows([50, 0, 17, 4], kv_heads=3)
    indices, counts = _selection(rows, block_size, 4)
    counter = torch.tensor([1, 2, 3, 4], device=device)
    arguments = (rows.query, rows.keys, rows.values, indices, counts, rows.start, rows.end)
    for _ in range(2):
        sparse_decode(*arguments, block_size=block_size, counter=counter, impl=impl)
    read = 0
    for row, length in enumerate(rows.lengths):
        for head in range(3):
            for block in indices[row, head, : counts[row, head].item()].tolist():
                read += min(length, (block + 1) * block_size) - block * block_size
    assert counter.tolist() == [1 + 2 * read, 2 + 2 * 3 * (50 + 17 + 4), 3, 4 + 2]


def test_the_counter_does_not_follow_the_default_device():
    counter, tokens = torch.zeros(4, dtype=torch.int64, device=device), int32([50])
    with torch.device("meta"):
        _reference.count_tokens(counter, tokens.sum(), tokens, 2)
    assert counter.tolist() == [50, 100, 0, 1]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"block_size": 0}, ValueError, r"block_size=0; allowed: an int of at least 1"),
        ({"values": torch.zeros(1, 2, 3, 64)}, ValueError, r"values has shape \[1, 2, 3, 64\]; allowed"),
        ({"values": torch.zeros(1, 2, 25, 64).half()}, TypeError, r"values has dtype torch.float16; allowed"),
        ({"block_indices": torch.zeros(1, 2, 3)}, TypeError, r"block_indices has dtype torch.float32; allowed"),
        ({"scale": True}, TypeError, r"scale=True has type bool; allowed: a number or None"),
        ({"block_counts": torch.zeros(1, 3).int()}, ValueError, r"block_counts has shape \[1, 3\]; allowed"),
        ({"counter": torch.zeros(2, 2).long()}, ValueError, r"counter has shape \[2, 2\]; allowed: \[4\]"),
        ({"query": torch.zeros(1, 3, 64)}, ValueError, r"q_heads=3 of query; allowed: a multiple of kv_heads=2"),
    ],
)
def test_errors_name_the_argument(change, error, message):
    rows = make_rows([20])
    arguments = {
        "query": rows.query,
        "keys": rows.keys,
        "values": rows.values,
        "block_indices": torch.zeros(1, 2, 3, dtype=torch.int32, device=device),
        "block_counts": torch.ones(1, 2, dtype=torch.int32, device=device),
        "seq_start": rows.start,
        "seq_end": rows.end,
        "block_size": 16,
    }
    change = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in change.items()}
    with pytest.raises(error, match=message):
        sparse_decode(**(arguments | change))
