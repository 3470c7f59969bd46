"""The contract between a benchmark and the rest of the harness."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from eval.errors import EvalError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hf_sparse_attn import SparseMethod


@dataclass(frozen=True)
class Sample:
    """One prompt in tokens, split into material and question.

    The material is prefilled once for all methods with a dense prefill, and once for consecutive samples with the same
    material; the question and the answer run with the method.
    """

    material_ids: Sequence[int]
    question_ids: Sequence[int]
    """Tokens of the question, at least one: the pass over the last one gives the first token of the answer."""
    references: Any
    """References for ``eval.metrics.score``; None if nothing is scored, as with ``forced_ids``."""
    max_new_tokens: int
    all_classes: Sequence[str] | None = None
    stop_at_newline: bool = False
    """Whether a newline ends the answer, in addition to the model's end-of-sequence tokens."""
    stop_texts: Sequence[str] = ()
    """Texts that end the answer; the prediction ends before the first of them."""
    min_new_tokens: int = 0
    """Minimum number of tokens of the answer; tokens that would end it earlier are suppressed."""
    forced_ids: Sequence[int] = ()
    """Tokens after the question whose likelihood is measured instead of an answer (perplexity)."""
    forced_chunk: int = 1
    """Forced tokens per forward pass; with 1, methods with sparse decoding apply to each of them."""
    truncated: bool = False
    """Whether the prompt was cut in the middle to fit."""


@dataclass(frozen=True)
class Item:
    """A sample before it is built: the key of its records, and the function that builds it.

    ``task``, ``length`` and ``sample_id`` identify it within a benchmark, on every machine and in every run.
    """

    task: str
    sample_id: str
    build: Callable[[], Sample]
    """Builds the sample. An exception is stored as the records' error, and the run continues."""
    length: int | None = None
    """The requested prompt length in tokens; None if the sample has its own."""
    depth: float | None = None
    """Position of the answer in the material, 0 to 1; None if it has no single position."""
    material: str | None = None
    """Name of the material within task and length, if several consecutive items share it. One process runs them, and
    prepares the material once; None if the item has its own."""
    categories: Mapping[str, str] = field(default_factory=dict)
    """The sample's categories, such as its difficulty. The mean score of each is reported beside the tasks'."""


@dataclass(frozen=True)
class Setup:
    """The settings from which a benchmark creates its items."""

    tokenizer: PreTrainedTokenizerBase
    max_positions: int
    """Maximum number of tokens that the model supports, answer included."""
    tasks: Sequence[str] = ()
    """The requested tasks, checked against the benchmark's; never empty. A run asks for them one at a time."""
    lengths: Sequence[int] = ()
    """The requested lengths in tokens; empty for the benchmark's default."""
    limit: int | None = None
    """Maximum number of samples per task and length; None for all."""
    seed: int = 0
    data_dir: Path | None = None
    protocol_dir: Path | None = None
    chat: bool = False
    """Whether prompts use the tokenizer's chat template, if the benchmark's protocol allows it."""
    options: dict[str, Any] | None = None
    """The benchmark's own settings (``--set name=value``), already checked against ``Benchmark.options``."""

    def option(self, name: str, default: Any) -> Any:
        """Return one of the benchmark's own settings."""
        return (self.options or {}).get(name, default)

    def check_length(self, length: int, needed: int | None = None) -> None:
        """Check that the model supports ``length`` tokens, or ``needed`` with what comes beside them.

        Raises
        ------
        EvalError
            ``length`` is not positive, or beyond the model's positions.
        """
        if length < 1:
            raise EvalError(f"length={length} is not allowed: at least 1 token")
        needed = length if needed is None else needed
        if needed > self.max_positions:
            takes = "" if needed == length else f", and question and answer take {needed - length} of them"
            raise EvalError(
                f"length={length} is not allowed: at most the model's {self.max_positions} positions{takes}; give "
                "--lengths"
            )


class Benchmark(ABC):
    """A benchmark: its tasks, and the items of a run. It has no state."""

    name: ClassVar[str]
    summary: ClassVar[str]
    """One line for ``python -m eval list``."""
    tasks: ClassVar[tuple[str, ...]]
    default_tasks: ClassVar[tuple[str, ...]] = ()
    """The tasks that run by default; empty for all of them."""
    default_lengths: ClassVar[tuple[int, ...]] = ()
    protocol: ClassVar[str | None] = None
    """The protocol file set that prompts and lengths come from (see ``eval/protocols.py``)."""
    averages: ClassVar[dict[str, tuple[str, ...]]] = {}
    """Averages of scores by name: over tasks, or over other averages. One is reported only if all its tasks were
    run."""
    options: ClassVar[dict[str, Any]] = {}
    """The benchmark's own settings and their defaults."""

    def check_methods(self, methods: Sequence[SparseMethod], setup: Setup) -> None:  # noqa: B027 -- most take any
        """Check that the benchmark's settings suit the methods.

        Raises
        ------
        EvalError
            With these settings, a method's records would be misleading.
        """

    @abstractmethod
    def items(self, setup: Setup) -> list[Item]:
        """Return the items of a run, in order; the same for the same ``setup``.

        Data files are found here, with :mod:`eval.data_files`, which notes them for the run's ``config.json``.

        Raises
        ------
        EvalError
            Data or protocol is missing or malformed, or a length does not fit the model. Raised before any work.
        """
