"""Report missing packages of the extra ``eval``."""

from __future__ import annotations

from contextlib import AbstractContextManager

from hf_sparse_attn.cli.extras import needs

PACKAGES = (
    *("datasets", "evaluate", "filelock", "huggingface_hub", "jieba", "jinja2", "matplotlib", "pooch", "pydantic"),
    *("rapidfuzz", "requests", "rouge", "rouge_score", "wonderwords", "yaml"),
    *("gguf", "platformdirs", "psutil", "rich", "typer"),  # from the extra `cli`
)


def needs_extra() -> AbstractContextManager[None]:
    """Exit with one line naming the extra if the block imports a missing package of it."""
    return needs("the evaluation harness", PACKAGES, "pip install -e '.[eval]'")
