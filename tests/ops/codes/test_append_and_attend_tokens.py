"""A whole decode step by key codes as one op, by each implementation."""

import logging
import math
import re
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from hf_sparse_attn_kernels import (
    _op,
    append_and_attend_tokens,
    append_and_select_tokens,
    code_scores,
    sparse_decode,
    use_impl,
)
from hf_sparse_attn_kernels import _tuning as tuning
from hf_sparse_attn_kernels.codes import cluster

from tests.ops.codes.steps import new_tokens, prefilled, step_arguments
from tests.ops.emulation import CLUSTERS, clusters_fixture, planned_with
from tests.ops.helpers import IMPLS, check_schema, device, grid

BUDGET = {"max_tokens": 80, "sink_tokens": 4}
STATE = ("keys", "values", "codes", "factors", "centres", "centre_scale", "coded")
SERVED = {"head_dim": 128, "page_size": 64, "dtype": torch.bfloat16}


def _arguments(lengths, **options):
    """Arguments of a step that appends to every row that has tokens."""
    coded = prefilled(lengths, **options)
    ends = [length + 1 if length else 0 for length in lengths]
    return step_arguments(coded, new_tokens(coded, seed=1), ends) | BUDGET


def _copy(arguments):
    counter = torch.tensor([5, 6, 7, 8], device=device)
    return {**arguments, **{name: arguments[name].clone() for name in STATE}, "counter": counter}


def _in_two_ops(arguments, impl):
    indices, counts = append_and_select_tokens(**arguments, impl=impl)
    rows = {name: arguments[name] for name in ("query", "keys", "values", "seq_start", "seq_end", "counter")}
    scale = arguments.get("scale")
    out, lse = sparse_decode(**rows, block_indices=indices, block_counts=counts, block_size=1, scale=scale, impl=impl)
    return out, lse, indices, counts


def _check_state(ours, expected):
    for name in (*STATE, "counter"):
        torch.testing.assert_close(ours[name], expected[name], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(
    ("options", "group_reduce"),
    [
        ({"page_size": 32}, "softmax"),
        ({"page_size": 48, "bits": 2, "centred": False}, "max"),
        ({"page_size": 32, "correction": "least_squares"}, "max"),
    ],
)
def test_equals_its_two_ops(impl, options, group_reduce):
    arguments = _arguments([95, 0, 33], group=3, **options) | {"group_reduce": group_reduce, "scale": 0.2}
    ours, expected = _copy(arguments), _copy(arguments)
    for found, exact in zip(append_and_attend_tokens(**ours, impl=impl), _in_two_ops(expected, impl), strict=True):
        assert torch.equal(found, exact)
    _check_state(ours, expected)


def test_attention_is_that_to_the_chosen_tokens_in_float64():
    arguments = _copy(_arguments([130, 95], group=2, dtype=torch.float64) | {"scale": 0.3})
    out, lse, indices, counts = append_and_attend_tokens(**arguments, impl="reference")
    for row in range(2):
        for head in range(4):
            chosen = indices[row, head // 2, : counts[row, head // 2]].long() + arguments["seq_start"][row]
            logits = arguments["keys"][row, head // 2, chosen] @ arguments["query"][row, head] * 0.3
            expected = logits.softmax(0) @ arguments["values"][row, head // 2, chosen]
            torch.testing.assert_close(out[row, head], expected)
            torch.testing.assert_close(lse[row, head], logits.logsumexp(0))


def test_the_schema_says_what_is_written():
    check_schema("append_and_attend_tokens", _copy(_arguments([40, 20])))


LIMITS = [
    (
        {"dtype": torch.float16},
        {},
        TypeError,
        r"dtype=torch.float16 of query; allowed for impl='cluster': torch.bfloat16",
    ),
    ({"head_dim": 64}, {}, ValueError, r"head_dim=64 of query; allowed for impl='cluster': 128"),
    ({"page_size": 32}, {}, ValueError, r"page_size=32; allowed for impl='cluster': 64"),
    ({"bits": 2}, {}, ValueError, r"bits=2; allowed for impl='cluster': 1"),
    ({"centred": False}, {}, ValueError, r"query_centre=None; allowed for impl='cluster': a tensor"),
    ({"group": 9}, {}, ValueError, r"group=9; allowed for impl='cluster': at most 8"),
    ({}, {"max_tokens": 4097}, ValueError, r"max_tokens=4097; allowed for impl='cluster': at most 4096"),
]


@pytest.mark.parametrize(("options", "change", "error", "message"), LIMITS, ids=str)
def test_an_input_beyond_the_limits_of_clusters_is_an_error_that_names_the_limit(options, change, error, message):
    arguments = _copy(_arguments([70, 20], **(SERVED | options)) | change)
    before = _copy(arguments)
    with pytest.raises(error, match=message):
        append_and_attend_tokens(**arguments, impl="cluster")
    _check_state(arguments, before)


def test_strides_that_clusters_do_not_load_are_an_error():
    arguments = _copy(_arguments([70, 20], **SERVED))
    wide = torch.zeros(*arguments["keys"].shape[:3], 130, dtype=torch.bfloat16, device=device)
    arguments["keys"] = wide[..., :128]
    with pytest.raises(ValueError, match=r"keys has strides \[.*130, 1\] and begins .* multiples of 16 bytes"):
        append_and_attend_tokens(**arguments, impl="cluster")


@pytest.mark.skipif(device.type == "cuda", reason="says what a CPU gets")
def test_clusters_need_cuda():
    with pytest.raises(RuntimeError, match="impl='cluster' with tensors on 'cpu'; allowed: CUDA tensors"):
        append_and_attend_tokens(**_copy(_arguments([70, 20], **SERVED)), impl="cluster")


def test_why_a_call_falls_back_is_logged_once(monkeypatch, caplog):
    monkeypatch.setattr(_op, "resolve_impl", lambda impl, tensor: "triton")  # as on a CUDA device
    _op._say_once.cache_clear()
    chosen = tuning.forced(code_step={"cluster": 8})  # on a CUDA device too
    with caplog.at_level(logging.DEBUG, logger=_op.__name__), chosen:
        for name in (None, "cluster"):
            with use_impl(name):
                append_and_attend_tokens(**_copy(_arguments([40], head_dim=64)))
    said = "append_and_attend_tokens runs as separate launches: dtype=torch.float32 of query; allowed for "
    assert caplog.messages == [said + "impl='cluster': torch.bfloat16"]


@pytest.mark.parametrize(("group", "pages"), [(1, 2048), (4, 2048), (8, 1024)])
@pytest.mark.parametrize("group_reduce", ["softmax", "max"])
def test_a_cluster_of_16_blocks_holds_the_scores_of_long_rows(group, pages, group_reduce):
    shared = cluster.shared_bytes(16, 256, group, group_reduce, pages // 16)
    assert 2 * (shared + 1024) <= 228 * 1024  # two blocks on a multiprocessor


@pytest.mark.parametrize(
    ("group", "group_reduce", "pages", "blocks"),
    [
        (4, "softmax", 2048, 8),
        (4, "softmax", 3072, 16),
        (1, "max", 8192, 16),
        (1, "max", 16368, 16),
        (4, "softmax", 8192, r"524288 takes \d+ bytes of shared memory of a block .* at most 232448"),
        (1, "max", 16384, "1048576 takes 1024 pages of a block of impl='cluster'; allowed: at most 1023"),
    ],
)
def test_long_rows_take_larger_clusters_up_to_a_limit(group, group_reduce, pages, blocks):
    with planned_with(cluster, lambda *shape: SimpleNamespace(max_clusters=lambda shared: 1)):
        plan = cluster._plan(torch.device("cpu"), group, group_reduce, "unbiased", 64 * pages, 8, 512, 0)
    if isinstance(blocks, int):
        assert (plan.cluster, plan.local_pages) == (blocks, -(-pages // blocks))
    else:
        assert re.search(blocks, str(plan))


class Recorded(NamedTuple):
    """A kernel that only keeps what it is launched with."""

    launches: list[tuple[object, ...]]

    def __call__(self, clusters, shared, stream, arguments):
        self.launches.append((clusters, shared, struct.unpack(cluster.ARGUMENTS.format, arguments)))


def test_a_launch_packs_the_members_of_the_kernels_struct(monkeypatch):
    arguments = _copy(_arguments([130, 70, 5], kv_heads=2, group=4, **SERVED))
    arguments |= {"scale": 0.5, "group_reduce": "softmax", "num_tokens": 128, "finished": None}
    kernel = Recorded([])
    plan = cluster.Plan(kernel, 8, 256, 5000, 7, 99)
    monkeypatch.setattr(cluster, "plan_of", lambda *shape: plan)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=3))
    out, lse, indices, counts = cluster.append_and_attend_tokens(**arguments)
    assert indices.shape == (3, 2, 80)
    ((clusters, shared, packed),) = kernel.launches
    assert (clusters, shared) == ((2, 3), 5000)
    source = (Path(cluster.__file__).parent / "cluster.cu").read_text(encoding="utf-8")
    members = re.search(r"struct Arguments \{(.*?)\};", source, re.DOTALL)[1]
    names = re.findall(r"(\w+)(?=[,;])", re.sub(r"//.*", "", members))
    named = dict(zip(names, packed, strict=True))
    outputs = {"out": out, "lse": lse, "block_indices": indices, "block_counts": counts}
    for name, tensor in (arguments | outputs).items():
        if isinstance(tensor, torch.Tensor):
            assert named[name] == tensor.data_ptr(), name
    for name in ("query", "new_key", "new_value", "keys", "values"):
        strides = [value for key, value in named.items() if re.fullmatch(rf"{name}_[bhdn]", key)]
        assert strides == list(arguments[name].stride())[: len(strides)], name
    pages = arguments["centres"].shape[2]
    numbers = {
        "kv_heads": 2,
        "max_pages": pages,
        "num_tokens": 128,
        "max_tokens": 80,
        "sink_tokens": 4,
        "local_pages": 7,
    }
    assert {name: named[name] for name in numbers} == numbers
    scales = [named[name] for name in ("scale", "score_scale", "offset_scale")]
    assert scales == pytest.approx([0.5, 0.5 / math.log(2), 0.5 / math.log(2) * 128**0.5])


on_clusters = clusters_fixture(cluster, "key_codes_step")


def _check_choice(found, exact, arguments):
    """The choice is the reference's, but for tokens whose scores differ by the rounding of float16."""
    assert torch.equal(found[1], exact[1])
    scored = {
        name: arguments[name] for name in (*STATE[2:6], "query", "seq_start", "seq_end", "page_size", "query_centre")
    }
    options = {name: arguments[name] for name in ("group_reduce", "scale") if name in arguments}
    scores = code_scores(**scored, **options, impl="reference").float()
    for ours, right, of_pair in zip(found[0].flatten(0, 1), exact[0].flatten(0, 1), scores.flatten(0, 1), strict=True):
        chosen, expected = set(ours.tolist()), set(right.tolist())
        extra, missing = (of_pair[sorted(one - other)] for one, other in ((chosen, expected), (expected, chosen)))
        assert len(extra) == len(missing) <= 2
        if len(extra):
            torch.testing.assert_close(extra.sort()[0], missing.sort()[0], rtol=2e-3, atol=1e-6)


@pytest.mark.usefixtures("on_clusters")
@pytest.mark.parametrize("choice", CLUSTERS, ids=lambda choice: "x".join(map(str, choice.values())))
@pytest.mark.parametrize(
    ("lengths", "kv_heads", "group", "group_reduce", "max_tokens", "correction"),
    [
        ([5000, 0, 33], 2, 4, "softmax", 200, "unbiased"),
        ([62, 63, 64, 127], 1, 1, "softmax", 100, "unbiased"),
        ([703, 90], 2, 8, "max", 128, "least_squares"),
        grid([63, 127], 2, 4, "softmax", 100, "least_squares"),
        grid([3001], 1, 7, "softmax", 1024, "unbiased"),
        grid([2047], 2, 2, "softmax", 300, "unbiased"),
        ([1151], 1, 3, "max", 90, "least_squares"),
    ],
)
def test_clusters_choose_and_write_what_the_reference_does(
    choice, lengths, kv_heads, group, group_reduce, max_tokens, correction
):
    arguments = _arguments(lengths, kv_heads=kv_heads, group=group, correction=correction, **SERVED)
    arguments |= {"group_reduce": group_reduce, "max_tokens": max_tokens}
    ours, again, expected = (_copy(arguments) for _ in range(3))
    with tuning.forced(code_step=choice):
        found = append_and_attend_tokens(**ours, impl="cluster")
        repeated = append_and_attend_tokens(**again, impl="cluster")
    assert all(torch.equal(first, second) for first, second in zip(found, repeated, strict=True))
    exact = append_and_attend_tokens(**expected, impl="reference")
    for name in ("keys", "values", "coded", "counter"):
        torch.testing.assert_close(ours[name], expected[name], rtol=0, atol=0, equal_nan=True)
    for name in STATE[2:6]:  # rounding may change the bit of a channel close to 0
        unequal = (ours[name].nan_to_num(0.5) != expected[name].nan_to_num(0.5)).sum().item()
        assert unequal <= 2, name
    _check_choice(found[2:], exact[2:], expected)
    right, lse = sparse_decode(
        ours["query"],
        ours["keys"],
        ours["values"],
        *found[2:],
        ours["seq_start"],
        ours["seq_end"],
        block_size=1,
        impl="reference",
    )
    torch.testing.assert_close(found[0].float(), right.float(), rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(found[1], lse, rtol=1e-3, atol=1e-3)


@pytest.mark.usefixtures("on_clusters")
@pytest.mark.parametrize("max_tokens", [70, 1200])
def test_clusters_choose_the_lower_token_among_equal_ones(max_tokens):
    arguments = _arguments([6400], kv_heads=1, group=4, **SERVED) | {"max_tokens": max_tokens, "scale": 0.0}
    with tuning.forced(code_step={"cluster": 2, "threads": 256}):
        chosen = append_and_attend_tokens(**arguments, impl="cluster")[2]
    assert chosen.tolist() == [[[*range(max_tokens - 1), 6400]]]


@pytest.mark.usefixtures("on_clusters")
@pytest.mark.parametrize("near", [200, 256, 257, 400])  # as a warp lists, and more
def test_clusters_choose_tokens_that_lie_together(near):
    """A warp looks through all of its keys where more may be chosen than it lists."""
    arguments = _arguments([6400], kv_heads=1, group=1, **SERVED) | {"max_tokens": near + 1, "sink_tokens": 0}
    arguments["factors"][:, :, 900 : 900 + near, 1] = 100.0  # all of one warp
    with tuning.forced(code_step={"cluster": 2, "threads": 256}):
        chosen = append_and_attend_tokens(**arguments, impl="cluster")[2]
    assert chosen.tolist() == [[[*range(900, 900 + near), 6400]]]


@pytest.mark.gpu
def test_clusters_in_a_cuda_graph_beside_another_stream():
    arguments = _copy(_arguments([2000, 900], group=4, **SERVED))
    expected = append_and_attend_tokens(**arguments, impl="cluster")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured = append_and_attend_tokens(**arguments, impl="cluster")
    with torch.cuda.stream(stream):
        graph.replay()
    beside = append_and_attend_tokens(**_copy(arguments), impl="triton")
    torch.cuda.synchronize()
    assert all(torch.equal(found, exact) for found, exact in zip(captured, expected, strict=True))
    torch.testing.assert_close(beside[0], expected[0], rtol=2e-2, atol=2e-2)
