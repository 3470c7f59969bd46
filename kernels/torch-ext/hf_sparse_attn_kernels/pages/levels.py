"""Page bounds in 8 bits: levels, and exponents of channels and pages."""
# Triton's decorator is untyped, and so are a kernel's arguments.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

import triton
import triton.language as tl


@triton.jit
def power_of_two(exponent):
    """2 ** exponent as float32, exact for -126 <= exponent <= 127."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def exponent_for(x, FRACTION: tl.constexpr):
    """The smallest e with x <= (1 + FRACTION / 2**23) * 64 * 2**e, for x >= 0."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits >> 23) - 133 + ((bits & 0x7FFFFF) > FRACTION).to(tl.int32)


@triton.jit
def channel_exponent_for(largest):
    """Exponent of a channel whose keys and RoPE partner's reach `largest`: 90 levels hold it, 127 hold it rotated."""
    return tl.minimum(tl.maximum(exponent_for(largest, 3407872), -60), 60)  # 90 = (1 + 3407872 / 2**23) * 64


@triton.jit
def page_exponent_for(largest):
    """Exponent of a page whose bounds reach `largest` in units of their channel's exponent: 127 levels hold it."""
    return tl.minimum(tl.maximum(exponent_for(largest, 8257536), 0), 60)  # 127 = (1 + 8257536 / 2**23) * 64


@triton.jit
def lower_level(x):
    """Rounded outwards to a level, as float32."""
    return tl.maximum(tl.minimum(tl.floor(x), 127.0), -127.0)


@triton.jit
def upper_level(x):
    """Rounded outwards to a level, as float32."""
    return tl.maximum(tl.minimum(tl.ceil(x), 127.0), -127.0)


@triton.jit
def levels_to_half(levels, INTERPRET: tl.constexpr):
    """int8 levels as float16, exactly.

    Converting each would keep the few units that can busy for longer than memory; the bits of 1024 + (level + 128),
    put together four at a time, less 1152, take two instructions for two levels.
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
