"""Triton launcher of `token_votes`, and the kernel of the head vote."""
# Triton's decorator is untyped, and so are a kernel's arguments.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

import torch
import triton
import triton.language as tl

from .._check import check_triton
from .._triton import next_power_of_2, wait_for_previous_kernel
from .candidates import Candidates, candidates_of, tile_size
from .scores import add_votes, token_scores
from .topk import find_top, search_size, taken_of_tile


@triton.jit
def head_votes_kernel(
    scores_ptr,  # [batch * q_heads, width]
    start_ptr,
    end_ptr,
    reuse_ptr,
    num_tokens,
    max_tokens,
    sink_tokens,
    recent_tokens,
    search_ptr,  # [batch * q_heads, search_size]
    votes_ptr,  # [batch, num_columns]
    search_size,
    q_heads,
    width,
    num_columns,
    CACHE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_TILES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Count the heads that have each token of a tile among their k highest scores; grid (tiles, batch)."""
    wait_for_previous_kernel(PDL)
    row = tl.program_id(1).to(tl.int64)
    first, last = candidates_of(
        row, start_ptr, end_ptr, reuse_ptr, num_tokens, max_tokens, sink_tokens, recent_tokens, CACHE
    )
    tile = tl.program_id(0)
    tokens = tile * BLOCK_T + tl.arange(0, BLOCK_T)
    votes = tl.zeros((BLOCK_T,), tl.float32)
    if (tile * BLOCK_T + BLOCK_T > first) & (tile * BLOCK_T < last) & (first < last):
        for head in range(q_heads):
            line = row * q_heads + head
            _, taken, _ = taken_of_tile(
                scores_ptr + line * width, search_ptr + line * search_size, first, last, tile, BLOCK_T, BLOCK_TILES
            )
            votes += taken.to(tl.float32)
    votes = tl.where((tokens >= first) & (tokens < last), votes, float("-inf"))
    tl.store(votes_ptr + row * num_columns + tokens, votes, mask=tokens < num_columns)


def head_votes(scores: torch.Tensor, candidates: Candidates, *, num_voted: int, num_columns: int) -> torch.Tensor:
    """Count the votes [batch, num_columns] of heads for the tokens of their highest scores [batch * q_heads, width]."""
    lines, batch = scores.shape[0], candidates.seq_start.shape[0]
    search = torch.zeros((lines, search_size(candidates)), dtype=torch.int32, device=scores.device)
    find_top(scores, candidates, search, num_voted=num_voted, pool_size=0, first_level=1)
    votes = torch.empty((batch, num_columns), dtype=torch.float32, device=scores.device)
    head_votes_kernel[(candidates.tiles, batch)](
        scores,
        *candidates.arguments(),
        search,
        votes,
        search_size(candidates),
        lines // batch,
        candidates.width,
        num_columns,
        BLOCK_TILES=next_power_of_2(candidates.tiles),
        **candidates.options(),
    )
    return votes


def token_votes(
    query: torch.Tensor,
    keys: torch.Tensor,
    seq_start: torch.Tensor,
    seq_end: torch.Tensor,
    *,
    sink_tokens: int,
    recent_tokens: int,
    vote: str,
    max_tokens: int | None,
    num_tokens: int | None,
) -> torch.Tensor:
    """Launch the kernels."""
    check_triton("query", query)
    num_tokens = keys.shape[2] if num_tokens is None else num_tokens
    candidates = Candidates(
        seq_start.contiguous(),
        seq_end.contiguous(),
        None,
        num_tokens,
        0,  # a row of any length has candidates
        sink_tokens,
        recent_tokens,
        tile_size(num_tokens, keys.device),
    )
    soft = vote == "soft"
    scored = token_scores(query, keys, candidates, None, None, soft=soft)
    if vote == "head":
        assert max_tokens is not None  # as checked
        num_voted = max_tokens - sink_tokens - recent_tokens
        return head_votes(scored.scores, candidates, num_voted=num_voted, num_columns=num_tokens)
    return add_votes(scored, candidates, None, soft=soft, num_columns=num_tokens, fill=True)
