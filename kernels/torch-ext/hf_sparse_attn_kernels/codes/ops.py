"""The ops that code keys, estimate scores from the codes, and choose tokens by them."""

import torch

from .._check import (
    BUFFER_AXES,
    check_at_least,
    check_contiguous,
    check_counters,
    check_dims,
    check_float,
    check_int32,
    check_last_stride,
    check_query,
    check_sequence,
)
from .._op import op, output, selection_output
from .checks import CODES_AXES, check_codes, check_correction, check_reduction, check_room, check_token_budget


@op(launcher="encode", writes=("codes", "factors", "centres", "centre_scale", "coded"))
def encode_keys(
    keys: torch.Tensor,
    codes: torch.Tensor,
    factors: torch.Tensor,
    centres: torch.Tensor,
    centre_scale: torch.Tensor,
    coded: torch.Tensor,
    seq_start: torch.Tensor,
    seq_end: torch.Tensor,
    *,
    page_size: int,
    bits: int = 1,
    correction: str = "unbiased",
    query_centre: torch.Tensor | None = None,
    shared_centre: bool = False,
    max_pages: int | None = None,
    impl: str | None = None,
) -> None:
    """Code, in place, the keys of the pages that have filled: `bits` bits a channel, and an exact factor a token.

    RaBitQ (arXiv 2405.12497), which RaBitQCache (arXiv 2606.31519) brought to the KV cache. Here every page has a
    centre. Page p of row b holds the row's tokens p * page_size to (p + 1) * page_size - 1, counted from seq_start[b].
    It is coded once it is full, from its keys alone. So codes do not depend on how a text is split into calls, up to
    the rounding of float32:

    - The centre c is the mean of the page's keys, stored as levels of 8 bits with one scale,
      max|mean| / 127 rounded to float16 and at least 2 ** -14. The stored centre is what follows uses. With
      `shared_centre` one given centre serves all pages, as in RaBitQCache.
    - The residual r = k - c of a token is rotated: u = R r, with a fixed orthogonal matrix R.
    - The value v_i of channel i is 1 for u_i >= 0, else 0; with 2 bits it is floor(u_i / (0.9957 rms(u))) + 2, from 0
      to 3. It stands for the odd symbol s_i = 2 v_i - (2 ** bits - 1).
    - The factor a scales the symbols: a s is an estimate of u. `correction` chooses between |r|**2 / (u.s), RaBitQ's,
      which has no bias along u, and (u.s) / (s.s), which has the least squared error. It is 0 if r is 0. With a query
      centre m, the offset w = m.r / sqrt(head_dim) is kept too. Both are float16, limited to its finite range.

    Parameters
    ----------
    keys : torch.Tensor
        Key buffer [batch, kv_heads, capacity, head_dim]; float32, bfloat16 or float16 (float64 in the reference).
        head_dim is a multiple of 8. The last stride is 1, the others are free. Only pages to be coded are read.
    codes : torch.Tensor
        uint8 [batch, kv_heads, pages * page_size, bits, head_dim // 8], contiguous like all below, with
        pages * page_size >= capacity: bit i of byte j of plane b is bit b of the value of channel
        i * (head_dim // 8) + j.
    factors : torch.Tensor
        float16 [batch, kv_heads, pages * page_size, 2]: a and w of every token; without a query centre a alone,
        [..., 1].
    centres : torch.Tensor
        int8 [batch, kv_heads, pages, head_dim]: the levels. With `shared_centre` [batch, kv_heads, 1, head_dim], read
        and not written.
    centre_scale : torch.Tensor
        float16 [batch, kv_heads, pages]; with `shared_centre` [batch, kv_heads, 1].
    coded : torch.Tensor
        int32 [batch, kv_heads]: the pages coded so far, zero at first. Pages before it do not change. Set to
        n // page_size, with n the row's number of tokens, or to `coded` + `max_pages` if that is less.
    seq_start, seq_end : torch.Tensor
        int32 [batch], on the device of `keys`: row b's valid tokens are at seq_start[b] .. seq_end[b] - 1.
    page_size : int
        Tokens per page, a multiple of 16.
    bits : {1, 2}
        Bits of a channel.
    correction : {"unbiased", "least_squares"}
        "unbiased": a s has the same product with u as u itself, so long residuals are not estimated too short.
        "least_squares": a s is the multiple of s nearest to u, so estimates are too small in the mean but vary less.
    query_centre : torch.Tensor, optional
        float32 [batch, kv_heads, head_dim]: a vector near the queries to come, such as the mean of the prompt's. It
        must stay as it is while codes made with it are used.
    shared_centre : bool
        Whether one centre, given in `centres` and `centre_scale`, serves all pages of a KV head. It too must stay as it
        is while codes made with it are used.
    max_pages : int, optional
        Maximum number of pages of a row to code in this call, at least 1: one in a decode step, which then takes one
        launch. Default: all pages of the capacity.
    impl : str, optional
        "triton" or "reference". Defaults to `use_impl`, then Triton on CUDA, else the reference.

    Raises
    ------
    TypeError
        Unsupported dtype.
    ValueError
        Invalid shape, stride, device, number or name, or head_dim > 256 with Triton.
    RuntimeError
        impl="triton" cannot run here.
    """
    check_dims("keys", keys, BUFFER_AXES)
    batch, kv_heads, capacity, head_dim = keys.shape
    check_float("keys", keys)
    check_last_stride("keys", keys)
    check_codes(
        codes,
        factors,
        centres,
        centre_scale,
        query_centre,
        shape=(batch, kv_heads, head_dim),
        page_size=page_size,
        bits=bits,
        shared_centre=shared_centre,
        other_name="keys",
        other=keys,
    )
    check_correction(correction)
    check_room(codes, capacity)
    check_int32("coded", coded, "batch, kv_heads", (batch, kv_heads), "keys", keys)
    check_contiguous("coded", coded)
    check_sequence(seq_start, seq_end, batch, "keys", keys)
    if max_pages is not None:
        check_at_least("max_pages", max_pages, 1)


@op(launcher="scores", writes=("counter",))
def code_scores(
    query: torch.Tensor,
    codes: torch.Tensor,
    factors: torch.Tensor,
    centres: torch.Tensor,
    centre_scale: torch.Tensor,
    seq_start: torch.Tensor,
    seq_end: torch.Tensor,
    *,
    page_size: int,
    bits: int = 1,
    query_centre: torch.Tensor | None = None,
    shared_centre: bool = False,
    first_page: int = 0,
    scale: float | None = None,
    group_reduce: str = "max",
    num_tokens: int | None = None,
    counter: torch.Tensor | None = None,
    impl: str | None = None,
) -> torch.Tensor:
    """Estimate q.k of every coded token from the codes of `encode_keys`, reduced over the query heads of a group.

    RaBitQ (arXiv 2405.12497). With c the centre of the token's page, a and w its factors, s its symbols, m the query
    centre (0 if there is none) and R the rotation of the codes:

        z_h(t) = scale * (q_h.c + sqrt(head_dim) * w + a * (R (q_h - m)).s)

    Query head h reads KV head h // group, group = q_heads // kv_heads. The candidates of a row of n tokens are those of
    its pages from `first_page` on and before page (n - 1) // page_size, the page of its newest token: all of them are
    coded in a decode step.

    For float32, bfloat16 and float16, the vectors that come from the query are whole numbers of a unit, so that their
    products are exact: q_h and q_h - m from -16256 to 16256 of 1/16256 of their greatest magnitude, and then
    R (q_h - m) from -31 to 31 of 1/31 of its own. The last adds less than 1 % to the error of the codes. Unless
    head_dim is a power of two, the query is rotated by R rounded to 1/127 of its greatest entry.

    Parameters
    ----------
    query : torch.Tensor
        One token per row [batch, q_heads, head_dim]; float32, bfloat16 or float16 (float64 in the reference).
    codes, factors, centres, centre_scale : torch.Tensor
        As `encode_keys` writes them.
    seq_start, seq_end : torch.Tensor
        int32 [batch], on the device of `query`: row b's valid tokens are at seq_start[b] .. seq_end[b] - 1.
    page_size, bits : int
        As for `encode_keys`.
    query_centre : torch.Tensor, optional
        The one that the codes were made with: float32 [batch, kv_heads, head_dim].
    shared_centre : bool
        As for `encode_keys`.
    first_page : int
        First page whose tokens are candidates; those before it are read in any case.
    scale : float, optional
        Default: head_dim ** -0.5.
    group_reduce : {"max", "softmax"}
        "max": the greatest z_h(t). "softmax": log sum_h exp(z_h(t) - log sum_t' exp z_h(t')), where t' are the row's
        candidates: each head's estimates are normalised over the row, then added. The estimates are rounded to float16
        in base 2, and memory holds them meanwhile: 2 bytes a token for each head of the groups, which count as 4, or
        the next power of two. With one query head per KV head both orders are the same, and nothing is normalised.
    num_tokens : int, optional
        Upper bound on the row lengths, known to the host; tokens beyond it are ignored. Default: the tokens of `codes`.
        Multiples of 16 are fastest: every KV head's scores are then aligned, and kernels access several at once.
    counter : torch.Tensor, optional
        int64 [4], added to in place: [2] += the bytes of the candidates' codes and factors and of their pages' centres
        and scales, each once.
    impl : str, optional
        "triton" or "reference". Defaults to `use_impl`, then Triton on CUDA, else the reference.

    Returns
    -------
    torch.Tensor
        float16 [batch, kv_heads, num_tokens] (float64 for float64), limited to the finite range; -inf for tokens that
        are no candidates. Column t is the row's token t, counted from seq_start.

    Raises
    ------
    TypeError
        Unsupported dtype.
    ValueError
        Invalid shape, stride, device, number or name, or head_dim > 256 with Triton.
    RuntimeError
        impl="triton" cannot run here.
    """
    check_dims("codes", codes, CODES_AXES)
    batch, kv_heads, tokens = codes.shape[:3]
    check_query(query, kv_heads)
    check_codes(
        codes,
        factors,
        centres,
        centre_scale,
        query_centre,
        shape=(query.shape[0], kv_heads, query.shape[2]),
        page_size=page_size,
        bits=bits,
        shared_centre=shared_centre,
        other_name="query",
        other=query,
    )
    check_sequence(seq_start, seq_end, batch, "query", query)
    check_reduction(group_reduce, num_tokens, tokens, scale)
    check_at_least("first_page", first_page, 0)
    check_counters(counter, None, query, kv_heads)
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float16
    return output(query, (batch, kv_heads, tokens if num_tokens is None else num_tokens), dtype)


@op(launcher="select")
def select_tokens_by_score(
    scores: torch.Tensor,
    seq_start: torch.Tensor,
    seq_end: torch.Tensor,
    *,
    max_tokens: int,
    sink_tokens: int,
    page_size: int,
    impl: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose the tokens to read: the first ones, the newest token's page, and those with the highest scores.

    Row b has n = seq_end[b] - seq_start[b] tokens, at most num_tokens. The first `sink_tokens` and the tokens from
    (n - 1) // page_size * page_size on are always chosen, and count in the budget. Both implementations choose the same
    tokens: the lower index wins among equal scores, and NaN ranks with -inf.

    Parameters
    ----------
    scores : torch.Tensor
        float16 [batch, kv_heads, num_tokens] (also bfloat16, float32 and float64 in the reference), as `code_scores`
        returns them. The scores of tokens that are always chosen are not used.
    seq_start, seq_end : torch.Tensor
        int32 [batch], on the device of `scores`: row b's valid tokens are at seq_start[b] .. seq_end[b] - 1.
    max_tokens : int
        Maximum number of tokens to choose per row and KV head, at least sink_tokens + page_size.
    sink_tokens : int
        Number of first tokens that are always chosen.
    page_size : int
        Tokens per page, a multiple of 16.
    impl : str, optional
        "triton" or "reference". Defaults to `use_impl`, then Triton on CUDA, else the reference.

    Returns
    -------
    block_indices : torch.Tensor
        int32 [batch, kv_heads, max_tokens], ascending, then -1: tokens, or blocks of one token, counted from seq_start.
    block_counts : torch.Tensor
        int32 [batch, kv_heads], min(max_tokens, n).

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
    batch, kv_heads = scores.shape[:2]
    check_sequence(seq_start, seq_end, batch, "scores", scores)
    check_token_budget(max_tokens, sink_tokens, page_size)
    return selection_output(scores, batch, kv_heads, max_tokens)
