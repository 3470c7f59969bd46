"""What the harness says where the packages of its extra are missing."""

from __future__ import annotations

from contextlib import AbstractContextManager

from hf_sparse_attn.cli.extras import needs

PACKAGES = (
    *("datasets", "evaluate", "filelock", "huggingface_hub", "jieba", "jinja2", "matplotlib", "pooch", "rapidfuzz"),
    *("requests", "rouge", "rouge_score", "wonderwords", "yaml"),
    *("gguf", "platformdirs", "psutil", "rich", "typer"),  # what the extra `cli` brings
)


def needs_extra() -> AbstractContextManager[None]:
    """Exit with one line that says what to install where the block imports a package of the extra that is missing."""
    return needs("the evaluation harness", PACKAGES, "pip install -e '.[eval]'")
