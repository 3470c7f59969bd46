"""The settings of a measurement of lossless decoding."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eval.errors import EvalError
from eval.speed_config import SpeedConfig
from eval.yarn import Yarn
from hf_sparse_attn import SparseMethod
from hf_sparse_attn.patch.speculation import check_method


@dataclass(frozen=True)
class LosslessConfig:
    """The settings of one measurement.

    Parameters
    ----------
    model, shape, contexts, method, token_budget, parameters, dtype, device
        As in :class:`eval.speed_config.SpeedConfig`.
    draft_tokens : tuple of int
        Tokens drafted before each dense pass; each is measured.
    new_tokens : int
        Tokens that each run generates, more than 2.
    prompts : int
        Number of prompts of each context.
    repeats : int
        Timed runs of each side and prompt.
    yarn : float or None
        Factor by which YaRN extends the model's trained length (:class:`eval.yarn.Yarn`); None for the RoPE as it is.
    data_dir : Path or None
        Folder with books, whose beginnings are the prompts; None for random tokens.
    limit_seconds : float or None
        Seconds of the whole measurement after which no further run begins; None for no limit.
    seed : int
        Seed of weights, cache and random prompts; each further prompt adds 1.
    """

    model: str | None = None
    shape: str | None = None
    contexts: tuple[int, ...] = ()
    method: tuple[str, ...] = ("quest",)
    token_budget: tuple[int, ...] = ()
    draft_tokens: tuple[int, ...] = (4, 8)
    parameters: dict[str, Any] = field(default_factory=dict)
    new_tokens: int = 128
    prompts: int = 1
    repeats: int = 3
    yarn: float | None = None
    data_dir: Path | None = None
    limit_seconds: float | None = None
    dtype: str | None = None
    device: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        """Check the values that need no model.

        Raises
        ------
        EvalError
            A value is not allowed.
        """
        if not self.draft_tokens:
            raise EvalError("draft_tokens is empty: at least one number of tokens must be given")
        if len(set(self.draft_tokens)) != len(self.draft_tokens):
            raise EvalError(f"draft_tokens={list(self.draft_tokens)} has duplicate entries")
        numbers = [("draft_tokens", each, 1) for each in self.draft_tokens]
        for name, value, least in (*numbers, ("new_tokens", self.new_tokens, 3), ("prompts", self.prompts, 1)):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise EvalError(f"{name}={value!r} is not allowed: a whole number, at least {least}")
        if self.limit_seconds is not None and not 0 < self.limit_seconds < math.inf:
            raise EvalError(f"limit_seconds={self.limit_seconds!r} is not allowed: a finite number above 0")
        if self.yarn is not None:
            Yarn(self.yarn)
            if self.shape is not None:
                raise EvalError(f"yarn={self.yarn:g} is not allowed with a shape, which holds every context as it is")
        if self.data_dir is not None and self.shape is not None:
            raise EvalError(f"data_dir={str(self.data_dir)!r} is not allowed with a shape, which has no tokenizer")
        if not self.methods():
            raise EvalError(f"method={','.join(self.method)!r} has no method that drafts")

    @property
    def speed(self) -> SpeedConfig:
        """The settings of one call of ``generate()``, checked."""
        return SpeedConfig(
            model=self.model,
            shape=self.shape,
            contexts=self.contexts,
            method=self.method,
            token_budget=self.token_budget,
            parameters=self.parameters,
            new_tokens=self.new_tokens,
            repeats=self.repeats,
            dtype=self.dtype,
            device=self.device,
            seed=self.seed,
        )

    def methods(self) -> list[SparseMethod]:
        """Create every method with every budget.

        Raises
        ------
        EvalError
            A method, a budget or a hyperparameter is not allowed, or a method cannot draft.
        """
        methods = self.speed.methods()
        for method in methods:
            try:
                check_method(method)
            except ValueError as error:
                raise EvalError(str(error)) from error
        return methods
