"""A whole decode step of Quest as one op, by each implementation."""

import logging

import pytest
import torch
from hf_sparse_attn_kernels import _op, append_and_attend, append_and_select, select_blocks, sparse_decode, use_impl
from hf_sparse_attn_kernels import _tuning as tuning
from hf_sparse_attn_kernels.quest import cluster, reference

from tests.ops.emulation import CLUSTERS, clusters_fixture
from tests.ops.helpers import IMPLS, check_schema, device, int32
from tests.ops.pages.steps import new_tokens, prefilled

BUDGET = {"max_blocks": 5, "sink_blocks": 1, "recent_blocks": 1}
STATE = ("keys", "values", "page_min", "page_max", "page_exponent", "channel_exponent")


def _arguments(lengths, int8=True, **shape):
    """Arguments of a step that appends to every row that has tokens."""
    rows, bounds = prefilled(lengths, int8, **shape)
    query, new_key, new_value = new_tokens(rows, 0)
    end = torch.where(rows.end > rows.start, rows.end + 1, rows.end)
    tensors = {"query": query, "new_key": new_key, "new_value": new_value, "keys": rows.keys, "values": rows.values}
    return {**tensors, "seq_start": rows.start, "seq_end": end, "page_size": 16, **bounds, **BUDGET}


def _copy(arguments):
    counter = torch.tensor([5, 6, 7, 8], device=device)
    own = {name: arguments[name].clone() for name in STATE if name in arguments}
    return {**arguments, **own, "counter": counter}


def _in_two_ops(arguments, impl):
    chosen = append_and_select(**arguments, impl=impl)
    rows = {name: arguments[name] for name in ("query", "keys", "values", "seq_start", "seq_end", "counter")}
    out, lse = sparse_decode(
        **rows, block_indices=chosen[0], block_counts=chosen[1], block_size=16, scale=arguments.get("scale"), impl=impl
    )
    return out, lse, *chosen


def _check_state(ours, expected):
    for name in (*(name for name in STATE if name in ours), "counter"):
        torch.testing.assert_close(ours[name], expected[name], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(("int8", "group_reduce"), [(True, "softmax"), (False, "mean")])
def test_equals_its_two_ops(impl, int8, group_reduce):
    arguments = _arguments([150, 0, 33], int8, group=3) | {"group_reduce": group_reduce, "scale": 0.2}
    ours, expected = _copy(arguments), _copy(arguments)
    for found, exact in zip(append_and_attend(**ours, impl=impl), _in_two_ops(expected, impl), strict=True):
        assert torch.equal(found, exact)
    _check_state(ours, expected)


def test_the_schema_says_what_is_written():
    check_schema("append_and_attend", _copy(_arguments([40, 20])))


LIMITS = [
    ({"query": "half"}, TypeError, r"dtype=torch.float16 of query; allowed for impl='cluster': torch.bfloat16"),
    ({"int8": False}, TypeError, r"dtype=torch.bfloat16 of page_min; allowed for impl='cluster': torch.int8"),
    ({"head_dim": 64}, ValueError, r"head_dim=64 of query; allowed for impl='cluster': 128"),
    ({"page_size": 32}, ValueError, r"page_size=32; allowed for impl='cluster': 16"),
    ({"statistic": "cuboid_mean"}, ValueError, r"statistic='cuboid_mean'; allowed for impl='cluster': 'minmax'"),
    ({"group": 9}, ValueError, r"group=9; allowed for impl='cluster': at most 8"),
    ({"max_blocks": 513}, ValueError, r"max_blocks=513; allowed for impl='cluster': at most 512"),
]


@pytest.mark.parametrize(("change", "error", "message"), LIMITS)
def test_an_input_beyond_the_limits_of_clusters_is_an_error_that_names_the_limit(change, error, message):
    change = dict(change)
    dtype = torch.float16 if change.pop("query", None) else torch.bfloat16
    shape = {"head_dim": change.pop("head_dim", 128), "group": change.pop("group", 2), "dtype": dtype}
    arguments = _copy(_arguments([40, 20], change.pop("int8", True), **shape) | change)
    before = _copy(arguments)
    with pytest.raises(error, match=message):
        append_and_attend(**arguments, impl="cluster")
    _check_state(arguments, before)


def test_strides_that_clusters_do_not_load_are_an_error():
    arguments = _copy(_arguments([40, 20], head_dim=128, dtype=torch.bfloat16))
    wide = torch.zeros(*arguments["keys"].shape[:3], 130, dtype=torch.bfloat16, device=device)
    arguments["keys"] = wide[..., :128]
    with pytest.raises(ValueError, match=r"keys has strides \[.*130, 1\] and begins .* multiples of 16 bytes"):
        append_and_attend(**arguments, impl="cluster")


def test_a_stride_beyond_32_bits_is_an_error():
    arguments = _arguments([40, 20], head_dim=128, dtype=torch.bfloat16)
    page_min = arguments["page_min"]
    # Such a buffer would take gigabytes, so this one has one page, and only the limits are asked.
    arguments["page_min"] = page_min.as_strided((*page_min.shape[:2], 1, 128), (*page_min.stride()[:2], 1 << 32, 1))
    error = cluster.limit(**arguments, group_reduce="softmax", num_pages=None, statistic="minmax", by_name=True)
    assert str(error) == (
        "page_min has stride 4294967296 in dimension 2; allowed for impl='cluster': at most 4294967295"
    )


@pytest.mark.skipif(device.type == "cuda", reason="says what a CPU gets")
def test_clusters_need_cuda():
    arguments = _copy(_arguments([40, 20], head_dim=128, dtype=torch.bfloat16))
    with pytest.raises(RuntimeError, match="impl='cluster' with tensors on 'cpu'; allowed: CUDA tensors"):
        append_and_attend(**arguments, impl="cluster")


def test_ops_without_clusters_run_as_by_default():
    scores = torch.tensor([[[1.0, 3.0, 2.0]]], device=device)
    arguments = (scores, int32([0]), int32([3]))
    with use_impl("cluster"):
        assert select_blocks(*arguments, block_size=1, max_blocks=2)[0].tolist() == [[[1, 2]]]
    with pytest.raises(ValueError, match="impl='cluster' for select_blocks; allowed: None, 'triton', 'reference'"):
        select_blocks(*arguments, block_size=1, max_blocks=2, impl="cluster")


def test_why_a_call_falls_back_is_logged_once(monkeypatch, caplog):
    monkeypatch.setattr(_op, "resolve_impl", lambda impl, tensor: "triton")  # as on a CUDA device
    _op._say_once.cache_clear()
    chosen = tuning.forced(cluster_step={"cluster": 8})  # on a CUDA device too
    with caplog.at_level(logging.DEBUG, logger=_op.__name__), chosen:
        for name in (None, "cluster"):
            with use_impl(name):
                append_and_attend(**_copy(_arguments([40], head_dim=64, dtype=torch.bfloat16)))
    said = "append_and_attend runs as separate launches: head_dim=64 of query; allowed for impl='cluster': 128"
    assert caplog.messages == [said]


@torch.no_grad()
def test_a_compiled_step_runs_on_clusters_by_default(monkeypatch):
    ran = []

    def implementation(impl, name=None):
        ran.append(name or impl)
        return (lambda *arguments, **options: None) if name == "limit" else reference.append_and_attend

    monkeypatch.setattr(append_and_attend.dispatch, "implementation", implementation)
    resolve = _op.resolve_impl
    monkeypatch.setattr(_op, "resolve_impl", lambda impl, tensor: "triton" if impl is None else resolve(impl, tensor))
    torch._dynamo.reset()
    step = torch.compile(lambda arguments: append_and_attend(**arguments), fullgraph=True, backend="eager")
    arguments = _arguments([40, 20])
    expected = append_and_attend(**_copy(arguments), impl="reference")
    ran.clear()
    for found, exact in zip(step(_copy(arguments)), expected, strict=True):
        assert torch.equal(found, exact)
    assert ran == ["limit", "cluster"]


on_clusters = clusters_fixture(cluster, "quest_step")


@pytest.mark.usefixtures("on_clusters")
@pytest.mark.parametrize("choice", CLUSTERS, ids=lambda choice: "x".join(map(str, choice.values())))
@pytest.mark.parametrize(
    ("lengths", "kv_heads", "group", "group_reduce"),
    [
        ([5000, 0, 33], 2, 4, "softmax"),
        ([14, 15, 16], 1, 1, "softmax"),
        ([3001], 1, 7, "mean"),
        ([700, 90], 2, 8, "max"),
    ],
)
def test_clusters_choose_and_write_what_the_reference_does(choice, lengths, kv_heads, group, group_reduce):
    shape = {"kv_heads": kv_heads, "group": group, "head_dim": 128, "dtype": torch.bfloat16}
    arguments = _arguments(lengths, **shape) | {"group_reduce": group_reduce, "max_blocks": 40}
    ours, expected = _copy(arguments), _copy(arguments)
    with tuning.forced(cluster_step=choice):
        found = append_and_attend(**ours, impl="cluster")
        again = append_and_attend(**(ours | {"counter": None}), impl="cluster")
    exact = append_and_attend(**expected, impl="reference")
    _check_state(ours, expected)
    for name, tensor, repeated, right in zip(("out", "lse", "indices", "counts"), found, again, exact, strict=True):
        assert torch.equal(tensor, repeated), name
        if tensor.is_floating_point():
            torch.testing.assert_close(tensor.float(), right.float(), rtol=1e-2, atol=1e-2)
        else:
            assert torch.equal(tensor, right), name


@pytest.mark.usefixtures("on_clusters")
def test_a_long_row_whose_pages_do_not_divide_among_the_blocks():
    arguments = _arguments([131_000], kv_heads=1, group=1, head_dim=128, dtype=torch.bfloat16) | {"max_blocks": 128}
    ours, expected = _copy(arguments), _copy(arguments)
    with tuning.forced(cluster_step={"cluster": 3, "threads": 512}):
        found = append_and_attend(**ours, impl="cluster")
    exact = append_and_attend(**expected, impl="reference")
    _check_state(ours, expected)
    assert torch.equal(found[3], exact[3])
    # Pages whose scores differ by rounding alone may change places; the outputs then hardly differ.
    torch.testing.assert_close(found[0].float(), exact[0].float(), rtol=2e-2, atol=2e-2)


@pytest.mark.usefixtures("on_clusters")
@pytest.mark.parametrize("choice", CLUSTERS, ids=lambda choice: "x".join(map(str, choice.values())))
def test_clusters_choose_the_lower_page_among_equal_ones(choice):
    arguments = _arguments([3200], kv_heads=1, group=4, head_dim=128, dtype=torch.bfloat16)
    for name in STATE[2:]:
        arguments[name].fill_(1)
    arguments["keys"][:, :, :3200] = 1.0
    arguments["new_key"] = torch.ones_like(arguments["new_key"])
    with tuning.forced(cluster_step=choice):
        assert append_and_attend(**arguments, impl="cluster")[2].tolist() == [[[0, 1, 2, 3, 200]]]


@pytest.mark.usefixtures("on_clusters")
@pytest.mark.parametrize("near", [250, 256, 258, 310])  # half of them as many as a warp lists, and more
@pytest.mark.parametrize("missing", [0, 20])
def test_clusters_choose_pages_that_lie_together(near, missing):
    """A warp looks through all of its pages where the choice is among more than it lists."""
    arguments = _arguments([40960], kv_heads=1, group=1, head_dim=128, dtype=torch.bfloat16)
    arguments |= {"sink_blocks": 0, "max_blocks": near - missing + 1}
    first = 320  # the first of the blocks' second warps
    for name in ("page_min", "page_max"):
        arguments[name].zero_()
        arguments[name][:, :, first : first + near] = 100
    arguments["query"] = torch.ones_like(arguments["query"])
    with tuning.forced(cluster_step={"cluster": 2, "threads": 256}):
        chosen = append_and_attend(**arguments, impl="cluster")[2]
    assert chosen.tolist() == [[[*range(first, first + near - missing), 2560]]]


@pytest.mark.gpu
def test_clusters_in_a_cuda_graph_beside_another_stream():
    arguments = _copy(_arguments([2000, 900], group=4, head_dim=128, dtype=torch.bfloat16))
    expected = append_and_attend(**arguments, impl="cluster")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured = append_and_attend(**arguments, impl="cluster")
    with torch.cuda.stream(stream):
        graph.replay()
    beside = append_and_attend(**(arguments | {"counter": None}), impl="triton")
    torch.cuda.synchronize()
    assert all(torch.equal(found, exact) for found, exact in zip(captured, expected, strict=True))
    torch.testing.assert_close(beside[0], expected[0], rtol=1e-2, atol=1e-2)
