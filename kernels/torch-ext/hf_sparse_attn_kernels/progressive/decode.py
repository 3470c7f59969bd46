"""Triton launcher of `progressive_decode`."""

import math

import torch

from .._check import check_triton
from .._triton import cdiv, dot_dtype, launch_options, multiprocessors, next_power_of_2
from .._tuning import choice
from .decode_kernel import progressive_decode_kernel

MAX_PROGRAMS = 128  # of a row and KV head: the state counts those that have ended in 8 bits
MAX_TICKETS = 1 << 20  # of a row and KV head: the state counts those taken in 21 bits
MERGED_AT_ONCE = 4096  # elements of partial results that the merging program holds, of at most 16 tickets
SEARCHED_AT_ONCE = 32  # tickets among which the stop is looked for


def progressive_decode(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    block_order: torch.Tensor,
    block_counts: torch.Tensor,
    seq_start: torch.Tensor,
    seq_end: torch.Tensor,
    *,
    block_size: int,
    microbatch: int,
    threshold: float,
    scale: float | None,
    counter: torch.Tensor | None,
    finished: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Launch `progressive_decode_kernel`.

    Scratch is `group` partial results in float32 for each ticket that a row may take: for microbatches of 256 tokens,
    two tickets each, and groups of 4, that is 1/32 of the keys and values in 16 bits, of one layer at a time.
    """
    check_triton("query", query)
    batch, q_heads, head_dim = query.shape
    kv_heads, capacity = keys.shape[1:3]
    max_blocks = block_order.shape[2]
    pairs, group = batch * kv_heads, q_heads // kv_heads
    scale = head_dim**-0.5 if scale is None else scale
    log2_odds = math.log2(threshold) - math.log1p(-threshold) / math.log(2) if threshold < 1 else math.inf

    block_d = max(16, next_power_of_2(head_dim))
    config = choice("progressive_decode", query.device, pairs=pairs, group=group, head_dim=head_dim, tokens=capacity)
    lanes = next_power_of_2(block_size)
    ticket = _ticket_blocks(microbatch, config["ticket"] // lanes)
    # One tile of K and one of V: at most 64 KiB, times the stages in flight.
    most_n = 32768 // (block_d * keys.element_size())
    block_n = max(16, min(config["block_n"], most_n, next_power_of_2(ticket * lanes)))
    tickets = cdiv(max_blocks, ticket)
    if tickets > MAX_TICKETS or tickets * group * head_dim >= 1 << 31:
        raise ValueError(
            f"microbatch={microbatch}; allowed for impl='triton' with max_blocks={max_blocks} of block_order: larger "
            f"ones, so that there are at most {min(MAX_TICKETS, (1 << 31) // (group * head_dim))} partial results"
        )
    # No more tiles in flight than a ticket has.
    stages = min(cdiv(ticket * lanes, block_n), 2 if keys.element_size() == 4 else config["stages"])
    programs = max(1, min(MAX_PROGRAMS, tickets, config["per_multiprocessor"] * multiprocessors(query.device) // pairs))
    merge_g = next_power_of_2(group)

    out = query.new_empty((batch, q_heads, head_dim))
    lse = query.new_empty((batch, q_heads), dtype=torch.float32)
    read_counts = torch.empty((batch, kv_heads), dtype=torch.int32, device=query.device)
    partial_max, partial_sum, partial_least = query.new_empty((3, pairs, tickets, group), dtype=torch.float32)
    partial_out = query.new_empty((pairs, tickets, group, head_dim), dtype=torch.float32)
    partial_tokens = read_counts
    if counter is not None:
        partial_tokens = torch.empty((pairs, tickets), dtype=torch.int32, device=query.device)
    shared = query.new_empty((pairs, 3, group), dtype=torch.float32)
    if finished is None:
        finished = torch.zeros((batch, kv_heads), dtype=torch.int32, device=query.device)
    progressive_decode_kernel[(programs, pairs)](
        query,
        keys,
        values,
        block_order.contiguous(),
        block_counts.contiguous(),
        seq_start.contiguous(),
        seq_end.contiguous(),
        out,
        lse,
        read_counts,
        partial_max,
        partial_sum,
        partial_least,
        partial_out,
        partial_tokens,
        shared,
        finished,
        read_counts if counter is None else counter,
        kv_heads,
        group,
        max_blocks,
        tickets,
        scale * math.log2(math.e),
        log2_odds,
        *query.stride(),
        *keys.stride()[:3],
        *values.stride()[:3],
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        LANES=lanes,
        TICKET=ticket,
        PARTS=microbatch // ticket,
        COUNT=counter is not None,
        BLOCK_N=block_n,
        BLOCK_G=max(16, next_power_of_2(group)),
        BLOCK_D=block_d,
        BLOCK_T=min(SEARCHED_AT_ONCE, next_power_of_2(tickets)),
        BLOCK_S=max(1, min(16, MERGED_AT_ONCE // (merge_g * block_d))),
        MERGE_G=merge_g,
        DOT_DTYPE=dot_dtype(keys.dtype),
        num_warps=config["warps"],
        num_stages=stages,
        **launch_options(query.device),
    )
    return out, lse, read_counts


def _ticket_blocks(microbatch: int, most: int) -> int:
    """Return the most blocks, at least 1 and else at most `most`, that divide a microbatch."""
    blocks = max(1, min(microbatch, most))
    while microbatch % blocks:
        blocks -= 1
    return blocks
