"""The settings of a run: one benchmark, one model, methods and budgets; from the command line or from YAML."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import yaml

from eval.errors import EvalError

QUESTION_MODES = ("decode", "prefill")
CHAT_MODES = ("auto", "on", "off")
DTYPES = ("float32", "bfloat16", "float16")
DENSE = "full"


@dataclass(frozen=True)
class RunConfig:
    """One run. Every field is in the results folder's ``config.json``, and a row's meaning depends on nothing else.

    Parameters
    ----------
    benchmark : str
        See ``python -m eval list``.
    model : str
        A name or path for ``hf_sparse_attn.cli.models.load_model``.
    tasks : tuple of str
        Empty for the benchmark's default.
    method : tuple of str
        Names in ``METHODS``; dense attention (``full``) runs beside them in any case.
    token_budget : tuple of int
        Each method runs once with each; empty for the methods' defaults.
    parameters : dict
        Further hyperparameters, for every method that has them.
    lengths : tuple of int
        In tokens; what that means is the benchmark's to say. Empty for its default.
    limit : int or None
        The most samples of each task and length.
    seed : int
        Of generated samples.
    question : str
        ``"decode"``: the question is fed token by token (Quest's protocol). ``"prefill"``: in one forward pass
        (TokenSelect's, Squeezed Attention's).
    chat : str
        ``"auto"``: the chat template where the tokenizer has one and the protocol allows it; ``"on"``, ``"off"``.
    data_dir, protocol_dir : str or None
        Folders of data and of protocol files; None to fetch them.
    options : dict
        The benchmark's own settings.
    dtype : str or None
        float32, bfloat16 or float16; None for bfloat16 on CUDA and float32 elsewhere.
    device : str or None
        None for CUDA where there is one.
    """

    benchmark: str
    model: str
    tasks: tuple[str, ...] = ()
    method: tuple[str, ...] = (DENSE,)
    token_budget: tuple[int, ...] = ()
    parameters: dict[str, Any] = field(default_factory=dict)
    lengths: tuple[int, ...] = ()
    limit: int | None = None
    seed: int = 0
    question: str = "decode"
    chat: str = "auto"
    data_dir: str | None = None
    protocol_dir: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    dtype: str | None = None
    device: str | None = None

    def __post_init__(self) -> None:
        """Check the values that need no model and no data.

        Raises
        ------
        EvalError
            A value is not allowed.
        """
        for name, allowed in (("question", QUESTION_MODES), ("chat", CHAT_MODES)):
            if getattr(self, name) not in allowed:
                raise EvalError(f"{name}={getattr(self, name)!r} is not allowed: one of {', '.join(allowed)}")
        if self.dtype is not None and self.dtype not in DTYPES:
            raise EvalError(f"dtype={self.dtype!r} is not allowed: one of {', '.join(DTYPES)}")
        for name in ("lengths", "token_budget"):
            for value in getattr(self, name):
                if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                    raise EvalError(f"{name}={value!r} is not allowed: a whole number, at least 1")
        if self.limit is not None and (not isinstance(self.limit, int) or self.limit < 1):
            raise EvalError(f"limit={self.limit!r} is not allowed: a whole number, at least 1, or nothing for all")
        for name in ("tasks", "method", "token_budget", "lengths"):
            values = getattr(self, name)
            if len(set(values)) != len(values):
                raise EvalError(f"{name}={list(values)} has the same entry twice")

    def as_json(self) -> dict[str, Any]:
        """The fields as JSON has them."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}


def make_config(values: Mapping[str, Any]) -> RunConfig:
    """Make a configuration from plain values, as YAML and JSON have them; lists may be given as single values.

    Raises
    ------
    EvalError
        A name is unknown, a value is of the wrong type or not allowed, or benchmark or model is missing.
    """
    known = {field.name: field for field in fields(RunConfig)}
    settings: dict[str, Any] = {}
    for name, value in values.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise EvalError(f"setting {name!r} is unknown{hint}; known: {', '.join(known)}")
        if value is None:
            continue
        kind = str(known[name].type)
        if kind.startswith("tuple"):
            value = tuple(value) if isinstance(value, (list, tuple)) else (value,)
            if "str" in kind and not all(isinstance(entry, str) for entry in value):
                raise EvalError(f"{name}={list(value)} is not allowed: a list of names")
        elif kind.startswith("dict") and not isinstance(value, dict):
            raise EvalError(f"{name}={value!r} is not allowed: a mapping of names to values")
        elif kind.startswith("str") and not isinstance(value, str):
            raise EvalError(f"{name}={value!r} is not allowed: text")
        elif kind.startswith("int") and (isinstance(value, bool) or not isinstance(value, int)):
            raise EvalError(f"{name}={value!r} is not allowed: a whole number")
        settings[name] = value
    for name in ("benchmark", "model"):
        if name not in settings:
            raise EvalError(f"no {name} is given: on the command line, or in the configuration file")
    return RunConfig(**settings)


def read_sweep(path: Path, overrides: Mapping[str, Any]) -> list[RunConfig]:
    """Read a YAML file: settings for all runs, and under ``runs`` a list of what each has of its own.

    ``overrides`` (the command line) wins over both. Other top-level keys that ``eval.tables`` reads (``paper``,
    ``figures``) are left to it.

    Raises
    ------
    EvalError
        The file cannot be read, is not a mapping, or a setting is not allowed; the message names the file.
    """
    content = read_yaml(path)
    shared = {name: value for name, value in content.items() if name not in ("runs", "paper", "figures")}
    runs = content.get("runs", [{}])
    if not isinstance(runs, list) or not runs or not all(isinstance(run, dict) for run in runs):
        raise EvalError(f"{path}: runs must be a list of mappings")
    given = {name: value for name, value in overrides.items() if value not in (None, (), {})}
    try:
        return [make_config({**shared, **run, **given}) for run in runs]
    except EvalError as error:
        raise EvalError(f"{path}: {error}") from error


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a YAML file that holds a mapping.

    Raises
    ------
    EvalError
        It cannot be read, or holds something else.
    """
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise EvalError(f"{path} cannot be read as YAML: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise EvalError(f"{path} must hold a mapping of settings, got {type(content).__name__}")
    return content


def with_dense(config: RunConfig) -> RunConfig:
    """The same run with dense attention first among its methods: every sparse row has a dense one beside it."""
    return replace(config, method=(DENSE, *(name for name in config.method if name != DENSE)))
