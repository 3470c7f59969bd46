"""The choice of the implementation: the requested one, or an error."""

import inspect
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path

import hf_sparse_attn_kernels
import pytest
import torch
from hf_sparse_attn_kernels import _op, select_blocks, skip_checks, use_impl

from tests.ops.helpers import device, int32

PACKAGE = Path(__file__).parents[2] / "kernels" / "torch-ext"


def _select(**options):
    scores = torch.tensor([[[1.0, 3.0, 2.0]]], device=device)
    return select_blocks(scores, int32([0]), int32([3]), block_size=1, max_blocks=2, **options)[0].tolist()


@pytest.fixture
def calls(monkeypatch):
    """The implementations that the ops ran, in order."""
    seen = []
    resolve = _op.resolve_impl

    def record(impl, tensor):
        seen.append(resolve(impl, tensor))
        return seen[-1]

    monkeypatch.setattr(_op, "resolve_impl", record)
    return seen


def test_default_and_use_impl(calls):
    default = "triton" if device.type == "cuda" else "reference"
    assert _select() == [[[1, 2]]]
    with use_impl("triton"):
        _select()
        with use_impl("reference"):
            _select()
            _select(impl="triton")
        _select()
    _select()
    assert calls == [default, "triton", "reference", "triton", "triton", default]


def test_use_impl_is_undone_by_an_error(calls):
    with pytest.raises(KeyError), use_impl("triton"):
        raise KeyError
    _select()
    assert calls == ["triton" if device.type == "cuda" else "reference"]


def test_unknown_name():
    with pytest.raises(ValueError, match="impl='cuda'; allowed"), use_impl("cuda"):
        pass


def test_triton_on_cpu_tensors_without_the_interpreter(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    scores = torch.zeros(1, 1, 3)
    bounds = torch.zeros(1, dtype=torch.int32), torch.full((1,), 3, dtype=torch.int32)
    with pytest.raises(RuntimeError, match="impl='triton' with tensors on 'cpu'; allowed"):
        select_blocks(scores, *bounds, block_size=1, max_blocks=2, impl="triton")


OPS = [
    getattr(hf_sparse_attn_kernels, name)
    for name in hf_sparse_attn_kernels.__all__
    if name not in ("skip_checks", "use_impl")
]


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.__name__)
def test_implementations_take_the_ops_arguments(op):
    """Same names in the same order, except `impl`, and without defaults, which only the op has."""
    schema = getattr(torch.ops.hf_sparse_attn_kernels, op.__name__).default._schema
    names = list(inspect.signature(op).parameters)
    assert [argument.name for argument in schema.arguments] == names
    assert not any(argument.has_default_value() for argument in schema.arguments)
    family = op.__module__.rpartition(".")[0]
    folder = Path(inspect.getfile(inspect.unwrap(op))).parent
    modules = [import_module(f"{family}.{path.stem}") for path in folder.glob("*.py")]
    found = {module.__name__: vars(module)[op.__name__] for module in modules if op.__name__ in vars(module)}
    del found[op.__module__]
    assert f"{family}.reference" in found
    assert len(found) >= 2
    for implementation in found.values():
        parameters = inspect.signature(implementation).parameters
        assert [*parameters, "impl"] == names
        assert all(parameter.default is parameter.empty for parameter in parameters.values())


def test_an_op_has_the_docs_of_its_function_and_python_s_errors():
    assert select_blocks.__doc__.startswith("Choose the blocks to read")
    with pytest.raises(TypeError, match="missing 1 required keyword-only argument: 'max_blocks'"):
        select_blocks(torch.zeros(1, 1, 3, device=device), int32([0]), int32([3]), block_size=1)
    with pytest.raises(TypeError, match="unexpected keyword argument 'budget'"):
        _select(budget=3)


def test_a_second_copy_of_the_package_has_ops_of_its_own():
    script = """
import importlib.util, sys
import torch, hf_sparse_attn_kernels as first
spec = importlib.util.spec_from_file_location("second", first.__file__)
second = sys.modules["second"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(second)
rows = (torch.zeros(1).int(), torch.full((1,), 3).int())
scores = torch.tensor([[[1.0, 3.0, 2.0]]])
for copy in (first, second):
    print(copy.select_blocks(scores, *rows, block_size=1, max_blocks=2)[0].tolist())
    node = getattr(torch.ops, copy.__name__).select_blocks
    print(node.default.namespace, node(scores, *rows, 1, 2, 0, 0, "reference")[0].tolist())
"""
    result = subprocess.run([sys.executable, "-c", script], cwd=PACKAGE, capture_output=True, text=True, check=True)
    found = "[[[1, 2]]]"
    assert result.stdout.splitlines() == [found, f"hf_sparse_attn_kernels {found}", found, f"second {found}"]


def test_without_triton_the_reference_runs_and_triton_is_an_error():
    script = """
import sys
sys.modules["triton"] = None
import torch
from hf_sparse_attn_kernels import select_blocks
arguments = (torch.zeros(1, 1, 3), torch.zeros(1).int(), torch.full((1,), 3).int())
print(select_blocks(*arguments, block_size=1, max_blocks=2)[0].tolist())
try:
    select_blocks(*arguments, block_size=1, max_blocks=2, impl="triton")
except RuntimeError as error:
    print(error)
"""
    result = subprocess.run([sys.executable, "-c", script], cwd=PACKAGE, capture_output=True, text=True, check=True)
    assert result.stdout.splitlines() == [
        "[[[0, 1]]]",
        "impl='triton', but triton is not installed; allowed here: impl='reference'",
    ]


def test_checks_are_skipped_in_the_block_by_its_thread_alone():
    too_many, message = {"sink_blocks": 2, "recent_blocks": 1}, "together at most"  # of at most two blocks
    with pytest.raises(ValueError, match=message):
        _select(**too_many)
    with skip_checks():
        with skip_checks():
            assert len(_select(**too_many)[0][0]) == 2
        assert len(_select(**too_many)[0][0]) == 2
        with ThreadPoolExecutor(1) as threads, pytest.raises(ValueError, match=message):
            threads.submit(_select, **too_many).result()
    with pytest.raises(ValueError, match=message):
        _select(**too_many)


def test_an_error_ends_the_block_that_skips_checks():
    with pytest.raises(IndexError), skip_checks():
        raise IndexError
    with pytest.raises(ValueError, match="together at most"):
        _select(sink_blocks=2, recent_blocks=1)
