"""Sparse attention as ops: Triton kernels, each with a torch reference of the same signature and results."""

from ._check import skip_checks
from ._op import use_impl
from .attention.ops import dense_decode, dense_prefill, sparse_decode, sparse_prefill
from .blocks.ops import block_sparse_prefill
from .centroids.ops import centroid_weights, lookup_runs, select_runs
from .codes.attend_ops import append_and_attend_tokens
from .codes.mass_ops import select_tokens_by_mass
from .codes.ops import code_scores, encode_keys, select_tokens_by_score
from .codes.step_ops import append_and_select_tokens
from .kmeans.ops import cluster_sums, nearest_centres
from .offload.ops import keep_chosen, load_blocks
from .pages.ops import page_bounds, page_scores, select_blocks
from .pages.step_ops import append_and_rank, append_and_select
from .products.ops import combined_one_row_linear, one_row_linear
from .progressive.ops import progressive_decode, rank_blocks
from .psa.ops import append_and_attend_progressively
from .quest.ops import append_and_attend
from .runs.ops import runs_decode, runs_prefill
from .sums.ops import one_shot_all_reduce
from .tokens.ops import mean_query, select_tokens, token_votes

__all__ = [
    "append_and_attend",
    "append_and_attend_progressively",
    "append_and_attend_tokens",
    "append_and_rank",
    "append_and_select",
    "append_and_select_tokens",
    "block_sparse_prefill",
    "centroid_weights",
    "cluster_sums",
    "code_scores",
    "combined_one_row_linear",
    "dense_decode",
    "dense_prefill",
    "encode_keys",
    "keep_chosen",
    "load_blocks",
    "lookup_runs",
    "mean_query",
    "nearest_centres",
    "one_row_linear",
    "one_shot_all_reduce",
    "page_bounds",
    "page_scores",
    "progressive_decode",
    "rank_blocks",
    "runs_decode",
    "runs_prefill",
    "select_blocks",
    "select_runs",
    "select_tokens",
    "select_tokens_by_mass",
    "select_tokens_by_score",
    "skip_checks",
    "sparse_decode",
    "sparse_prefill",
    "token_votes",
    "use_impl",
]
