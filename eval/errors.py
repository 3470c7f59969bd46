"""The error of a request that the harness cannot meet."""

from __future__ import annotations


class EvalError(ValueError):
    """A request that cannot be met: the message names the value, where it was looked for, and what is allowed."""
