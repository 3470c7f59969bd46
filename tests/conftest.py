"""Test-wide settings: offline hub, Triton's interpreter where no CUDA device is present, no unwanted skips in CI."""

import importlib.util
import os
from collections import defaultdict
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import torch

os.environ["HF_HUB_OFFLINE"] = "1"
if not torch.cuda.is_available():
    # Read by Triton when a kernel is decorated, so it must be set before the kernels package is imported.
    os.environ["TRITON_INTERPRET"] = "1"
    if importlib.util.find_spec("triton") is not None:
        from tests.interpreter import patch_once_per_launch

        patch_once_per_launch()

if os.environ.get("ATEN_CPU_CAPABILITY") in ("default", "avx2"):
    # Whether attention packs bfloat16 for AMX PyTorch asks oneDNN, which has a setting of its own, and then it fails
    # ("pack_vnni2 is only supported when avx512 is supported"). oneDNN reads the setting at its first use.
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX2")

TESTS = Path(__file__).parent
CONTRACTS = ("test_contracts.py", "context", "methods", "patch/test_families.py", "patch/test_speculation.py")
"""Tests that compare what is chosen, or tokens, in which a processor's rounding could decide."""
IN_CI = os.environ.get("HF_SPARSE_ATTN_CI") == "1"


def may_skip(reason: str) -> bool:
    """Whether a test may be skipped in CI: only without CUDA."""
    return "needs CUDA" in reason and not torch.cuda.is_available()


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    contracts = [TESTS / name for name in CONTRACTS]
    for item in items:
        if any(item.path.is_relative_to(path) for path in contracts):
            item.add_marker(pytest.mark.contract)
    thin_out(items)
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu") is not None:
                item.add_marker(pytest.mark.skip(reason="needs CUDA"))


def thin_out(items: list[pytest.Item]) -> None:
    """Mark cases of tests with ``one_in(n)`` as ``grid``, but for those whose numbers of values add up to 0 modulo n.

    Values are numbered in the order in which a test's cases have them. In CI, where all cases are collected, every
    value of every parameter must have a case left.
    """
    numbered: dict[tuple[str, str], dict[int, int]] = defaultdict(dict)  # by the value's id
    kept: set[tuple[str, str, int]] = set()
    for item in items:
        mark = item.get_closest_marker("one_in")
        if mark is None:
            continue
        test, numbers = item.nodeid.partition("[")[0], {}
        for name, value in independent_parameters(item).items():
            values = numbered[test, name]
            numbers[name] = values.setdefault(id(value), len(values))
        if sum(numbers.values()) % mark.args[0]:
            item.add_marker(pytest.mark.grid)
        else:
            kept |= {(test, name, number) for name, number in numbers.items()}
    left_out = {(*key, number) for key, values in numbered.items() for number in values.values()} - kept
    if IN_CI and left_out:
        raise pytest.UsageError(f"one_in leaves values out of every case: {left_out}")


def independent_parameters(item: pytest.Item) -> dict[str, Any]:
    """Return the values of a case's parameters; of parameters that vary together, the first alone."""
    values: dict[str, Any] = dict(item.callspec.params)  # type: ignore[attr-defined]
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0].split(",") if isinstance(mark.args[0], str) else mark.args[0]
        for name in names[1:]:
            del values[name.strip()]
    return values


def fail_unwanted_skip(report: pytest.TestReport | pytest.CollectReport) -> None:
    if not IN_CI or not report.skipped or hasattr(report, "wasxfail"):
        return
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    if not may_skip(reason):
        report.outcome = "failed"
        report.longrepr = f"{report.nodeid} was skipped in CI: {reason}"


@pytest.fixture
def dynamo() -> Generator[dict[str, Any], None, None]:
    """Dynamo's counters in a test that begins with nothing compiled. It limits how often a function is compiled."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    yield counters
    torch._dynamo.reset()


@pytest.fixture
def exact() -> Generator[None, None, None]:
    """Run the ops' references, which take float64, on CUDA too."""
    from hf_sparse_attn_kernels import use_impl

    with use_impl("reference"):
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    fail_unwanted_skip(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, Any, pytest.CollectReport]:
    report = yield  # a module-level skip (importorskip) never becomes a test
    fail_unwanted_skip(report)
    return report
