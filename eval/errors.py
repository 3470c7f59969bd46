"""What the harness says when it is asked for something that cannot be."""

from __future__ import annotations


class EvalError(ValueError):
    """A request that cannot be met: the message names the value, where it was looked for, and what is allowed."""
