"""Page bounds in 8 bits: levels with exponents per channel and per page."""
# Triton's decorator is untyped, and so are a kernel's arguments.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

import triton
import triton.language as tl


@triton.jit
def power_of_two(exponent):
    """Return 2 ** exponent as float32, exact for -126 <= exponent <= 127."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def exponent_for(x, FRACTION: tl.constexpr):
    """Return the smallest e with x <= (1 + FRACTION / 2**23) * 64 * 2**e, for x >= 0."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits >> 23) - 133 + ((bits & 0x7FFFFF) > FRACTION).to(tl.int32)


@triton.jit
def channel_exponent_for(largest):
    """Return a channel's exponent: `largest`, over its keys and its RoPE partner's, takes 90 levels, rotated 127."""
    return tl.minimum(tl.maximum(exponent_for(largest, 3407872), -60), 60)  # 90 = (1 + 3407872 / 2**23) * 64


@triton.jit
def page_exponent_for(largest):
    """Return a page's exponent: `largest`, over its bounds in units of their channels' exponents, takes 127 levels."""
    return tl.minimum(tl.maximum(exponent_for(largest, 8257536), 0), 60)  # 127 = (1 + 8257536 / 2**23) * 64


@triton.jit
def lower_level(x):
    """Round a lower bound outwards to a level, as float32."""
    return tl.maximum(tl.minimum(tl.floor(x), 127.0), -127.0)


@triton.jit
def upper_level(x):
    """Round an upper bound outwards to a level, as float32."""
    return tl.maximum(tl.minimum(tl.ceil(x), 127.0), -127.0)


@triton.jit
def to_levels(lower, upper, exponent):
    """Round the bounds of a page to levels, given its channels' exponents; also return the page's exponent.

    Bounds of channels that do not exist are 0.
    """
    lower = lower * power_of_two(-exponent)
    upper = upper * power_of_two(-exponent)
    page_exponent = page_exponent_for(tl.max(tl.maximum(tl.abs(lower), tl.abs(upper))))
    lower = lower_level(lower * power_of_two(-page_exponent))
    upper = upper_level(upper * power_of_two(-page_exponent))
    return lower, upper, page_exponent


@triton.jit
def levels_to_half(levels, INTERPRET: tl.constexpr):
    """Convert int8 levels to float16 exactly.

    Plain conversions take longer than the loads, since few units can do them. The bits of 1024 + (level + 128) are
    assembled four at a time instead; subtracting 1152 leaves the level, with two instructions for two levels.
    """
    if INTERPRET:
        return levels.to(tl.float16)
    return tl.inline_asm_elementwise(
        """
        {
            .reg .b32 shifted, low, high, bias;
            mov.b32 bias, 0x64806480;
            xor.b32 shifted, $2, 0x80808080;
            prmt.b32 low, shifted, 0x64646464, 0x4140;
            prmt.b32 high, shifted, 0x64646464, 0x4342;
            sub.rn.f16x2 $0, low, bias;
            sub.rn.f16x2 $1, high, bias;
        }
        """,
        "=r,=r,r",
        [levels],
        dtype=tl.float16,
        is_pure=True,
        pack=4,
    )
