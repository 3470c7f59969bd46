"""The distributions, the editable layout, and imports without optional packages."""

import fnmatch
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Sequence
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

import hf_sparse_attn
from tests.tiny import save_model

ROOT = Path(__file__).resolve().parents[1]
TOP_LEVEL = {"hf_sparse_attn": ROOT, "hf_sparse_attn_kernels": ROOT / "kernels/torch-ext"}
REPOSITORY = "https://github.com/hf-sparse-attn/hf_sparse_attn"
RAW = REPOSITORY.replace("github.com", "raw.githubusercontent.com")
SITE = "https://hf-sparse-attn.github.io/hf_sparse_attn"


def run_python(code: str, cwd: Path, *paths: Path, arguments: Sequence[str] = ()) -> str:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    command = [sys.executable, "-c", code, *arguments]
    result = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Build the source distribution, and a wheel from it."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True)
    (sdist,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    return sdist, wheel


@pytest.fixture(scope="module")
def wheel(distributions: tuple[Path, Path]) -> Path:
    return distributions[1]


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return Parser().parsestr(archive.read(name).decode("utf-8"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--target", str(target), str(wheel)]
    subprocess.run(command, check=True, capture_output=True)
    return target


def test_wheel_holds_exactly_both_packages(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    sources = {
        path.relative_to(folder).as_posix()
        for package, folder in TOP_LEVEL.items()
        for path in (folder / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert names == sources
    for package in TOP_LEVEL:
        assert f"{package}/py.typed" in names
    assert "hf_sparse_attn_kernels/tuned.json" in names


def test_sdist_holds_everything_at_the_root(distributions: tuple[Path, Path]) -> None:
    """It includes every file that the tests read, so `make test` runs there too."""
    with tarfile.open(distributions[0]) as archive:
        packed = {name.split("/")[1] for name in archive.getnames() if "/" in name}
    ignored = [line.rstrip("/") for line in (ROOT / ".gitignore").read_text(encoding="utf-8").split()]
    own = {
        path.name
        for path in ROOT.iterdir()
        if path.name not in (".git", ".ci") and not any(fnmatch.fnmatch(path.name, pattern) for pattern in ignored)
    }
    assert packed - {"PKG-INFO"} == own


def test_version_and_addresses_are_the_same_everywhere(metadata: Message) -> None:
    version = hf_sparse_attn.__version__
    assert metadata["Version"] == version
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.findall(r"^## \[(\d[^]]*)\]", changelog, re.MULTILINE)[0] == version
    urls = [value.split(", ")[1] for value in metadata.get_all("Project-URL", [])]
    assert {"Homepage", "Documentation", "Repository", "Issues", "Changelog"} == {
        value.split(", ")[0] for value in metadata.get_all("Project-URL", [])
    }
    assert all(url.startswith((REPOSITORY, SITE)) for url in urls)
    for path in (*ROOT.glob("*.md"), *ROOT.glob("*.yml"), ROOT / "CITATION.cff"):
        text = path.read_text(encoding="utf-8")
        for url in re.findall(r"https://[\w.]*github[\w.]*/[\w./-]*hf[-_]sparse[-_]attn[\w./-]*", text):
            assert url.startswith((REPOSITORY, SITE, RAW)), path


def test_ci_tests_the_oldest_transformers_that_is_allowed(metadata: Message) -> None:
    (allowed,) = [entry for entry in metadata.get_all("Requires-Dist", []) if entry.startswith("transformers")]
    (tested,) = re.findall(r'transformers: "([\d.]+)"', (ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8"))
    assert f">={tested.removesuffix('.0')}" in allowed


_FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_TARGET = re.compile(r"\]\(([^)\s]+)\)|\s(?:src|srcset|href)=\"([^\"]+)\"")


def test_description_is_the_readme_with_absolute_links(metadata: Message) -> None:
    readme, description = (ROOT / "README.md").read_text(encoding="utf-8"), str(metadata.get_payload())
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert _FENCE.findall(description) == _FENCE.findall(readme)
    targets = ["".join(found) for found in _TARGET.findall(_FENCE.sub("", readme))]
    described = ["".join(found) for found in _TARGET.findall(_FENCE.sub("", description))]
    assert targets
    pictures = (".png", ".svg", ".gif", ".jpg", ".webp")
    for target, absolute in zip(targets, described, strict=True):
        if target.startswith(("https://", "#")):
            assert absolute == target
            continue
        assert (ROOT / target.partition("#")[0]).exists(), target
        assert absolute.endswith(f"/v{metadata['Version']}/{target}")
        host = RAW if target.endswith(pictures) else f"{REPOSITORY}/blob/"
        assert absolute.startswith(host)


REPORT = "import hf_sparse_attn as a, hf_sparse_attn_kernels as b; print(a.__file__); print(b.__file__)"
USE = """
import sys
from importlib.metadata import version

import hf_sparse_attn, hf_sparse_attn_kernels
from hf_sparse_attn import patch_model, sparse_attention_stats, unpatch_model
from transformers import AutoModelForCausalLM, AutoTokenizer

assert version("hf-sparse-attn") == hf_sparse_attn.__version__
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
inputs = AutoTokenizer.from_pretrained(sys.argv[1])("The ferry left the quay at seven. " * 20, return_tensors="pt")
patch_model(model, "quest", token_budget=64)
model.generate(**inputs, max_new_tokens=4, do_sample=False, pad_token_id=0)
assert 0 < sparse_attention_stats(model).kv_fraction < 1
unpatch_model(model)
print(hf_sparse_attn.__file__)
print(hf_sparse_attn_kernels.__file__)
"""


def test_installed_wheel_patches_a_model_elsewhere(installed: Path, tmp_path: Path) -> None:
    model = save_model(tmp_path / "model")
    for line in run_python(USE, tmp_path, installed, arguments=[str(model)]).split():
        assert Path(line).is_relative_to(installed)


def test_installed_console_script_runs(installed: Path, tmp_path: Path) -> None:
    script = installed / "bin/hf-sparse-attn"
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    command = [sys.executable, str(script), "methods", "--json"]
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert '"quest"' in result.stdout


def test_installed_wheel_imports_from_the_repository_root(installed: Path) -> None:
    """At the root, its own hf_sparse_attn comes first and ``kernels`` is not a package; everything still imports."""
    run_python("import transformers; " + REPORT, ROOT, installed)


def test_installed_wheel_declares_its_model_for_lm_eval(installed: Path, tmp_path: Path) -> None:
    code = "from importlib.metadata import entry_points; print(entry_points(group='lm_eval.models')['hf-sparse'].value)"
    assert run_python(code, tmp_path, installed).strip() == "hf_sparse_attn.lm_eval.model:HFSparseLM"


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
    """An editable install's paths work with and without Hugging Face's ``kernels`` distribution."""
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
    optional = ("gguf", "platformdirs", "psutil", "datasets", "evaluate", "lm_eval", "matplotlib")
    code = (
        f"import sys; sys.modules |= dict.fromkeys({optional!r}); import hf_sparse_attn; "
        "assert not {'typer', 'rich'} & sys.modules.keys(), 'too much'; import hf_sparse_attn.cli.app"
    )
    run_python(code, tmp_path, ROOT, ROOT / "kernels/torch-ext")
