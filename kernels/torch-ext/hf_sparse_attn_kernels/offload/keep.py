"""Triton launcher and kernels of `keep_chosen`: one launch assigns slots, another reads the missing blocks.

The first has a program a row and KV head. Its threads exchange slots through the tables in global memory, between
barriers. The second has as many programs as keep the link busy.
"""
# Triton's decorator is untyped, and so are a kernel's arguments.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

import torch
import triton
import triton.language as tl

from .._triton import cdiv, launch_options, multiprocessors, next_power_of_2, wait_for_previous_kernel

MOST_ENTRIES = 1024
"""Entries of a selection, or slots, that the assigning program holds at once."""
LOADED_BYTES = 8192  # of keys and values that a loading program requests at once: four times 16 in each thread
MULTIPROCESSORS_PER_LOADER = 4
"""At least, unless pairs are many. A link needs some hundred KB on their way, each of them for about two microseconds.
With megabytes on their way, tokens that are spread over gigabytes took longer: too many wait for their addresses."""


@triton.jit
def assign_slots_kernel(
    indices_ptr,  # int32 [pairs, chosen] or, if SHARED, [batch, chosen]
    counts_ptr,  # int32 [pairs] or [batch]
    start_ptr,
    end_ptr,
    slot_blocks_ptr,  # int32 [pairs, slots + 1], updated
    block_slots_ptr,  # [pairs, blocks], updated
    free_ptr,  # int32 [pairs, slots], written
    loads_ptr,  # int32 [pairs, 2, chosen], written: blocks to load, and their slots
    todo_ptr,  # int32 [pairs, 2], written: their number, and the first offset to load of the last slot's block
    slot_indices_ptr,  # int32 [pairs, chosen], written
    kept_end_ptr,  # int32 [batch], written
    counter_ptr,
    traffic_ptr,
    kv_heads,
    chosen,
    slots,
    blocks,
    SHARED: tl.constexpr,
    COUNT: tl.constexpr,
    COUNT_TRAFFIC: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Find the chosen blocks that are in slots, and assign free slots to the others; grid (pairs,)."""
    wait_for_previous_kernel(PDL)
    pair = tl.program_id(0).to(tl.int64)
    row = pair // kv_heads
    length = tl.maximum(tl.load(end_ptr + row) - tl.load(start_ptr + row), 0)
    in_newest = length % BLOCK_SIZE
    newest = tl.where(in_newest > 0, length // BLOCK_SIZE, -1)
    selection = row if SHARED else pair
    indices_ptr += selection * chosen
    count = tl.minimum(tl.load(counts_ptr + selection), chosen)
    slot_blocks_ptr += pair * (slots + 1)
    block_slots_ptr += pair * blocks
    free_ptr += pair * slots
    loads_ptr += pair * 2 * chosen
    slot_indices_ptr += pair * chosen
    lanes = tl.arange(0, TILE)

    # A slot whose block is chosen is marked by -2 - block, which is below -1: no block.
    full = tl.zeros((), tl.int32)
    hits = tl.zeros((), tl.int32)
    newest_is_chosen = tl.zeros((), tl.int32)
    for first in range(0, chosen, TILE):
        entry = first + lanes
        block = tl.load(indices_ptr + entry, mask=entry < count, other=-1)
        is_newest = (entry < count) & (block == newest)
        is_full = (block >= 0) & (block != newest)
        slot = tl.load(block_slots_ptr + block, mask=is_full, other=-1).to(tl.int32)
        may_hit = is_full & (slot >= 0) & (slot < slots)
        is_hit = may_hit & (tl.load(slot_blocks_ptr + slot, mask=may_hit, other=-1) == block)
        tl.store(slot_blocks_ptr + slot, -2 - block, mask=is_hit)
        place = tl.where(is_hit, slot, tl.where(is_newest, slots, -1))
        tl.store(slot_indices_ptr + entry, place, mask=entry < chosen)
        full += tl.sum(is_full.to(tl.int32))
        hits += tl.sum(is_hit.to(tl.int32))
        newest_is_chosen += tl.sum(is_newest.to(tl.int32))
    tl.debug_barrier()

    free_before = tl.zeros((), tl.int32)
    for first in range(0, slots, TILE):
        slot = first + lanes
        held = tl.load(slot_blocks_ptr + slot, mask=slot < slots, other=-2)
        is_marked = (slot < slots) & (held < -1)
        is_free = (slot < slots) & (held >= -1)
        tl.store(slot_blocks_ptr + slot, -2 - held, mask=is_marked)
        rank = free_before + tl.cumsum(is_free.to(tl.int32), axis=0) - 1
        tl.store(free_ptr + rank, slot, mask=is_free)
        free_before += tl.sum(is_free.to(tl.int32))
    tl.debug_barrier()

    missing = tl.zeros((), tl.int32)
    for first in range(0, chosen, TILE):
        entry = first + lanes
        block = tl.load(indices_ptr + entry, mask=entry < count, other=-1)
        place = tl.load(slot_indices_ptr + entry, mask=entry < count, other=0)
        is_missing = (entry < count) & (block >= 0) & (place == -1)
        rank = missing + tl.cumsum(is_missing.to(tl.int32), axis=0) - 1
        slot = tl.load(free_ptr + rank, mask=is_missing, other=0)
        tl.store(slot_indices_ptr + entry, slot, mask=is_missing)
        tl.store(slot_blocks_ptr + slot, block, mask=is_missing)
        tl.store(block_slots_ptr + block, slot.to(block_slots_ptr.dtype.element_ty), mask=is_missing)
        tl.store(loads_ptr + rank, block, mask=is_missing)
        tl.store(loads_ptr + chosen + rank, slot, mask=is_missing)
        missing += tl.sum(is_missing.to(tl.int32))

    begin = length - in_newest
    filled = tl.load(slot_blocks_ptr + slots)
    present = tl.where((filled > begin) & (filled <= length), filled - begin, 0)
    if newest_is_chosen > 0:
        tl.store(slot_blocks_ptr + slots, length)
        tl.store(loads_ptr + missing, newest)
        tl.store(loads_ptr + chosen + missing, slots)
    tl.store(todo_ptr + pair * 2, missing + newest_is_chosen)
    tl.store(todo_ptr + pair * 2 + 1, present)
    if pair % kv_heads == 0:
        tl.store(kept_end_ptr + row, slots * BLOCK_SIZE + in_newest)
    if COUNT:
        tl.atomic_add(counter_ptr, (full * BLOCK_SIZE + newest_is_chosen * in_newest).to(tl.int64), sem="relaxed")
        tl.atomic_add(counter_ptr + 1, length.to(tl.int64), sem="relaxed")
        if pair == 0:
            tl.atomic_add(counter_ptr + 3, tl.full((), 1, tl.int64), sem="relaxed")
    if COUNT_TRAFFIC:
        loaded = missing * BLOCK_SIZE + newest_is_chosen * (in_newest - present)
        tl.atomic_add(traffic_ptr, full.to(tl.int64), sem="relaxed")
        tl.atomic_add(traffic_ptr + 1, hits.to(tl.int64), sem="relaxed")
        tl.atomic_add(traffic_ptr + 2, loaded.to(tl.int64), sem="relaxed")
        tl.atomic_add(traffic_ptr + 3, tl.full((), 1, tl.int64), sem="relaxed")


@triton.jit
def load_chosen_kernel(
    keys_ptr,  # [batch, kv_heads, capacity, HEAD_DIM] by strides
    values_ptr,
    kept_keys_ptr,  # [pairs, (slots + 1) * BLOCK_SIZE, HEAD_DIM]
    kept_values_ptr,
    loads_ptr,  # int32 [pairs, 2, chosen]
    todo_ptr,  # int32 [pairs, 2]
    start_ptr,
    end_ptr,
    kv_heads,
    chosen,
    slots,
    keys_stride_b,
    keys_stride_h,
    keys_stride_n,
    values_stride_b,
    values_stride_h,
    values_stride_n,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    """Copy the blocks to load of a row and KV head, BLOCK_T tokens at a time; grid (programs, pairs)."""
    wait_for_previous_kernel(PDL)
    pair = tl.program_id(1).to(tl.int64)
    row = pair // kv_heads
    head = pair % kv_heads
    tokens = tl.load(todo_ptr + pair * 2) * BLOCK_SIZE
    present = tl.load(todo_ptr + pair * 2 + 1)
    start = tl.load(start_ptr + row)
    end = tl.load(end_ptr + row)
    keys_ptr += row * keys_stride_b + head * keys_stride_h
    values_ptr += row * values_stride_b + head * values_stride_h
    kept = pair * (slots + 1) * BLOCK_SIZE * HEAD_DIM
    kept_keys_ptr += kept
    kept_values_ptr += kept
    loads_ptr += pair * 2 * chosen
    # A token's key and value are asked for at once: where they are neighbours, one translation of their address serves.
    is_key = tl.arange(0, 2)[None, :, None] == 0
    dims = tl.arange(0, BLOCK_D)[None, None, :]
    kept_ptr = tl.where(is_key, kept_keys_ptr, kept_values_ptr)
    for first in range(tl.program_id(0) * BLOCK_T, tokens, tl.num_programs(0) * BLOCK_T):
        token = first + tl.arange(0, BLOCK_T)
        number = token // BLOCK_SIZE
        offset = token % BLOCK_SIZE
        block = tl.load(loads_ptr + number, mask=token < tokens, other=0)
        slot = tl.load(loads_ptr + chosen + number, mask=token < tokens, other=0)
        position = start.to(tl.int64) + block.to(tl.int64) * BLOCK_SIZE + offset
        is_lacking = (token < tokens) & (position < end) & ((slot != slots) | (offset >= present))
        mask = is_lacking[:, None, None] & (dims < HEAD_DIM)
        position = position[:, None, None]
        rows = tl.where(is_key, keys_ptr + position * keys_stride_n, values_ptr + position * values_stride_n)
        target = (slot.to(tl.int64) * BLOCK_SIZE + offset)[:, None, None] * HEAD_DIM
        tl.store(kept_ptr + target + dims, tl.load(rows + dims, mask=mask), mask=mask)


def keep_chosen(
    keys: torch.Tensor,
    values: torch.Tensor,
    kept_keys: torch.Tensor,
    kept_values: torch.Tensor,
    slot_blocks: torch.Tensor,
    block_slots: torch.Tensor,
    block_indices: torch.Tensor,
    block_counts: torch.Tensor,
    seq_start: torch.Tensor,
    seq_end: torch.Tensor,
    *,
    block_size: int,
    counter: torch.Tensor | None,
    traffic: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch the kernels."""
    batch, kv_heads, _, head_dim = keys.shape
    pairs, chosen, slots = batch * kv_heads, block_indices.shape[2], slot_blocks.shape[2] - 1
    seq_start, seq_end = seq_start.contiguous(), seq_end.contiguous()
    slot_indices = block_indices.new_empty((batch, kv_heads, chosen))
    kept_end = block_indices.new_empty((batch,))
    free = block_indices.new_empty((pairs, slots))
    loads = block_indices.new_empty((pairs, 2, chosen))
    todo = block_indices.new_empty((pairs, 2))
    tile = min(MOST_ENTRIES, max(16, next_power_of_2(slots)))
    launch = launch_options(keys.device)
    assign_slots_kernel[(pairs,)](
        block_indices.contiguous(),
        block_counts.contiguous(),
        seq_start,
        seq_end,
        slot_blocks,
        block_slots,
        free,
        loads,
        todo,
        slot_indices,
        kept_end,
        todo if counter is None else counter,
        todo if traffic is None else traffic,
        kv_heads,
        chosen,
        slots,
        block_slots.shape[2],
        SHARED=block_counts.shape[1] != kv_heads,
        COUNT=counter is not None,
        COUNT_TRAFFIC=traffic is not None,
        BLOCK_SIZE=block_size,
        TILE=tile,
        num_warps=max(1, tile // 128),
        **launch,
    )
    block_d = next_power_of_2(head_dim)
    block_t = max(1, LOADED_BYTES // 2 // (block_d * keys.element_size()))
    loaders = cdiv(multiprocessors(keys.device), MULTIPROCESSORS_PER_LOADER)
    programs = min(cdiv(chosen * block_size, block_t), cdiv(loaders, pairs))
    load_chosen_kernel[(programs, pairs)](
        keys,
        values,
        kept_keys,
        kept_values,
        loads,
        todo,
        seq_start,
        seq_end,
        kv_heads,
        chosen,
        slots,
        *keys.stride()[:3],
        *values.stride()[:3],
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        BLOCK_T=block_t,
        BLOCK_D=block_d,
        num_warps=4,
        **launch,
    )
    return slot_indices, kept_end
