"""Triton launcher of `code_scores`: one launch prepares the query, one or two scan the codes."""

import math
from typing import Any

import torch

from .._check import check_triton
from .._triton import INTERPRET, cdiv, launch_options, multiprocessors, next_power_of_2
from .._tuning import choice
from .query import prepare_query_kernel
from .rotation import rotation
from .scan import scan_codes_kernel

PAGES_AT_ONCE = 64
LEAST_DEPTH = 32  # of a product of bytes on the tensor cores
MOST_COLUMNS = 64  # of a product, if several tokens share a line
LEAST_GROUP = 4  # of two parts each: the tensor cores have at least 8 columns


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
    batch, q_heads, head_dim = query.shape
    kv_heads, capacity = codes.shape[1:3]
    pairs, heads, pages = batch * kv_heads, q_heads // kv_heads, capacity // page_size
    num_tokens = capacity if num_tokens is None else num_tokens
    scale = head_dim**-0.5 if scale is None else scale
    softmax = group_reduce == "softmax" and heads > 1
    if softmax:
        scale *= math.log2(math.e)
    group = max(LEAST_GROUP, next_power_of_2(heads))
    # The bytes of a token, and how many tokens make a line that is deep enough for a product. Their columns lie side by
    # side, so that a large group has fewer.
    block_b = max(4, next_power_of_2(head_dim // 8))
    tokens_per_line = max(1, min(LEAST_DEPTH // block_b, MOST_COLUMNS // (2 * group)))
    block_b = max(block_b, LEAST_DEPTH // tokens_per_line)
    options = launch_options(query.device)
    row_bounds = (seq_start.contiguous(), seq_end.contiguous())
    sizes = {
        "HEADS": heads,
        "GROUP": group,
        "PAGE_SIZE": page_size,
        "BITS": bits,
        "OFFSETS": query_centre is not None,
        "BLOCK_B": block_b,
    }
    parts = torch.empty((pairs, 2 * group, 8 * block_b), dtype=torch.int8, device=query.device)
    lines = torch.empty((pairs, 2, group), dtype=torch.float32, device=query.device)
    page_scores = torch.empty((pairs, pages, group), dtype=torch.float32, device=query.device)
    prepare_query_kernel[(heads + cdiv(cdiv(num_tokens, page_size), PAGES_AT_ONCE), pairs)](
        query,
        lines if query_centre is None else query_centre,
        rotation(head_dim, query.device),
        centres,
        centre_scale,
        *row_bounds,
        parts,
        lines,
        page_scores,
        lines if counter is None else counter,
        kv_heads,
        num_tokens,
        pages,
        first_page,
        scale,
        *query.stride(),
        HEAD_DIM=head_dim,
        SHARED_CENTRE=shared_centre,
        COUNT=counter is not None,
        BLOCK_N=PAGES_AT_ONCE,
        BLOCK_D=max(LEAST_DEPTH, next_power_of_2(head_dim)),
        num_warps=4,
        **sizes,
        **options,
    )

    config = choice("code_scan", query.device, pairs=pairs, group=heads, head_dim=head_dim, tokens=num_tokens)
    # A tile of a large group is smaller, so that its sums stay in registers. A warp has at least 16 lines.
    block_t = max(16 * tokens_per_line * config["warps"], min(config["block_t"], 4096 // (2 * group)))
    per_program = cdiv(num_tokens * pairs, multiprocessors(query.device) * config["per_multiprocessor"])
    tokens_per_program = block_t * max(1, round(per_program / block_t))
    programs = cdiv(num_tokens, tokens_per_program)
    scores = torch.empty((batch, kv_heads, num_tokens), dtype=torch.float16, device=query.device)
    program_lse = lines
    if softmax:
        program_lse = torch.empty((pairs, programs, group), dtype=torch.float32, device=query.device)
    launch: dict[str, Any] = {
        "BYTES": head_dim // 8,
        "BLOCK_T": block_t,
        "BLOCK_P": next_power_of_2(programs),
        "TOKENS": tokens_per_line,
        "INTERPRETED": INTERPRET,
        "num_warps": config["warps"],
        "num_stages": config["stages"],
        **sizes,
        **options,
    }
    for result in ("lse", "softmax") if softmax else ("max",):
        scan_codes_kernel[(programs, pairs)](
            codes,
            factors if query_centre is None else factors.view(torch.int32),
            parts,
            lines,
            page_scores,
            program_lse,
            *row_bounds,
            scores,
            kv_heads,
            num_tokens,
            capacity,
            tokens_per_program,
            scale * head_dim**0.5,
            RESULT=result,
            **launch,
        )
    return scores
