"""Triton launcher of `progressive_decode`."""

import math

import torch

from .._check import check_triton
from .._triton import cdiv, dot_dtype, launch_options, multiprocessors, next_power_of_2
from .._tuning import choice
from .first_wave import first_wave_kernel
from .later_waves import later_waves_kernel

MAX_PROGRAMS = 128  # of a row and KV head
MAX_PARTS = 32  # tickets of a microbatch
MERGED_AT_ONCE = 8192  # elements of partial results that the merging program holds, of at most 16 tickets
SEARCHED_AT_ONCE = 64  # tickets among which the stop is looked for


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
    rest: str,
    forced_blocks: int,
    counter: torch.Tensor | None,
    finished: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Launch the kernel of the first wave, and that of later ones if a row may have blocks for them.

    The first wave is one ticket, a microbatch or a part of one, for each program that the device runs at once. Scratch
    is `group` partial results in float32 for each ticket that a row may take: for microbatches of 256 tokens, two
    tickets each, and groups of 4, that is 1/32 of the keys and values in 16 bits, of one layer at a time.
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
    parts = _parts(microbatch, config["ticket"] // lanes)
    ticket = microbatch // parts
    # One tile of K and one of V: at most 64 KiB, times the stages in flight.
    most_n = 32768 // (block_d * keys.element_size())
    block_n = max(16, min(config["block_n"], most_n, next_power_of_2(ticket * lanes)))
    tickets = cdiv(cdiv(max_blocks, ticket), parts) * parts
    if tickets * group * head_dim >= 1 << 31:
        raise ValueError(
            f"microbatch={microbatch}; allowed for impl='triton' with max_blocks={max_blocks} of block_order: larger "
            f"ones, so that there are at most {(1 << 31) // (group * head_dim)} partial results"
        )
    per_pair = min(MAX_PROGRAMS, config["per_multiprocessor"] * multiprocessors(query.device) // pairs)
    programs = min(tickets, max(1, per_pair // parts) * parts)
    more = tickets > programs
    # One stage computes, so others load one tile less: no more of them than a ticket has tiles.
    tiles = cdiv(ticket * lanes, block_n)
    stages = 1 if tiles == 1 else min(tiles + 1, 2 if keys.element_size() == 4 else config["stages"])
    merge_g = next_power_of_2(group)

    out = query.new_empty((batch, q_heads, head_dim))
    lse = query.new_empty((batch, q_heads), dtype=torch.float32)
    read_counts = torch.empty((batch, kv_heads), dtype=torch.int32, device=query.device)
    partial_out = query.new_empty((pairs, tickets, group, head_dim), dtype=torch.float32)
    sums = query.new_empty((4, pairs, tickets, group), dtype=torch.float32)
    counted = tokens = read_counts
    if rest == "last" or counter is not None:
        counted, tokens = torch.empty((2, pairs, tickets), dtype=torch.int32, device=query.device)
    shared, goes_on = lse, read_counts
    if more:
        shared = query.new_empty((pairs, 3, group), dtype=torch.float32)
        goes_on = torch.empty((pairs,), dtype=torch.int32, device=query.device)
    if finished is None:
        finished = torch.zeros((batch, kv_heads), dtype=torch.int32, device=query.device)
    tensors = (
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
        sums[0],
        sums[1],
        counted,
        tokens,
        sums[2],
        sums[3],
        partial_out,
        shared,
        goes_on,
        finished,
        read_counts if counter is None else counter,
    )
    sizes = (kv_heads, group, max_blocks, tickets)
    numbers = (forced_blocks, scale * math.log2(math.e), log2_odds)
    strides = (*query.stride(), *keys.stride()[:3], *values.stride()[:3])
    options = {
        "HEAD_DIM": head_dim,
        "BLOCK_SIZE": block_size,
        "LANES": lanes,
        "TICKET": ticket,
        "PARTS": parts,
        "LAST": rest == "last",
        "COUNT": counter is not None,
        "BLOCK_N": block_n,
        "BLOCK_G": max(16, next_power_of_2(group)),
        "BLOCK_D": block_d,
        "BLOCK_B": next_power_of_2(ticket),
        "BLOCK_T": max(parts, min(SEARCHED_AT_ONCE, next_power_of_2(programs))),
        "BLOCK_S": max(1, min(16, MERGED_AT_ONCE // (merge_g * block_d))),
        "MERGE_G": merge_g,
        "DOT_DTYPE": dot_dtype(keys.dtype),
        "num_warps": config["warps"],
        "num_stages": stages,
        **launch_options(query.device),
    }
    first_wave_kernel[(programs, pairs)](*tensors, *sizes, *numbers, *strides, MORE=more, **options)
    if more:
        later = min(programs, tickets - programs)
        own = query.new_empty((pairs, later, 3, group), dtype=torch.float32)
        later_waves_kernel[(later, pairs)](
            *tensors, own, *sizes, programs, *numbers, *strides, BLOCK_W=next_power_of_2(2 * later + parts), **options
        )
    return out, lse, read_counts


def _parts(microbatch: int, most_blocks: int) -> int:
    """Return into how many tickets to divide a microbatch: a power of two, so that they have at most `most_blocks`."""
    parts = 1
    while microbatch // parts > most_blocks and parts < MAX_PARTS and microbatch % (2 * parts) == 0:
        parts *= 2
    return parts
