"""Device code that rounds a query to whole numbers and rotates it.

A rotation is a product of the query in 14 bits with rows of 8 bits, like the score of a centre, and is rounded to few
units afterwards. Every step is exact or rounded once, so all implementations end with the same whole numbers.
"""
# Triton's decorator is untyped, and so are a kernel's arguments.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

import triton
import triton.language as tl

from . import ROTATED_UNITS, SHIFTS, UNIT_PLACE, UNITS

PER_UNIT = tl.constexpr(1.0 / UNITS)
PER_ROTATED_UNIT = tl.constexpr(1.0 / ROTATED_UNITS)
FACTORS = tl.constexpr(
    tuple(
        tuple(2 ** (UNIT_PLACE + plane - bit - shift) for bit, shift in enumerate(shifts))
        for plane, shifts in enumerate(SHIFTS)
    )
)
"""Of a channel, by the bit of its value and the bit of a byte that it meets."""
PLACE = tl.constexpr(UNIT_PLACE)
ROWS_AT_ONCE = tl.constexpr(64)  # of the rotation, in a product


@triton.jit
def load_in_units(
    query_ptr,  # of the first head
    query_centre_ptr,
    query_stride_h,
    query_stride_d,
    heads,
    COLUMNS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    CENTRED: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Round queries, less their centre if CENTRED, to whole numbers of units; return both.

    A whole number is 128 times its high part plus its low part: int8 [BLOCK_D, COLUMNS], both parts side by side. The
    units are float32 [COLUMNS // 2].
    """
    dims = tl.arange(0, BLOCK_D)
    columns = tl.arange(0, COLUMNS)
    mask = (dims < HEAD_DIM)[:, None] & (columns < 2 * heads)[None, :]
    at = query_ptr + columns[None, :] // 2 * query_stride_h + dims[:, None] * query_stride_d
    query = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    if CENTRED:
        centre = tl.load(query_centre_ptr + dims, mask=dims < HEAD_DIM, other=0.0)[:, None]
        query = tl.where(mask, query - centre, 0.0)
    unit = tl.maximum(tl.max(tl.abs(query), axis=0), 1e-30) * PER_UNIT
    whole = tl.floor(tl.div_rn(query, tl.broadcast_to(unit[None, :], (BLOCK_D, COLUMNS))) + 0.5)
    high = tl.floor((whole + 64.0) * 0.0078125)
    parts = tl.where((columns % 2 == 0)[None, :], high, whole - 128.0 * high).to(tl.int8)
    unit, _ = tl.split(tl.reshape(unit, (COLUMNS // 2, 2)))
    return parts, unit


@triton.jit
def whole_products(levels, parts):
    """Return the products of levels, int8 [rows, BLOCK_D], and queries in two parts, float32 [rows, COLUMNS // 2]."""
    products = tl.dot(levels, parts, out_dtype=tl.int32)
    high, low = tl.split(tl.reshape(products, (products.shape[0], products.shape[1] // 2, 2)))
    return (high * 128 + low).to(tl.float32)


@triton.jit
def rotate_heads(
    query_ptr,  # of the row and the first of these heads
    query_centre_ptr,  # of the pair
    rotation_ptr,  # int8 [HEAD_DIM, HEAD_DIM]
    parts_ptr,  # of the first of these heads, like the next
    slopes_ptr,
    scale,  # of the scores, times the unit of the rotation
    query_stride_h,
    query_stride_d,
    heads,  # at most AT_ONCE
    AT_ONCE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BITS: tl.constexpr,
    OFFSETS: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Rotate queries, less their centre, and store them by the bits that their channels meet, with their slopes.

    A slope times the products of bits is the product of the query and the symbols.
    """
    parts, unit = load_in_units(
        query_ptr,
        query_centre_ptr,
        query_stride_h,
        query_stride_d,
        heads,
        2 * AT_ONCE,
        HEAD_DIM,
        OFFSETS,
        BLOCK_D,
    )
    dims = tl.arange(0, BLOCK_D)
    ROWS: tl.constexpr = BLOCK_D if BLOCK_D < ROWS_AT_ONCE else ROWS_AT_ONCE
    rotated = ()
    greatest = tl.full((AT_ONCE,), 1.0, tl.float32)
    for first in tl.static_range(0, BLOCK_D, ROWS):
        rows = first + tl.arange(0, ROWS)
        mask = (rows < HEAD_DIM)[:, None] & (dims < HEAD_DIM)[None, :]
        levels = tl.load(rotation_ptr + rows[:, None] * HEAD_DIM + dims[None, :], mask=mask, other=0)
        products = whole_products(levels, parts)  # [ROWS, AT_ONCE]
        rotated += (products,)  # type: ignore[assignment]
        greatest = tl.maximum(greatest, tl.max(tl.abs(products), axis=0))
    rotated_unit = greatest * PER_ROTATED_UNIT
    head = tl.arange(0, AT_ONCE)
    # Channel i * (HEAD_DIM // 8) + j meets bit i of byte j. The scan has BLOCK_B bytes, of which absent ones are 0.
    BYTES: tl.constexpr = HEAD_DIM // 8
    parts_ptr += head[None, :] * (BITS * 8 * BLOCK_B)
    for part in tl.static_range(0, BLOCK_D // ROWS):
        rows = part * ROWS + tl.arange(0, ROWS)
        whole = tl.floor(tl.div_rn(rotated[part], tl.broadcast_to(rotated_unit[None, :], (ROWS, AT_ONCE))) + 0.5)
        at = parts_ptr + (rows // BYTES * BLOCK_B + rows % BYTES)[:, None]
        mask = (rows < HEAD_DIM)[:, None] & (head < heads)[None, :]
        for plane in tl.static_range(BITS):
            factor = tl.zeros((ROWS,), tl.float32)
            for bit in tl.static_range(8):
                factor = tl.where(rows // BYTES == bit, FACTORS[plane][bit], factor)
            tl.store(at + plane * (8 * BLOCK_B), (whole * factor[:, None]).to(tl.int8), mask=mask)
    # The symbols are 2 v - (2 ** BITS - 1) for values v, and products are those with 2 ** (PLACE - 1) of a symbol.
    tl.store(slopes_ptr + head, unit * rotated_unit * (scale / 2 ** (PLACE - 1)), mask=head < heads)
