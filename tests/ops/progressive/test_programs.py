"""How `progressive_decode` divides the work changes no result, and stops it."""

import pytest
import torch
from hf_sparse_attn_kernels import _tuning as tuning
from hf_sparse_attn_kernels import progressive_decode, rank_blocks
from hf_sparse_attn_kernels.progressive.first_wave import first_wave_kernel
from hf_sparse_attn_kernels.progressive.later_waves import later_waves_kernel
from hypothesis import given, settings
from hypothesis import strategies as st
from triton.runtime import interpreter

from tests.ops.helpers import IMPLS, device, grid
from tests.ops.progressive.inputs import make_progressive, one_block_at_a_time
from tests.ops.progressive.interleave import interleave

CANDIDATES = tuning.CANDIDATES["progressive_decode"]
NAMES = ("block_n", "ticket", "per_multiprocessor", "warps", "stages")
CHOICES = [
    *(candidate if candidate in (CANDIDATES[0], CANDIDATES[-1]) else grid(candidate) for candidate in CANDIDATES),
    dict(zip(NAMES, (16, 16, 1, 4, 1), strict=True)),  # one block a ticket
    dict(zip(NAMES, (16, 1000, 16, 4, 2), strict=True)),  # more programs than tickets
    dict(zip(NAMES, (16, 32, 0, 4, 1), strict=True)),  # as few programs as a microbatch has tickets
]


@pytest.mark.parametrize("choice", CHOICES, ids=lambda choice: "-".join(map(str, choice.values())))
@pytest.mark.parametrize("block_size", [16, grid(48)])
@pytest.mark.parametrize("rest", ["least", "last"])
def test_no_choice_changes_a_result(choice, block_size, rest):
    case = make_progressive(
        [350, 200, 111, 0],
        block_size=block_size,
        microbatch=4,
        threshold=0.8,
        group=3,
        head_dim=32,
        rest=rest,
        forced_blocks=1,
    )
    _check_twice(case, choice)


def _check_twice(case, choice):
    expected = one_block_at_a_time(case)
    counter = torch.zeros(4, dtype=torch.int64, device=device)
    finished = torch.zeros(*case.arguments["block_counts"].shape, dtype=torch.int32, device=device)
    with tuning.forced(progressive_decode=choice):
        for _ in range(2):
            out, lse, read_counts = progressive_decode(
                **case.arguments, counter=counter, finished=finished, impl="triton"
            )
    assert not finished.any()
    assert torch.equal(read_counts, expected.read_counts)
    torch.testing.assert_close((out.double(), lse.double()), (expected.out, expected.lse), rtol=1e-4, atol=1e-5)
    cached = case.arguments["block_counts"].shape[1] * sum(case.rows.lengths)
    assert counter.tolist() == [2 * expected.tokens, 2 * cached, 0, 2]


@pytest.mark.parametrize("order", ["last program first", "side by side"])
@pytest.mark.parametrize(
    ("microbatch", "ticket", "rest"),
    [(1, 16, "least"), (4, 16, "last"), grid(4, 16, "least"), grid(2, 32, "last"), grid(3, 48, "least")],
)
def test_programs_may_run_in_any_order(order, microbatch, ticket, rest, monkeypatch):
    """Rows go on for several rounds after the first wave, in which some programs find results that others do not."""
    if device.type == "cpu":
        if order == "side by side":
            interleave(first_wave_kernel, "attend_to_ticket", monkeypatch)
            interleave(later_waves_kernel, "attend_to_ticket", monkeypatch)
        else:
            _reverse_programs(monkeypatch)
    options = {"microbatch": microbatch, "rest": rest, "forced_blocks": 1, "peak": 0.5, "threshold": 0.7}
    case = make_progressive([500, 300], head_dim=16, group=2, **options)
    _check_twice(case, dict(zip(NAMES, (16, ticket, 2, 4, 1), strict=True)))


def _reverse_programs(monkeypatch):
    """Let the interpreter run the last program of each row and KV head first."""
    builder = interpreter.interpreter_builder
    set_grid_idx = builder.set_grid_idx
    monkeypatch.setattr(builder, "set_grid_idx", lambda x, y, z: set_grid_idx(builder.grid_dim[0] - 1 - x, y, z))


@pytest.mark.parametrize("threshold", [0.8, 1.0])
@pytest.mark.parametrize("rest", ["least", "last"])
def test_rows_that_have_enough_cost_nothing_more(threshold, rest, monkeypatch):
    """One program per row and KV head takes the tickets up to the stop, and no other."""
    options = {"microbatch": 2, "threshold": threshold, "rest": rest, "group": 2, "head_dim": 32}
    case = make_progressive([450, 300, 150], **options)
    expected = one_block_at_a_time(case)
    allocated, new_empty = [], torch.Tensor.new_empty

    def record(self, *size, **options):
        allocated.append(new_empty(self, *size, **options))
        return allocated[-1]

    monkeypatch.setattr(torch.Tensor, "new_empty", record)
    with tuning.forced(progressive_decode={"ticket": 32, "per_multiprocessor": 0}):
        _, _, read_counts = progressive_decode(**case.arguments, impl="triton")
    (_, _, partial_max, _) = next(tensor for tensor in allocated if tensor.dim() == 4 and tensor.shape[0] == 4)
    taken = (~partial_max.isnan()).all(dim=2).sum(dim=1).view(3, 2)  # microbatches
    assert torch.equal(read_counts, expected.read_counts)
    assert torch.equal(taken.int(), (expected.read_counts + 1) // 2)


@pytest.mark.parametrize("impl", IMPLS)
def test_nothing_after_the_stop_influences_the_result(impl):
    case = make_progressive([500, 222, 77], threshold=0.7, group=3)
    rows, size = case.rows, case.arguments["block_size"]
    expected = progressive_decode(**case.arguments, impl=impl)
    read_counts = expected[2]
    unread = 0
    for row in range(3):
        for head in range(2):
            count = case.arguments["block_counts"][row, head].item()
            for block in case.arguments["block_order"][row, head, read_counts[row, head].item() : count].tolist():
                first = rows.start[row].item() + block * size
                last = min(first + size, rows.end[row].item())
                rows.keys[row, head, first:last] = float("nan")
                rows.values[row, head, first:last] = float("inf")
                unread += 1
            case.arguments["block_order"][row, head, count:] = 10**6
    assert unread > 5
    assert all(map(torch.equal, progressive_decode(**case.arguments, impl=impl), expected))


@pytest.mark.parametrize("impl", IMPLS)
def test_a_padded_row_equals_the_row_alone(impl):
    case = make_progressive([300, 150, 80], threshold=0.8, group=3)
    out, lse, read_counts = progressive_decode(**case.arguments, impl=impl)
    for row, length in enumerate(case.rows.lengths):
        one, begin = slice(row, row + 1), 3 * row
        keys, values = (case.arguments[name][one, :, begin : begin + length] for name in ("keys", "values"))
        alone = {name: case.arguments[name][one] for name in ("query", "block_order", "block_counts")}
        bounds = {"seq_start": torch.zeros_like(case.rows.start[one]), "seq_end": case.rows.end[one] - begin}
        arguments = case.arguments | alone | bounds | {"keys": keys, "values": values}
        expected = progressive_decode(**arguments, impl=impl)
        torch.testing.assert_close((out[one], lse[one], read_counts[one]), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("factor", [30, 1000])
def test_large_scores_stay_finite(impl, factor):
    """The sum of a block may be too small for float32 beside that of another."""
    case = make_progressive([300, 90], threshold=0.99, group=2, microbatch=1)
    case.rows.query *= factor
    expected = one_block_at_a_time(case)
    out, lse, read_counts = progressive_decode(**case.arguments, impl=impl)
    assert torch.equal(read_counts, expected.read_counts)
    torch.testing.assert_close(out.double(), expected.out, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(lse.double(), expected.lse, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("impl", IMPLS)
def test_a_query_of_nan_reads_everything(impl):
    case = make_progressive([200, 100], threshold=0.5, group=2)
    expected = progressive_decode(**case.arguments, impl=impl)
    case.rows.query[0, 1] = float("nan")
    out, lse, read_counts = progressive_decode(**case.arguments, impl=impl)
    assert read_counts[0, 0] == case.arguments["block_counts"][0, 0]
    assert out[0, 1].isnan().all()
    torch.testing.assert_close((out[:, 2:], lse[:, 2:]), (expected[0][:, 2:], expected[1][:, 2:]))
    assert torch.equal(read_counts[:, 1], expected[2][:, 1])


@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_properties(data):
    block_size, microbatch = data.draw(st.sampled_from([1, 3, 16])), data.draw(st.integers(1, 5))
    lengths = data.draw(st.lists(st.integers(0, 12 * block_size), min_size=1, max_size=2))
    options = {
        "threshold": data.draw(st.floats(0, 1, exclude_min=True, width=32)),
        "max_blocks": data.draw(st.none() | st.integers(1, 13)),
        "peak": data.draw(st.sampled_from([0.0, 0.5, 4.0])),
        "seed": data.draw(st.integers(0, 9)),
        "rest": data.draw(st.sampled_from(["least", "last"])),
        "forced_blocks": data.draw(st.integers(0, 4)),
    }
    case = make_progressive(lengths, block_size=block_size, microbatch=microbatch, head_dim=16, group=2, **options)
    expected = one_block_at_a_time(case)
    clear = expected.margin.to(device) > 1e-3
    for impl in IMPLS:
        out, lse, read_counts = progressive_decode(**case.arguments, impl=impl)
        assert torch.equal(read_counts[clear], expected.read_counts[clear]), impl
        heads = clear.repeat_interleave(2, dim=1)
        torch.testing.assert_close(out[heads].double(), expected.out[heads], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(lse[heads].double(), expected.lse[heads], rtol=1e-4, atol=1e-5)


def _step(query, keys, values, scores, seq_start, seq_end, counter, finished):
    """Rank, and attend until enough is read."""
    bounds = {"seq_start": seq_start, "seq_end": seq_end, "block_size": 16}
    ranked = rank_blocks(scores, **bounds, sink_blocks=1)
    return progressive_decode(
        query, keys, values, *ranked, **bounds, microbatch=2, threshold=0.8, counter=counter, finished=finished
    )


def _step_arguments(lengths, **options):
    rows = make_progressive(lengths, **options).rows
    width = -(-rows.capacity // 16)
    scores = torch.randn(len(lengths), 2, width, generator=torch.Generator().manual_seed(0)).to(device)
    counter = torch.zeros(4, dtype=torch.int64, device=device)
    finished = torch.zeros(len(lengths), 2, dtype=torch.int32, device=device)
    return rows.query, rows.keys, rows.values, scores, rows.start, rows.end, counter, finished


@torch.no_grad()
def test_one_graph_with_the_results_of_eager_calls():
    torch._dynamo.reset()
    compiled = torch.compile(_step, fullgraph=True, backend="aot_eager")
    arguments, others = (_step_arguments([200, 90], group=3) for _ in range(2))
    for _ in range(2):
        torch.testing.assert_close(compiled(*arguments), _step(*others))
    torch.testing.assert_close(arguments[-2], others[-2])
    assert arguments[-2][3] == 2


@pytest.mark.gpu
def test_a_cuda_graph_follows_lengths_and_gives_the_same_from_run_to_run():
    arguments = _step_arguments([20000, 3000, 700], group=4, head_dim=128, dtype=torch.bfloat16, peak=1.0)
    end = arguments[5]
    _step(*arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = _step(*arguments)
    for taken_away in (0, 0, 600, 0):
        end -= taken_away
        expected = _step(*arguments)
        for _ in range(20):
            graph.replay()
            torch.testing.assert_close(outputs, expected, rtol=0, atol=0)
        end += taken_away
    assert not arguments[-1].any()
