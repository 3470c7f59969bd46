"""Make the methods that a command compares, from names, budgets and parameters."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

from hf_sparse_attn.methods import FULL, METHODS, SparseMethod, make_known


def make_methods(
    names: Sequence[str],
    budgets: Sequence[int] = (),
    parameters: Mapping[str, Any] | None = None,
    methods: Mapping[str, type[SparseMethod]] = METHODS,
) -> list[SparseMethod]:
    """Make each named method with each combination of swept parameters and each budget, budgets innermost.

    Parameters
    ----------
    names : sequence of str
        Names in ``methods``. Dense attention (``full``) is left out, because commands always run it unpatched.
    budgets : sequence of int
        Token budgets; empty for the methods' defaults. A method that reads everything is made once.
    parameters : mapping, optional
        Further hyperparameters. ``page_size`` applies to every method that has it, ``quest.page_size`` only to Quest.
        If both are given, the prefixed one wins. A list of values is a sweep: the method is made with each of them.
    methods : mapping, optional
        The methods to choose from, by name.

    Raises
    ------
    ValueError
        A method or a parameter is unknown, one is given twice, a sweep is empty, or a value is not allowed.
    TypeError
        A value is of the wrong type.
    """
    parameters = parameters or {}
    for what, values in (("method", names), ("token budget", budgets)):
        for value in values:
            if list(values).count(value) > 1:
                raise ValueError(f"{what} {value!r} is given twice")
    for name in names:
        if name not in methods:
            make_known(methods, name, {})  # raises an error that suggests the nearest name
    known = {name: [field.name for field in fields(methods[name])] for name in names}
    for key in parameters:
        _check_parameter(key, known, methods)
        if budgets and key.rpartition(".")[2] == "token_budget":
            raise ValueError("token_budget is given twice")
    variants = []
    for name in (name for name in names if name != FULL.name):
        chosen = {key: value for key, value in parameters.items() if key in known[name]}
        chosen |= {
            key.removeprefix(f"{name}."): value for key, value in parameters.items() if key.startswith(f"{name}.")
        }
        if budgets and methods[name].sparse_phases:
            chosen["token_budget"] = list(budgets)
        sweeps = [_sweep(key, value) for key, value in chosen.items()]
        variants += [
            make_known(methods, name, dict(zip(chosen, values, strict=True))) for values in itertools.product(*sweeps)
        ]
    return variants


def _sweep(key: str, value: Any) -> list[Any]:
    """Return a parameter's values: those of a list or tuple, else the value itself."""
    if not isinstance(value, (list, tuple)):
        return [value]
    if not value:
        raise ValueError(f"{key}={value!r} is not allowed: at least one value to sweep over")
    for entry in value:
        if list(value).count(entry) > 1:
            raise ValueError(f"{key}={list(value)}: {entry!r} is given twice")
    return list(value)


def _check_parameter(key: str, known: Mapping[str, Sequence[str]], methods: Mapping[str, type[SparseMethod]]) -> None:
    method, dot, parameter = key.rpartition(".")
    if dot and method not in known:
        raise ValueError(f"parameter {key!r}: {method!r} is not among the methods {', '.join(known)}")
    if dot and parameter not in known[method]:
        make_known(methods, method, {parameter: None})  # raises an error that suggests the nearest name
    if not dot and not any(key in names for names in known.values()):
        accepted = "; ".join(f"{name} takes {', '.join(names)}" for name, names in known.items())
        raise ValueError(f"unknown parameter {key!r}: {accepted}")


def varied_parameters(methods: Sequence[SparseMethod]) -> list[dict[str, Any]]:
    """Return the parameters of each method that differ between the methods of its name, the budget first."""
    values = [asdict(method) for method in methods]
    varied = []
    for method, own in zip(methods, values, strict=True):
        alike = [other for each, other in zip(methods, values, strict=True) if each.name == method.name]
        names = [key for key in own if any(other[key] != own[key] for other in alike)]
        varied.append({key: own[key] for key in sorted(names, key=lambda key: key != "token_budget")})
    return varied


def column_names(methods: Sequence[SparseMethod]) -> list[str]:
    """Name each method, with its budget and the parameters that distinguish it if a method occurs more than once."""
    return [
        " ".join([method.name, *(f"{value}" if key == "token_budget" else f"{key}={value}" for key, value in varied)])
        for method, varied in zip(methods, (each.items() for each in varied_parameters(methods)), strict=True)
    ]


def describe(methods: Sequence[SparseMethod]) -> list[str]:
    """List the parameters in one line per method, joining values that differ between budgets with "or"."""
    lines = []
    for name in dict.fromkeys(method.name for method in methods):
        alike = [asdict(method) for method in methods if method.name == name]
        values = {key: dict.fromkeys(str(each[key]) for each in alike) for key in alike[0]}
        lines.append(f"{name}: " + ", ".join(f"{key}={' or '.join(options)}" for key, options in values.items()))
    return lines
