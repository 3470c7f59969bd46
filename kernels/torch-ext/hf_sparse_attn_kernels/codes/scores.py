"""Triton launcher of `code_scores`: one launch prepares the query, one scans the codes, one more reduces by softmax."""

from __future__ import annotations

import math

import torch

from .._check import check_triton
from .._triton import INTERPRET, cdiv, launch_options, multiprocessors, next_power_of_2
from .._tuning import choice
from . import bit_scan
from .prepared import PAGES_AT_ONCE, Prepared, Scanned
from .query import prepare_query_kernel
from .rotation import rotation_levels
from .scan import scan_codes_kernel
from .softmax import reduce_estimates_kernel

LEAST_DEPTH = 32  # of a product of bytes on the tensor cores
MOST_COLUMNS = 64  # of a product, if several tokens share a line
MOST_FETCHED = 4096  # tokens of a program
LEAST_REDUCED, MOST_REDUCED = 2048, 8192  # estimates that a program reduces
MOST_LSE = 8192  # numbers of the scan's programs that a later one loads at once
LEAST_COLUMNS = 8  # of a product
LEAST_GROUP = 4
SCORING_PROGRAMS = 3  # for each multiprocessor


def plan(
    query: torch.Tensor,
    codes: torch.Tensor,
    query_centre: torch.Tensor | None,
    *,
    page_size: int,
    bits: int,
    scale: float | None,
    group_reduce: str,
) -> Prepared:
    """Allocate what a launch is to prepare."""
    batch, q_heads, head_dim = query.shape
    kv_heads, capacity = codes.shape[1:3]
    pairs, heads = batch * kv_heads, q_heads // kv_heads
    scale = head_dim**-0.5 if scale is None else scale
    softmax = group_reduce == "softmax" and heads > 1
    if softmax:
        scale *= math.log2(math.e)
    group = max(LEAST_GROUP, next_power_of_2(heads))
    # The bytes of a token, and how many tokens make a line that is deep enough for a product. Their columns lie side by
    # side, so that a large group has fewer.
    block_b = max(4, next_power_of_2(head_dim // 8))
    tokens_per_line = max(1, min(LEAST_DEPTH // block_b, MOST_COLUMNS // group))
    block_b = max(block_b, LEAST_DEPTH // tokens_per_line)
    group = max(group, LEAST_COLUMNS // tokens_per_line)
    return Prepared(
        torch.empty((pairs, group, bits, 8 * block_b), dtype=torch.int8, device=query.device),
        torch.empty((pairs, group), dtype=torch.float32, device=query.device),
        torch.empty((pairs, capacity // page_size, group), dtype=torch.float32, device=query.device),
        scale,
        softmax,
        tokens_per_line,
        {
            "HEADS": heads,
            "GROUP": group,
            "PAGE_SIZE": page_size,
            "BITS": bits,
            "OFFSETS": query_centre is not None,
            "BLOCK_B": block_b,
        },
    )


def scoring_programs(prepared: Prepared, num_tokens: int) -> int:
    """Return how many programs score the centres of a pair: of all pairs, about as many as run at once."""
    tiles = cdiv(cdiv(num_tokens, prepared.sizes["PAGE_SIZE"]), PAGES_AT_ONCE)
    at_once = SCORING_PROGRAMS * multiprocessors(prepared.parts.device)
    return min(tiles, cdiv(at_once, max(len(prepared.parts), 1)))


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
    bits: int,
    query_centre: torch.Tensor | None,
    shared_centre: bool,
    first_page: int,
    scale: float | None,
    group_reduce: str,
    num_tokens: int | None,
    counter: torch.Tensor | None,
) -> torch.Tensor:
    """Launch the kernels."""
    check_triton("query", query)
    num_tokens = codes.shape[2] if num_tokens is None else num_tokens
    row_bounds = (seq_start.contiguous(), seq_end.contiguous())
    prepared = plan(query, codes, query_centre, page_size=page_size, bits=bits, scale=scale, group_reduce=group_reduce)
    kv_heads, (pairs, pages, _) = codes.shape[1], prepared.page_scores.shape
    head_dim = query.shape[2]
    levels, rotation_unit = rotation_levels(head_dim, query.device)
    prepare_query_kernel[(prepared.programs + scoring_programs(prepared, num_tokens), pairs)](
        query,
        prepared.slopes if query_centre is None else query_centre,
        levels,
        centres,
        centre_scale,
        *row_bounds,
        *prepared[:3],
        prepared.slopes if counter is None else counter,
        kv_heads,
        num_tokens,
        pages,
        first_page,
        prepared.scale,
        rotation_unit,
        *query.stride(),
        HEAD_DIM=head_dim,
        SHARED_CENTRE=shared_centre,
        COUNT=counter is not None,
        BLOCK_N=PAGES_AT_ONCE,
        BLOCK_D=max(LEAST_DEPTH, next_power_of_2(head_dim)),
        num_warps=4,
        **prepared.sizes,
        **launch_options(query.device),
    )
    scanned = scan(prepared, codes, factors, row_bounds, num_tokens, first_page)
    reduce_estimates(scanned, row_bounds, page_size=page_size, first_page=first_page)
    return scanned.scores


def scan(
    prepared: Prepared,
    codes: torch.Tensor,
    factors: torch.Tensor,
    row_bounds: tuple[torch.Tensor, torch.Tensor],
    num_tokens: int,
    first_page: int = 0,
) -> Scanned:
    """Launch the scan, of products of bits where it serves the call, else `scan_codes_kernel`."""
    scanned = bit_scan.scan(prepared, codes, factors, row_bounds, num_tokens, first_page)
    if scanned is not None:
        return scanned
    batch, kv_heads, capacity = codes.shape[:3]
    pairs, device, head_dim = batch * kv_heads, codes.device, 8 * codes.shape[4]
    sizes, tokens_per_line = prepared.sizes, prepared.tokens_per_line
    group = sizes["GROUP"]
    launch = "softmax_scan" if prepared.softmax else "code_scan"
    config = choice(launch, device, pairs=pairs, group=sizes["HEADS"], head_dim=head_dim, tokens=num_tokens)
    # A tile of a large group is smaller, so that its sums, and those of weights, stay in registers. A warp has at least
    # 16 lines.
    most = (512 * config["warps"] if prepared.softmax else 4096) // group
    block_t = max(16 * tokens_per_line * config["warps"], min(config["block_t"], most))
    per_program = cdiv(num_tokens * pairs, multiprocessors(device) * config["per_multiprocessor"])
    tokens_per_program = block_t * max(1, round(per_program / block_t))
    programs = cdiv(num_tokens, tokens_per_program)
    scores = torch.empty((batch, kv_heads, num_tokens), dtype=torch.float16, device=device)
    estimates = program_lse = prepared.slopes
    if prepared.softmax:
        estimates = torch.empty((pairs, num_tokens, group), dtype=torch.float16, device=device)
        program_lse = torch.empty((pairs, programs, group), dtype=torch.float32, device=device)
    fetched = min(tokens_per_program, MOST_FETCHED)
    scan_codes_kernel[(programs, pairs)](
        codes,
        factors,
        *prepared[:3],
        estimates,
        program_lse,
        *row_bounds,
        scores,
        kv_heads,
        num_tokens,
        capacity,
        first_page,
        tokens_per_program,
        prepared.scale * head_dim**0.5,
        BYTES=head_dim // 8,
        SOFTMAX=prepared.softmax,
        BLOCK_T=block_t,
        TOKENS=tokens_per_line,
        LEAST_LINES=16 * config["warps"],
        WHOLE=capacity % block_t == 0,
        # Lines of 128 bytes of codes, and of factors, that a program asks for before it waits.
        CODE_LINES=next_power_of_2(cdiv(fetched * codes.shape[3] * codes.shape[4], 128)),
        FACTOR_LINES=next_power_of_2(cdiv(fetched * factors.shape[3], 64)),
        STAGES=config["stages"],
        INTERPRETED=INTERPRET,
        num_warps=config["warps"],
        **sizes,
        **launch_options(device),
    )
    if not prepared.softmax:
        return Scanned(scores, heads=sizes["HEADS"])
    return Scanned(scores, estimates, program_lse, tokens_per_program, sizes["HEADS"])


def programs_at_once(scanned: Scanned) -> int:
    """Return of how many of the scan's programs a later one loads the log-sum-exp at once."""
    return min(next_power_of_2(scanned.programs), max(1, MOST_LSE // scanned.group))


def reduce_estimates(
    scanned: Scanned, row_bounds: tuple[torch.Tensor, torch.Tensor], *, page_size: int, first_page: int = 0
) -> None:
    """Launch `reduce_estimates_kernel` if there are estimates; it writes the scores."""
    if scanned.estimates is None:
        return
    kv_heads, (pairs, num_tokens, group) = scanned.scores.shape[1], scanned.estimates.shape
    device = scanned.scores.device
    reduced = next_power_of_2(cdiv(pairs * num_tokens * group, 4 * multiprocessors(device)))
    tile = max(LEAST_REDUCED, min(reduced, MOST_REDUCED)) // group
    reduce_estimates_kernel[(cdiv(num_tokens, tile), pairs)](
        scanned.estimates,
        scanned.program_lse,
        *row_bounds,
        scanned.scores,
        kv_heads,
        num_tokens,
        first_page,
        scanned.programs,
        scanned.tokens_per_program,
        HEADS=scanned.heads,
        GROUP=group,
        PAGE_SIZE=page_size,
        BLOCK_T=tile,
        BLOCK_P=programs_at_once(scanned),
        INTERPRETED=INTERPRET,
        num_warps=4,
        **launch_options(device),
    )
