"""Tensors of a device whose contents wait in host memory while their cache is not in use."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch

from hf_sparse_attn.cache.lasting import lasting_tensors, mark_like
from hf_sparse_attn.cache.offload.transfers import pinned_empty


class Exchange(Protocol):
    """Returns the tensor to put in the place of another one."""

    def __call__(self, tensor: torch.Tensor, tokens: int | None = None, /) -> torch.Tensor:
        """Return the tensor. If ``tokens`` are given, only so many of [batch, kv_heads, capacity, ...] matter."""
        ...


ExchangeAll = Callable[[Exchange], None]
"""Replaces all tensors that an object owns on its device by what an :class:`Exchange` returns for them."""


class ParkedTensor(NamedTuple):
    """A tensor in host memory."""

    placeholder: torch.Tensor
    """A tensor on the ``meta`` device with the shape and dtype. An op that reads it fails."""
    contents: torch.Tensor
    """The contents on the host, up to the last token."""
    device: torch.device
    """Where the tensor lay."""

    def restored(self) -> torch.Tensor:
        """Return a new tensor on the device with the contents; zeros after the last token, as in static buffers."""
        tensor = torch.empty_like(self.placeholder, device=self.device)
        if tensor.shape == self.contents.shape:
            tensor.copy_(self.contents, non_blocking=True)
        else:
            tokens = self.contents.shape[2]
            tensor[:, :, :tokens].copy_(self.contents, non_blocking=True)
            tensor[:, :, tokens:].zero_()
        return mark_like(tensor, self.placeholder)


class ParkedTensors:
    """The tensors of one object, moved to host memory, which is pinned for CUDA devices.

    Parameters
    ----------
    exchange_all
        Replaces the object's tensors. Nothing is replaced if host memory does not suffice.
    """

    def __init__(self, exchange_all: ExchangeAll) -> None:
        found: dict[int, tuple[torch.Tensor, int | None]] = {}

        def note(tensor: torch.Tensor, tokens: int | None = None, /) -> torch.Tensor:
            found[id(tensor)] = tensor, tokens
            return tensor

        exchange_all(note)
        with lasting_tensors():
            parked = {key: _parked(tensor, tokens) for key, (tensor, tokens) in found.items()}
        for device in {each.device for each in parked.values() if each.device.type == "cuda"}:
            torch.cuda.current_stream(device).synchronize()
        exchange_all(lambda tensor, tokens=None, /: parked[id(tensor)].placeholder)
        self._tensors = list(parked.values())

    def restore(self, exchange_all: ExchangeAll, before: Callable[[], None]) -> None:
        """Put new tensors in the places of the placeholders.

        ``before`` is called once they are allocated. Nothing is replaced if that or the allocation fails.
        """
        with lasting_tensors():
            restored = {id(parked.placeholder): parked.restored() for parked in self._tensors}
        before()
        exchange_all(lambda tensor, tokens=None, /: restored[id(tensor)])


def _parked(tensor: torch.Tensor, tokens: int | None) -> ParkedTensor:
    filled = tensor if tokens is None else tensor[:, :, :tokens]
    contents = _host_empty(filled)
    contents.copy_(filled, non_blocking=True)
    placeholder = mark_like(torch.empty_like(tensor, device="meta"), tensor)
    return ParkedTensor(placeholder, contents, tensor.device)


def _host_empty(like: torch.Tensor) -> torch.Tensor:
    """Allocate host memory, pinned for a tensor on CUDA if that is possible."""
    if like.is_cuda:
        try:
            return pinned_empty(tuple(like.shape), like.dtype)
        except RuntimeError as error:
            gib = like.numel() * like.element_size() / 2**30
            warnings.warn(
                f"park: {gib:.2f} GiB of host memory cannot be pinned ({str(error).splitlines()[0]}); using pageable "
                "memory, to and from which copies are slower; raise the limit on locked memory (ulimit -l) to avoid "
                "this",
                RuntimeWarning,
                stacklevel=2,
            )
    return torch.empty(like.shape, dtype=like.dtype)
