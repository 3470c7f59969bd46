"""Argument checks shared by the ops that read progressively."""

RESTS = ("least", "last")


def check_threshold(threshold: float) -> None:
    """Check the share of the attention weight to read."""
    if not 0 < threshold <= 1:
        raise ValueError(f"threshold={threshold!r}; allowed: a number above 0 and at most 1")


def check_rest(rest: str) -> None:
    """Check the name of an estimate of what has not been read."""
    if rest not in RESTS:
        raise ValueError(f"rest={rest!r}; allowed: {' or '.join(map(repr, RESTS))}")
