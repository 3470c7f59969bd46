import pytest
import torch
from hf_sparse_attn_kernels import dense_decode, progressive_decode

from tests.ops.helpers import IMPLS, check_schema, device
from tests.ops.progressive.inputs import make_progressive, one_block_at_a_time

NEAR = 1e-3  # distance from the threshold, in logits, within which a rounding may decide


def _eager_error(case, expected):
    """Largest error of plain attention to the same blocks with every step rounded to the dtype of the query."""
    rows, arguments = case.rows, case.arguments
    dtype, group = rows.query.dtype, rows.query.shape[1] // rows.keys.shape[1]
    error = 0.0
    for row in range(len(rows.lengths)):
        for head in range(rows.query.shape[1]):
            kv = head // group
            blocks = arguments["block_order"][row, kv, : expected.read_counts[row, kv].item()].tolist()
            start, end = rows.start[row].item(), rows.end[row].item()
            size = arguments["block_size"]
            tokens = [start + block * size + i for block in blocks for i in range(size)]
            tokens = [token for token in tokens if token < end]
            if tokens:
                k, v = rows.keys[row, kv, tokens], rows.values[row, kv, tokens]
                out = ((k @ rows.query[row, head]) * k.shape[1] ** -0.5).softmax(dim=0).to(dtype) @ v
                error = max(error, (out.double() - expected.out[row, head]).abs().max().item())
    return error


def check(case):
    """Both implementations read the blocks that the loop reads, and err no more than plain attention to them."""
    expected = one_block_at_a_time(case)
    assert expected.margin.min() > NEAR  # so that the stop does not depend on rounding
    allowed = 2 * _eager_error(case, expected) + 1e-6
    for impl in IMPLS:
        out, lse, read_counts = progressive_decode(**case.arguments, impl=impl)
        assert torch.equal(read_counts, expected.read_counts), impl
        assert read_counts.dtype == torch.int32
        assert out.dtype == case.rows.query.dtype
        assert (out.double() - expected.out).abs().max().item() <= allowed, impl
        torch.testing.assert_close(lse.double(), expected.lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("lengths", "block_size", "microbatch", "threshold", "kv_heads", "group", "head_dim", "dtype"),
    [
        ([300, 111, 63, 16, 1, 0], 16, 2, 0.9, 2, 1, 64, torch.float32),
        ([400, 300, 200], 16, 3, 0.8, 1, 3, 80, torch.bfloat16),
        ([333, 250], 8, 4, 0.95, 2, 7, 128, torch.float16),
        ([200, 111, 77], 5, 1, 0.7, 1, 3, 80, torch.float32),
        ([200, 150], 1, 8, 0.9, 1, 2, 16, torch.float32),
        ([200, 111], 32, 8, 0.5, 2, 1, 256, torch.bfloat16),  # a microbatch larger than the row
        ([700], 128, 1, 0.6, 1, 1, 32, torch.float32),
        ([300, 111], 16, 2, 1e-6, 1, 9, 64, torch.float32),  # one microbatch is enough
        ([300, 111], 16, 3, 1.0, 1, 2, 96, torch.float32),
    ],
)
def test_matches_one_block_at_a_time(lengths, block_size, microbatch, threshold, kv_heads, group, head_dim, dtype):
    case = make_progressive(
        lengths,
        block_size=block_size,
        microbatch=microbatch,
        threshold=threshold,
        kv_heads=kv_heads,
        group=group,
        head_dim=head_dim,
        dtype=dtype,
    )
    check(case)


@pytest.mark.parametrize(
    ("lengths", "microbatch", "forced_blocks", "options"),
    [
        ([500, 300, 111, 63, 1, 0], 2, 0, {}),
        ([400, 300, 200], 3, 4, {"group": 3, "head_dim": 80, "dtype": torch.bfloat16, "sink_blocks": 3}),
        ([333, 250], 4, 6, {"block_size": 8, "group": 7, "threshold": 0.7}),
        ([700, 500], 1, 2, {"block_size": 48, "threshold": 0.6}),
        ([300, 111], 2, 100, {}),  # there are no other blocks
        ([400, 300], 4, 3, {"max_blocks": 9, "threshold": 0.95}),
    ],
    ids=str,
)
def test_the_rest_may_be_estimated_by_the_microbatches_means(lengths, microbatch, forced_blocks, options):
    options = {"rest": "last", "forced_blocks": forced_blocks, "threshold": 0.8, **options}
    check(make_progressive(lengths, microbatch=microbatch, **options))


@pytest.mark.parametrize("impl", IMPLS)
def test_the_least_block_stops_earlier_than_the_least_mean(impl):
    case = make_progressive([500, 400], threshold=0.8, group=2, peak=1.0)
    least, last = (
        progressive_decode(**(case.arguments | {"rest": rest, "forced_blocks": 2}), impl=impl)[2]
        for rest in ("least", "last")
    )
    assert (least <= last).all()
    assert (least < last).any()


@pytest.mark.parametrize("rest", ["least", "last"])
def test_reference_is_exact_in_float64(rest):
    case = make_progressive([400, 250, 100], group=3, dtype=torch.float64, threshold=0.8, rest=rest, forced_blocks=1)
    expected = one_block_at_a_time(case, scale=0.2)
    out, lse, read_counts = progressive_decode(**case.arguments, scale=0.2, impl="reference")
    assert torch.equal(read_counts, expected.read_counts)
    assert read_counts.unique().numel() > 2  # rows and heads stop at different times
    torch.testing.assert_close((out, lse), (expected.out, expected.lse), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(("block_size", "microbatch"), [(16, 2), (32, 100)])
def test_threshold_one_is_dense_attention(impl, block_size, microbatch):
    case = make_progressive([300, 111, 5, 0], block_size=block_size, microbatch=microbatch, threshold=1.0, group=3)
    out, lse, read_counts = progressive_decode(**case.arguments, impl=impl)
    buffers = [case.arguments[name] for name in ("query", "keys", "values", "seq_start", "seq_end")]
    torch.testing.assert_close((out, lse), dense_decode(*buffers, impl=impl), rtol=1e-5, atol=1e-5)
    assert torch.equal(read_counts, case.arguments["block_counts"])


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("max_blocks", [1, 5, 8])
def test_a_cap_ends_the_reading(impl, max_blocks):
    case = make_progressive([300, 200, 40], max_blocks=max_blocks, threshold=0.95, peak=0.5, group=3)
    expected = one_block_at_a_time(case)
    assert expected.read_counts.max() == max_blocks
    out, lse, read_counts = progressive_decode(**case.arguments, impl=impl)
    assert torch.equal(read_counts, expected.read_counts)
    torch.testing.assert_close((out.double(), lse.double()), (expected.out, expected.lse), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("impl", IMPLS)
def test_a_block_beyond_the_row_reads_no_nan(impl):
    case = make_progressive([40], threshold=1.0)
    order = torch.tensor([5, 0, 2], device=device).int().expand(1, 2, -1)
    counts = torch.full((1, 2), 3, dtype=torch.int32, device=device)
    lists = {"block_order": order.contiguous(), "block_counts": counts}
    out, lse, _ = progressive_decode(**(case.arguments | lists), impl=impl)
    lists = {"block_order": order[..., 1:].contiguous(), "block_counts": counts - 1}
    expected = progressive_decode(**(case.arguments | lists), impl=impl)
    torch.testing.assert_close((out, lse), expected[:2])


@pytest.mark.parametrize("impl", IMPLS)
def test_counter_adds_the_tokens_attended(impl):
    case = make_progressive([300, 111, 0, 5], threshold=0.7)
    expected = one_block_at_a_time(case)
    counter = torch.tensor([1, 2, 3, 4], device=device)
    for _ in range(2):
        progressive_decode(**case.arguments, counter=counter, impl=impl)
    assert counter.tolist() == [1 + 2 * expected.tokens, 2 + 2 * 2 * (300 + 111 + 5), 3, 4 + 2]


def test_schema():
    case = make_progressive([100, 50])
    check_schema("progressive_decode", case.arguments)
    scratch = torch.zeros(2, 2, dtype=torch.int32, device=device)
    counter = torch.zeros(4, dtype=torch.int64, device=device)
    check_schema("progressive_decode", case.arguments | {"finished": scratch, "counter": counter, "scale": 0.5})


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"threshold": 0.0}, ValueError, r"threshold=0.0; allowed: a number above 0 and at most 1"),
        ({"threshold": 1.5}, ValueError, r"threshold=1.5; allowed"),
        ({"threshold": float("nan")}, ValueError, r"threshold=nan; allowed"),
        ({"scale": "x"}, TypeError, r"scale='x' has type str; allowed: a number or None"),
        ({"rest": "mean"}, ValueError, r"rest='mean'; allowed: 'least' or 'last'"),
        ({"forced_blocks": -1}, ValueError, r"forced_blocks=-1; allowed: an int of at least 0"),
        ({"microbatch": 0}, ValueError, r"microbatch=0; allowed: an int of at least 1"),
        ({"block_size": 0}, ValueError, r"block_size=0; allowed: an int of at least 1"),
        ({"block_order": torch.zeros(1, 1, 3).int()}, ValueError, r"block_order has shape \[1, 1, 3\]; allowed"),
        ({"block_order": torch.zeros(1, 2, 3)}, TypeError, r"block_order has dtype torch.float32; allowed"),
        ({"block_counts": torch.zeros(1, 1).int()}, ValueError, r"block_counts has shape \[1, 1\]; allowed"),
        ({"finished": torch.zeros(1, 1).int()}, ValueError, r"finished has shape \[1, 1\]; allowed"),
        ({"query": torch.zeros(1, 3, 64)}, ValueError, r"q_heads=3 of query; allowed: a multiple of kv_heads=2"),
    ],
)
def test_errors_name_the_argument(change, error, message):
    case = make_progressive([40])
    change = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in change.items()}
    with pytest.raises(error, match=message):
        progressive_decode(**(case.arguments | change))
