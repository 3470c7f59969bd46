"""Under torch.compile the ops are opaque nodes of one graph, with their writes declared."""

import pytest
import torch
from hf_sparse_attn_kernels import (
    _op,
    append_and_rank,
    append_and_select,
    dense_decode,
    page_bounds,
    page_scores,
    select_blocks,
    sparse_decode,
    use_impl,
)
from torch._dynamo.testing import CompileCounterWithBackend

from tests.ops.helpers import check_schema, device, empty_bounds, make_rows

BUDGET = {"max_blocks": 4, "sink_blocks": 1, "recent_blocks": 1}


def _state(int8, seed=0, lengths=(90, 70)):
    """Tensors of a decode step, with room for a few more tokens."""
    rows = make_rows(list(lengths), group=3, seed=seed)
    bounds = empty_bounds(rows, 16, int8=int8)
    page_bounds(rows.keys, seq_start=rows.start, seq_end=rows.end, page_size=16, num_new=1000, **bounds)
    counter = torch.zeros(4, dtype=torch.int64, device=device)
    buffers = {"keys": rows.keys, "values": rows.values, "seq_start": rows.start, "seq_end": rows.end}
    return {**buffers, **bounds, "counter": counter}


def _step(query, new_key, new_value, keys, values, seq_start, seq_end, counter, **bounds):
    """Run one decode step with every op."""
    rows = {"seq_start": seq_start, "seq_end": seq_end}
    seq_end += 1
    chosen = append_and_select(
        query, new_key, new_value, keys, values, page_size=16, counter=counter, **rows, **bounds, **BUDGET
    )
    ranked = append_and_rank(query, new_key, new_value, keys, values, page_size=16, counter=counter, **rows, **bounds)
    sparse, _ = sparse_decode(query, keys, values, *chosen, block_size=16, counter=counter, **rows)
    dense, lse = dense_decode(query, keys, values, **rows)
    page_bounds(keys, page_size=16, num_new=2, **rows, **bounds)
    scores = page_scores(query, page_size=16, **rows, **bounds)
    return sparse, dense, lse, scores, *ranked, *select_blocks(scores, block_size=16, **rows, **BUDGET)


def _tokens(seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(2, heads, 64, generator=generator).to(device) for heads in (6, 2, 2)]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("dynamic_capacity", [False, True])
@torch.no_grad()
def test_one_graph_with_the_results_of_eager_calls(backend, int8, dynamic_capacity):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(_step, fullgraph=True, backend=counter)
    for seed in range(2):
        eager_state, state = _state(int8, seed), _state(int8, seed)
        if dynamic_capacity:
            for name in ("keys", "values"):
                torch._dynamo.maybe_mark_dynamic(state[name], 2)
        for token in range(3):
            expected = _step(*_tokens(token), **eager_state)
            for first, second in zip(compiled(*_tokens(token), **state), expected, strict=True):
                torch.testing.assert_close(first, second, equal_nan=True)
            for name, tensor in state.items():
                torch.testing.assert_close(tensor, eager_state[name], rtol=0, atol=0, equal_nan=True, msg=name)
    assert counter.frame_count == 1  # contents of the tensors make no difference
    assert state["counter"][3].item() == 3


@torch.no_grad()
def test_compiled_code_follows_use_impl(monkeypatch):
    seen = []
    resolve = _op.resolve_impl

    def record(impl, tensor):
        seen.append(resolve(impl, tensor))
        return seen[-1]

    monkeypatch.setattr(_op, "resolve_impl", record)
    torch._dynamo.reset()
    compiled = torch.compile(lambda *rows: dense_decode(*rows), fullgraph=True, backend="eager")
    rows = make_rows([20])
    arguments = (rows.query, rows.keys, rows.values, rows.start, rows.end)
    with use_impl("reference"):
        expected = compiled(*arguments)
    with use_impl("triton"):
        torch.testing.assert_close(compiled(*arguments), expected)
    assert seen == ["reference", "triton"]


@torch.no_grad()
def test_errors_are_raised_while_tracing():
    torch._dynamo.reset()
    rows = make_rows([20])
    compiled = torch.compile(lambda *rows: dense_decode(*rows), fullgraph=True, backend="eager")
    with pytest.raises(Exception, match=r"values has dtype torch.float16; allowed"):
        compiled(rows.query, rows.keys, rows.values.half(), rows.start, rows.end)


@torch.no_grad()
def test_checks_of_sizes_that_may_differ_make_no_guards_and_the_real_call_checks(monkeypatch):
    torch._dynamo.reset()
    trees = []
    keep = lambda manager, scope, builder: trees.append(str(manager))  # noqa: E731
    monkeypatch.setattr(torch._dynamo.guards, "guard_manager_testing_hook_fn", keep)
    compiled = torch.compile(
        lambda keys, values, *rest: dense_decode(rest[0], keys, values, *rest[1:]), backend="eager"
    )
    rows = make_rows([20])

    def buffers(capacity):
        resized = [buffer.new_zeros(1, 2, capacity, buffer.shape[3]) for buffer in (rows.keys, rows.values)]
        for buffer in resized:
            torch._dynamo.maybe_mark_dynamic(buffer, 2)
        return resized

    compiled(*buffers(64), rows.query, rows.start, rows.end)
    assert "L['keys'].size()[2]" in trees[0]
    assert "L['values'].size()[2] == L['keys'].size()[2]" not in trees[0]
    with pytest.raises(ValueError, match="values has shape"):
        compiled(buffers(64)[0], buffers(128)[1], rows.query, rows.start, rows.end)
    assert len(trees) == 1


@pytest.mark.parametrize("int8", [False, True])
def test_schemas_declare_what_is_written_and_fakes_what_is_returned(int8):
    state = _state(int8)
    bounds = {name: state[name] for name in state if name.startswith(("page", "channel"))}
    query, new_key, new_value = _tokens(0)
    rows = {"seq_start": state["seq_start"], "seq_end": state["seq_end"]}
    buffers = {"query": query, "keys": state["keys"], "values": state["values"]}
    scores = page_scores(query, page_size=16, **rows, **bounds)
    blocks = dict(
        zip(("block_indices", "block_counts"), select_blocks(scores, block_size=16, **rows, **BUDGET), strict=True)
    )
    counted = {"counter": state["counter"], **buffers, **rows}
    calls = {
        "page_bounds": {"keys": state["keys"], "page_size": 16, "num_new": 3, **rows, **bounds},
        "page_scores": {"query": query, "page_size": 16, "num_pages": 3, **rows, **bounds},
        "select_blocks": {"scores": scores, "block_size": 16, **rows, **BUDGET},
        "append_and_select": {
            "new_key": new_key, "new_value": new_value, "page_size": 16, **counted, **bounds, **BUDGET
        },
        "append_and_rank": {"new_key": new_key, "new_value": new_value, "page_size": 16, **counted, **bounds},
        "sparse_decode": {"block_size": 16, **blocks, **counted},
        "dense_decode": counted,
    }  # fmt: skip
    for name, arguments in calls.items():
        check_schema(name, arguments)
