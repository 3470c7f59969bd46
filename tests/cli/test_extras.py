"""A missing extra ends a command with one line naming the install command, and exit code 2."""

from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import packages_distributions
from pathlib import Path
from types import ModuleType

import pytest

from eval.extras import PACKAGES
from hf_sparse_attn.cli.extras import needs
from hf_sparse_attn.cli.models import ModelLoadError, load_model
from tests.tiny import save_model

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
CLI = ("gguf", "matplotlib", "platformdirs", "psutil", "rich", "typer")
INSTALL_CLI = "pip install 'hf-sparse-attn[cli]'"
INSTALL_EVAL = "pip install -e '.[eval]'"
Hide = Callable[..., None]


@pytest.fixture
def hide(monkeypatch: pytest.MonkeyPatch) -> Hide:
    """Make importing these packages fail, even if they are imported already."""

    def hide_packages(*packages: str) -> None:
        loaded = [name for name in sys.modules if name.partition(".")[0] in packages]
        for name in (*packages, *loaded):
            monkeypatch.setitem(sys.modules, name, None)

    return hide_packages


@contextmanager
def fresh_modules(*prefixes: str) -> Iterator[None]:
    """Forget modules with these prefixes inside the block and restore them after it."""

    def matching() -> dict[str, ModuleType]:
        return {name: module for name, module in sys.modules.items() if name.startswith(prefixes)}

    def forget() -> None:
        for name in matching():
            del sys.modules[name]
            parent, _, leaf = name.rpartition(".")
            vars(sys.modules.get(parent, ModuleType(parent))).pop(leaf, None)

    former = matching()
    forget()
    try:
        yield
    finally:
        forget()
        sys.modules.update(former)
        for name, module in former.items():
            parent, _, leaf = name.rpartition(".")
            setattr(sys.modules[parent], leaf, module)


def run_module(module: str, *arguments: str) -> int | str | None:
    """Run ``python -m module`` in this process with freshly imported command lines; return the exit code."""
    with (
        fresh_modules("hf_sparse_attn.cli.", "hf_sparse_attn.__main__", "eval."),
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(sys, "argv", [module, *arguments])
        with pytest.raises(SystemExit) as exited:
            runpy.run_module(module, run_name="__main__")
    return exited.value.code


@pytest.mark.parametrize(
    ("module", "missing", "line"),
    [
        ("hf_sparse_attn", CLI, f"error: the command line needs typer: {INSTALL_CLI}\n"),
        ("hf_sparse_attn", ("rich",), f"error: the command line needs rich: {INSTALL_CLI}\n"),
        ("eval", PACKAGES, f"error: the evaluation harness needs typer: {INSTALL_EVAL}\n"),
        ("eval", ("yaml",), f"error: the evaluation harness needs yaml: {INSTALL_EVAL}\n"),
    ],
)
def test_a_command_without_its_extra_is_one_line(module, missing, line, hide: Hide, capsys) -> None:
    hide(*missing)
    assert run_module(module, "--help") == 2
    assert capsys.readouterr() == ("", line)


def test_a_package_that_one_command_needs_is_named_when_it_is_called(hide: Hide, capsys, tmp_path: Path) -> None:
    hide("matplotlib")
    assert run_module("eval", "report", str(tmp_path)) == 2
    assert capsys.readouterr() == ("", f"error: the evaluation harness needs matplotlib: {INSTALL_EVAL}\n")


def test_methods_are_listed_without_the_packages_for_weights(hide: Hide, capsys) -> None:
    hide("gguf", "platformdirs", "psutil")
    assert run_module("hf_sparse_attn", "methods") == 0
    assert "quest" in capsys.readouterr().out


def test_memory_that_cannot_be_measured_is_one_line(hide: Hide, capsys, tmp_path: Path) -> None:
    arguments = ("--model", str(save_model(tmp_path / "model")), "--passkey-tokens", "400", "--device", "cpu")
    hide("psutil")
    assert run_module("hf_sparse_attn", "compare", *arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.endswith(f"error: peak memory on CPU is measured with psutil: {INSTALL_CLI}\n")


def test_loading_weights_by_name_names_missing_packages(hide: Hide) -> None:
    hide(*CLI)
    with pytest.raises(ModelLoadError) as raised:
        load_model("smollm2")
    assert str(raised.value) == f"model 'smollm2' is a GGUF file, which needs the gguf package: {INSTALL_CLI}"


def test_another_missing_module_is_not_caught() -> None:
    with pytest.raises(ModuleNotFoundError, match="hf_sparse_attn_kernelz"), needs("all", ("rich",), INSTALL_CLI):
        import hf_sparse_attn_kernelz  # noqa: F401


def test_named_packages_are_those_of_the_extras() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert extras["eval"][0] == "hf-sparse-attn[cli]"
    distributions = packages_distributions()
    for packages, requirements in ((CLI, extras["cli"]), (PACKAGES, [*extras["eval"][1:], *extras["cli"]])):
        wanted = {re.split("[<>=;\\[ ]", requirement)[0].lower() for requirement in requirements}
        assert {distributions[package][0].lower().replace("_", "-") for package in packages} == wanted
