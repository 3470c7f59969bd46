"""Triton kernel of `one_shot_all_reduce`: each GPU writes what it has into the memory of all others, and adds up."""
# Triton's decorator is untyped, and so are a kernel's arguments.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

import torch
import triton
import triton.language as tl

from .._triton import INTERPRET, cdiv, launch_options, wait_for_previous_kernel
from . import PROGRAM_WORDS


@triton.jit
def _push(at, message, COMPILED: tl.constexpr):
    """Store messages of 64 bits, each at once, where another GPU waits for them."""
    if COMPILED:
        tl.inline_asm_elementwise(
            "st.relaxed.sys.global.b64 [$1], $2; mov.b32 $0, 0;",
            "=r,l,l",
            [at, message],
            tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        tl.store(at, message)


@triton.jit
def _pull(at, count, COMPILED: tl.constexpr):
    """Wait until messages have this count, and return their words."""
    if COMPILED:
        word = tl.inline_asm_elementwise(
            """
            {
                .reg .pred is_old;
                .reg .b32 count;
                .reg .b64 message;
                wait:
                ld.relaxed.sys.global.b64 message, [$1];
                mov.b64 {$0, count}, message;
                setp.ne.b32 is_old, count, $2;
                @is_old bra wait;
            }
            """,
            "=&r,l,r",
            [at, count],
            tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        message = tl.load(at)
        while tl.max(((message >> 32) != count).to(tl.int32)) == 1:
            message = tl.load(at)
        word = message.to(tl.int32)
    return word


@triton.jit
def _halves(word, DTYPE: tl.constexpr):
    """Return the two numbers of 16 bits in a word as float32."""
    low = word.to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)
    return low, (word >> 16).to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)


@triton.jit
def _bits(value, DTYPE: tl.constexpr):
    """Round to a dtype of 16 bits, and return them as int32."""
    return value.to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF


@triton.jit
def _plus(total, addend, DTYPE: tl.constexpr, PAIRED: tl.constexpr):
    """Add words of numbers, and round each."""
    if PAIRED:
        low, high = _halves(total, DTYPE)
        more_low, more_high = _halves(addend, DTYPE)
        words = _bits(low + more_low, DTYPE) | (_bits(high + more_high, DTYPE) << 16)
    else:
        words = (total.to(tl.float32, bitcast=True) + addend.to(tl.float32, bitcast=True)).to(tl.int32, bitcast=True)
    return words


@triton.jit
def one_shot_all_reduce_kernel(
    words_ptr,
    addend_ptr,
    combined_ptr,
    addresses,
    counts_ptr,
    words,
    capacity,
    RANK: tl.constexpr,
    COMBINES: tl.constexpr,
    DTYPE: tl.constexpr,
    PAIRED: tl.constexpr,
    BLOCK: tl.constexpr,
    COMPILED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Add up BLOCK words over the processes; grid (words / BLOCK,)."""
    program = tl.program_id(0)
    word = program * BLOCK + tl.arange(0, BLOCK)
    wait_for_previous_kernel(PDL)
    own = tl.load(words_ptr + word, mask=word < words, other=0)
    count = tl.load(counts_ptr + program) + 1
    half = (count & 1) * len(addresses)
    # The count comes with every word, in one store, so no word waits for another one's arrival.
    message = (count.to(tl.int64) << 32) | (own.to(tl.int64) & 0xFFFFFFFF)
    for process in tl.static_range(len(addresses)):
        if process != RANK:
            buffer_ptr = addresses[process].to(tl.pointer_type(tl.int64))
            _push(buffer_ptr + (half + RANK) * capacity + word, message, COMPILED)
    received_ptr = addresses[RANK].to(tl.pointer_type(tl.int64))
    if COMBINES:
        addend = tl.load(addend_ptr + word, mask=word < words, other=0)
    expected = tl.zeros((BLOCK,), tl.int32) + count
    first = tl.zeros((BLOCK,), tl.float32)
    second = tl.zeros((BLOCK,), tl.float32)
    for process in tl.static_range(len(addresses)):  # in the order of the ranks: all get the same bits
        part = own if process == RANK else _pull(received_ptr + (half + process) * capacity + word, expected, COMPILED)
        if PAIRED:
            low, high = _halves(part, DTYPE)
            first += low
            second += high
        else:
            first += part.to(tl.float32, bitcast=True)
    total = _bits(first, DTYPE) | (_bits(second, DTYPE) << 16) if PAIRED else first.to(tl.int32, bitcast=True)
    tl.store(words_ptr + word, total, mask=word < words)
    if COMBINES:
        tl.store(combined_ptr + word, _plus(total, addend, DTYPE, PAIRED), mask=word < words)
    tl.store(counts_ptr + program, count)


def one_shot_all_reduce(
    tensor: torch.Tensor,
    buffers: list[torch.Tensor],
    counts: torch.Tensor,
    *,
    rank: int,
    addend: torch.Tensor | None,
    combined: torch.Tensor | None,
) -> None:
    """Launch `one_shot_all_reduce_kernel`."""
    words = _words(tensor)
    dtypes = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
    one_shot_all_reduce_kernel[(cdiv(words.numel(), PROGRAM_WORDS),)](
        words,
        None if addend is None else _words(addend),
        None if combined is None else _words(combined),
        tuple(buffer.data_ptr() for buffer in buffers),  # those of other devices too, which Triton does not check
        counts,
        words.numel(),
        buffers[0].shape[2],
        RANK=rank,
        COMBINES=combined is not None,
        DTYPE=dtypes[tensor.dtype],
        PAIRED=tensor.itemsize == 2,
        BLOCK=PROGRAM_WORDS,
        COMPILED=not INTERPRET,
        num_warps=PROGRAM_WORDS // 32,
        **launch_options(tensor.device),
    )


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's bits as words of 32."""
    return tensor.view(-1).view(torch.int32)
