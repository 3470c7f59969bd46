"""Votes of the query heads for single tokens: the kernels behind `token_votes` and `select_tokens`."""
# Triton's decorator is untyped, and so are a kernel's arguments.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

import math
from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ._token_topk import TokenRows, candidates_of, clear_search, count_first_digits
from ._triton import dot_dtype, launch_options, multiprocessors, wait_for_previous_kernel

SCORED = {"block_n": 128, "per_multiprocessor": 1, "warps": 4, "stages": 6, "block_g": 8}
MAX_SPLITS = 512
TILE_BYTES = 32768  # of keys
OTHER_SHARED_MEMORY = 32768
VOTED = {"block_t": 256, "block_h": 32, "warps": 8}
LOWEST = tl.constexpr(-3.0e38)  # stands in for -inf where differences are taken


class TokenScores(NamedTuple):
    """What scoring leaves to voting."""

    scores: torch.Tensor
    """float32 [batch * q_heads, width], candidates only; in units of log2 for "soft"."""
    maxima: torch.Tensor
    """float32 [batch * q_heads, splits]: of the scores of a split, for "soft" only, like the next."""
    sums: torch.Tensor
    """float32 [batch * q_heads, splits]: of 2 ** (score - maximum)."""


@triton.jit
def token_scores_kernel(
    query_ptr,
    keys_ptr,
    start_ptr,
    end_ptr,
    reuse_ptr,
    num_tokens,
    max_tokens,
    sink_tokens,
    recent_tokens,
    scores_ptr,  # [batch * q_heads, width]
    maxima_ptr,  # [batch * q_heads, splits], of the scores of a split, for SOFT only, like the next
    sums_ptr,  # [batch * q_heads, splits], of 2 ** (score - maximum)
    search_ptr,  # [batch, search_size], set to 0, for SEARCH only
    search_size,
    kv_heads,
    group,
    width,
    scale,
    query_stride_b,
    query_stride_h,
    query_stride_d,
    keys_stride_b,
    keys_stride_h,
    keys_stride_n,
    HEAD_DIM: tl.constexpr,
    SOFT: tl.constexpr,
    CACHE: tl.constexpr,
    SEARCH: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    PDL: tl.constexpr,
):
    """One split of the candidates of a row and KV head, all query heads of its group; grid (splits, pairs)."""
    if PDL:
        gdc_wait()
    split = tl.program_id(0)
    splits = tl.num_programs(0)
    pair = tl.program_id(1).to(tl.int64)
    row = pair // kv_heads
    head = pair % kv_heads
    if SEARCH and (split == splits - 1) & (head == 0):
        clear_search(search_ptr + row * search_size, search_size)
    first, last = candidates_of(
        row, start_ptr, end_ptr, reuse_ptr, num_tokens, max_tokens, sink_tokens, recent_tokens, CACHE
    )
    if first < last:
        start = tl.load(start_ptr + row).to(tl.int64)
        heads = tl.arange(0, BLOCK_G)
        dims = tl.arange(0, BLOCK_D)
        lanes = tl.arange(0, BLOCK_N)
        in_group = heads < group
        query_ptr += row * query_stride_b + head * group * query_stride_h
        q = tl.load(
            query_ptr + heads[None, :] * query_stride_h + dims[:, None] * query_stride_d,
            mask=in_group[None, :] & (dims < HEAD_DIM)[:, None],
            other=0.0,
        ).to(DOT_DTYPE)  # [BLOCK_D, BLOCK_G]
        keys_ptr += row * keys_stride_b + head * keys_stride_h + start * keys_stride_n
        scores_ptr += pair * group * width
        running_max = tl.full((BLOCK_N, BLOCK_G), LOWEST, tl.float32)
        running_sum = tl.zeros((BLOCK_N, BLOCK_G), tl.float32)
        first_tile = first // BLOCK_N
        tiles = tl.cdiv(last, BLOCK_N) - first_tile
        begin = first_tile + split * tiles // splits
        end = first_tile + (split + 1) * tiles // splits
        for tile in range(begin, end):
            token = tile * BLOCK_N + lanes
            # In place of a token that is no candidate, the nearest one: no other is read.
            nearest = tl.minimum(tl.maximum(token, first), last - 1).to(tl.int64)
            key_at = keys_ptr + nearest[:, None] * keys_stride_n + dims[None, :]
            k = tl.load(key_at, mask=(dims < HEAD_DIM)[None, :], other=0.0)
            scores = tl.dot(k.to(DOT_DTYPE), q, input_precision="ieee") * scale  # [BLOCK_N, BLOCK_G]
            valid = (token >= first) & (token < last)
            at = scores_ptr + heads[None, :] * width + token[:, None]
            tl.store(at, scores, mask=valid[:, None] & in_group[None, :])
            if SOFT:
                # Of every lane its own maximum and sum, put together after the last tile: no exchange between threads.
                scores = tl.where(valid[:, None], scores, float("-inf"))
                grows = scores > running_max
                decay = tl.exp2(-tl.abs(scores - running_max))
                running_sum = tl.where(grows, running_sum * decay + 1.0, running_sum + decay)
                running_max = tl.where(grows, scores, running_max)
        if PDL:
            gdc_launch_dependents()  # not before: programs that wait for this kernel take room from those that read
        if SOFT:
            maxima = tl.max(running_max, axis=0)
            sums = tl.sum(running_sum * tl.exp2(running_max - maxima[None, :]), axis=0)
            at = (pair * group + heads) * splits + split
            tl.store(maxima_ptr + at, maxima, mask=in_group)
            tl.store(sums_ptr + at, sums, mask=in_group)


@triton.jit
def _log_sum_exp(maxima_ptr, sums_ptr, heads, exists, splits, BLOCK_S: tl.constexpr):
    """Log-sum-exp of the scores of each of the `heads` over all splits, in units of log2; 0 where no head `exists`."""
    every = tl.arange(0, BLOCK_S)
    mask = exists[:, None] & (every < splits)[None, :]
    at = heads[:, None] * splits + every[None, :]
    maxima = tl.load(maxima_ptr + at, mask=mask, other=LOWEST)
    sums = tl.load(sums_ptr + at, mask=mask, other=0.0)
    top = tl.max(maxima, axis=1)
    total = tl.sum(sums * tl.exp2(maxima - top[:, None]), axis=1)
    return tl.where(exists, top + tl.log2(tl.where(exists, total, 1.0)), 0.0)


@triton.jit
def token_votes_kernel(
    scores_ptr,  # [batch * q_heads, width]
    maxima_ptr,  # [batch * q_heads, splits], for SOFT only, like the next
    sums_ptr,
    start_ptr,
    end_ptr,
    reuse_ptr,
    num_tokens,
    max_tokens,
    sink_tokens,
    recent_tokens,
    votes_ptr,  # [batch, votes_width]
    search_ptr,  # [batch, search_size]
    search_size,
    q_heads,
    splits,
    width,
    votes_width,
    SOFT: tl.constexpr,
    CACHE: tl.constexpr,
    SEARCH: tl.constexpr,
    FILL: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_S: tl.constexpr,
    PDL: tl.constexpr,
):
    """The votes for BLOCK_T tokens of a row, and their first digits; grid (tiles, batch).

    FILL says to write -inf where there is no candidate.
    """
    wait_for_previous_kernel(PDL)
    row = tl.program_id(1).to(tl.int64)
    first, last = candidates_of(
        row, start_ptr, end_ptr, reuse_ptr, num_tokens, max_tokens, sink_tokens, recent_tokens, CACHE
    )
    tile = tl.program_id(0) * BLOCK_T
    tokens = tile + tl.arange(0, BLOCK_T)
    is_candidate = (tokens >= first) & (tokens < last)
    has_candidates = (tile + BLOCK_T > first) & (tile < last) & (first < last)
    votes_ptr += row * votes_width
    if has_candidates:
        votes = tl.zeros((BLOCK_T,), tl.float32)
        for first_head in range(0, q_heads, BLOCK_H):
            in_row = first_head + tl.arange(0, BLOCK_H)
            exists = in_row < q_heads
            heads = row * q_heads + in_row
            at = scores_ptr + heads[:, None] * width + tokens[None, :]
            if SOFT:
                scores = tl.load(at, mask=exists[:, None], other=float("-inf"))
                lse = _log_sum_exp(maxima_ptr, sums_ptr, heads, exists, splits, BLOCK_S)
                votes += tl.sum(tl.exp2(tl.where(is_candidate[None, :], scores - lse[:, None], float("-inf"))), axis=0)
            else:
                votes += tl.sum(tl.load(at, mask=exists[:, None], other=0.0), axis=0)
        votes = tl.where(is_candidate, votes, float("-inf"))
        tl.store(votes_ptr + tokens, votes, mask=tokens < votes_width)
        if SEARCH:
            count_first_digits(search_ptr + row * search_size, votes, is_candidate)
    elif FILL:
        tl.store(votes_ptr + tokens, tl.full((BLOCK_T,), float("-inf"), tl.float32), mask=tokens < votes_width)


@lru_cache
def _stages(device: torch.device) -> int:
    """How many tiles of keys a multiprocessor has room for beside the rest of a program's shared memory."""
    if device.type != "cuda":
        return 2
    room: int = triton.runtime.driver.active.utils.get_device_properties(device.index or 0)["max_shared_mem"]
    return max(2, (room - OTHER_SHARED_MEMORY) // TILE_BYTES)


def token_scores(
    query: torch.Tensor,
    keys: torch.Tensor,
    rows: TokenRows,
    search: torch.Tensor | None,
    *,
    soft: bool,
) -> TokenScores:
    """Launch `token_scores_kernel`, which also clears the buffer of a `search` to come."""
    batch, q_heads, head_dim = query.shape
    kv_heads = keys.shape[1]
    pairs, group = batch * kv_heads, q_heads // kv_heads
    block_d = max(16, triton.next_power_of_2(head_dim))
    block_n = max(16, min(SCORED["block_n"], SCORED["block_n"] * 256 // (block_d * keys.element_size())))
    splits = SCORED["per_multiprocessor"] * multiprocessors(keys.device) // pairs
    splits = max(1, min(MAX_SPLITS, triton.cdiv(rows.num_tokens, block_n), splits))
    scores = torch.empty((batch * q_heads, rows.width), dtype=torch.float32, device=keys.device)
    maxima = sums = scores
    if soft:
        maxima, sums = torch.empty((2, batch * q_heads, splits), dtype=torch.float32, device=keys.device)
    token_scores_kernel[(splits, pairs)](
        query,
        keys,
        *rows.arguments(),
        scores,
        maxima,
        sums,
        scores if search is None else search,
        rows.search_size,
        kv_heads,
        group,
        rows.width,
        math.log2(math.e) if soft else 1.0,
        *query.stride(),
        *keys.stride()[:3],
        HEAD_DIM=head_dim,
        SOFT=soft,
        CACHE=rows.reuse is not None,
        SEARCH=search is not None,
        BLOCK_N=block_n,
        BLOCK_G=max(SCORED["block_g"], triton.next_power_of_2(group)),
        BLOCK_D=block_d,
        DOT_DTYPE=dot_dtype(keys.dtype),
        num_warps=SCORED["warps"],
        num_stages=2 if keys.element_size() == 4 else min(SCORED["stages"], _stages(keys.device)),
        **launch_options(keys.device),
    )
    return TokenScores(scores, maxima, sums)


def add_votes(
    scored: TokenScores, rows: TokenRows, search: torch.Tensor | None, *, soft: bool, num_columns: int, fill: bool
) -> torch.Tensor:
    """Launch `token_votes_kernel`, which also counts first digits for a `search`: votes [batch, num_columns]."""
    batch, device = rows.seq_start.shape[0], scored.scores.device
    votes = torch.empty((batch, num_columns), dtype=torch.float32, device=device)
    q_heads, splits = scored.scores.shape[0] // batch, scored.maxima.shape[1] if soft else 1
    block_t = min(rows.block, VOTED["block_t"])
    token_votes_kernel[(rows.width // block_t, batch)](
        *scored,
        *rows.arguments(),
        votes,
        votes if search is None else search,
        rows.search_size,
        q_heads,
        splits,
        rows.width,
        num_columns,
        SOFT=soft,
        CACHE=rows.reuse is not None,
        SEARCH=search is not None,
        FILL=fill,
        BLOCK_T=block_t,
        BLOCK_H=min(VOTED["block_h"], triton.next_power_of_2(q_heads)),
        BLOCK_S=triton.next_power_of_2(splits),
        num_warps=VOTED["warps"],
        **launch_options(device),
    )
    return votes
