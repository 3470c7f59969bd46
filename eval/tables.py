"""Tables of the papers: their runs and figures."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass

from eval.config import RunConfig, read_sweep, read_yaml
from eval.errors import EvalError
from eval.validation import first_problem

CONFIGS = Path(__file__).parent / "configs"
RENAMED = {
    "psa-longbench": "psa-fig5",
    "quest-longbench": "quest-fig7",
    "quest-passkey": "quest-1",
    "quest-pg19": "quest-fig6",
    "squeezed-longbench": "squeezed-2",
    "tokenselect-infinitebench": "tokenselect-1",
    "tokenselect-ruler": "tokenselect-2",
}
"""Earlier names of tables, and what they are called now."""


_STRICT = ConfigDict(extra="forbid", strict=True)
_Text = Annotated[str, Field(min_length=1)]
_Positive = Annotated[int, Field(ge=1)]


@dataclass(frozen=True, config=_STRICT)
class Paper:
    """The publication of a table."""

    title: _Text
    arxiv: Annotated[str, Field(pattern=r"^\d{4}\.\d{5}$")]
    """Number on arXiv, such as ``2406.10774``."""
    table: _Text
    """Table or figure of the paper."""
    note: _Text
    """Source of the figures, and differences from the paper's setting."""
    missing: _Text | None = None
    """Why figures of the table are not in the file; None if all are."""


@dataclass(frozen=True, config=_STRICT)
class Figure:
    """One figure printed in the paper, or a row without one, which shows ours alone.

    A figure is one of ``score``, ``perplexity`` and ``seconds``.
    """

    benchmark: _Text
    method: _Text
    """This package's name of the method, which need not be in ``METHODS``; ``full`` for dense attention."""
    model: _Text
    task: _Text | None = None
    """None for the mean over ``tasks``."""
    length: _Positive | None = None
    """In tokens; None for the mean over ``lengths``."""
    token_budget: _Positive | None = None
    """In tokens; None for dense attention, and for the method's default."""
    variant: str = ""
    """Name of the method's variant in the run, such as ``vote=head``; see ``eval.engine.Variant``."""
    score: Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)] | None = None
    """In percent."""
    perplexity: Annotated[float, Field(ge=1, allow_inf_nan=False)] | None = None
    seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """To the first token."""
    is_timed: bool = False
    """Whether a row without a figure shows seconds, not the score."""
    tasks: tuple[str, ...] = ()
    """Tasks averaged by a mean, those of the file's run; empty for all measured tasks."""
    lengths: tuple[_Positive, ...] = ()
    """Lengths averaged by a mean, those of the file's run; empty if each sample has its own."""

    @property
    def value(self) -> float | None:
        """The score in percent, the perplexity, or the seconds; None if the paper has no figure."""
        return next((value for value in (self.score, self.perplexity, self.seconds) if value is not None), None)

    @property
    def shows_seconds(self) -> bool:
        """Whether the row is a time."""
        return self.seconds is not None or self.is_timed


@dataclass(frozen=True, config=_STRICT)
class PaperTable:
    """A file of ``eval/configs``; its runs are ``eval.config.read_sweep(path, overrides)``."""

    name: str
    paper: Paper | None
    """None for a sweep that no paper has."""
    figures: tuple[Figure, ...]
    path: Path


def config_names(folder: Path = CONFIGS) -> list[str]:
    """List the names of the files in ``eval/configs``."""
    return sorted(path.stem for path in folder.glob("*.yaml"))


def table_names(folder: Path = CONFIGS) -> list[str]:
    """List the names of the files that reproduce a paper's table or figure, which ``read_table`` reads.

    Those whose figures could not be read are among them; ``Paper.missing`` says why.
    """
    return [name for name in config_names(folder) if read_yaml(folder / f"{name}.yaml").get("paper")]


def read_table(name: str, folder: Path = CONFIGS) -> PaperTable:
    """Read and check the file of a paper's table.

    Parameters
    ----------
    name : str
        One of ``table_names(folder)``.

    Raises
    ------
    EvalError
        Unknown table (the message lists the known ones, and says what an earlier name was replaced by), a file of no
        paper, or a malformed paper, figure or run (the message names file and entry).
    """
    if name in config_names(folder):
        table = read_paper_file(folder / f"{name}.yaml")
        if table.paper is not None:
            return table
        raise EvalError(
            f"table {name!r} is not allowed: {table.path.name} is of no paper. Run it with "
            f"python -m eval run --config eval/configs/{table.path.name}; tables: {', '.join(table_names(folder))}"
        )
    known = table_names(folder)
    near = difflib.get_close_matches(name, known, n=1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    if RENAMED.get(name) in known:
        hint = f" (its name is now {RENAMED[name]!r})"
    raise EvalError(f"table {name!r} is unknown{hint}; known: {', '.join(known) or f'none in {folder}'}")


def read_paper_file(path: Path) -> PaperTable:
    """Read and check a file of ``eval/configs``, with or without figures.

    Raises
    ------
    EvalError
        A malformed paper, figure or run; the message names file and entry.
    """
    content = read_yaml(path)
    runs = read_sweep(path, {})
    paper = _read_paper(content["paper"], path) if "paper" in content else None
    listed = content.get("figures") or []
    if not isinstance(listed, list):
        raise EvalError(f"{path}: figures must be a list, got {type(listed).__name__}")
    if listed and paper is None:
        raise EvalError(f"{path}: paper is missing; it must name the source of the figures")
    if paper is not None and not listed and paper.missing is None:
        raise EvalError(f"{path}: paper: missing is missing; without figures it must say why there are none")
    figures = [_read_figure(entry, f"{path}: figure {number}", runs) for number, entry in enumerate(listed, start=1)]
    return PaperTable(name=path.stem, paper=paper, figures=tuple(figures), path=path)


def _read_paper(values: Any, path: Path) -> Paper:
    names = ", ".join(field.name for field in fields(Paper) if field.name != "missing")
    if not isinstance(values, dict):
        raise EvalError(f"{path}: paper={values!r} is not allowed: a mapping of {names}")
    try:
        return Paper(
            **{name: " ".join(text.split()) if isinstance(text, str) else text for name, text in values.items()}
        )
    except ValidationError as error:
        raise EvalError(f"{path}: paper: {first_problem(error)}; it needs {names}, each as text") from error


def _read_figure(entry: Any, place: str, runs: Sequence[RunConfig]) -> Figure:
    names = ", ".join(field.name for field in fields(Figure) if field.name not in ("tasks", "lengths"))
    if not isinstance(entry, dict):
        raise EvalError(f"{place}: {entry!r} is not a mapping of {names}")
    given = {name: value for name, value in entry.items() if value is not None}
    own = next(
        (run for run in runs if (run.benchmark, run.model) == (given.get("benchmark"), given.get("model"))), None
    )
    tasks = () if "task" in given or own is None else own.tasks
    lengths = () if "length" in given or own is None else own.lengths
    try:
        figure = Figure(**{"tasks": tasks, "lengths": lengths, **given})
    except (ValidationError, TypeError) as error:
        problem = first_problem(error) if isinstance(error, ValidationError) else str(error)
        raise EvalError(f"{place}: {problem} in {entry}; known: {names}") from error
    if sum(value is not None for value in (figure.score, figure.perplexity, figure.seconds)) != 1:
        raise EvalError(f"{place}: exactly one of score, perplexity and seconds is needed in {entry}")
    if own is None:
        raise EvalError(f"{place}: no run of the file has benchmark and model of {entry}")
    return figure
