"""What the launchers share."""

import os
from typing import Any

import torch
import triton.language as tl

INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"  # as Triton sees it when the kernels are decorated

_DOT_DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def dot_dtype(dtype: torch.dtype) -> Any:
    """Return the type of the operands of `tl.dot` for tensors of `dtype`.

    Triton's interpreter multiplies the bit patterns of bfloat16 as integers, so there they are widened, which is exact.
    """
    if INTERPRET and dtype == torch.bfloat16:
        return tl.float32
    return _DOT_DTYPES[dtype]
