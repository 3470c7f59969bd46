"""The settings of a run: one benchmark, one model, methods and budgets; from the command line or from YAML."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import asdict, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import yaml
from pydantic import ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass

from eval.errors import EvalError
from eval.validation import first_problem

QuestionMode = Literal["decode", "prefill"]
ChatMode = Literal["auto", "on", "off"]
Measure = Literal["score", "divergence"]
Dtype = Literal["float32", "bfloat16", "float16"]
QUESTION_MODES, CHAT_MODES, MEASURES, DTYPES = map(get_args, (QuestionMode, ChatMode, Measure, Dtype))
DENSE = "full"

_Positive = Annotated[int, Field(ge=1)]


@dataclass(frozen=True, config=ConfigDict(extra="forbid", strict=True))
class RunConfig:
    """One run. The fields are stored in the results folder's ``config.json``; records depend on nothing else.

    Parameters
    ----------
    benchmark : str
        See ``python -m eval list``.
    model : str
        A name or path for ``hf_sparse_attn.cli.models.load_model``.
    tasks : tuple of str
        Empty for the benchmark's default.
    method : tuple of str
        Names in ``METHODS``; dense attention (``full``) always runs too.
    token_budget : tuple of int
        Each method runs with each of them; empty for the methods' defaults.
    parameters : dict
        Further hyperparameters, for every method that has them.
    variants : tuple of dict
        Further methods, each by its name under ``method`` and its own hyperparameters; a list of values is a sweep.
    lengths : tuple of int
        In tokens, of a part of the prompt that the benchmark defines. Empty for its default.
    limit : int or None
        Maximum number of samples per task and length.
    seed : int
        Seed of generated samples.
    question : str
        ``"decode"`` feeds the question token by token (Quest's protocol), ``"prefill"`` in one forward pass (the
        protocol of TokenSelect and Squeezed Attention).
    chat : str
        ``"auto"`` uses the chat template if the tokenizer has one and the protocol allows it; or ``"on"``, ``"off"``.
    chat_template : str or None
        The chat template: a file in Jinja, or ``ruler:NAME``, one of RULER's. None for the tokenizer's own.
    data_dir, protocol_dir : str or None
        Folders of data and of protocol files; None to fetch them.
    options : dict
        The benchmark's own settings.
    measure : tuple of str
        ``"score"`` is the task's own figure. ``"divergence"`` feeds each method dense attention's answer, or the text
        of a sample that has one, and compares the predictions along it. Both may be measured.
    dtype : str or None
        float32, bfloat16 or float16; None for bfloat16 on CUDA and float32 elsewhere.
    device : str or None
        None for CUDA if available, else the CPU.
    cuda_graph : bool
        Record each method's passes over single tokens as a CUDA graph, where it can be.
    """

    benchmark: str
    model: str
    tasks: tuple[str, ...] = ()
    method: tuple[str, ...] = (DENSE,)
    token_budget: tuple[_Positive, ...] = ()
    parameters: dict[str, Any] = field(default_factory=dict)
    variants: tuple[dict[str, Any], ...] = ()
    lengths: tuple[_Positive, ...] = ()
    limit: _Positive | None = None
    seed: int = 0
    question: QuestionMode = "decode"
    chat: ChatMode = "auto"
    chat_template: str | None = None
    data_dir: str | None = None
    protocol_dir: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    measure: Annotated[tuple[Measure, ...], Field(min_length=1)] = ("score",)
    dtype: Dtype | None = None
    device: str | None = None
    cuda_graph: bool = False

    def __post_init__(self) -> None:
        """Refuse values that are given twice; pydantic has checked each of them."""
        for value in self.variants:
            if not isinstance(value.get("method"), str):
                raise EvalError(f"variants: {value!r} is not allowed: it needs a method's name under 'method'")
        for name in ("tasks", "method", "token_budget", "lengths", "measure"):
            values = getattr(self, name)
            if len(set(values)) != len(values):
                raise EvalError(f"{name}={list(values)} has duplicate entries")

    def as_json(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}


def changed(config: RunConfig, changes: Mapping[str, Any]) -> RunConfig:
    """Return a configuration with other settings.

    Raises
    ------
    EvalError
        A value has the wrong type or is not allowed.
    """
    try:
        return replace(config, **changes)
    except ValidationError as error:
        raise EvalError(first_problem(error)) from error


def make_config(values: Mapping[str, Any]) -> RunConfig:
    """Create a configuration from YAML or JSON values; a list of one entry may be given as the entry.

    Raises
    ------
    EvalError
        A name is unknown, a value has the wrong type or is not allowed, or benchmark or model is missing.
    """
    known = {field.name: str(field.type) for field in fields(RunConfig)}
    settings: dict[str, Any] = {}
    for name, value in values.items():
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise EvalError(f"setting {name!r} is unknown{hint}; known: {', '.join(known)}")
        if value is not None:
            is_list = "tuple[" in known[name]
            settings[name] = (tuple(value) if isinstance(value, (list, tuple)) else (value,)) if is_list else value
    if isinstance(settings.get("chat"), bool):
        settings["chat"] = "on" if settings["chat"] else "off"  # as YAML reads these words without quotes
    for name in ("benchmark", "model"):
        if name not in settings:
            raise EvalError(f"{name} is missing: give it on the command line or in the configuration file")
    try:
        return RunConfig(**settings)
    except ValidationError as error:
        raise EvalError(first_problem(error)) from error


def read_sweep(path: Path, overrides: Mapping[str, Any]) -> list[RunConfig]:
    """Read a YAML file: settings for all runs, and under ``runs`` a list of each run's own settings.

    ``overrides`` (the command line) take precedence over both. The keys of ``eval.tables`` (``paper``, ``figures``) and
    of ``eval.budget`` (``search``) are ignored.

    Raises
    ------
    EvalError
        The file cannot be read, is not a mapping, or a setting is not allowed; the message names the file.
    """
    content = read_yaml(path)
    shared = {name: value for name, value in content.items() if name not in ("runs", "paper", "figures", "search")}
    runs = content.get("runs", [{}])
    if not isinstance(runs, list) or not runs or not all(isinstance(run, dict) for run in runs):
        raise EvalError(f"{path}: runs must be a list of mappings")
    given = {name: value for name, value in overrides.items() if value not in (None, (), {})}
    try:
        return [make_config({**shared, **run, **given}) for run in runs]
    except EvalError as error:
        raise EvalError(f"{path}: {error}") from error


class _UniqueKeys(yaml.SafeLoader):
    """Refuses a key that a mapping has twice, of which YAML's own loader keeps the last.

    A value that is not of its type, such as a date without a day, has an error that names it and its line.
    """

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)  # type: ignore[no-untyped-call]
        except (ValueError, LookupError, AttributeError) as error:  # of the conversions of YAML's own loader
            problem = f"{node.value!r:.80} is not of type {node.tag.rpartition(':')[2]}"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark) from error

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: list[Any] = []
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue  # what <<: brings may be given anew
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.MarkedYAMLError(problem=f"{key!r} is given twice", problem_mark=key_node.start_mark)
            seen.append(key)
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        return mapping


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a YAML file that holds a mapping.

    Raises
    ------
    EvalError
        The file cannot be read, does not hold a mapping, gives a key twice, has a value that is not of its type, or is
        nested too deeply.
    """
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), _UniqueKeys)
    except (OSError, UnicodeDecodeError, RecursionError, yaml.YAMLError) as error:
        raise EvalError(f"{path} cannot be read as YAML: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise EvalError(f"{path} must hold a mapping of settings, got {type(content).__name__}")
    return content


def with_dense(config: RunConfig) -> RunConfig:
    """Return the run with dense attention first among its methods, so that every sparse record has a dense one."""
    return replace(config, method=(DENSE, *(name for name in config.method if name != DENSE)))
