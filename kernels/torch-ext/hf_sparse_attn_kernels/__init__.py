"""Sparse-attention decode ops: Triton kernels, each with a torch reference of the same name and signature."""

from importlib import import_module

from . import _custom_ops
from ._runtime import HAS_TRITON, use_impl

# A kernel module shares its op's name, and importing a submodule binds that name in the package. Importing the
# modules first leaves the name with the public function below, whatever is imported later.
if HAS_TRITON:
    for _op in _custom_ops.SCHEMAS:
        import_module(f".{_op}", __name__)

from .api import append_and_select, page_bounds, page_scores, select_blocks
from .attention_api import dense_decode, sparse_decode, sparse_prefill
from .token_api import mean_query, select_tokens, token_votes

_custom_ops.register()

__all__ = [
    "append_and_select",
    "dense_decode",
    "mean_query",
    "page_bounds",
    "page_scores",
    "select_blocks",
    "select_tokens",
    "sparse_decode",
    "sparse_prefill",
    "token_votes",
    "use_impl",
]
