"""Which implementation runs an op that has one on thread-block clusters, as on a CUDA device."""

import logging

import pytest
import torch
from hf_sparse_attn_kernels import _op, skip_checks, use_impl
from hf_sparse_attn_kernels._nvrtc import CudaError

SAID = "double runs as separate launches: "


def double(tensor, *, impl=None):
    if tensor.dim() != 1:
        raise ValueError("tensor has not one dimension")


class Calls:
    """A dispatch whose implementations only note that they ran; `refused` is of `limit`, `failed` of the launch."""

    def __init__(self):
        self.ran, self.refused, self.failed = [], None, None
        self.dispatch = _op.Dispatch(double, "tensor", "launcher", "cluster")
        self.dispatch.implementation = self._implementation

    def _implementation(self, impl, name=None):
        if name == "limit":
            return lambda tensor, by_name: self.refused

        def run(tensor):
            if impl == "cluster" and self.failed:
                raise self.failed
            self.ran.append(impl)
            return 2 * tensor

        return run

    def __call__(self, impl=None):
        self.ran.clear()
        assert self.dispatch.run((torch.ones(3),), {"impl": impl}).tolist() == [2, 2, 2]
        return self.ran[0]


@pytest.fixture
def calls(monkeypatch):
    resolved = {None: "triton", "cluster": "triton"}
    monkeypatch.setattr(
        _op, "resolve_impl", lambda impl, tensor: resolved.get(requested := _op.requested_impl(impl), requested)
    )
    _op._say_once.cache_clear()
    return Calls()


def test_clusters_are_the_default_where_triton_would_run(calls, monkeypatch):
    assert calls() == "cluster"
    for name in ("triton", "reference"):
        assert calls(name) == name
        with use_impl(name):
            assert calls() == name
            assert calls("cluster") == "cluster"
            with use_impl(None):
                assert calls() == "cluster"
    with use_impl("cluster"):
        assert [calls(), calls("triton")] == ["cluster", "triton"]
    monkeypatch.setattr(_op, "resolve_impl", lambda impl, tensor: "reference")  # no CUDA, or no Triton
    assert calls() == "reference"
    with use_impl("cluster"):
        assert calls() == "cluster"


def test_without_checks_clusters_are_the_default_too(calls):
    with skip_checks():
        assert calls() == "cluster"
        calls.refused = ValueError("too long")
        assert calls() == "triton"


@pytest.mark.parametrize("name", [None, "cluster"])
@pytest.mark.parametrize("attribute", ["refused", "failed"])
def test_what_clusters_do_not_run_is_launched_separately_and_logged_once(calls, caplog, name, attribute):
    setattr(calls, attribute, CudaError("libnvrtc.so.99 is not found"))
    with caplog.at_level(logging.DEBUG, logger=_op.__name__), use_impl(name):
        assert [calls(), calls()] == ["triton", "triton"]
    assert caplog.messages == [SAID + "libnvrtc.so.99 is not found"]
    with pytest.raises(CudaError, match="libnvrtc"):
        calls("cluster")


def test_other_errors_of_a_launch_are_raised(calls):
    calls.failed = RuntimeError("out of memory")
    with pytest.raises(RuntimeError, match="out of memory"):
        calls()
