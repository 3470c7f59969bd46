"""The settings of a speed measurement: a model or a shape, contexts, methods, repeats."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from eval.compile_config import check_options
from eval.config import DTYPES, make_config
from eval.engine import make_variants
from eval.errors import EvalError
from eval.speed_runs import WAYS
from eval.speed_shapes import SHAPES
from eval.split import Split
from hf_sparse_attn import SparseMethod
from hf_sparse_attn.cache.host.room import check_kv_storage


@dataclass(frozen=True)
class SpeedConfig:
    """The settings of one speed measurement.

    Parameters
    ----------
    model : str or None
        A model for ``hf_sparse_attn.cli.models.load_model``: real weights, and a prompt that ``generate()`` prefills.
    shape : str or None
        A name in ``SHAPES``, instead of ``model``: random weights, and a cache filled without a prefill.
    contexts : tuple of int
        Tokens before the first new one.
    method, token_budget, parameters
        As in :class:`eval.config.RunConfig`; dense attention always runs too.
    new_tokens : int
        Tokens that each run generates, at least 2.
    repeats : int
        Timed runs of each side.
    warmup : int
        Untimed runs of each side before them, which measure memory and tokens read. At least 1.
    dtype, device : str or None
        As in :class:`eval.config.RunConfig`.
    seed : int
        Seed of weights, cache and prompt.
    kv_storage : str
        ``"host"`` to run each method with K and V in host memory too; else ``"device"``.
    split : str
        How the model is spread over GPUs: a value of :class:`eval.split.Split`.
    ways : tuple of str
        Ways to run the methods' decode steps, of :data:`eval.speed_runs.WAYS`.
    compile_options : dict
        Options for Inductor in compiled sides, dense ones too, beside those that Transformers sets.
    module_guards : bool
        Whether compiled steps check that the model's modules are as they were.
    """

    model: str | None = None
    shape: str | None = None
    contexts: tuple[int, ...] = ()
    method: tuple[str, ...] = ("quest",)
    token_budget: tuple[int, ...] = ()
    parameters: dict[str, Any] = field(default_factory=dict)
    new_tokens: int = 32
    repeats: int = 5
    warmup: int = 1
    dtype: str | None = None
    device: str | None = None
    seed: int = 0
    kv_storage: str = "device"
    split: str = "none"
    ways: tuple[str, ...] = WAYS
    compile_options: dict[str, Any] = field(default_factory=dict)
    module_guards: bool = True

    def __post_init__(self) -> None:
        """Check the values that need no model.

        Raises
        ------
        EvalError
            A value is not allowed.
        """
        if (self.model is None) == (self.shape is None):
            raise EvalError(f"model={self.model!r}, shape={self.shape!r}: exactly one of the two must be given")
        if self.shape is not None and self.shape not in SHAPES:
            raise EvalError(f"shape={self.shape!r} is unknown; known: {', '.join(SHAPES)}")
        if self.split not in [split.value for split in Split]:
            raise EvalError(f"split={self.split!r} is unknown; known: {', '.join(split.value for split in Split)}")
        if self.dtype is not None and self.dtype not in DTYPES:
            raise EvalError(f"dtype={self.dtype!r} is unknown; known: {', '.join(DTYPES)}")
        if not self.contexts:
            raise EvalError("contexts is empty: at least one number of tokens must be given")
        for name, least in (("contexts", 1), ("new_tokens", 2), ("repeats", 1), ("warmup", 1)):
            value = getattr(self, name)
            for entry in value if isinstance(value, tuple) else (value,):
                if isinstance(entry, bool) or not isinstance(entry, int) or entry < least:
                    raise EvalError(f"{name}={entry!r} is not allowed: a whole number, at least {least}")
        if len(set(self.contexts)) != len(self.contexts):
            raise EvalError(f"contexts={list(self.contexts)} has duplicate entries")
        if not self.ways or (unknown := [way for way in self.ways if way not in WAYS]):
            what = f"ways={unknown[0]!r} is unknown" if self.ways else "ways is empty"
            raise EvalError(f"{what}; known: {', '.join(WAYS)}")
        check_options(self.compile_options)
        for method in self.methods():
            try:
                check_kv_storage(self.kv_storage, method)
            except ValueError as error:
                raise EvalError(str(error)) from error
            if self.shape is not None and (reason := _needs_prefill(method)):
                raise EvalError(
                    f"method={method.name!r} is not allowed with a shape, whose cache is filled without a prefill: "
                    f"{reason}"
                )

    def methods(self) -> list[SparseMethod]:
        """Create every method except dense attention, with every budget.

        Raises
        ------
        EvalError
            A method, a budget or a hyperparameter is not allowed.
        """
        run = make_config(
            {
                "benchmark": "speed",
                "model": self.model or self.shape or "",
                "method": self.method,
                "token_budget": self.token_budget,
                "parameters": self.parameters,
            }
        )
        return [variant.method for variant in make_variants(run) if not variant.is_dense]


def _needs_prefill(method: SparseMethod) -> str | None:
    """Return why a method cannot go on from keys and values that no prefill of its own has written; None if it can."""
    if method.needs_queries and method.keeps_queries:
        return "it needs the prompt's queries"
    if method.needs_weights:
        return "it needs the prompt's attention weights"
    if method.lasting_metadata:
        return f"it needs the {', '.join(method.lasting_metadata)} of all tokens"
    if method.changes_rope:
        return "it rotates keys in its own way"
    if method.evicts:
        return "it evicts tokens, which the next run would lack"
    return None
