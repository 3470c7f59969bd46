"""What a pass adds to the results of its products and sums, or multiplies them with: the same in each pass."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

OPERATIONS = {torch.Tensor.add: "add", torch.Tensor.mul: "mul"}
"""What ``+`` and ``*`` call, by their names in the kernels."""
LARGEST = 256 * 1024
"""Bytes of a result that is kept for a later call: a few rows. The first pass keeps all that are no larger."""


class Other(NamedTuple):
    """What a result will be combined with."""

    by: str
    """Name of the operation."""
    tensor: torch.Tensor


class _Made(NamedTuple):
    """A result that was combined ahead of the call for it."""

    by: str
    tensors: tuple[torch.Tensor, torch.Tensor]
    versions: tuple[int, int]
    combined: torch.Tensor


class Combinations:
    """What passes combine with the results of their products and sums, as the first pass did.

    A residual connection adds what has been there for long to a result that is just made, and a gated activation
    multiplies the two. The kernel that makes the result can do so too, and saves a launch that would read and write a
    single row. Calls have numbers in a pass. In the first one is learned which results are combined with a tensor from
    an earlier call. Later passes make these results and the combinations at once; a call then takes what is made if its
    tensors are those, and unchanged since, as far as PyTorch knows.
    """

    def __init__(self) -> None:
        self._learned: dict[int, tuple[str, int]] = {}
        """By the number of the call that makes a result: the operation, and the call that made the other tensor."""
        self._others: set[int] = set()
        """The calls that make these other tensors."""
        self._is_first = True
        self._begin()

    def _begin(self) -> None:
        self._call = 0
        self._numbers: dict[tuple[Any, ...], int] = {}
        self._tensors: dict[int, torch.Tensor] = {}
        """Results by the numbers of their calls; in the first pass all, so that none takes the memory of another."""
        self._products: set[int] = set()
        self._made: list[_Made] = []

    def end(self) -> None:
        """End a pass. After one that called nothing, the next one is the first."""
        self._is_first = self._is_first and not self._tensors
        self._begin()

    def begin_call(self) -> None:
        """Begin a call of the pass."""
        self._call += 1

    def other(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Other | None:
        """Return what the result of this call, a product or a sum of such a form, will be combined with."""
        if self._is_first or self._call not in self._learned or torch.is_inference_mode_enabled():
            return None
        by, number = self._learned[self._call]
        tensor = self._tensors.get(number)
        fits = (
            tensor is not None
            and tensor.shape == shape
            and tensor.dtype == dtype
            and tensor.device == device
            and tensor.is_contiguous()
        )
        return Other(by, tensor) if tensor is not None and fits else None

    def keep(self, result: Any, is_product: bool = False) -> None:
        """Note the result of this call, if a later call may be combined with it."""
        if not _is_plain(result) or result.is_inference() or result.untyped_storage().nbytes() > LARGEST:
            return
        if self._is_first:
            if is_product:
                self._products.add(self._call)
            elif _place(result) in self._numbers:  # another view of a result
                return
            self._tensors[self._call] = result
            self._numbers[_place(result)] = self._call
        elif self._call in self._others:
            self._tensors[self._call] = result

    def note_written(self, tensor: Any) -> None:
        """Note that this call writes a tensor in place, which neither NCCL nor a kernel tells PyTorch."""
        if _is_plain(tensor) and not tensor.is_inference():
            torch.autograd.graph.increment_version(tensor)
            self._numbers.pop(_place(tensor), None)

    def add_made(self, result: torch.Tensor, other: Other, combined: torch.Tensor) -> None:
        """Note a combination that was made with the result of this call."""
        tensors = (result, other.tensor)
        self._made.append(_Made(other.by, tensors, _versions(tensors), combined))

    def take(self, by: str, operands: tuple[Any, ...]) -> torch.Tensor | None:
        """Return the combination of two tensors if it is made; in the first pass, learn that it is asked for."""
        if len(operands) != 2 or not all(map(_is_plain, operands)):
            return None
        if self._is_first:
            self._learn(by, *operands)
            return None
        places = set(map(_place, operands))
        for made in self._made:
            is_of_both = made.by == by and set(map(_place, made.tensors)) == places
            if is_of_both and _versions(made.tensors) == made.versions:
                self._made.remove(made)
                return made.combined
        return None

    def _learn(self, by: str, first: torch.Tensor, second: torch.Tensor) -> None:
        known = [self._numbers.get(_place(tensor)) for tensor in (first, second)]
        if None in known or first.shape != second.shape or first.dtype != second.dtype:
            return
        earlier, later = sorted(number for number in known if number is not None)
        if later in self._products and earlier < later:
            _, other = self._learned.setdefault(later, (by, earlier))
            self._others.add(other)


def _is_plain(value: Any) -> bool:
    """Whether a value is a tensor that has memory of its own: none of another kind, layout, or of a transformation."""
    return (
        type(value) is torch.Tensor
        and value.layout is torch.strided
        and not value.is_nested
        and not torch._C._functorch.is_functorch_wrapped_tensor(value)
    )


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return where a tensor lies, and how: hooks may return another object for the same memory."""
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def _versions(tensors: tuple[torch.Tensor, torch.Tensor]) -> tuple[int, int]:
    """Return how often tensors have been changed."""
    return tensors[0]._version, tensors[1]._version
