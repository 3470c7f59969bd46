import json
import subprocess
import sys
from pathlib import Path

import pytest

from hf_sparse_attn import __version__
from tests.cli.commands import invoke


def test_methods_table() -> None:
    result = invoke("methods")
    assert result.exit_code == 0
    for text in ("quest", "2406.10774", "page_size=16", "decode"):
        assert text in result.stdout


def test_methods_json() -> None:
    (quest,) = [method for method in json.loads(invoke("methods", "--json").stdout) if method["name"] == "quest"]
    assert quest["parameters"]["page_size"] == 16
    assert quest["sparse_phases"] == ["decode"]


def test_module_entry_point() -> None:
    command = [sys.executable, "-m", "hf_sparse_attn", "--help"]
    root = Path(__file__).parents[2]
    environment = {"PYTHONPATH": f"{root}:{root / 'kernels/torch-ext'}", "PATH": ""}
    result = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    assert "hf-sparse-attn" in result.stdout


def test_version() -> None:
    result = invoke("--version")
    assert result.exit_code == 0
    assert result.stdout == f"hf-sparse-attn {__version__}\n"


@pytest.mark.parametrize("columns", [80, 120])
def test_help_has_every_option_with_its_default(columns: int) -> None:
    result = invoke("compare", "--help", columns=columns)
    assert result.exit_code == 0
    assert max(map(len, result.stdout.splitlines())) <= columns
    words = " ".join(result.stdout.replace("│", " ").split())
    for option in (
        "--model",
        "--method",
        "--token-budget",
        "--set",
        "--depths",
        "--prompt-file",
        "--html",
        "--picture",
    ):
        assert option in words
    for default in ("quest", "2000", "8 for a passkey, 64 for a text", "float32 on CPU, bfloat16 on CUDA"):
        assert f"[default: ({default})]" in words
