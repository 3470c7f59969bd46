"""A whole decode step of Progressive Sparse Attention as one op, by each implementation."""

import logging
import re
import struct
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hf_sparse_attn_kernels import (
    _op,
    append_and_attend_progressively,
    append_and_rank,
    page_scores,
    progressive_decode,
    use_impl,
)
from hf_sparse_attn_kernels import _tuning as tuning
from hf_sparse_attn_kernels.psa import cluster

from tests.ops.emulation import CLUSTERS, MOST_SHARED, clusters_fixture, planned_with
from tests.ops.helpers import IMPLS, check_schema, device, grid, read_blocks
from tests.ops.pages.steps import new_tokens, prefilled

STEP = {"page_size": 32, "microbatch": 2, "threshold": 0.9, "sink_blocks": 1}
STATE = ("keys", "values", "page_min", "page_max", "page_exponent", "channel_exponent")
SERVED = {"head_dim": 128, "dtype": torch.bfloat16}


def _arguments(lengths, int8=True, peak=4.0, statistic="cuboid_mean", **shape):
    """Arguments of a step that appends to every row that has tokens, with a query that attends to few of them."""
    rows, bounds = prefilled(lengths, int8, 32, statistic, **shape)
    query, new_key, new_value = new_tokens(rows, 0)
    end = torch.where(rows.end > rows.start, rows.end + 1, rows.end)
    tensors = {"query": query * peak, "new_key": new_key, "new_value": new_value}
    buffers = {"keys": rows.keys, "values": rows.values, "seq_start": rows.start, "seq_end": end}
    return {**tensors, **buffers, **bounds, **STEP, "statistic": statistic}


def _copy(arguments):
    counter = torch.tensor([5, 6, 7, 8], device=device)
    own = {name: arguments[name].clone() for name in STATE if name in arguments}
    return {**arguments, **own, "counter": counter}


def _in_two_ops(arguments, impl):
    reading = {name: arguments[name] for name in ("microbatch", "threshold", "rest") if name in arguments}
    ranking = {name: value for name, value in arguments.items() if name not in reading}
    order, counts = append_and_rank(**ranking, impl=impl)
    rows = {name: arguments[name] for name in ("query", "keys", "values", "seq_start", "seq_end", "counter")}
    forced_blocks = arguments["sink_blocks"] + arguments.get("recent_blocks", 1)
    out, lse, read_counts = progressive_decode(
        **rows, block_order=order, block_counts=counts, block_size=32, scale=arguments.get("scale"),
        forced_blocks=forced_blocks, impl=impl, **reading,
    )  # fmt: skip
    return out, lse, order, read_counts


def _check_state(ours, expected):
    for name in (*(name for name in STATE if name in ours), "counter"):
        torch.testing.assert_close(ours[name], expected[name], rtol=0, atol=0, equal_nan=True)


def _check_read(found, exact):
    """Check that the same blocks are read in the same order."""
    assert torch.equal(found[3], exact[3])
    assert torch.equal(read_blocks(*found[2:]), read_blocks(*exact[2:]))


def _check_order(found, exact, arguments, tolerance, group_reduce="softmax"):
    """Check the order of the blocks read; blocks whose scores differ by rounding alone may change places."""
    names = ("query", "seq_start", "seq_end", "page_size", *STATE[2:])
    scores = page_scores(**{name: arguments[name] for name in names}, group_reduce=group_reduce)
    for order, right, count, of_pair in zip(
        *(each.flatten(0, 1) for each in (found[2], exact[2], exact[3][..., None], scores)), strict=True
    ):
        order, right = (each[: count.item()].long() for each in (order, right))
        assert len(set(order.tolist())) == len(order)
        torch.testing.assert_close(of_pair[order], of_pair[right], rtol=0, atol=tolerance)


def _check_equals_two_ops(impl, int8, dtype, options):
    arguments = _arguments([300, 0, 33, 500], int8, group=3, dtype=dtype) | options
    ours, expected = _copy(arguments), _copy(arguments)
    found, exact = append_and_attend_progressively(**ours, impl=impl), _in_two_ops(expected, impl)
    assert all(map(torch.equal, found[:2], exact[:2]))
    _check_read(found, exact)
    _check_state(ours, expected)
    blocks = torch.tensor([10, 0, 2, 16], device=device)[:, None]
    assert (found[3] < blocks).any()
    assert found[3][1].tolist() == [0, 0]


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(
    ("int8", "options"),
    [(True, {}), (False, {"group_reduce": "mean", "rest": "last", "scale": 0.2, "max_blocks": 7})],
)
def test_equals_its_two_ops(impl, int8, options):
    _check_equals_two_ops(impl, int8, torch.float32, options)


@pytest.mark.parametrize(
    ("int8", "options"),
    [(False, {"rest": "last", "recent_blocks": 2}), grid(True, {"num_pages": 9, "microbatch": 3})],
)
def test_equals_its_two_ops_in_float64(int8, options):
    _check_equals_two_ops("reference", int8, torch.float64, options)


def test_the_schema_says_what_is_written():
    check_schema("append_and_attend_progressively", _copy(_arguments([40, 20])))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"microbatch": 0}, "microbatch=0; allowed: an int of at least 1"),
        ({"threshold": 0.0}, r"threshold=0.0; allowed: a number above 0 and at most 1"),
        ({"rest": "mean"}, "rest='mean'; allowed: 'least' or 'last'"),
        ({"recent_blocks": 0}, "recent_blocks=0; allowed: an int of at least 1"),
        ({"max_blocks": 1}, "sink_blocks=1 and recent_blocks=1; allowed: together at most"),
    ],
)
def test_bad_numbers_are_errors_before_anything_is_written(change, message):
    arguments = _copy(_arguments([40, 20]))
    before = _copy(arguments)
    with pytest.raises(ValueError, match=message):
        append_and_attend_progressively(**(arguments | change))
    _check_state(arguments, before)


LIMITS = [
    ({"dtype": torch.float16}, TypeError, r"dtype=torch.float16 of query; allowed for impl='cluster': torch.bfloat16"),
    ({"int8": False}, TypeError, r"dtype=torch.bfloat16 of page_min; allowed for impl='cluster': torch.int8"),
    ({"head_dim": 64}, ValueError, r"head_dim=64 of query; allowed for impl='cluster': 128"),
    ({"page_size": 64}, ValueError, r"page_size=64; allowed for impl='cluster': 32"),
    (
        {"statistic": "representative"},
        ValueError,
        r"statistic='representative'; allowed for impl='cluster': 'cuboid_mean' or 'minmax'",
    ),
    ({"group": 9}, ValueError, r"group=9; allowed for impl='cluster': at most 8"),
    ({"microbatch": 33}, ValueError, r"microbatch=33; allowed for impl='cluster': at most 32"),
]


@pytest.mark.parametrize(("change", "error", "message"), LIMITS)
def test_an_input_beyond_the_limits_of_clusters_is_an_error_that_names_the_limit(change, error, message):
    shape = {name: change.get(name, default) for name, default in (*SERVED.items(), ("group", 2), ("int8", True))}
    options = {name: value for name, value in change.items() if name not in shape}
    arguments = _copy(_arguments([40, 20], **shape) | options)
    before = _copy(arguments)
    with pytest.raises(error, match=message):
        append_and_attend_progressively(**arguments, impl="cluster")
    _check_state(arguments, before)


@pytest.mark.parametrize("name", ["keys", "values"])
def test_strides_that_clusters_do_not_load_are_an_error(name):
    arguments = _copy(_arguments([40, 20], **SERVED))
    wide = torch.zeros(*arguments[name].shape[:-1], 130, dtype=torch.bfloat16, device=device)
    arguments[name] = wide[..., :128]
    with pytest.raises(ValueError, match=rf"{name} has strides \[.*130, 1\] and begins .* multiples of 16 bytes"):
        append_and_attend_progressively(**arguments, impl="cluster")


@pytest.mark.skipif(device.type == "cuda", reason="says what a CPU gets")
def test_clusters_need_cuda():
    with pytest.raises(RuntimeError, match="impl='cluster' with tensors on 'cpu'; allowed: CUDA tensors"):
        append_and_attend_progressively(**_copy(_arguments([40, 20], **SERVED)), impl="cluster")


def test_why_a_call_falls_back_is_logged_once(monkeypatch, caplog):
    monkeypatch.setattr(_op, "resolve_impl", lambda impl, tensor: "triton")  # as on a CUDA device
    _op._say_once.cache_clear()
    chosen = tuning.forced(progressive_step={"cluster": 8})
    with caplog.at_level(logging.DEBUG, logger=_op.__name__), use_impl("cluster"), chosen:
        for _ in range(2):
            append_and_attend_progressively(**_copy(_arguments([40])))
    said = "append_and_attend_progressively runs as separate launches: dtype=torch.float32 of query; allowed for "
    assert caplog.messages == [said + "impl='cluster': torch.bfloat16"]


@pytest.mark.parametrize(
    ("shape", "found"),
    [
        ((4, 4096, 8, 8, 512), 8),
        ((4, 4096, 32, 2, 256), 16),  # a microbatch takes more warps than the chosen clusters have
        ((8, 65536, 8, 8, 512), 16),
        ((8, 65536, 8, 4, 256), 16),
    ],
)
def test_shapes_that_the_chosen_clusters_do_not_serve_take_others(shape, found):
    group, pages, microbatch, size, threads = shape
    with planned_with(cluster, lambda *shape: SimpleNamespace(max_clusters=lambda shared: 1)):
        plan = cluster._plan(torch.device("cpu"), group, "softmax", pages, microbatch, size, threads, 0)
    assert plan.cluster == found
    assert plan.shared <= MOST_SHARED


@pytest.mark.parametrize(
    ("size", "threads", "microbatch", "waves"),
    [
        (8, 512, 8, (64, 128)),
        (3, 512, 8, (24, 48)),
        (2, 256, 16, (0, 16)),
        (4, 256, 3, (15, 30)),
        (16, 512, 1, (32, 32)),
    ],
)
def test_waves_are_whole_microbatches_with_half_a_block_or_one_for_a_warp(size, threads, microbatch, waves):
    assert cluster.waves_of(size, threads, microbatch) == waves


def test_a_launch_packs_the_members_of_the_kernels_struct(monkeypatch):
    arguments = _copy(_arguments([130, 70, 5], kv_heads=2, group=4, **SERVED))
    options = {"scale": 0.5, "group_reduce": "softmax", "num_pages": 5, "max_blocks": None, "recent_blocks": 2}
    launches = []
    kernel = SimpleNamespace(launch=lambda *launch: launches.append(launch))
    plan = cluster.Plan(kernel.launch, 8, 256, 5000, 32, 99)
    monkeypatch.setattr(cluster, "plan_of", lambda *shape: plan)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=3))
    outputs = cluster.append_and_attend_progressively(**arguments, **options, rest="last", finished=None)
    assert outputs[2].shape == (3, 2, 5)
    ((clusters, shared, stream, packed),) = launches
    assert (clusters, shared, stream) == ((2, 3), 5000, 3)
    source = (Path(cluster.__file__).parent / "cluster.cu").read_text(encoding="utf-8")
    members = re.search(r"struct Arguments \{(.*?)\};", source, re.DOTALL)[1]
    names = re.findall(r"(\w+)(?=[,;])", re.sub(r"//.*", "", members))
    named = dict(zip(names, struct.unpack(cluster.ARGUMENTS.format, packed), strict=True))
    tensors = arguments | dict(zip(("out", "lse", "block_order", "read_counts"), outputs, strict=True))
    for name, tensor in tensors.items():
        if isinstance(tensor, torch.Tensor):
            assert named[name] == tensor.data_ptr(), name
    for name, tensor in (("min", "page_min"), ("max", "page_max"), ("keys", "keys"), ("query", "query")):
        strides = [value for key, value in named.items() if re.fullmatch(rf"{name}_[bhdnp]", key)]
        assert strides == list(arguments[tensor].stride())[:3], name
    numbers = {
        "kv_heads": 2, "capacity": arguments["keys"].shape[2], "max_pages": arguments["page_min"].shape[2],
        "num_pages": 5, "max_blocks": 5, "sink_blocks": 1, "recent_blocks": 2, "local_pages": 32, "microbatch": 2,
        "first_wave": 32, "wave": 64, "forced": 3, "by_mean": 1, "whole_range": 0, "scale": 0.5,
    }  # fmt: skip
    assert {name: named[name] for name in numbers} == numbers
    assert named["log2_odds"] == pytest.approx(3.169925)  # of 0.9


def test_the_enumeration_of_stages_agrees_with_the_kernels():
    source = (Path(cluster.__file__).parent / "cluster.cu").read_text(encoding="utf-8")
    listed = source.partition("enum class Stage {")[2].partition("}")[0]
    assert [name.strip().lower() for name in listed.split(",")] == ["start", *cluster.STAGES]


on_clusters = clusters_fixture(cluster, "progressive_step")


@pytest.mark.usefixtures("on_clusters")
@pytest.mark.parametrize("choice", CLUSTERS, ids=lambda choice: "x".join(map(str, choice.values())))
@pytest.mark.parametrize(
    ("lengths", "kv_heads", "group", "options"),
    [
        ([5000, 0, 33], 2, 4, {"microbatch": 8}),
        ([30, 31, 32], 1, 1, {}),
        ([3001], 1, 7, {"group_reduce": "mean", "rest": "last", "microbatch": 3}),
        ([700, 90], 2, 8, {"group_reduce": "max", "max_blocks": 11, "sink_blocks": 2, "recent_blocks": 2}),
        ([9990], 1, 2, {"threshold": 0.999, "microbatch": 8, "statistic": "minmax"}),
    ],
)
def test_clusters_read_and_write_what_the_reference_does(choice, lengths, kv_heads, group, options):
    statistic = options.get("statistic", "cuboid_mean")
    arguments = _arguments(lengths, kv_heads=kv_heads, group=group, statistic=statistic, **SERVED) | options
    ours, again, expected = _copy(arguments), _copy(arguments), _copy(arguments)
    with tuning.forced(progressive_step=choice):
        found = append_and_attend_progressively(**ours, impl="cluster")
        repeated = append_and_attend_progressively(**(again | {"counter": None}), impl="cluster")
    exact = append_and_attend_progressively(**expected, impl="reference")
    _check_state(ours, expected)
    _check_read(found, repeated)
    assert torch.equal(found[3], exact[3])
    _check_order(found, exact, expected, 1e-4, options.get("group_reduce", "softmax"))
    for name, tensor, same, right in zip(("out", "lse"), found, repeated, exact, strict=False):
        assert torch.equal(tensor, same), name
        torch.testing.assert_close(tensor.float(), right.float(), rtol=1e-2, atol=1e-2)


@pytest.mark.usefixtures("on_clusters")
@pytest.mark.parametrize("raised", [3, 7])
def test_clusters_rank_blocks_whose_scores_lie_together(raised):
    # Nearly all scores share a bin, right behind the first wave's, or far behind them.
    arguments = _arguments([9990], kv_heads=1, group=2, peak=0.1 if raised == 3 else 0.02, **SERVED)
    arguments["page_exponent"][..., 5:25] += raised
    expected = _copy(arguments)
    with tuning.forced(progressive_step={"cluster": 3, "threads": 256}):
        found = append_and_attend_progressively(**_copy(arguments), impl="cluster")
    exact = append_and_attend_progressively(**expected, impl="reference")
    assert torch.equal(found[3], exact[3])
    assert found[3].item() > 270
    _check_order(found, exact, expected, 1e-5)


@pytest.mark.gpu
def test_clusters_read_equal_blocks_in_ascending_order():
    arguments = _arguments([40_000], kv_heads=1, group=4, **SERVED) | {"threshold": 0.6, "microbatch": 8}
    for name in STATE[2:]:
        arguments[name].fill_(1)
    arguments["keys"][:, :, :40_000] = 1.0
    arguments["new_key"] = torch.ones_like(arguments["new_key"])
    scores = page_scores(
        **{name: arguments[name] for name in ("query", "seq_start", "seq_end", "page_size", *STATE[2:])}
    )
    assert (scores[..., :1250] == scores[..., :1]).all()
    _, _, order, read_counts = append_and_attend_progressively(**arguments, impl="cluster")
    count = read_counts.item()
    assert count > 512
    assert order[0, 0, :count].tolist() == [1250, *range(count - 1)]


@pytest.mark.gpu
def test_clusters_in_a_cuda_graph_beside_another_stream():
    arguments = _copy(_arguments([2000, 900], group=4, **SERVED))
    expected = append_and_attend_progressively(**arguments, impl="cluster")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured = append_and_attend_progressively(**arguments, impl="cluster")
    with torch.cuda.stream(stream):
        graph.replay()
    beside = append_and_attend_progressively(**(arguments | {"counter": None}), impl="triton")
    torch.cuda.synchronize()
    assert all(map(torch.equal, captured[:2], expected[:2]))
    _check_read(captured, expected)
    torch.testing.assert_close(beside[0], expected[0], rtol=1e-2, atol=1e-2)
