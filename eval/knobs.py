"""The hyperparameter that a search for the smallest budget varies, of each method, and its steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import count, takewhile
from typing import Any

from eval.config import DENSE
from eval.engine import Variant
from eval.errors import EvalError
from eval.studies import known_methods
from hf_sparse_attn import METHODS
from hf_sparse_attn.cli.variants import make_methods
from hf_sparse_attn.methods import make_method

_LEAST_BUDGET = 32
_LEAST_SHARE = 2**-10
_LEAST_THRESHOLD = 2**-6
_LEAST_MARGIN = 0.25
ANY_LENGTH = 1 << 20
"""Longer than any prompt that is searched for the first time: for checks before prompts are known."""


@dataclass(frozen=True)
class Knob:
    """A hyperparameter that says how much a method reads."""

    parameter: str
    steps: Callable[[int], list[float]]
    """Returns the default values for prompts of at most so many tokens, from the least read to the most."""


def _budgets(longest: int) -> list[float]:
    """Powers of two and their midpoints, to the first that holds the whole prompt."""
    doubled = [_LEAST_BUDGET << power for power in range(max(1, longest).bit_length())]
    budgets = [value for power in doubled for value in (power, power * 3 // 2)]
    shorter = list(takewhile(lambda budget: budget < longest, budgets))
    return [*shorter, budgets[len(shorter)]]


def _shares(least: float, below: float) -> list[float]:
    """Powers of two and their midpoints from ``least`` to ``below``, which is left out; both are powers of two."""
    powers = takewhile(lambda power: power < below, (least * 2**number for number in count()))
    return [value for power in powers for value in (power, power * 1.5)]


def _thresholds(longest: int) -> list[float]:
    """Powers of two and midpoints up to 1/2, from there their distances from 1, and 1, which reads everything."""
    below, above = _shares(_LEAST_THRESHOLD, 0.5), _shares(_LEAST_SHARE, 0.5)
    return [*below, 0.5, *(1 - share for share in reversed(above)), 1.0]


def _sparsities(longest: int) -> list[float]:
    """1 - x, for shares x that are read, powers of two and midpoints to 1, which is everything."""
    return [*(1 - share for share in _shares(_LEAST_SHARE, 1.0)), 0.0]


def _margins(longest: int) -> list[float]:
    """Powers of two and their midpoints, in nats, and one by which scores never differ."""
    return [*_shares(_LEAST_MARGIN, 64.0), 1024.0]


BUDGET = Knob("token_budget", _budgets)
KNOBS: dict[str, Knob] = {
    "infinigen": Knob("alpha", _margins),
    "psa": Knob("threshold", _thresholds),
    "rabitqcache": Knob("top_p", _thresholds),
    "squeezed": Knob("target_sparsity", _sparsities),
}
"""The methods that are not searched by their token budget. This table is the only place that knows."""


def knob_of(method: str) -> Knob:
    """Return the hyperparameter that a search varies."""
    return KNOBS.get(method, BUDGET)


@dataclass(frozen=True)
class Ladder:
    """A method at each step of its knob, from the least read to the most."""

    method: str
    parameter: str
    steps: tuple[float, ...]
    variants: tuple[Variant, ...]


def check_searchable(names: Iterable[str]) -> None:
    """Raise ``EvalError`` if a method has no setting that says how much it reads, but for a budget that it ignores."""
    known = known_methods()
    for name in names:
        if name in known and not known[name].sparse_phases:
            raise EvalError(f"method: {name} reads everything, so there is nothing to search")


@dataclass(frozen=True)
class Ladders:
    """Makes the ladder of each method of a search.

    Parameters
    ----------
    methods : sequence of str
        Names in ``METHODS``; dense attention is left out.
    parameters : mapping
        Further hyperparameters, as for ``make_methods``, one value of each.
    steps : mapping
        Values of the knob by method, instead of the default ones.
    """

    methods: Sequence[str]
    parameters: Mapping[str, Any]
    steps: Mapping[str, Sequence[float]]

    def __post_init__(self) -> None:
        """Check names and values.

        Raises
        ------
        EvalError
            A method, a hyperparameter or a step is not allowed.
        """
        try:
            make_methods(self.methods, (), self.parameters)
        except (TypeError, ValueError) as error:
            raise EvalError(str(error)) from error
        for name, value in self.parameters.items():
            if isinstance(value, (list, tuple)):
                raise EvalError(f"parameters: {name}={list(value)} is not allowed: a search takes one value")
        check_searchable(self.names)
        for name in self.steps:
            if name not in self.names:
                raise EvalError(f"steps: {name!r} is not among the searched methods {', '.join(self.names)}")
        if not self.names:
            raise EvalError("method: at least one method besides full must be given")
        for name in self.names:
            self.of(name, longest=ANY_LENGTH)

    @property
    def names(self) -> list[str]:
        """The methods to search."""
        return [name for name in self.methods if name != DENSE]

    def of(self, name: str, longest: int) -> Ladder:
        """Return a method's ladder for prompts of at most ``longest`` tokens.

        Default steps that the method refuses, such as a budget below its page, are left out.

        Raises
        ------
        EvalError
            The method refuses a step that was asked for, or every default step.
        """
        knob = knob_of(name)
        known = [field.name for field in fields(METHODS[name])]
        given = {key: value for key, value in self.parameters.items() if key in known}
        prefix = f"{name}."
        given |= {key.removeprefix(prefix): value for key, value in self.parameters.items() if key.startswith(prefix)}
        if knob.parameter in given:
            raise EvalError(f"parameters: {knob.parameter} of {name} is searched; name its steps with --steps")
        made: dict[float, Variant] = {}
        refused = ""
        for step in self._steps(name, knob, longest):
            try:
                method = make_method(name, **given, **{knob.parameter: step})
            except (TypeError, ValueError) as error:
                if name in self.steps:
                    raise EvalError(f"steps: {name} {knob.parameter}={step!r} is not allowed: {error}") from error
                refused = str(error)
                continue
            label = "" if knob is BUDGET else f"{knob.parameter}={step}"
            made[step] = Variant(method, method.token_budget, label)
        if not made:
            raise EvalError(f"{name}: no step of {knob.parameter} is allowed: {refused}")
        return Ladder(name, knob.parameter, tuple(made), tuple(made.values()))

    def _steps(self, name: str, knob: Knob, longest: int) -> list[float]:
        steps = knob.steps(longest)
        if name not in self.steps:
            return steps
        named = self.steps[name]
        if not isinstance(named, (list, tuple)) or not named or not all(_is_number(step) for step in named):
            raise EvalError(f"steps: {name}={named!r} is not allowed: a list of numbers")
        return sorted(set(named), reverse=steps[0] > steps[-1])


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
