"""The op of a whole decode step of KeyCodes."""

import torch

from .._check import check_counters
from .._op import op, output, selection_output
from .._reference import compute_dtype
from .step_checks import check_step


@op(
    launcher="attend",
    writes=("keys", "values", "codes", "factors", "centres", "centre_scale", "coded", "counter", "finished"),
    cluster="cluster",
)
def append_and_attend_tokens(
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
    finished: torch.Tensor | None = None,
    impl: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Append one token to every row, code the page that it fills, choose tokens by their codes, and attend to them.

    A decode step by key codes as one op: `append_and_select_tokens`, then `sparse_decode`. It can be one launch on
    thread-block clusters, which compute capability 9.0 and later have.

    Parameters
    ----------
    query, new_key, new_value, keys, values, codes, factors, centres, centre_scale, coded, seq_start, seq_end
        As for `append_and_select_tokens`, all torch.Tensor. The step never lowers `coded`, on clusters either: whoever
        shortens a row first lowers it to at most new length // page_size.
    page_size, max_tokens, sink_tokens, bits, correction, query_centre, group_reduce, num_tokens
        As for `append_and_select_tokens`.
    scale : float, optional
        Factor on q.k, of estimates and attention. Default: head_dim ** -0.5.
    counter : torch.Tensor, optional
        int64 [4], added to in place, as `append_and_select_tokens` and `sparse_decode` do.
    finished : torch.Tensor, optional
        As for `sparse_decode`.
    impl : str, optional
        "triton", "reference" or "cluster". Defaults to `use_impl`; then, on CUDA, to clusters where they serve the call
        and were measured to be faster, else Triton; else the reference. Clusters serve bfloat16 with head_dim 128,
        page_size 64, codes of one bit with a query centre, at most 8 query heads per KV head, max_tokens of at most
        4,096, and as many tokens as a cluster's shared memory holds scores of: all strides and addresses multiples of
        16 bytes.

    Returns
    -------
    out : torch.Tensor
        [batch, q_heads, head_dim], of the dtype of `query`; zeros for a row without tokens.
    lse : torch.Tensor
        As of `sparse_decode`.
    block_indices : torch.Tensor
        int32 [batch, kv_heads, max_tokens], ascending, then -1.
    block_counts : torch.Tensor
        int32 [batch, kv_heads].

    Raises
    ------
    TypeError
        Unsupported dtype.
    ValueError
        Invalid shape, stride, device, number or name, head_dim > 256 with Triton, or beyond the limits of clusters.
    RuntimeError
        impl="triton" or impl="cluster" cannot run here.
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
    check_counters(counter, finished, query, kv_heads)
    out, lse = output(query, query.shape, query.dtype), output(query, query.shape[:2], compute_dtype(query.dtype))
    return out, lse, *selection_output(query, batch, kv_heads, max_tokens)
