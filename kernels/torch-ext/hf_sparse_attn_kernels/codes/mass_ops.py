"""The op that chooses tokens until they hold a share of the estimated attention weight."""

import torch

from .._check import check_dims, check_float, check_sequence
from .._op import op, selection_output
from .checks import check_forced_tokens, check_share, check_token_budget
from .mass_weights import MOST_TOKENS


@op(launcher="mass")
def select_tokens_by_mass(
    scores: torch.Tensor,
    seq_start: torch.Tensor,
    seq_end: torch.Tensor,
    *,
    top_p: float,
    sink_tokens: int,
    page_size: int,
    max_tokens: int | None = None,
    impl: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose the first tokens, the newest token's page, and the fewest others that hold a share of the weight.

    The top-p rule of RaBitQCache (arXiv 2606.31519) and Twilight (arXiv 2502.02770), per KV head. Row b has
    n = seq_end[b] - seq_start[b] tokens, at most num_tokens. The first `sink_tokens` and the tokens from
    (n - 1) // page_size * page_size on are always chosen. The others are candidates. A candidate weighs exp(score) over
    the greatest candidate's exp(score): with the scores of `code_scores` and group_reduce="softmax", the sum of its
    softmax weights over the query heads of the group. The fewest candidates that hold at least `top_p` of the weight of
    all candidates are chosen, the heaviest first, and of equal weights the lower index.

    Weights are whole numbers, so their sums are exact and both implementations choose the same tokens. With the scores
    s in float32 and i = floor((max s - s) * 32 log2(e)), at most 1023, a weight is 2 ** (-i / 32), rounded to a
    multiple of 2 ** -40. It is so up to 2.2 % above exp(s - max s); the tokens chosen hold at least
    top_p / (top_p + (1 - top_p) * 2 ** (1 / 32)) of the exact weight, for 0.95 that is 0.949. NaN and -inf weigh
    nothing and are never chosen; inf counts as the greatest float16.

    Parameters
    ----------
    scores : torch.Tensor
        float16 [batch, kv_heads, num_tokens] (also bfloat16, float32 and float64 in the reference), as `code_scores`
        returns them, with num_tokens at most 2 ** 22. The scores of tokens that are always chosen are not used.
    seq_start, seq_end : torch.Tensor
        int32 [batch], on the device of `scores`: row b's valid tokens are at seq_start[b] .. seq_end[b] - 1.
    top_p : float
        Share of the candidates' weight, above 0 and at most 1, which chooses every candidate that has a weight. It is
        rounded to a multiple of 2 ** -20.
    sink_tokens : int
        Number of first tokens that are always chosen.
    page_size : int
        Tokens per page, a multiple of 16.
    max_tokens : int, optional
        Maximum number of tokens to choose per row and KV head, at least sink_tokens + page_size; beyond it the lightest
        are left out. Default: no maximum.
    impl : str, optional
        "triton" or "reference". Defaults to `use_impl`, then Triton on CUDA, else the reference.

    Returns
    -------
    block_indices : torch.Tensor
        int32 [batch, kv_heads, max_tokens], or num_tokens without a maximum; ascending, then -1: tokens, or blocks of
        one token, counted from seq_start.
    block_counts : torch.Tensor
        int32 [batch, kv_heads].

    Raises
    ------
    TypeError
        Unsupported dtype.
    ValueError
        Invalid shape, device or number.
    RuntimeError
        impl="triton" cannot run here.
    """
    check_dims("scores", scores, "batch, kv_heads, num_tokens")
    check_float("scores", scores)
    batch, kv_heads, num_tokens = scores.shape
    if num_tokens > MOST_TOKENS:
        raise ValueError(f"scores has {num_tokens} tokens; allowed: at most {MOST_TOKENS}")
    check_sequence(seq_start, seq_end, batch, "scores", scores)
    check_share("top_p", top_p)
    check_forced_tokens(sink_tokens, page_size)
    if max_tokens is not None:
        check_token_budget(max_tokens, sink_tokens, page_size)
    return selection_output(scores, batch, kv_heads, num_tokens if max_tokens is None else max_tokens)
