"""The kernels in kernel-builder's layout, read and loaded by Hugging Face's ``kernels`` package."""

import json
import re
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import hf_sparse_attn_kernels
import pytest
import torch
from kernels._rust import Backend, Build

import kernels
from tests.ops.helpers import int32

PROJECT = Path(__file__).parents[1] / "kernels"
PACKAGE = PROJECT / "torch-ext" / "hf_sparse_attn_kernels"


def setting(name: str) -> Any:
    """Return a value of build.toml that is written as in JSON."""
    (value,) = re.findall(rf"^{name} = ([^#\n]+)", (PROJECT / "build.toml").read_text(), re.MULTILINE)
    return json.loads(value)


def build(folder: Path, build_id: str) -> Path:
    """Lay out the package as kernel-builder does without compilation: a folder with metadata for each backend."""
    for backend in setting("backends"):
        variant = folder / "build" / f"torch-{backend}"
        for file in PACKAGE.rglob("*"):
            if file.suffix.removeprefix(".") in setting("pyext"):
                target = variant / file.relative_to(PACKAGE)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, target)
        metadata = {
            "name": setting("name"),
            "id": f"_hf_sparse_attn_kernels_{backend}_{build_id}",
            "version": setting("version"),
            "license": setting("license"),
            "python-depends": [],
            "backend": {"type": backend},
        }
        (variant / "metadata.json").write_text(json.dumps(metadata))
    return folder


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ModuleType]:
    """Load two builds into one process."""
    ids = ("first", "second")
    return {
        id: kernels.get_local_kernel(build(tmp_path_factory.mktemp(id), id), backend="cpu", trust_remote_code=True)
        for id in ids
    }


def test_the_builders_parser_takes_build_toml() -> None:
    parsed = Build.open(PROJECT)
    assert parsed.general.backends == [Backend.CPU, Backend.CUDA]
    assert parsed.all_kernel_depends(Backend.CUDA) == []


def test_a_build_exports_and_computes_the_same(loaded: dict[str, ModuleType]) -> None:
    scores = torch.randn(2, 2, 9)
    options = {"seq_start": int32([0, 3]).cpu(), "seq_end": int32([9, 9]).cpu(), "block_size": 1, "max_blocks": 4}
    expected = hf_sparse_attn_kernels.select_blocks(scores, **options)
    for module in loaded.values():
        assert module.__all__ == hf_sparse_attn_kernels.__all__
        for ours, theirs in zip(expected, module.select_blocks(scores, **options), strict=True):
            assert torch.equal(ours, theirs)


def test_each_build_has_its_own_ops_files_and_modules(loaded: dict[str, ModuleType]) -> None:
    names = [module.__name__ for module in loaded.values()]
    assert names == ["_hf_sparse_attn_kernels_cpu_first", "_hf_sparse_attn_kernels_cpu_second"]
    for module in (hf_sparse_attn_kernels, *loaded.values()):
        ops = getattr(torch.ops, module.__name__)
        assert ops.select_blocks.default.name() == f"{module.__name__}::select_blocks"
    assert len({module.select_blocks.__globals__["__name__"] for module in loaded.values()}) == 2


def test_a_build_has_every_file_that_the_package_reads(loaded: dict[str, ModuleType]) -> None:
    for module in loaded.values():
        folder = Path(str(module.__file__)).parent
        built = {file.relative_to(folder) for file in folder.rglob("*") if file.suffix in (".py", ".json")}
        sources = {file.relative_to(PACKAGE) for file in PACKAGE.rglob("*") if file.suffix in (".py", ".json")}
        assert built == {*sources, Path("metadata.json")}


def test_a_compiled_call_stays_in_its_build(loaded: dict[str, ModuleType]) -> None:
    scores, start, end = torch.randn(1, 1, 9), int32([0]).cpu(), int32([9]).cpu()
    seen = []

    def backend(graph: torch.fx.GraphModule, _: object) -> object:
        seen.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    for module in loaded.values():
        torch.compile(module.select_blocks, backend=backend)(scores, start, end, block_size=1, max_blocks=4)
    targets = [target for target in seen if "select_blocks" in target]
    assert targets == [f"{module.__name__}.select_blocks" for module in loaded.values()]
