"""Attention to one ticket of a progressive read: a whole number of blocks, at most a microbatch."""
# Triton's decorator is untyped, and so are a kernel's arguments.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

import triton
import triton.language as tl


@triton.jit
def load_queries(
    query_ptr,
    row,
    head,
    group,
    query_stride_b,
    query_stride_h,
    query_stride_d,
    HEAD_DIM: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
):
    """Load the query heads of a KV head, [BLOCK_G, BLOCK_D]."""
    heads = tl.arange(0, BLOCK_G)
    dims = tl.arange(0, BLOCK_D)
    query_at = query_ptr + row * query_stride_b + (head * group + heads)[:, None] * query_stride_h
    mask = (heads < group)[:, None] & (dims < HEAD_DIM)[None, :]
    return tl.load(query_at + dims[None, :] * query_stride_d, mask=mask, other=0.0).to(DOT_DTYPE)


@triton.jit
def no_tickets(BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr):
    """Return the running maximum, sum and output before a program's first ticket."""
    top = tl.full((BLOCK_G,), float("-inf"), tl.float32)
    return top, tl.zeros((BLOCK_G,), tl.float32), tl.zeros((BLOCK_G, BLOCK_D), tl.float32)


@triton.jit
def attend_to_ticket(
    q,  # [BLOCK_G, BLOCK_D]
    ticket,
    top,  # running maximum of the program's tickets, in units of log2
    total,  # their sum
    out,  # their output before the division by the sum
    keys_ptr,  # of the row and KV head, like all pointers here
    values_ptr,
    order_ptr,
    weight_ptr,  # [tickets, group]: log2 of the sum of the ticket's blocks
    rest_ptr,  # [tickets, group]: what the estimate of the rest needs of the ticket, in log2
    counted_ptr,  # int32 [tickets], for LAST: the blocks that `rest_ptr` sums
    tokens_ptr,  # int32 [tickets], for COUNT
    max_ptr,  # [tickets, group], and the next two: the program's results so far
    sum_ptr,
    out_ptr,  # [tickets, group, HEAD_DIM]
    group,
    max_blocks,
    count,
    forced_blocks,
    start,
    length,
    keys_stride_n,
    values_stride_n,
    scale_log2,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    LANES: tl.constexpr,  # BLOCK_SIZE rounded up to a power of two
    TICKET: tl.constexpr,  # blocks
    LAST: tl.constexpr,
    COUNT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_B: tl.constexpr,  # TICKET rounded up to a power of two
    DOT_DTYPE: tl.constexpr,
):
    """Attend to the blocks of a ticket, in tiles that are whole blocks or parts of one, and write what is known then.

    Returns the running maximum, sum and output with this ticket. The estimate of the rest needs the least sum of a
    complete block or, for LAST, the sum of the complete blocks that are not forced.
    """
    TILE_BLOCKS: tl.constexpr = max(1, BLOCK_N // LANES)
    BLOCK_TILES: tl.constexpr = max(1, LANES // BLOCK_N)
    dims = tl.arange(0, BLOCK_D)
    lanes = tl.arange(0, BLOCK_N)
    tile_blocks = tl.arange(0, TILE_BLOCKS)
    first = ticket * TICKET
    order_ptr += first
    blocks = tl.minimum(count - first, TICKET)
    listed = tl.minimum(max_blocks - first, TICKET)  # loads of the order that do not wait for the count
    before = top
    own_total = tl.zeros((BLOCK_G,), tl.float32)  # of the ticket, in units of `top`, like all sums here
    block_total = tl.zeros((BLOCK_G,), tl.float32)  # of the block that has begun, if a block has several tiles
    least = tl.full((BLOCK_G,), float("inf"), tl.float32)
    lane_total = tl.zeros((BLOCK_G, BLOCK_N), tl.float32)  # of a lane of all tiles, like the next two
    lane_counted = tl.zeros((BLOCK_G, BLOCK_N), tl.float32)
    lane_tokens = tl.zeros((BLOCK_N,), tl.int32)
    # A tile's blocks are loaded one tile ahead: its keys and values can then be loaded while others are attended to.
    next_block = tl.load(order_ptr + lanes // LANES, mask=lanes // LANES < listed, other=-1)
    for tile in range(tl.cdiv(TICKET * LANES, BLOCK_N)):
        lane = tile * BLOCK_N + lanes
        block = next_block
        next_place = (lane + BLOCK_N) // LANES
        next_block = tl.load(order_ptr + next_place, mask=next_place < listed, other=-1)
        place = tile // BLOCK_TILES * TILE_BLOCKS + tile_blocks
        tile_block = tl.load(order_ptr + place, mask=place < listed, other=-1)
        token = block * BLOCK_SIZE + lane % LANES
        valid = (lane // LANES < blocks) & (block >= 0) & (lane % LANES < BLOCK_SIZE) & (token < length)
        position = start.to(tl.int64) + token
        mask = valid[:, None] & (dims < HEAD_DIM)[None, :]
        # Masked values must be 0: a weight of 0 times a NaN in the buffer would still be NaN.
        k = tl.load(keys_ptr + position[:, None] * keys_stride_n + dims[None, :], mask=mask, other=0.0)
        v = tl.load(values_ptr + position[:, None] * values_stride_n + dims[None, :], mask=mask, other=0.0)
        scores = tl.dot(q, tl.trans(k.to(DOT_DTYPE)), input_precision="ieee") * scale_log2  # [BLOCK_G, BLOCK_N]
        scores = tl.where(valid[None, :], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, axis=1))
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(scores - shift[:, None])
        decay = tl.exp2(top - shift)
        top = new_top
        out = out * decay[:, None]
        out = tl.dot(weights.to(v.dtype).to(DOT_DTYPE), v.to(DOT_DTYPE), out, input_precision="ieee")
        if COUNT:
            lane_tokens += valid.to(tl.int32)

        # A sum too small for float32 counts as 0: beside the largest weight, it makes P exceed any threshold anyway.
        if LAST:
            is_counted = (first + lane // LANES >= forced_blocks) & ((block + 1) * BLOCK_SIZE <= length)
            lane_total = lane_total * decay[:, None] + weights
            lane_counted = lane_counted * decay[:, None] + tl.where(is_counted[None, :], weights, 0.0)
        else:
            is_complete = (place < blocks) & (tile_block >= 0) & ((tile_block + 1) * BLOCK_SIZE <= length)
            sums = tl.sum(tl.reshape(weights, (BLOCK_G, TILE_BLOCKS, BLOCK_N // TILE_BLOCKS)), axis=2)
            tile_total = tl.sum(sums, axis=1)
            own_total = own_total * decay + tile_total
            if BLOCK_TILES > 1:
                block_total = block_total * decay + tile_total
                sums = block_total[:, None]
                is_end = tile % BLOCK_TILES == BLOCK_TILES - 1
                is_complete = is_complete & is_end
                block_total = tl.where(is_end, 0.0, block_total)
            log_sums = tl.where(is_complete[None, :], tl.log2(sums) + shift[:, None], float("inf"))
            least = tl.minimum(least, tl.min(log_sums, axis=1))

    heads = tl.arange(0, BLOCK_G)
    head_mask = heads < group
    group_mask = head_mask[:, None] & (dims < HEAD_DIM)[None, :]
    at = ticket * group + heads
    shift = tl.where(top == float("-inf"), 0.0, top)
    if LAST:
        own_total = tl.sum(lane_total, axis=1)
        counted_total = tl.sum(lane_counted, axis=1)
        place = tl.arange(0, BLOCK_B)
        block = tl.load(order_ptr + place, mask=place < listed, other=-1)
        is_counted = (place < blocks) & (block >= 0) & (first + place >= forced_blocks)
        is_counted = is_counted & ((block + 1) * BLOCK_SIZE <= length)
        tl.store(counted_ptr + ticket, tl.sum(is_counted.to(tl.int32)))
        tl.store(rest_ptr + at, tl.log2(counted_total) + shift, mask=head_mask)
    else:
        tl.store(rest_ptr + at, least, mask=head_mask)
    total = total * tl.exp2(before - shift) + own_total
    tl.store(weight_ptr + at, tl.log2(own_total) + shift, mask=head_mask)
    tl.store(max_ptr + at, top, mask=head_mask)
    tl.store(sum_ptr + at, total, mask=head_mask)
    tl.store(out_ptr + at[:, None] * HEAD_DIM + dims[None, :], out, mask=group_mask)
    if COUNT:
        tl.store(tokens_ptr + ticket, tl.sum(lane_tokens))
    return top, total, out
