"""The arguments of ``--model_args``: the method's hyperparameters, ours, and those that lm_eval's own model takes."""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

from hf_sparse_attn.methods import METHODS, SparseMethod, make_method

MIN_SIMILARITY = 0.8
"""Above it an unknown argument is taken for a misspelt one, below it for one of ``from_pretrained``."""


class ArgumentError(SystemExit, ValueError):
    """An argument that is not allowed. Ends the ``lm_eval`` command with its message alone; in Python a ValueError."""


@dataclass(frozen=True)
class Scheme:
    """Which tokens are fed one a forward pass, so that a method that makes decoding sparse is in force for them.

    Parameters
    ----------
    decode_last : int
        Of a prompt that is to be continued, the last so many tokens. A context whose continuation is scored has its
        last token decoded in any case: it predicts the first one that is scored.
    rolling_prefill : int
        Of a text that is scored as a whole, the first so many tokens of each window are fed and scored in one pass.
    """

    decode_last: int = 0
    rolling_prefill: int = 0

    def __post_init__(self) -> None:
        """Check the numbers.

        Raises
        ------
        ValueError
            One is not a whole number, or negative.
        """
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ValueError(f"{field.name} must be a whole number, 0 or more, got {value!r}")

    def prefill(self, context: int, inputs: int, is_rolling: bool) -> int:
        """Return how many of ``inputs`` tokens one pass takes, of which ``context`` come before the first scored."""
        tokens = context - max(1, self.decode_last)
        if is_rolling:
            tokens = max(tokens, self.rolling_prefill)
        return min(max(tokens, 0), inputs - 1)


def split_arguments(
    model_class: type, method: str | SparseMethod, arguments: dict[str, Any]
) -> tuple[SparseMethod, dict[str, Any]]:
    """Make the method from its hyperparameters among the arguments, and return it with the other arguments.

    Parameters
    ----------
    model_class : type
        lm_eval's model, whose constructor takes the other arguments, and hands those that it does not know to
        ``from_pretrained``.
    method : str or SparseMethod
        As for ``patch_model``.
    arguments : dict
        All but ours.

    Raises
    ------
    TypeError, ValueError
        The method or a hyperparameter is not allowed, or an argument looks like a misspelt one.
    """
    of_methods = {field.name for method_class in METHODS.values() for field in fields(method_class)}
    made = make_method(method, **{name: value for name, value in arguments.items() if name in of_methods})
    others = {name: value for name, value in arguments.items() if name not in of_methods}
    of_model = set(inspect.signature(model_class).parameters)
    for name in others.keys() - of_model:
        near = difflib.get_close_matches(name, _known(made), n=1, cutoff=MIN_SIMILARITY)
        if near:
            raise ValueError(f"unknown argument {name!r} (did you mean {near[0]!r}?); {_takes(made)}")
    return made, others


def _known(method: SparseMethod) -> list[str]:
    return ["method", *(field.name for kind in (method, Scheme) for field in fields(kind))]


def _takes(method: SparseMethod) -> str:
    ours = ", ".join(field.name for field in fields(Scheme))
    return f"{method.name} takes {', '.join(field.name for field in fields(method))}; any method: {ours}"


@contextmanager
def argument_errors() -> Iterator[None]:
    """Turn the package's own errors into an :class:`ArgumentError`."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise ArgumentError(str(error)) from error


@contextmanager
def load_errors(pretrained: str, method: SparseMethod) -> Iterator[None]:
    """Turn two errors of loading into an :class:`ArgumentError`: no such model, and an argument that nothing takes."""
    try:
        yield
    except OSError as error:
        raise ArgumentError(
            f"model {pretrained!r} could not be loaded: {str(error).strip().splitlines()[0]}"
        ) from error
    except TypeError as error:
        unknown = re.search(r"unexpected keyword argument '(\w+)'", str(error))
        if unknown is None:
            raise
        raise ArgumentError(
            f"unknown argument {unknown[1]!r}; {_takes(method)}; all else goes to lm_eval's own "
            "model, hf, and to from_pretrained"
        ) from error
