"""Run official code without its packages: its files at a commit, and a tokenizer and a model that note their input."""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from tests.eval.tokenizers import tiny_tokenizer

COMMITS = {
    "RULER": "c3f5e3b4f87f97e048793bb510a3a6b19a46bf3a",
    "LongBench": "2e00731f8d0bff23dc4325161044d0ed8af94c1e",
    "InfiniteBench": "88b3daa6989da2fbe0077170d7a3c84c25d5ae58",
    "Quest": "01c1623bf9395009520874e989e29f683203b357",
    "SqueezedAttention": "4a50c64eca2f20232a4e998d754d030ce3a7f6e6",
}
CUT = 300
"""Tokens to which the official code cuts a prompt."""


def show(clones: Path, name: str, path: str, commit: str | None = None) -> str:
    """Return an official file at its commit."""
    command = ["git", "-C", str(clones / name), "show", f"{commit or COMMITS[name]}:{path}"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


class Batch(SimpleNamespace):
    """A tokenizer's output, which stays on the CPU whatever the official code says."""

    def to(self, device: Any) -> Batch:
        """Return itself."""
        return self

    def keys(self) -> list[str]:
        """Return the names of what is passed on with ``**``."""
        return ["input_ids"]

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)


class RecordingTokenizer:
    """The tests' tokenizer, in the way the official code calls one."""

    def __init__(self) -> None:
        self.plain = tiny_tokenizer()
        self.eos_token_id = self.plain.eos_token_id

    def __call__(self, text: str, **_: Any) -> Batch:
        """Encode a text."""
        return Batch(input_ids=torch.tensor([self.plain(text)["input_ids"]]))

    def encode(self, text: str, **options: Any) -> list[int]:
        """Encode a text as a list."""
        return list(self.plain.encode(text, **options))

    def decode(self, ids: Any, **options: Any) -> str:
        """Decode tokens."""
        return str(self.plain.decode(ids, **options))


class RecordingModel:
    """A model that notes what it is fed, and predicts given tokens behind the material and a number of tokens.

    ``said`` has the tokens that it generates for each prompt; without it, a prompt's last token is repeated.
    """

    def __init__(self, answer: Sequence[int] = (1,), after: int = 0, said: Sequence[Sequence[int]] = ()) -> None:
        self.fed: list[list[int]] = []
        self.options: list[dict[str, Any]] = []
        self.answer, self.after, self.said = answer, after, said

    def generate(self, input_ids: torch.Tensor, **options: Any) -> torch.Tensor:
        """Note the prompt and the options of the generation."""
        self.fed.append(input_ids[0].tolist())
        self.options.append(options)
        said = torch.tensor([self.said[len(self.fed) - 1]]).long() if self.said else input_ids[:, -1:]
        return torch.cat([input_ids, said], 1)

    def __call__(self, input_ids: torch.Tensor, **_: Any) -> Any:
        """Note the tokens, and predict the next one."""
        self.fed.append(input_ids[0].tolist())
        place = max(0, len(self.fed) - 1 - self.after)
        logits = torch.zeros(1, 1, 4000)
        logits[0, 0, self.answer[min(place, len(self.answer) - 1)]] = 1
        return SimpleNamespace(logits=logits, past_key_values=())


def execute(code: str, name: str, **given: Any) -> dict[str, Any]:
    """Execute a module's definitions, without its imports and its main part; return its names."""
    tree = ast.parse(code)
    tree.body = [node for node in tree.body if not isinstance(node, (ast.Import, ast.ImportFrom, ast.If))]
    module = ModuleType(name)
    module.__dict__.update(given)
    exec(compile(tree, name, "exec"), module.__dict__)
    return module.__dict__


def execute_main(code: str, names: dict[str, Any]) -> None:
    """Execute the main part of a module, over the names that its definitions gave."""
    (main,) = (node for node in ast.parse(code).body if isinstance(node, ast.If))
    exec(compile(ast.Module(main.body, []), "main", "exec"), names)
