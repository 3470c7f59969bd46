"""Device code that estimates the scores of a tile of tokens: bits stay packed until they are operands of a product."""
# Triton's decorator is untyped, and so are a kernel's arguments.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

import triton
import triton.language as tl

from . import MOST_HALF, SHIFTS

LIMIT = tl.constexpr(MOST_HALF)
BIT_SHIFTS = tl.constexpr(SHIFTS)
PLACES = tl.constexpr(tuple(tuple(bit + shift for bit, shift in enumerate(shifts)) for shifts in SHIFTS))
WHOLE_FLOAT = tl.constexpr(12582912.0)
"""1.5 * 2 ** 23. Sums that begin with its bits are float32 as they stand, while they are below 2 ** 22."""
FLOAT_BITS = tl.constexpr(0x4B400000)


@triton.jit
def shift_bytes(codes, SHIFT: tl.constexpr, INTERPRETED: tl.constexpr):
    """Shift every byte to the left, or to the right if SHIFT is negative; bits of its neighbours may come in."""
    if SHIFT == 0:
        return codes
    if INTERPRETED:
        return codes << SHIFT if SHIFT > 0 else codes >> -SHIFT
    # Four bytes at a time.
    asm: tl.constexpr = f"shl.b32 $0, $1, {SHIFT};" if SHIFT > 0 else f"shr.b32 $0, $1, {-SHIFT};"
    return tl.inline_asm_elementwise(asm, "=r,r", [codes], dtype=tl.uint8, is_pure=True, pack=4)


@triton.jit
def mask_bytes(codes, PLACE: tl.constexpr, INTERPRETED: tl.constexpr):
    """Return the bit at PLACE of every byte as int8: 0 or 2 ** PLACE."""
    if INTERPRETED:
        return (codes & (1 << PLACE)).to(tl.int8)
    asm: tl.constexpr = f"and.b32 $0, $1, {(1 << PLACE) * 0x01010101};"
    return tl.inline_asm_elementwise(asm, "=r,r", [codes], dtype=tl.int8, is_pure=True, pack=4)


@triton.jit
def level_of_products(parts, BITS: tl.constexpr, LINES: tl.constexpr):
    """Return what sums begin with, int32 [1, columns]: what makes products with symbols of those with values.

    It is a product itself. Besides, the compiler then brings the parts into the layout of an operand here, not in each
    turn of the loop.
    """
    DEPTH: tl.constexpr = parts[0].shape[0]
    level = tl.zeros((LINES, parts[0].shape[1]), tl.int32)
    for bit in tl.static_range(8 * BITS):
        half = tl.full((LINES, DEPTH), -(2 ** (PLACES[bit // 8][bit % 8] - 1)), tl.int8)
        level = tl.dot(half, parts[bit], level, out_dtype=tl.int32)
    return (tl.max(level, axis=0) + FLOAT_BITS)[None, :]


@triton.jit
def fast_exp2(x, INTERPRETED: tl.constexpr):
    """Return 2 ** x within 2 units in the last place, 0 below 2 ** -126: one instruction."""
    if INTERPRETED:
        return tl.exp2(x)
    return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def to_finite_half(x, INTERPRETED: tl.constexpr):
    """Round to float16, limited to its finite range, two numbers at a time."""
    if INTERPRETED:
        return tl.minimum(tl.maximum(x, -LIMIT), LIMIT).to(tl.float16)
    asm: tl.constexpr = "cvt.rn.satfinite.f16x2.f32 $0, $2, $1;"
    return tl.inline_asm_elementwise(asm, "=r,f,f", [x], dtype=tl.float16, is_pure=True, pack=2)


@triton.jit
def to_estimate(x, INTERPRETED: tl.constexpr):
    """Round to float16 as estimates are kept: at most its greatest number, and -inf below its least."""
    if INTERPRETED:
        return tl.where(x < -LIMIT, float("-inf"), tl.minimum(x, LIMIT)).to(tl.float16)
    asm: tl.constexpr = (
        "{ .reg .b32 t, most; mov.b32 most, 0x7bff7bff; cvt.rn.f16x2.f32 t, $2, $1; min.f16x2 $0, t, most; }"
    )
    return tl.inline_asm_elementwise(asm, "=r,f,f", [x], dtype=tl.float16, is_pure=True, pack=2)


@triton.jit
def estimate_tile(
    codes_ptr,  # of the pair, like all below
    factors_ptr,
    page_scores_ptr,
    parts,  # tuple of int8 [TOKENS * BLOCK_B, TOKENS * GROUP]: the query's channels, by the bit that they meet
    level,  # int32 [1, TOKENS * GROUP]: what sums begin with
    slope,  # [1, GROUP]
    offset_scale,
    first,
    end,
    capacity,
    PAGE_SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    BYTES: tl.constexpr,
    OFFSETS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_B: tl.constexpr,
    TOKENS: tl.constexpr,
    WHOLE: tl.constexpr,
    ABSENT: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Estimate the scaled scores of BLOCK_T tokens.

    Return them without the offset that all heads add, [BLOCK_T, GROUP], and the offset, [BLOCK_T]. Scores are -inf for
    absent heads, and ABSENT from `end` on.
    """
    tokens = tl.arange(0, BLOCK_T)
    # A line holds the bytes of TOKENS tokens, DEPTH in all, as deep as a product of bytes must be.
    DEPTH: tl.constexpr = TOKENS * BLOCK_B
    lines = tl.arange(0, BLOCK_T // TOKENS)[:, None]
    columns = tl.arange(0, DEPTH)[None, :]
    first_place = tl.full((), 0, tl.int64) + first
    codes_ptr += first_place * (BITS * BYTES)
    factors_ptr += first_place * (1 + OFFSETS)
    sums = tl.zeros((BLOCK_T // TOKENS, TOKENS * GROUP), tl.int32) + level
    for bit_plane in tl.static_range(BITS):
        at = codes_ptr + (lines * TOKENS + columns // BLOCK_B) * (BITS * BYTES) + bit_plane * BYTES + columns % BLOCK_B
        if (BITS == 1) & (BYTES == BLOCK_B):
            at = codes_ptr + (lines * DEPTH + columns)
        if WHOLE & (BYTES == BLOCK_B):
            codes = tl.load(at)
        else:
            codes = tl.load(at, mask=(first + lines * TOKENS < capacity) & (columns % BLOCK_B < BYTES), other=0)
        for bit in tl.static_range(8):
            # The same shift of several bits is one instruction.
            shifted = shift_bytes(codes, BIT_SHIFTS[bit_plane][bit], INTERPRETED)
            bits = mask_bytes(shifted, PLACES[bit_plane][bit], INTERPRETED)
            sums = tl.dot(bits, parts[8 * bit_plane + bit], sums, out_dtype=tl.int32)
    products = tl.reshape(sums.to(tl.float32, bitcast=True) - WHOLE_FLOAT, (BLOCK_T, GROUP)) * slope
    # A page that is not coded yet may hold anything: results that mix tokens must not read it, others may.
    last = end if ABSENT != 0.0 else capacity
    if OFFSETS:
        pairs = tl.arange(0, 2 * BLOCK_T)
        at = factors_ptr + pairs
        both = tl.load(at) if WHOLE & (ABSENT == 0.0) else tl.load(at, mask=first + pairs // 2 < last, other=0.0)
        factor, offset = tl.split(tl.reshape(both, (BLOCK_T, 2)))
        offset = offset.to(tl.float32) * offset_scale
    else:
        factor = tl.load(factors_ptr + tokens, mask=first + tokens < last, other=0.0)
        offset = tl.zeros((BLOCK_T,), tl.float32)
    # Tokens that lie in one page.
    IN_PAGE: tl.constexpr = PAGE_SIZE & -PAGE_SIZE
    SLICE: tl.constexpr = IN_PAGE if IN_PAGE < BLOCK_T else BLOCK_T
    slices = tl.arange(0, BLOCK_T // SLICE)
    pages = first // PAGE_SIZE + slices if PAGE_SIZE == SLICE else (first + slices * SLICE) // PAGE_SIZE
    at = page_scores_ptr + (pages * GROUP)[:, None] + tl.arange(0, GROUP)[None, :]
    if WHOLE & (ABSENT == 0.0):
        of_pages = tl.load(at)
    else:
        of_pages = tl.load(at, mask=(first + slices * SLICE < last)[:, None], other=ABSENT)
    of_pages = tl.reshape(tl.broadcast_to(of_pages[:, None, :], (BLOCK_T // SLICE, SLICE, GROUP)), (BLOCK_T, GROUP))
    return of_pages + products * factor.to(tl.float32)[:, None], offset
