"""The wheel, the editable layout, and what importing the package must not need."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TOP_LEVEL = {"hf_sparse_attn", "hf_sparse_attn_kernels"}


def run_python(code: str, cwd: Path, *paths: Path) -> str:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder)]
    subprocess.run([*command, str(ROOT)], check=True, capture_output=True)
    (built,) = folder.glob("hf_sparse_attn-*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--target", str(target), str(wheel)]
    subprocess.run(command, check=True, capture_output=True)
    return target


def test_wheel_holds_both_packages_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    top = {name.split("/")[0] for name in names}
    assert {name for name in top if not name.endswith(".dist-info")} == TOP_LEVEL
    for package in TOP_LEVEL:
        assert f"{package}/py.typed" in names
        assert f"{package}/__init__.py" in names
    assert any(name.endswith("entry_points.txt") for name in names)


REPORT = "import hf_sparse_attn as a, hf_sparse_attn_kernels as b; print(a.__file__); print(b.__file__)"


def test_installed_wheel_imports_from_elsewhere(installed: Path, tmp_path: Path) -> None:
    for line in run_python(REPORT, tmp_path, installed).split():
        assert Path(line).is_relative_to(installed)


def test_installed_wheel_imports_from_the_repository_root(installed: Path) -> None:
    """The root's own hf_sparse_attn comes first there, ``kernels`` is no package, and everything still imports."""
    run_python("import transformers; " + REPORT, ROOT, installed)


def test_installed_wheel_declares_its_model_for_lm_eval(installed: Path, tmp_path: Path) -> None:
    code = (
        "from importlib.metadata import entry_points; from hf_sparse_attn.lm_eval import MODEL_NAME, TARGET; "
        "print(entry_points(group='lm_eval.models')[MODEL_NAME].value == TARGET)"
    )
    assert run_python(code, tmp_path, installed).split() == ["True"]


HIDE_HUB_KERNELS = """
import importlib.machinery
import sys


class OutsideSitePackages:
    def find_spec(self, name, path=None, target=None):
        if name != "kernels":
            return None
        folders = [folder for folder in sys.path if "site-packages" not in folder]
        return importlib.machinery.PathFinder.find_spec(name, folders)


sys.meta_path.insert(0, OutsideSitePackages())
"""


@pytest.mark.parametrize("has_hub_kernels", [True, False])
def test_root_layout_does_not_shadow_hub_kernels(has_hub_kernels: bool, tmp_path: Path) -> None:
    """Paths that an editable install adds, with and without Hugging Face's ``kernels`` distribution."""
    if has_hub_kernels:
        (tmp_path / "kernels").mkdir()
        (tmp_path / "kernels" / "__init__.py").write_text("HUB = True\n")
        check = "import kernels; assert kernels.HUB; "
    else:
        (tmp_path / "sitecustomize.py").write_text(HIDE_HUB_KERNELS)
        check = ""
    code = check + "import transformers; from transformers import LlamaForCausalLM; " + REPORT
    for line in run_python(code, ROOT, ROOT, ROOT / "kernels/torch-ext", tmp_path).split():
        assert Path(line).is_relative_to(ROOT)


def test_no_folder_shadows_another_package() -> None:
    for folder in ("kernels", "tests/kernels", "kernels/triton"):
        assert not (ROOT / folder / "__init__.py").exists()


def test_import_needs_no_optional_package(tmp_path: Path) -> None:
    optional = ("gguf", "psutil", "datasets", "evaluate", "matplotlib", "lm_eval")
    code = (
        f"import sys; sys.modules |= dict.fromkeys({optional!r}); import hf_sparse_attn; "
        "assert not {'typer', 'rich'} & sys.modules.keys(), 'too much'; import hf_sparse_attn.cli.app"
    )
    run_python(code, tmp_path, ROOT, ROOT / "kernels/torch-ext")
