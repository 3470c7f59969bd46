"""The contract between a benchmark and the rest of the harness."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from eval.errors import EvalError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hf_sparse_attn import SparseMethod


@dataclass(frozen=True)
class Sample:
    """One prompt in tokens, split where the material ends and the question begins.

    The material is prefilled once for all methods that leave prefill dense; the question and the answer run with the
    method on.
    """

    material_ids: Sequence[int]
    question_ids: Sequence[int]
    """Never empty: the forward pass over its last token gives the answer's first."""
    references: Any
    """References for ``eval.metrics.score``; None where nothing is generated (``forced_ids``)."""
    max_new_tokens: int
    all_classes: Sequence[str] | None = None
    stop_at_newline: bool = False
    """Whether a newline ends the answer, beside the model's own end-of-sequence tokens."""
    min_new_tokens: int = 0
    """Tokens that the answer has at least: before, none that would end it is chosen."""
    forced_ids: Sequence[int] = ()
    """Tokens after the question whose likelihood is measured in place of an answer (perplexity)."""
    forced_chunk: int = 1
    """Tokens a forward pass while measuring; with 1, a method that makes decoding sparse is in force for each."""


@dataclass(frozen=True)
class Item:
    """A sample that is not made yet: what names its row in the results, and how to make it.

    ``task``, ``length`` and ``sample_id`` together name it within a benchmark, on every machine and in every run.
    """

    task: str
    sample_id: str
    build: Callable[[], Sample]
    """Makes the sample; what it raises is recorded as the row's error, and the run goes on."""
    length: int | None = None
    """The requested prompt length in tokens; None where the row has its own."""
    depth: float | None = None
    """Place of the answer in the material, 0 to 1; None where that is not one place."""


@dataclass(frozen=True)
class Setup:
    """The settings that a benchmark makes its items from."""

    tokenizer: PreTrainedTokenizerBase
    max_positions: int
    """The most tokens, answer included, that the model can hold."""
    tasks: Sequence[str] = ()
    """The requested tasks, checked against the benchmark's; never empty."""
    lengths: Sequence[int] = ()
    """The requested lengths in tokens; empty for the benchmark's default."""
    limit: int | None = None
    """The most samples of each task and length; None for all."""
    seed: int = 0
    data_dir: Path | None = None
    protocol_dir: Path | None = None
    chat: bool = False
    """Whether prompts are wrapped in the tokenizer's chat template, where the benchmark's protocol allows it."""
    options: dict[str, Any] | None = None
    """The benchmark's own settings (``--set name=value``), already checked against ``Benchmark.options``."""

    def option(self, name: str, default: Any) -> Any:
        """One of the benchmark's own settings."""
        return (self.options or {}).get(name, default)

    def check_length(self, length: int) -> None:
        """Raise where the model cannot hold ``length`` tokens.

        Raises
        ------
        EvalError
            ``length`` is not positive, or beyond the model's positions.
        """
        if length < 1:
            raise EvalError(f"length={length} is not allowed: at least 1 token")
        if length > self.max_positions:
            raise EvalError(f"length={length} is beyond what the model holds: {self.max_positions} positions")


class Benchmark(ABC):
    """A benchmark: its tasks, and the items that a run goes through. No state."""

    name: ClassVar[str]
    summary: ClassVar[str]
    """One line for ``python -m eval list``."""
    tasks: ClassVar[tuple[str, ...]]
    default_tasks: ClassVar[tuple[str, ...]] = ()
    """The tasks that run where none is named; empty for all of them."""
    default_lengths: ClassVar[tuple[int, ...]] = ()
    protocol: ClassVar[str | None] = None
    """The protocol file set that prompts and lengths come from (see ``eval/protocols.py``)."""
    options: ClassVar[dict[str, Any]] = {}
    """The benchmark's own settings and their defaults."""

    def check_methods(self, methods: Sequence[SparseMethod], setup: Setup) -> None:  # noqa: B027 -- most take any
        """Raise where a method's rows would not mean what they say.

        Raises
        ------
        EvalError
            A method does not go with the benchmark's settings.
        """

    @abstractmethod
    def items(self, setup: Setup) -> list[Item]:
        """Everything a run goes through, in order; the same for the same ``setup``.

        Raises
        ------
        EvalError
            Data or protocol is missing or malformed, or a length does not fit the model. Raised here, before any work.
        """
