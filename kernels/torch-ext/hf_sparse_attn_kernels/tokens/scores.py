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

from .._triton import (
    cdiv,
    dot_dtype,
    finished_last,
    launch_options,
    multiprocessors,
    next_power_of_2,
    sum_of_products,
    wait_for_previous_kernel,
)
from .candidates import Candidates, candidates_of
from .topk import clear_search, count_first_digits, search_size

# Scoring runs one program per multiprocessor, with as many tiles of keys in flight as fit.
SCORED = {"block_n": 128, "per_multiprocessor": 1, "warps": 4, "stages": 6, "block_g": 8}
TILE_BYTES = 32768  # of keys, at most
OTHER_SHARED_MEMORY = 32768
# Voting programs take this many tokens, and query heads at once.
VOTED = {"block_t": 256, "block_h": 16, "warps": 4}
LOWEST = tl.constexpr(-3.0e38)  # replaces -inf where differences are taken


class TokenScores(NamedTuple):
    """Results of scoring, read by voting."""

    scores: torch.Tensor
    """float32 [batch * q_heads, width], candidates only; in units of log2 for "soft"."""
    lse: torch.Tensor
    """float32 [batch * q_heads]: the log-sum-exp of a head's scores, in units of log2, for "soft" only."""


@triton.jit
def _log_sum_exp(maxima_ptrs, sums_ptrs, in_group, splits, BLOCK_S: tl.constexpr):
    """Return the log-sum-exp of each head's scores in units of log2; pointers [group, 1] are those of split 0."""
    every = tl.arange(0, BLOCK_S)[None, :]
    mask = in_group[:, None] & (every < splits)
    maxima = tl.load(maxima_ptrs + every, mask=mask, other=LOWEST, cache_modifier=".cg")
    sums = tl.load(sums_ptrs + every, mask=mask, other=0.0, cache_modifier=".cg")
    top = tl.max(maxima, axis=1)
    total = sum_of_products(sums, tl.exp2(maxima - top[:, None]), 1)
    return top + tl.log2(tl.where(in_group, total, 1.0))


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
    lse_ptr,  # [batch * q_heads], for SOFT only, like the next three
    maxima_ptr,  # [batch * q_heads, splits], of the scores of a split
    sums_ptr,  # [batch * q_heads, splits], of 2 ** (score - maximum)
    finished_ptr,  # int32 [batch * kv_heads], 0 before and after
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
    BLOCK_S: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Score one split of the candidates of a row and KV head for all query heads; grid (splits, pairs)."""
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
            # A token that is no candidate is replaced by the nearest candidate, so that only candidates are read.
            nearest = tl.minimum(tl.maximum(token, first), last - 1).to(tl.int64)
            key_at = keys_ptr + nearest[:, None] * keys_stride_n + dims[None, :]
            k = tl.load(key_at, mask=(dims < HEAD_DIM)[None, :], other=0.0)
            scores = tl.dot(k.to(DOT_DTYPE), q, input_precision="ieee") * scale  # [BLOCK_N, BLOCK_G]
            valid = (token >= first) & (token < last)
            at = scores_ptr + heads[None, :] * width + token[:, None]
            tl.store(at, scores, mask=valid[:, None] & in_group[None, :])
            if SOFT:
                # Each lane keeps its own maximum and sum until the last tile, which avoids exchange between threads.
                scores = tl.where(valid[:, None], scores, float("-inf"))
                grows = scores > running_max
                decay = tl.exp2(-tl.abs(scores - running_max))
                running_sum = tl.where(grows, running_sum * decay + 1.0, running_sum + decay)
                running_max = tl.where(grows, scores, running_max)
        if PDL:
            gdc_launch_dependents()  # not earlier: waiting programs take room from those that read
        if SOFT:
            maxima = tl.max(running_max, axis=0)
            sums = sum_of_products(running_sum, tl.exp2(running_max - maxima[None, :]), 0)
            at = (pair * group + heads) * splits
            tl.store(maxima_ptr + at + split, maxima, mask=in_group)
            tl.store(sums_ptr + at + split, sums, mask=in_group)
            if finished_last(finished_ptr + pair, splits):
                lse = _log_sum_exp(maxima_ptr + at[:, None], sums_ptr + at[:, None], in_group, splits, BLOCK_S)
                tl.store(lse_ptr + pair * group + heads, lse, mask=in_group)


@triton.jit
def token_votes_kernel(
    scores_ptr,  # [batch * q_heads, width]
    lse_ptr,  # [batch * q_heads], for SOFT only
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
    width,
    votes_width,
    SOFT: tl.constexpr,
    CACHE: tl.constexpr,
    SEARCH: tl.constexpr,
    FILL: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write the votes for BLOCK_T tokens of a row, and count their first digits; grid (tiles, batch).

    FILL writes -inf for tokens that are no candidates.
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
                lse = tl.load(lse_ptr + heads, mask=exists, other=0.0)
                weights = tl.exp2(tl.where(is_candidate[None, :], scores - lse[:, None], float("-inf")))
            else:
                weights = tl.load(at, mask=exists[:, None], other=0.0)
            votes += tl.sum(weights, axis=0)
        votes = tl.where(is_candidate, votes, float("-inf"))
        tl.store(votes_ptr + tokens, votes, mask=tokens < votes_width)
        if SEARCH:
            count_first_digits(search_ptr + row * search_size, tl.program_id(0), votes, is_candidate)
    elif FILL:
        tl.store(votes_ptr + tokens, tl.full((BLOCK_T,), float("-inf"), tl.float32), mask=tokens < votes_width)


@lru_cache
def _stages(device: torch.device) -> int:
    """Return the number of key tiles in flight that fit next to the rest of a program's shared memory."""
    if device.type != "cuda":
        return 2
    room: int = triton.runtime.driver.active.utils.get_device_properties(device.index or 0)["max_shared_mem"]
    return max(2, min(SCORED["stages"], (room - OTHER_SHARED_MEMORY) // TILE_BYTES))


def token_scores(
    query: torch.Tensor,
    keys: torch.Tensor,
    candidates: Candidates,
    search: torch.Tensor | None,
    finished: torch.Tensor | None,
    *,
    soft: bool,
) -> TokenScores:
    """Launch `token_scores_kernel`, which also clears the buffer for a later `search`."""
    batch, q_heads, head_dim = query.shape
    kv_heads = keys.shape[1]
    pairs, group = batch * kv_heads, q_heads // kv_heads
    block_d = max(16, next_power_of_2(head_dim))
    block_n = max(16, min(SCORED["block_n"], SCORED["block_n"] * 256 // (block_d * keys.element_size())))
    programs = SCORED["per_multiprocessor"] * multiprocessors(keys.device)
    splits = max(1, min(cdiv(candidates.num_tokens, block_n), programs // pairs))
    block_g = max(SCORED["block_g"], next_power_of_2(group))
    scores = torch.empty((batch * q_heads, candidates.width), dtype=torch.float32, device=keys.device)
    lse = maxima = sums = scores
    if soft:
        maxima, sums = torch.empty((2, batch * q_heads, splits), dtype=torch.float32, device=keys.device)
        lse = torch.empty((batch * q_heads,), dtype=torch.float32, device=keys.device)
        finished = torch.zeros_like(lse, dtype=torch.int32) if finished is None else finished
    token_scores_kernel[(splits, pairs)](
        query,
        keys,
        *candidates.arguments(),
        scores,
        lse,
        maxima,
        sums,
        scores if finished is None else finished,
        scores if search is None else search,
        search_size(candidates),
        kv_heads,
        group,
        candidates.width,
        math.log2(math.e) if soft else 1.0,
        *query.stride(),
        *keys.stride()[:3],
        HEAD_DIM=head_dim,
        SOFT=soft,
        CACHE=candidates.reuse is not None,
        SEARCH=search is not None,
        BLOCK_N=block_n,
        BLOCK_G=block_g,
        BLOCK_D=block_d,
        BLOCK_S=next_power_of_2(splits),
        DOT_DTYPE=dot_dtype(keys.dtype),
        num_warps=SCORED["warps"] if block_g <= 16 else 2 * SCORED["warps"],
        num_stages=2 if keys.element_size() == 4 else _stages(keys.device),
        **launch_options(keys.device),
    )
    return TokenScores(scores, lse)


def add_votes(
    scored: TokenScores,
    candidates: Candidates,
    search: torch.Tensor | None,
    *,
    soft: bool,
    num_columns: int,
    fill: bool,
) -> torch.Tensor:
    """Launch `token_votes_kernel`, which also counts first digits for a `search`; return votes [batch, num_columns]."""
    batch, device = candidates.seq_start.shape[0], scored.scores.device
    votes = torch.empty((batch, num_columns), dtype=torch.float32, device=device)
    q_heads = scored.scores.shape[0] // batch
    block_t = min(candidates.block, VOTED["block_t"])
    token_votes_kernel[(candidates.width // block_t, batch)](
        *scored,
        *candidates.arguments(),
        votes,
        votes if search is None else search,
        search_size(candidates),
        q_heads,
        candidates.width,
        num_columns,
        SOFT=soft,
        CACHE=candidates.reuse is not None,
        SEARCH=search is not None,
        FILL=fill,
        BLOCK_T=block_t,
        BLOCK_H=min(VOTED["block_h"], next_power_of_2(q_heads)),
        num_warps=VOTED["warps"],
        **launch_options(device),
    )
    return votes
