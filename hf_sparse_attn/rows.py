"""Where the rows of a batch begin and end: one record on each device, shared by all layers of a cache there."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch

from hf_sparse_attn.buffers import mark_static, replaced


@torch.library.custom_op(
    "hf_sparse_attn::advance_rows", mutates_args=("seq_end",), schema="(Tensor(a!) seq_end, SymInt num_new) -> ()"
)
def _advance_rows(seq_end: torch.Tensor, num_new: int) -> None:
    """Add in place. A plain addition the compiler would repeat for every op of every layer that reads the rows."""
    seq_end.add_(num_new)


@_advance_rows.register_fake
def _(seq_end: torch.Tensor, num_new: int) -> None:
    return None


class Rows:
    """First and last positions of every row, on the device, and their common end once more on the host.

    Decoding reads the device's numbers only, so that a compiled step depends on no Python value that changes from
    step to step. The host's number is a mirror: it follows eager steps, a compiled step forgets it, and whoever needs
    it afterwards waits for the device once.

    Parameters
    ----------
    static
        Whether compiled steps may use the rows: then their tensors keep their addresses.
    """

    seq_start: torch.Tensor
    """int32 [batch]: position of each row's first token."""
    seq_end: torch.Tensor
    """int32 [batch]: position after each row's last token, the same in every row."""

    def __init__(self, static: bool) -> None:
        self._static = static
        self.least_padding = 0
        self.has_padding = False
        self.attention_appends = False
        """Whether the attention function of the present step caches single tokens itself."""
        self._attention_appends_next = False
        self._length: int | None = 0

    def allocate(self, batch: int, device: torch.device) -> None:
        """Make the tensors anew, for rows without tokens."""
        self.seq_start = torch.zeros(batch, dtype=torch.int32, device=device)
        self.seq_end = torch.zeros_like(self.seq_start)
        if self._static:
            mark_static(self.seq_start)
            mark_static(self.seq_end)
        self.cut(0)

    @property
    def length(self) -> int:
        """Tokens per row, left padding counted in. Waits for the device where only that knows."""
        if self._length is None:
            self._length = int(self.seq_end[0])
        return self._length

    @property
    def length_is_known(self) -> bool:
        """Whether :attr:`length` can be told without waiting for the device."""
        return self._length is not None

    def announce_step(self) -> None:
        """Say that the coming step is a patched model's, whose attention function caches single tokens itself."""
        self._attention_appends_next = True

    def set_padding(self, seq_start: torch.Tensor, least_padding: int, has_padding: bool) -> None:
        """Say where each row's first token lies."""
        self.seq_start.copy_(seq_start)
        self.least_padding = least_padding
        self.has_padding = has_padding

    def advance(self, num_new: int) -> None:
        """Count ``num_new`` more tokens in every row: once in a step, before any layer caches them."""
        self.attention_appends, self._attention_appends_next = self._attention_appends_next, False
        if self._static and torch.compiler.is_compiling():
            _advance_rows(self.seq_end, num_new)
            self._length = None
            return
        self.seq_end.add_(num_new)
        if self._length is not None:
            self._length += num_new

    def cut(self, length: int) -> None:
        """Keep the first ``length`` positions of every row; of none of them, no padding either."""
        self.seq_end.fill_(length)
        self._length = length
        if length == 0:
            self.least_padding, self.has_padding = 0, False
            self.seq_start.zero_()

    def map(self, of_rows: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Reorder, repeat or choose rows."""
        self.seq_start = replaced(self.seq_start, of_rows(self.seq_start), self._static)
        self.seq_end = replaced(self.seq_end, of_rows(self.seq_end), self._static)

    def copy(self) -> Rows:
        """Make a record with tensors of its own."""
        twin = copy.copy(self)
        twin.seq_start, twin.seq_end = self.seq_start.clone(), self.seq_end.clone()
        if self._static:
            mark_static(twin.seq_start)
            mark_static(twin.seq_end)
        return twin
