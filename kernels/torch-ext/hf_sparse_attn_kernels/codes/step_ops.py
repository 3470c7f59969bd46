"""The op of a decode step that appends a token, codes the page that it fills, and chooses tokens."""

import torch

from .._check import check_counters
from .._op import op, selection_output
from .step_checks import check_step


@op(
    launcher="step",
    writes=("keys", "values", "codes", "factors", "centres", "centre_scale", "coded", "counter"),
)
def append_and_select_tokens(
    query: torch.Tensor,
    new_key: torch.Tensor,
    new_value: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    codes: torch.Tensor,
    factors: torch.Tensor,
    centres: torch.Tensor,
    centre_scale: torch.Tensor,
    coded: torch.Tensor,
    seq_start: torch.Tensor,
    seq_end: torch.Tensor,
    *,
    page_size: int,
    max_tokens: int,
    sink_tokens: int,
    bits: int = 1,
    correction: str = "unbiased",
    query_centre: torch.Tensor | None = None,
    scale: float | None = None,
    group_reduce: str = "max",
    num_tokens: int | None = None,
    counter: torch.Tensor | None = None,
    impl: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Append one token to every row, code the page that it fills, and choose the tokens to read.

    The selection of a decode step by key codes as one op: writes `new_key` and `new_value` to buffer position
    seq_end[b] - 1, then does `encode_keys` with max_pages=1, `code_scores` and `select_tokens_by_score`. A row with
    seq_end <= seq_start appends and selects nothing.

    Parameters
    ----------
    query : torch.Tensor
        One token per row [batch, q_heads, head_dim]; float32, bfloat16 or float16 (float64 in the reference). head_dim
        is a multiple of 8.
    new_key, new_value : torch.Tensor
        The token to append [batch, kv_heads, head_dim], of the dtype of `query`. The last stride is 1.
    keys, values : torch.Tensor
        Buffers to write to [batch, kv_heads, capacity, head_dim], of the dtype of `query`. The last stride is 1, the
        others are free. Of the keys, only those of the new token's page are read, once it is full.
    codes, factors, centres, centre_scale : torch.Tensor
        As for `encode_keys`, which has coded all pages before that of the new token.
    coded : torch.Tensor
        int32 [batch, kv_heads]: the pages coded so far. A page that the new token fills is coded, unless `coded` counts
        it already. The Triton step never lowers it. Whoever shortens a row first lowers `coded` to at most
        new length // page_size; the keys after these pages are then coded anew.
    seq_start, seq_end : torch.Tensor
        int32 [batch], on the device of `query`: row b's valid tokens, the new one included, are at
        seq_start[b] .. seq_end[b] - 1.
    page_size, bits, correction
        As for `encode_keys`.
    max_tokens, sink_tokens : int
        As for `select_tokens_by_score`.
    query_centre : torch.Tensor, optional
        As for `encode_keys`.
    scale, group_reduce, num_tokens, counter
        As for `code_scores`. Tokens beyond `num_tokens` are appended and coded, but not chosen.
    impl : str, optional
        "triton" or "reference". Defaults to `use_impl`, then Triton on CUDA, else the reference.

    Returns
    -------
    block_indices : torch.Tensor
        int32 [batch, kv_heads, max_tokens], as `select_tokens_by_score` returns it.
    block_counts : torch.Tensor
        int32 [batch, kv_heads].

    Raises
    ------
    TypeError
        Unsupported dtype.
    ValueError
        Invalid shape, stride, device, number or name, or head_dim > 256 with Triton.
    RuntimeError
        impl="triton" cannot run here.
    """
    check_step(
        query,
        (new_key, new_value),
        (keys, values),
        (codes, factors, centres, centre_scale),
        query_centre,
        coded,
        (seq_start, seq_end),
        page_size=page_size,
        bits=bits,
        correction=correction,
        max_tokens=max_tokens,
        sink_tokens=sink_tokens,
        scale=scale,
        group_reduce=group_reduce,
        num_tokens=num_tokens,
    )
    batch, kv_heads = coded.shape
    check_counters(counter, None, query, kv_heads)
    return selection_output(query, batch, kv_heads, max_tokens)
