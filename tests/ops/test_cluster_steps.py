"""Properties that the steps of Quest, KeyCodes and PSA on thread-block clusters share."""

import ctypes
import logging
from collections.abc import Callable
from contextlib import ExitStack
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import hf_sparse_attn_kernels
import pytest
import torch
from hf_sparse_attn_kernels import _cluster, _op, skip_checks, use_impl
from hf_sparse_attn_kernels import _tuning as tuning
from hf_sparse_attn_kernels._nvrtc import CudaError

from tests.ops.codes import test_append_and_attend_tokens as codes
from tests.ops.emulation import MOST_SHARED, on_device, planned_with, recorded_launches
from tests.ops.helpers import device, grid, read_blocks
from tests.ops.psa import test_append_and_attend_progressively as psa
from tests.ops.quest import test_append_and_attend as quest


class Family(NamedTuple):
    op: str
    tests: ModuleType
    """Tests of the op, with its arguments."""
    choice: str
    """Name of its launch choice."""
    kernel: str
    budget: tuple[str, int]
    """An option of which the implementation serves so much."""
    page_size: int
    served: dict[str, Any]
    """The implementation's requirements on the arguments."""

    @property
    def module(self) -> ModuleType:
        """The implementation on clusters."""
        return self.tests.cluster

    def arguments(self, lengths: tuple[int, ...] = (70, 20), **shape: Any) -> dict[str, Any]:
        return self.tests._copy(self.tests._arguments(list(lengths), **(self.served | shape)))

    @property
    def function(self) -> Callable[..., tuple[torch.Tensor, ...]]:
        return getattr(hf_sparse_attn_kernels, self.op)

    def results(self, outputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """Leave out what follows the blocks that PSA has read: it has no meaning."""
        if self.tests is not psa:
            return outputs
        out, lse, order, counts = outputs
        return out, lse, read_blocks(order, counts), counts

    def __call__(self, arguments: dict[str, Any], impl: str | None = None) -> tuple[torch.Tensor, ...]:
        with tuning.forced(**{self.choice: {"cluster": 8}}):
            return self.function(**arguments, impl=impl)


BFLOAT16 = {"dtype": torch.bfloat16, "head_dim": 128, "group": 2}
CODED = BFLOAT16 | {"page_size": 64}
FAMILIES = [
    Family("append_and_attend", quest, "cluster_step", "quest_step", ("max_blocks", 512), 16, BFLOAT16),
    Family("append_and_attend_tokens", codes, "code_step", "key_codes_step", ("max_tokens", 4096), 64, CODED),
    Family(
        "append_and_attend_progressively", psa, "progressive_step", "progressive_step", ("microbatch", 32), 32, BFLOAT16
    ),
]
families = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.choice)
of_pages = pytest.mark.parametrize("family", [FAMILIES[0], FAMILIES[2]], ids=lambda family: family.choice)


class Kernel:
    """A kernel that only counts its launches, of which the device runs so many clusters at once."""

    def __init__(self, max_clusters: int) -> None:
        self.launches = 0
        self.max_clusters = lambda shared: max_clusters

    def __call__(self, *launch: object) -> None:
        self.launches += 1


@pytest.fixture
def standing_in(monkeypatch):
    """Return a function that lets a family plan for a device that runs so many clusters, and returns the kernel."""
    if device.type == "cuda":
        pytest.skip("stands in for a device")
    resolve = _op.resolve_impl
    monkeypatch.setattr(_op, "resolve_impl", lambda impl, tensor: "triton" if impl is None else resolve(impl, tensor))
    _op._say_once.cache_clear()

    def unlaunchable(query: torch.Tensor, *others: Any) -> Exception | None:
        return _cluster.unlaunchable(SimpleNamespace(is_cuda=True, shape=query.shape), *others)  # type: ignore[arg-type]

    with ExitStack() as stack:

        def plan_for(family: Family, max_clusters: int, **properties: Any) -> Kernel:
            kernel = Kernel(max_clusters)
            monkeypatch.setattr(family.module, "unlaunchable", unlaunchable)
            stack.enter_context(planned_with(family.module, lambda *shape: kernel, **properties))
            return kernel

        yield plan_for


def _shifted(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy that starts one element after an aligned address."""
    return tensor.new_zeros(tensor.numel() + 1)[1:].view(tensor.shape).copy_(tensor)


def _padded(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy whose rows are 4 bytes longer than its last dimension."""
    extra = 4 // tensor.element_size()
    wide = tensor.new_zeros(*tensor.shape[:-1], tensor.shape[-1] + extra)
    return wide[..., :-extra].copy_(tensor)


def _changes(family: Family) -> list[tuple[str, Callable[[dict[str, Any]], dict[str, Any]], str]]:
    """Return changes of arguments, each with its name and the error that it leads to."""
    budget, most = family.budget
    strided = ("keys", "values", *(("new_key", "new_value") if family.tests is codes else ("page_min", "page_max")))
    contiguous = ("codes", "factors", "centres") if family.tests is codes else ()
    return [
        ("dtype", lambda now: family.arguments(dtype=torch.float16), "dtype=torch.float16 of query"),
        ("head_dim", lambda now: family.arguments(head_dim=64), "head_dim=64 of query"),
        ("page_size", lambda now: now | {"page_size": 128}, f"page_size=128; .*: {family.page_size}"),
        ("group", lambda now: family.arguments(group=9), "group=9; .* at most 8"),
        (budget, lambda now: now | {budget: most + 1}, f"{budget}={most + 1}; .* at most {most}"),
        *(
            (f"{change.__name__} {name}", lambda now, name=name, change=change: now | {name: change(now[name])}, error)
            for change, names in ((_shifted, (*strided, *contiguous)), (_padded, strided))
            for name in names
            for error in (f"{name} has strides .* and begins .* multiples of 16 bytes",)
        ),
    ]


CHANGES = [
    pytest.param(family, change, error, id=f"{family.choice} {name}")
    for family in FAMILIES
    for name, change, error in _changes(family)
]


@pytest.mark.parametrize(("family", "change", "error"), CHANGES)
def test_without_checks_a_call_is_refused_after_one_that_was_served(family, change, error, standing_in):
    kernel = standing_in(family, 1024)
    served = family.arguments()
    family(served, "cluster")
    refused = change(served)
    with skip_checks():
        for launches in (2, 3):
            family(served, "cluster")
            with pytest.raises((TypeError, ValueError), match=error):
                family(refused, "cluster")
            assert kernel.launches == launches


@families
def test_without_checks_a_stride_beyond_32_bits_is_refused(family, standing_in):
    kernel = standing_in(family, 1024)
    arguments = family.arguments()
    keys = arguments["keys"]
    far = keys.as_strided((*keys.shape[:2], 1, 128), (*keys.stride()[:2], 1 << 32, 1))  # of one token
    with skip_checks():
        family(arguments, "cluster")
        with pytest.raises(ValueError, match=r"keys has stride 4294967296 in dimension 2; .* at most 4294967295"):
            family(arguments | {"keys": far}, "cluster")
    assert kernel.launches == 1


def _falls_back(family: Family, arguments: dict[str, Any], caplog: pytest.LogCaptureFixture) -> str:
    """Assert that calls run as separate launches by default, and return the reason, which is logged once."""
    caplog.clear()
    with caplog.at_level(logging.DEBUG, logger=_op.__name__):
        for name in (None, "cluster"):
            with use_impl(name):
                family(arguments)
    (said,) = caplog.messages
    begin, reason = said.split(": ", maxsplit=1)
    assert begin == f"{family.op} runs as separate launches"
    return reason


@families
def test_clusters_that_do_not_all_run_at_once_are_launched_by_name_alone(family, standing_in, caplog):
    kernel = standing_in(family, 2)
    assert _falls_back(family, family.arguments(), caplog) == "the device runs 2 of 4 clusters at once"
    assert kernel.launches == 0
    family(family.arguments(), "cluster")
    assert kernel.launches == 1
    family(family.arguments((70,)))  # two pairs of a row and a KV head
    assert kernel.launches == 2


@families
def test_a_cache_that_cannot_be_loaded_is_logged_once_wherever_it_moves(family, standing_in, caplog):
    standing_in(family, 1024)
    arguments = family.arguments()
    padded = [arguments | {"keys": _padded(arguments["keys"])} for _ in range(2)]  # at two addresses
    with caplog.at_level(logging.DEBUG, logger=_op.__name__):
        for each in padded:
            family(each)
    (said,) = caplog.messages
    assert f"keys has strides {list(padded[0]['keys'].stride())} and begins 0 bytes past a multiple of 16" in said


@families
def test_clusters_that_the_device_has_no_room_for_are_an_error_by_name(family, standing_in, caplog):
    kernel = standing_in(family, 0)
    arguments = family.arguments()
    reason = "impl='cluster': cpu has no room for a cluster of 4 blocks"
    assert _falls_back(family, arguments, caplog) == reason
    for _ in range(2):
        with pytest.raises(RuntimeError, match=reason) as caught:
            family(arguments, "cluster")
        assert len(caught.traceback) < 10  # each call raises an error of its own
    assert kernel.launches == 0


@families
def test_devices_without_clusters_are_an_error_by_name(family, standing_in, caplog):
    kernel = standing_in(family, 1024, capability=(8, 0))
    arguments = family.arguments()
    reason = "impl='cluster' on compute capability (8, 0); allowed: (9, 0) and later"
    assert _falls_back(family, arguments, caplog) == reason
    with pytest.raises(RuntimeError) as caught:
        family(arguments, "cluster")
    assert str(caught.value) == reason
    assert kernel.launches == 0


@of_pages
def test_more_pages_than_16_bits_count_are_an_error(family, standing_in):
    kernel = standing_in(family, 1024)
    arguments = family.arguments((20,), kv_heads=1)
    for name in ("page_min", "page_max", "page_exponent"):
        shape = list(arguments[name].shape)
        shape[2] = 65_537
        arguments[name] = arguments[name].new_zeros(shape)
    with pytest.raises(ValueError, match="num_pages=65537; allowed for impl='cluster': at most 65536"):
        family(arguments, "cluster")
    assert kernel.launches == 0
    family(arguments | {"num_pages": 65_536}, "cluster")
    assert kernel.launches == 1


@families
def test_the_devices_shared_memory_limits_a_row(family, standing_in, caplog):
    """With 99 KB, as on compute capability 12.0."""
    name = "num_tokens" if family.tests is codes else "num_pages"
    arguments = family.arguments((60_000,), kv_heads=1)
    served = standing_in(family, 1024, capability=(12, 0), most_shared=101_376)
    family(arguments, "cluster")
    assert served.launches == 1
    refused = standing_in(family, 1024, capability=(12, 0), most_shared=20_000)
    reason = rf"{name}=\d+ takes \d+ bytes of .*shared memory.* impl='cluster'; allowed: at most 20000"
    with pytest.raises(RuntimeError, match=reason):
        family(arguments, "cluster")
    assert refused.launches == 0


class Driver:
    """Stands in for the CUDA driver of a device, or of a part of one (MIG).

    It has so much shared memory, runs so many clusters of each size at once, and may fail with a code.
    """

    def __init__(
        self, most_shared: int = MOST_SHARED, code: int = 0, max_clusters: dict[int, int] | None = None
    ) -> None:
        self.most_shared, self.code, self.max_clusters = most_shared, code, max_clusters or {}
        self.attributes: dict[int, int] = {}
        self.launched = b""

    def cuGetErrorString(self, code, text):  # noqa: N802 - the driver's names
        text._obj.value = b"unknown device"

    def cuDeviceGet(self, ordinal, index):  # noqa: N802
        ordinal._obj.value = 40 + index
        return self.code

    def cuDeviceGetAttribute(self, value, attribute, ordinal):  # noqa: N802
        assert (attribute, ordinal.value) == (97, 43)  # CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
        value._obj.value = self.most_shared
        return 0

    def cuModuleLoadData(self, module, image):  # noqa: N802
        return 0

    def cuModuleGetFunction(self, function, module, name):  # noqa: N802
        return 0

    def cuFuncSetAttribute(self, function, attribute, value):  # noqa: N802
        self.attributes[attribute] = value
        return 0

    def cuOccupancyMaxActiveClusters(self, count, function, launch):  # noqa: N802
        asked = launch._obj
        assert asked.shared == 1000
        attributes = asked.attributes[: asked.num_attributes]
        (size,) = (each.value[0] for each in attributes if each.id == _cluster.CLUSTER_DIMENSION)
        count._obj.value = self.max_clusters[size]
        return 0

    def cuLaunchKernelEx(self, launch, function, parameters, extra):  # noqa: N802
        address = ctypes.cast(parameters, ctypes.POINTER(ctypes.c_void_p))[0]
        self.launched = ctypes.string_at(address, 6)
        return 0


@pytest.fixture
def driver(monkeypatch):
    """Return a function that lets a driver stand in for that of device 3."""
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (12, 0))
    monkeypatch.setattr(_cluster, "compiled", lambda *sources: b"an image")

    def stand_in(**options):
        driver = Driver(**options)
        monkeypatch.setattr(_cluster, "_driver", lambda: driver)
        _cluster.most_shared_bytes.cache_clear()
        return driver

    yield stand_in
    _cluster.most_shared_bytes.cache_clear()


def test_a_kernel_may_have_the_shared_memory_of_its_device(driver):
    found = driver(most_shared=101_376)
    kernel = _cluster.ClusterKernel(("a.cu",), (), "step", cluster=8, threads=256)
    assert found.attributes == {8: 101_376}  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    kernel((2, 1), 1000, 0, b"ab\0\0cd")
    assert found.launched == b"ab\0\0cd"


def test_the_driver_says_which_clusters_a_part_of_a_device_runs(driver, monkeypatch):
    """A small slice has too few multiprocessors in a group for 16 blocks, or for any cluster."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))

    def planned(**max_clusters):
        driver(max_clusters={int(size[1:]): number for size, number in max_clusters.items()})
        return _cluster.plan_launch(
            torch.device("cuda", 3),
            16,
            256,
            lambda size, most: _cluster.Room(shared=1000, local_pages=1),
            lambda size: _cluster.ClusterKernel(("a.cu",), (), "step", cluster=size, threads=256),
        )

    plan = planned(_16=0, _8=3)
    assert (plan.cluster, plan.max_clusters) == (8, 3)
    refused = planned(_16=0, _8=0, _4=0)
    assert isinstance(refused, RuntimeError)
    assert str(refused) == "impl='cluster': cuda:3 has no room for a cluster of 4 blocks"


def test_a_driver_that_does_not_say_its_shared_memory_has_no_plan(driver, monkeypatch):
    driver(code=101)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    plan = _cluster.plan_launch(torch.device("cuda", 3), 8, 256, lambda *shape: None, lambda size: None)
    assert isinstance(plan, CudaError)
    assert str(plan) == "cuDeviceGet failed: unknown device"


@families
@pytest.mark.parametrize("backend", ["aot_eager", grid("eager")])
@torch.no_grad()
def test_a_compiled_step_does_what_an_uncompiled_one_does(family, backend, monkeypatch):
    launches = recorded_launches(monkeypatch)
    torch._dynamo.reset()
    function = family.function
    step = torch.compile(lambda arguments: function(**arguments), fullgraph=True, backend=backend)
    arguments = family.arguments((150, 33), kv_heads=1, group=4)
    ours, expected = (family.tests._copy(arguments) for _ in range(2))
    on_clusters = on_device(family.module, family.kernel)
    with on_clusters, tuning.forced(**{family.choice: {"cluster": 3, "threads": 256}}), use_impl("cluster"):
        for token in range(2):
            found, exact = step(ours), function(**expected)
            assert len(launches) == 2 * (token + 1)
            for state in (ours, expected):
                state["seq_end"] = state["seq_end"] + 1
            assert all(map(torch.equal, family.results(found), family.results(exact)))
    family.tests._check_state(ours, expected)


@pytest.mark.gpu
@families
def test_graphs_on_two_streams_replay_beside_a_matmul(family):
    """Clusters of two steps and a matmul's blocks share the device, in any order; no step may see the other's data."""
    steps = [family.arguments(lengths, group=4) for lengths in ((30_000, 9_000), (21_000, 17_000))]
    alone = [[tensor.clone() for tensor in family.results(family(arguments, "cluster"))] for arguments in steps]
    matrix = torch.randn(8192, 8192, dtype=torch.bfloat16, device=device)
    streams = [torch.cuda.Stream() for _ in steps]
    differ = [torch.zeros((), dtype=torch.bool, device=device) for _ in steps]
    torch.cuda.synchronize()
    graphs, outputs = [torch.cuda.CUDAGraph() for _ in steps], []
    for graph, stream, arguments in zip(graphs, streams, steps, strict=True):
        with torch.cuda.graph(graph, stream=stream):
            outputs.append(family(arguments, "cluster"))
    torch.cuda.synchronize()
    for _ in range(50):
        torch.mm(matrix, matrix)
        for _ in range(10):
            for graph, stream, found, exact, differs in zip(graphs, streams, outputs, alone, differ, strict=True):
                with torch.cuda.stream(stream):
                    graph.replay()
                    for one, other in zip(family.results(found), exact, strict=True):
                        differs |= (one != other).any()
                    for one in found:
                        one.zero_()
        torch.cuda.synchronize()
    assert [differs.item() for differs in differ] == [False, False]


@families
@pytest.mark.parametrize("name", ["query", "new_key", "new_value"])
def test_nan_is_not_hidden(family, name):
    arguments = family.arguments()
    arguments[name] = arguments[name].clone()
    arguments[name][0, 0] = float("nan")
    with on_device(family.module, family.kernel), tuning.forced(**{family.choice: {"cluster": 3, "threads": 256}}):
        out, lse, *_ = family.function(**arguments, impl="cluster")
    assert out[0, 0].isnan().all()
    assert lse[0, 0].isnan() or name == "new_value"
    assert out[1].isfinite().all()
    assert lse[1].isfinite().all()


@families
def test_scores_may_lie_far_below_zero(family):
    """Lower than what stands for no score at all: every token read still has its weight."""
    arguments = family.arguments()
    arguments["query"] = arguments["query"].abs() * 1e30
    for name in ("keys", "new_key"):
        arguments[name] = -arguments[name].abs()
    expected = family.tests._copy(arguments)
    with on_device(family.module, family.kernel), tuning.forced(**{family.choice: {"cluster": 3, "threads": 256}}):
        out, lse, indices, counts = family.function(**arguments, impl="cluster")
    exact_out, exact_lse, exact_indices, exact_counts = family.function(**expected, impl="reference")
    assert exact_lse.max() < -1e30
    assert torch.equal(counts, exact_counts)
    assert torch.equal(read_blocks(indices, counts), read_blocks(exact_indices, exact_counts))
    torch.testing.assert_close(out.float(), exact_out.float(), rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(lse, exact_lse, rtol=1e-3, atol=0)
