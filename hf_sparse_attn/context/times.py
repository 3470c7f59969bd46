"""How long the preparation of a context took."""

from __future__ import annotations

from typing import NamedTuple


class PreparationSeconds(NamedTuple):
    """The parts of a preparation, in seconds."""

    prefill: float
    clustering: float
    calibration: float
