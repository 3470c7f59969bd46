"""Attention to chosen runs of a clustered context, and to the tokens after it."""

MAX_RUN = 16
"""Most slots of a run."""
