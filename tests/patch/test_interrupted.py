"""What Ctrl-C leaves of a compiled step, without a GPU; `tests/reliability/test_gpu_faults.py` has real ones."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch._inductor import cudagraph_trees

from hf_sparse_attn import patch_model
from hf_sparse_attn.patch.interrupted import forget_interrupted_run
from tests.models import make_model, random_ids

CUDA = torch.device("cuda", 1)


def run_of(traces: list[None], noted: int) -> cudagraph_trees.CUDAWarmupNode:
    """Return a run before a recording, of a step with a trace for each output, of which some have been noted."""
    node = object.__new__(cudagraph_trees.CUDAWarmupNode)
    node.stack_traces = traces
    node.tensor_weakrefs = [None] * noted
    return node


@pytest.fixture
def current(monkeypatch):
    """Return the manager of device 1, whose current run a test sets."""
    manager = SimpleNamespace(current_node=None)
    monkeypatch.setattr(cudagraph_trees, "get_manager", lambda index, create_if_none_exists: {1: manager}.get(index))
    return manager


@pytest.mark.parametrize(("noted", "left"), [(0, 0), (3, 3)], ids=["interrupted", "whole"])
def test_a_run_has_as_many_outputs_as_it_has_noted(current, noted, left):
    traces = [None] * 3  # shared by all runs of a step
    current.current_node = run_of(traces, noted)
    forget_interrupted_run(CUDA)
    assert len(current.current_node.stack_traces) == len(current.current_node.tensor_weakrefs) == left
    assert len(traces) == 3


def test_a_recorded_step_stays_as_it_is(current):
    current.current_node = SimpleNamespace(stack_traces=[None] * 3, tensor_weakrefs=[])
    forget_interrupted_run(CUDA)
    assert len(current.current_node.stack_traces) == 3


@pytest.mark.parametrize("device", [torch.device("cpu"), torch.device("cuda", 0), CUDA], ids=str)
def test_without_a_run_there_is_nothing_to_do(current, device):
    forget_interrupted_run(device)
    assert current.current_node is None


@pytest.mark.parametrize("compiles", [True, False])
def test_a_call_that_may_compile_looks_for_one(monkeypatch, compiles):
    seen = []
    monkeypatch.setattr("hf_sparse_attn.patch.generation.forget_interrupted_run", seen.append)
    model = patch_model(make_model("llama"), "quest", token_budget=48)
    model.generate(random_ids(1, 20), max_new_tokens=2, do_sample=False, num_beams=1 if compiles else 2)
    assert seen == ([model.device] if compiles else [])
