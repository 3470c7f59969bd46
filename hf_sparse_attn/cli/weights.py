"""Read models from files that have all of their weights, and run no code of theirs."""

from __future__ import annotations

import os
from typing import Any

from transformers import AutoModelForCausalLM, PreTrainedModel

NO_CODE = {"trust_remote_code": False}
"""Argument of every ``from_pretrained``: without it Transformers asks on the terminal whether to run a model's code."""


def whole_model(source: str | os.PathLike[str], **options: Any) -> PreTrainedModel:
    """Load a causal language model whose files have every weight, each in the shape that its configuration says.

    Transformers draws missing weights at random, and says so in a log only.

    Parameters
    ----------
    source : str or path
        The first argument of ``from_pretrained``.
    options
        Its further arguments.

    Raises
    ------
    ValueError
        Weights are missing or have another shape, or the model needs code of its own.
    """
    model, found = AutoModelForCausalLM.from_pretrained(
        source, output_loading_info=True, ignore_mismatched_sizes=True, **NO_CODE, **options
    )
    if missing := sorted(found["missing_keys"]):
        raise ValueError(f"its files lack {len(missing)} of the model's weights, such as {missing[0]!r}")
    if mismatched := sorted(found["mismatched_keys"]):
        name, held, wanted = mismatched[0]
        raise ValueError(
            f"{len(mismatched)} of its weights have another shape than the model's configuration says, such as "
            f"{name!r}: {list(held)} instead of {list(wanted)}"
        )
    loaded: PreTrainedModel = model
    return loaded
