"""Sparse-attention decode ops: Triton kernels, each with a torch reference of the same name and signature."""

from importlib import import_module

from ._runtime import HAS_TRITON, use_impl

# A kernel module shares its op's name, and importing a submodule binds that name in the package. Importing the
# modules first leaves the name with the public function below, whatever is imported later.
if HAS_TRITON:
    for _module in ("page_bounds", "page_scores", "select_blocks", "sparse_decode"):
        import_module(f".{_module}", __name__)

from .api import page_bounds, page_scores, select_blocks, sparse_decode

__all__ = ["page_bounds", "page_scores", "select_blocks", "sparse_decode", "use_impl"]
