"""Arguments of ``--model_args``: the method's hyperparameters, our own, and those of lm_eval's ``hf`` model."""

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
"""Above it, an unknown argument counts as a misspelling; below it, as an argument of ``from_pretrained``."""


class ArgumentError(SystemExit, ValueError):
    """Invalid argument. Ends the ``lm_eval`` command with only its message; in Python it is a ValueError."""


@dataclass(frozen=True)
class Scheme:
    """Choose the tokens that are decoded one per forward pass, where methods with sparse decoding apply.

    Parameters
    ----------
    decode_last : int
        Number of tokens at the end of a prompt that are decoded. The last token of a scored continuation's context is
        always decoded, because it predicts the first scored token.
    rolling_prefill : int
        Number of tokens at the start of each window of a rolling text that are fed and scored in one pass.
    """

    decode_last: int = 0
    rolling_prefill: int = 0

    def __post_init__(self) -> None:
        """Validate the fields.

        Raises
        ------
        ValueError
            A field is negative or not a whole number.
        """
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ValueError(f"{field.name} must be a whole number, 0 or more, got {value!r}")

    def prefill(self, context: int, inputs: int, is_rolling: bool) -> int:
        """Return the number of tokens to prefill of ``inputs`` tokens, with ``context`` before the first scored one."""
        tokens = context - max(1, self.decode_last)
        if is_rolling:
            tokens = max(tokens, self.rolling_prefill)
        return min(max(tokens, 0), inputs - 1)


def split_arguments(
    model_class: type, method: str | SparseMethod, arguments: dict[str, Any]
) -> tuple[SparseMethod, dict[str, Any]]:
    """Make the method from the hyperparameters among the arguments; return it with the remaining arguments.

    Parameters
    ----------
    model_class : type
        lm_eval's model. Its constructor takes the remaining arguments, and passes unknown ones to
        ``from_pretrained``.
    method : str or SparseMethod
        As for ``patch_model``.
    arguments : dict
        All arguments except those of :class:`Scheme`.

    Raises
    ------
    TypeError, ValueError
        The method or a hyperparameter is not allowed, or an argument looks misspelt.
    """
    hyperparameters = {field.name for method_class in METHODS.values() for field in fields(method_class)}
    chosen = make_method(method, **{name: value for name, value in arguments.items() if name in hyperparameters})
    others = {name: value for name, value in arguments.items() if name not in hyperparameters}
    model_parameters = set(inspect.signature(model_class).parameters)
    for name in others.keys() - model_parameters:
        near = difflib.get_close_matches(name, _known(chosen), n=1, cutoff=MIN_SIMILARITY)
        if near:
            raise ValueError(f"unknown argument {name!r} (did you mean {near[0]!r}?); {_takes(chosen)}")
    return chosen, others


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
    except (TypeError, ValueError, OSError) as error:
        raise ArgumentError(str(error)) from error


@contextmanager
def load_errors(pretrained: str, method: SparseMethod) -> Iterator[None]:
    """Turn errors about missing models and unknown arguments into an :class:`ArgumentError`."""
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
            f"unknown argument {unknown[1]!r}; {_takes(method)}; other arguments go to lm_eval's hf model and "
            "to from_pretrained"
        ) from error
