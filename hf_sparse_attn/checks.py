"""Checks of arguments, each with one message wherever the argument comes from."""

from __future__ import annotations

from operator import index
from typing import SupportsIndex

import torch


def whole_number(name: str, value: object, least: int | None = None, or_else: str = "") -> int:
    """Return a whole number, such as an int of NumPy's or a tensor's only element.

    Raises
    ------
    TypeError
        ``value`` is no whole number. The message names the argument and, with ``or_else``, what else is allowed.
    ValueError
        It is below ``least``.
    """
    wrong = f"{name} must be a whole number{or_else}, got {value!r}"
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        raise TypeError(wrong)
    try:
        number = index(value)
    except TypeError as error:  # a tensor of floats, or of several numbers
        raise TypeError(wrong) from error
    if least is not None and number < least:
        raise ValueError(f"{name} must be at least {least}{or_else}, got {number}")
    return number


def boolean(name: str, value: object) -> bool:
    """Return a bool; raise ``TypeError`` for anything else, which Python would take as true or false."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")
    return value


def whole_numbers(name: str, value: object) -> torch.Tensor:
    """Return a tensor, or nested sequences, of whole numbers as int64; raise ``TypeError`` for anything else."""
    try:
        numbers = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"{name} must be whole numbers, got {type(value).__name__}: {error}") from error
    if not numbers.numel():
        return numbers.long()
    if numbers.is_floating_point() or numbers.is_complex() or numbers.dtype == torch.bool:
        raise TypeError(f"{name} must be whole numbers, got {numbers.dtype}")
    return numbers.long()


def token_ids(name: str, value: object, vocabulary: int) -> torch.Tensor:
    """Return token ids of a model as int64, in their shape and on their device, for which it waits.

    Raises
    ------
    TypeError
        ``value`` holds no whole numbers.
    ValueError
        An id is negative, or not below ``vocabulary``.
    """
    ids = whole_numbers(name, value)
    if ids.numel():
        least, most = (int(each) for each in ids.aminmax())
        if least < 0 or most >= vocabulary:
            raise ValueError(
                f"{name} must be at least 0 and below the model's vocabulary of {vocabulary} tokens, got "
                f"{least if least < 0 else most}"
            )
    return ids


def one_text(ids: torch.Tensor) -> torch.Tensor:
    """Return ``input_ids`` of one text as [1, tokens]; raise ``ValueError`` unless they are that or [tokens]."""
    if ids.dim() == 1:
        ids = ids[None]
    if ids.dim() != 2 or len(ids) != 1:
        raise ValueError(f"input_ids must be [tokens] or [1, tokens], got shape {tuple(ids.shape)}")
    return ids
