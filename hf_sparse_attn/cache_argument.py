"""The name of the argument in which Transformers' models and ``generate()`` take a cache."""

from __future__ import annotations

import inspect
from typing import Any

from transformers import GenerationMixin

OLD_NAME = "past_key_values"
CACHE = "cache" if "cache" in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters else OLD_NAME
"""``"cache"`` since Transformers 5.24, which takes the old name too and warns; ``"past_key_values"`` before."""


def renamed(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return a model's keyword arguments with the cache under its present name."""
    if CACHE == OLD_NAME or OLD_NAME not in kwargs:
        return kwargs
    others = {name: value for name, value in kwargs.items() if name != OLD_NAME}
    return {CACHE: kwargs[OLD_NAME], **others}
