"""The error of an invalid request to the harness."""

from __future__ import annotations


class EvalError(ValueError):
    """An invalid request. The message names the value, the places looked at, and the allowed values."""
