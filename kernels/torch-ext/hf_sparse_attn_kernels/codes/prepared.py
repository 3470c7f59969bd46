"""Results that launches of `code_scores` and `select_tokens_by_score` pass to the next ones."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from .._triton import cdiv
from .query import HEADS_AT_ONCE

PAGES_AT_ONCE = 64


class Prepared(NamedTuple):
    """The query as the scan reads it, and the shapes that the launches share. Some launch before it writes it."""

    parts: torch.Tensor
    """int8 [pairs, group, bits, 8 * bytes]: the rotated query, by the bit and the byte that its channels meet."""
    slopes: torch.Tensor
    """float32 [pairs, group]: from products to scores."""
    page_scores: torch.Tensor
    """float32 [pairs, pages, group]: the products of queries and centres."""
    scale: float
    softmax: bool
    tokens_per_line: int
    sizes: dict[str, Any]
    """Arguments of the kernels that prepare and of those that scan."""

    @property
    def programs(self) -> int:
        """Programs of a pair that rotate its heads; others score the centres of `PAGES_AT_ONCE` pages each."""
        return cdiv(self.parts.shape[1], HEADS_AT_ONCE)


class Scanned(NamedTuple):
    """The result of a scan: the scores, or for a reduction by softmax what they are to be reduced from."""

    scores: torch.Tensor
    """float16 [batch, kv_heads, num_tokens]; without values as long as there are estimates."""
    estimates: torch.Tensor | None = None
    """float16 [pairs, num_tokens, group], base 2."""
    program_lse: torch.Tensor | None = None
    """float32 [pairs, programs, group], base 2: the log-sum-exp of a program's estimates."""
    tokens_per_program: int = 0
    heads: int = 1
    """Query heads of a group, the first ones of the estimates'; 1 if the scores are all that is known."""

    @property
    def group(self) -> int:
        """Estimates of a token."""
        return 1 if self.estimates is None else self.estimates.shape[2]

    @property
    def programs(self) -> int:
        """Programs of a pair."""
        return 0 if self.program_lse is None else self.program_lse.shape[1]
