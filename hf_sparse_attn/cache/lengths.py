"""Start and end of each row of a batch: one record per device, shared by a cache's layers there."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from hf_sparse_attn.cache.lasting import lasting_tensors, mark_static
from hf_sparse_attn.cache.padding import Padding

if TYPE_CHECKING:
    from hf_sparse_attn.record import SelectionRecord


@torch.library.custom_op(
    "hf_sparse_attn::advance_rows", mutates_args=("seq_end",), schema="(Tensor(a!) seq_end, SymInt num_new) -> ()"
)
def _advance_rows(seq_end: torch.Tensor, num_new: int) -> None:
    """Add in place. The compiler would repeat a plain addition for every op that reads the result."""
    seq_end.add_(num_new)


@_advance_rows.register_fake
def _(seq_end: torch.Tensor, num_new: int) -> None:
    return None


class Lengths:
    """First and last positions of every row on the device, with a copy of the common end on the host.

    Decoding reads the device tensors only: a compiled step must not depend on a Python value that changes from step to
    step. The host caches the length; compiled steps invalidate it, and the next read synchronizes.

    Parameters
    ----------
    batch
        Number of rows.
    device
        Device of the layers that share the record.
    is_static
        Whether compiled steps may use the record, whose tensors then keep their addresses.
    """

    seq_start: torch.Tensor
    """int32 [batch]: position of each row's first token."""
    seq_end: torch.Tensor
    """int32 [batch]: position after each row's last token, the same in every row."""

    def __init__(self, batch: int, device: torch.device, is_static: bool) -> None:
        self._is_static = is_static
        self.expects_step = False
        """Whether a patched model has announced that its method's ``decode`` will write the next token."""
        self.in_step = False
        """Whether the token counted last was announced so."""
        self.is_captured = False
        """Whether the pass in progress is recorded as a CUDA graph; see ``SparseCache.captured``."""
        self.masks_disagreed: torch.Tensor | None = None
        """bool, on the device: whether a decode step's mask hid cached tokens; None before the first check."""
        self.allocate(batch, device)

    def allocate(self, batch: int, device: torch.device) -> None:
        """Create the tensors, for empty rows."""
        with lasting_tensors():
            self.seq_start = torch.zeros(batch, dtype=torch.int32, device=device)
            self.seq_end = torch.zeros(batch, dtype=torch.int32, device=device)
        self._mark()
        self._length: int | None = 0
        self._starts: tuple[int, ...] | None = None
        self.least_padding, self.has_padding = 0, False

    @property
    def is_traced(self) -> bool:
        """Whether the step is being compiled, or recorded as a CUDA graph: it may depend on no host value."""
        return self._is_static and (torch.compiler.is_compiling() or self.is_captured)

    @property
    def known_length(self) -> int | None:
        """Tokens per row, left padding included; None if the host would have to wait for the device."""
        return None if self.is_traced else self._length

    @property
    def length(self) -> int:
        """Tokens per row, left padding included. Waits for the device after compiled steps."""
        if self._length is None:
            self._length = int(self.seq_end[0])
        return self._length

    @property
    def starts(self) -> tuple[int, ...]:
        """Position of each row's first token. Waits for the device once after every change."""
        if self._starts is None:
            self._starts = tuple(self.seq_start.tolist())
        return self._starts

    def set_padding(self, padding: Padding) -> None:
        """Set the position of each row's first token."""
        self.seq_start.copy_(padding.seq_start)
        self._starts = None
        self.least_padding, self.has_padding = padding.least, padding.has_padding

    def padding(self) -> Padding:
        """Return a copy of the positions of the rows' first tokens."""
        return Padding(self.seq_start.clone(), self.least_padding, self.has_padding)

    def note_mask(self, disagreed: torch.Tensor) -> None:
        """Record on the device whether a decode step's mask hid cached tokens, a bool scalar."""
        self.masks_disagreed = disagreed if self.masks_disagreed is None else self.masks_disagreed | disagreed

    def check_masks(self) -> None:
        """Raise ``ValueError`` if :meth:`note_mask` recorded True. Waits for the device."""
        disagreed, self.masks_disagreed = self.masks_disagreed, None
        if disagreed is not None and bool(disagreed):
            raise ValueError(
                "the attention_mask of an earlier decode step hid cached tokens, which had no effect: in decode steps "
                "it may hide only the left padding of the prompt"
            )

    def advance(self, num_new: int) -> None:
        """Count ``num_new`` more tokens in every row. Called once per forward pass, before any layer caches them."""
        self.in_step, self.expects_step = self.expects_step, False
        if self.is_traced:
            _advance_rows(self.seq_end, num_new)
            self._length = None
            return
        self.seq_end.add_(num_new)
        if self._length is not None:
            self._length += num_new

    def forget(self) -> None:
        """Let the next read of the length wait for the device, which has advanced the rows by itself."""
        self._length = None

    def cut(self, length: int) -> None:
        """Keep the first ``length`` positions of every row. Length 0 drops the padding too."""
        self.seq_end.fill_(length)
        self._length = length
        self.expects_step = self.in_step = False
        if length == 0:
            self.least_padding, self.has_padding = 0, False
            self.seq_start.zero_()
            self._starts = None

    def map(
        self,
        change: Callable[[torch.Tensor], torch.Tensor],
        replace: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> None:
        """Reorder, repeat or choose rows; ``replace`` is ``Storage.replace``."""
        with lasting_tensors():
            rows = len(self.seq_start)
            self.seq_start = replace(self.seq_start, change(self.seq_start))
            self.seq_end = replace(self.seq_end, change(self.seq_end))
        self._starts = None
        if self.has_padding and len(self.seq_start) != rows:  # the rows with the least or most padding may be gone
            self.least_padding, most = (int(bound) for bound in self.seq_start.aminmax())
            self.has_padding = most > 0

    def until(self, length: int) -> Lengths:
        """Return a record of the first ``length`` positions of every row, for a part of a pass; not for compiled steps.

        It shares the starts of the rows.
        """
        part = copy.copy(self)
        part.seq_end = torch.full_like(self.seq_end, length)
        part._length = length
        return part

    def copy(self) -> Lengths:
        """Return a record with its own tensors."""
        twin = copy.copy(self)
        with lasting_tensors():
            twin.seq_start, twin.seq_end = self.seq_start.clone(), self.seq_end.clone()
        twin._mark()
        twin.masks_disagreed = None
        return twin

    def _mark(self) -> None:
        if self._is_static:
            mark_static(self.seq_start)
            mark_static(self.seq_end)


class Shared:
    """State shared by a cache's layers: their lengths on each device, and the padding of rows not yet allocated.

    ``prompt_is_open`` says whether tokens other than those of announced decode steps were written since a method last
    finished the prompt. ``verifies_draft`` announces a compiled pass over several tokens that verifies a draft: it
    follows a finished prompt, and reads by row bounds on the device. ``is_captured`` says that a pass is recorded as a
    CUDA graph; see ``SparseCache.captured``. ``recorder`` receives the selections of decode
    steps while ``record_selections`` is active. ``prefill_chunk`` is the maximum number of tokens that a method's
    ``prefill`` attends from at once; None for no limit.
    """

    def __init__(self) -> None:
        self.lengths: dict[torch.device, Lengths] = {}
        self.padding: Padding | None = None
        self.prompt_is_open = False
        self.verifies_draft = False
        self.is_captured = False
        self.recorder: SelectionRecord | None = None
        self.prefill_chunk: int | None = None

    def check_masks(self) -> None:
        """Raise ``ValueError`` if the mask of an earlier decode step hid cached tokens. Waits for the device."""
        for lengths in self.lengths.values():
            lengths.check_masks()
