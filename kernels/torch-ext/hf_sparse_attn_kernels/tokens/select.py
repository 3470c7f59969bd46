"""Triton kernels of `select_tokens`: the reuse of a row's last selection, and the write of the selected tokens."""
# Triton's decorator is untyped, and so are a kernel's arguments.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

import torch
import triton
import triton.language as tl

from .._check import check_triton
from .._topk import _ranks
from .._triton import launch_options, next_power_of_2, wait_for_previous_kernel
from .candidates import Candidates, candidates_of, row_length, tile_size
from .scores import add_votes, token_scores
from .topk import find_top, search_size, taken_of_tile
from .votes import head_votes


@triton.jit
def reuse_selection_kernel(
    query_ptr,
    cached_query_ptr,  # [batch, q_heads, head_dim]
    cached_valid_ptr,  # [batch]
    start_ptr,
    end_ptr,
    reuse_ptr,  # [batch]
    num_tokens,
    max_tokens,
    threshold,
    elements,
    query_stride_b,
    query_stride_h,
    query_stride_d,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Decide whether a row reuses its last selection; grid (batch,)."""
    wait_for_previous_kernel(PDL)
    row = tl.program_id(0).to(tl.int64)
    dot = tl.zeros((BLOCK,), tl.float32)
    norm = tl.zeros((BLOCK,), tl.float32)
    cached_norm = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, elements, BLOCK):
        lanes = first + tl.arange(0, BLOCK)
        mask = lanes < elements
        at = row * query_stride_b + (lanes // HEAD_DIM) * query_stride_h + (lanes % HEAD_DIM) * query_stride_d
        q = tl.load(query_ptr + at, mask=mask, other=0.0).to(tl.float32)
        cached = tl.load(cached_query_ptr + row * elements + lanes, mask=mask, other=0.0).to(tl.float32)
        dot += q * cached
        norm += q * q
        cached_norm += cached * cached
    # NaN, from a query of norm 0, is below every threshold.
    cosine = tl.sum(dot) / (tl.sqrt(tl.sum(norm)) * tl.sqrt(tl.sum(cached_norm)))
    is_long = row_length(row, start_ptr, end_ptr, num_tokens) > max_tokens
    reuses = is_long & (tl.load(cached_valid_ptr + row) != 0) & (cosine >= threshold)
    tl.store(reuse_ptr + row, reuses.to(tl.int32))


@triton.jit
def write_selection_kernel(
    votes_ptr,  # [batch, width]
    start_ptr,
    end_ptr,
    reuse_ptr,
    num_tokens,
    max_tokens,
    sink_tokens,
    recent_tokens,
    search_ptr,  # [batch, search_size]
    indices_ptr,  # [batch, max_tokens]
    counts_ptr,  # [batch]
    query_ptr,
    cached_query_ptr,  # the selection cache, for CACHE only, like the next two
    cached_tokens_ptr,
    cached_valid_ptr,
    counter_ptr,
    reuse_counter_ptr,
    search_size,
    width,
    tiles,
    elements,
    key_bytes,
    query_stride_b,
    query_stride_h,
    query_stride_d,
    HEAD_DIM: tl.constexpr,
    CACHE: tl.constexpr,
    COUNT: tl.constexpr,
    COUNT_REUSE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_TILES: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write the chosen candidates of a tile; the last program writes everything else; grid (tiles + 1, batch)."""
    wait_for_previous_kernel(PDL)
    tile = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    first, last = candidates_of(
        row, start_ptr, end_ptr, reuse_ptr, num_tokens, max_tokens, sink_tokens, recent_tokens, CACHE
    )
    num_voted = max_tokens - sink_tokens - recent_tokens
    indices_ptr += row * max_tokens
    cached_tokens_ptr += row * num_voted
    if tile < tiles:
        if (tile * BLOCK_T + BLOCK_T > first) & (tile * BLOCK_T < last) & (first < last):
            tokens, taken, before = taken_of_tile(
                votes_ptr + row * width,
                search_ptr + row * search_size,
                first,
                last,
                tile,
                BLOCK_T,
                BLOCK_TILES,
            )
            slots = before + _ranks(taken, BLOCK_T)
            tl.store(indices_ptr + sink_tokens + slots, tokens, mask=taken)
            if CACHE:
                tl.store(cached_tokens_ptr + slots, tokens, mask=taken)
    else:
        length = row_length(row, start_ptr, end_ptr, num_tokens)
        is_long = length > max_tokens
        votes_anew = first < last
        tl.store(counts_ptr + row, tl.minimum(length, max_tokens))
        voted_end = tl.where(is_long, max_tokens - recent_tokens, 0)  # of slots
        copied_end = tl.where(votes_anew, 0, voted_end)
        for first_slot in range(0, max_tokens, BLOCK):
            slots = first_slot + tl.arange(0, BLOCK)
            after_sinks = slots >= sink_tokens
            tokens = tl.where(after_sinks, slots + tl.maximum(length - max_tokens, 0), slots)
            tokens = tl.where(slots < length, tokens, -1)
            left_out = after_sinks & (slots < voted_end)
            if CACHE:
                copied = after_sinks & (slots < copied_end)
                cached = tl.load(cached_tokens_ptr + slots - sink_tokens, mask=copied, other=0)
                tokens = tl.where(copied, cached, tokens)
                left_out = left_out & (slots >= copied_end)
            tl.store(indices_ptr + slots, tokens, mask=(slots < max_tokens) & (left_out == 0))
        if CACHE:
            if votes_anew | (is_long == 0):
                tl.store(cached_valid_ptr + row, votes_anew.to(tl.int32))
            if votes_anew:
                for first_lane in range(0, elements, BLOCK):
                    lanes = first_lane + tl.arange(0, BLOCK)
                    at = (lanes // HEAD_DIM) * query_stride_h + (lanes % HEAD_DIM) * query_stride_d
                    q = tl.load(query_ptr + row * query_stride_b + at, mask=lanes < elements)
                    tl.store(cached_query_ptr + row * elements + lanes, q, mask=lanes < elements)
        if COUNT and votes_anew:
            tl.atomic_add(counter_ptr + 2, (last - first).to(tl.int64) * key_bytes, sem="relaxed")
        if COUNT_REUSE and is_long:
            tl.atomic_add(reuse_counter_ptr, (votes_anew == 0).to(tl.int64), sem="relaxed")
            tl.atomic_add(reuse_counter_ptr + 1, tl.full((), 1, tl.int64), sem="relaxed")


def select_tokens(
    query: torch.Tensor,
    keys: torch.Tensor,
    seq_start: torch.Tensor,
    seq_end: torch.Tensor,
    *,
    max_tokens: int,
    sink_tokens: int,
    recent_tokens: int,
    vote: str,
    pool_size: int,
    num_tokens: int | None,
    cached_query: torch.Tensor | None,
    cached_tokens: torch.Tensor | None,
    cached_valid: torch.Tensor | None,
    threshold: float,
    counter: torch.Tensor | None,
    reuse_counter: torch.Tensor | None,
    finished: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch the kernels."""
    check_triton("query", query)
    batch, kv_heads, capacity, head_dim = keys.shape
    num_tokens = capacity if num_tokens is None else num_tokens
    num_voted = max_tokens - sink_tokens - recent_tokens
    elements = query.shape[1] * head_dim
    seq_start, seq_end = seq_start.contiguous(), seq_end.contiguous()
    with_cache = cached_query is not None and threshold < 1
    reuse = None
    if with_cache:
        reuse = torch.empty((batch,), dtype=torch.int32, device=keys.device)
        reuse_selection_kernel[(batch,)](
            query,
            cached_query,
            cached_valid,
            seq_start,
            seq_end,
            reuse,
            num_tokens,
            max_tokens,
            threshold,
            elements,
            *query.stride(),
            HEAD_DIM=head_dim,
            BLOCK=min(4096, next_power_of_2(elements)),
            num_warps=8,
            **launch_options(keys.device),
        )
    block = tile_size(num_tokens, keys.device)
    candidates = Candidates(seq_start, seq_end, reuse, num_tokens, max_tokens, sink_tokens, recent_tokens, block)
    search = torch.empty((batch, search_size(candidates)), dtype=torch.int32, device=keys.device)
    soft = vote == "soft"
    scored = token_scores(query, keys, candidates, search, finished, soft=soft)
    first_level = 1 if vote == "head" or pool_size > 1 else 2
    if vote == "head":
        votes = head_votes(scored.scores, candidates, num_voted=num_voted, num_columns=candidates.width)
    else:
        counting = search if first_level == 2 else None
        votes = add_votes(scored, candidates, counting, soft=soft, num_columns=candidates.width, fill=False)
    votes = find_top(votes, candidates, search, num_voted=num_voted, pool_size=pool_size, first_level=first_level)

    indices = torch.empty((batch, 1, max_tokens), dtype=torch.int32, device=keys.device)
    counts = torch.empty((batch, 1), dtype=torch.int32, device=keys.device)
    write_selection_kernel[(candidates.tiles + 1, batch)](
        votes,
        *candidates.arguments(),
        search,
        indices,
        counts,
        query,
        cached_query if with_cache else query,
        cached_tokens if with_cache else indices,
        cached_valid if with_cache else counts,
        seq_start if counter is None else counter,
        seq_start if reuse_counter is None else reuse_counter,
        search_size(candidates),
        candidates.width,
        candidates.tiles,
        elements,
        kv_heads * head_dim * keys.element_size(),
        *query.stride(),
        HEAD_DIM=head_dim,
        COUNT=counter is not None,
        COUNT_REUSE=reuse_counter is not None,
        BLOCK_TILES=next_power_of_2(candidates.tiles),
        BLOCK=1024,
        **candidates.options(),
    )
    return indices, counts
