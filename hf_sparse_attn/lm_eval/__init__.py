"""The lm-evaluation-harness model ``hf-sparse``: Transformers models with sparse attention."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module

from hf_sparse_attn.cli.extras import install_command

MODEL_NAME = "hf-sparse"
TARGET = "hf_sparse_attn.lm_eval.model:HFSparseLM"


def register() -> None:
    """Register ``hf-sparse`` with lm_eval in this process, for releases that do not discover installed plugins.

    Raises
    ------
    ImportError
        lm_eval is not installed.
    """
    with lm_eval_needed():
        import_module("lm_eval.models")  # registers lm_eval's own models, which it skips once the registry is not empty
        from lm_eval.api.registry import model_registry
    if MODEL_NAME not in model_registry:
        model_registry.register(MODEL_NAME, target=TARGET)


@contextmanager
def lm_eval_needed() -> Iterator[None]:
    """Name the extra to install if lm_eval is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "lm_eval":
            raise
        raise ImportError(
            f"hf_sparse_attn.lm_eval needs lm-evaluation-harness: {install_command('lm-eval')}"
        ) from error
