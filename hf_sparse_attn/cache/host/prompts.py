"""Passes over several tokens: one layer at a time has its keys and values on the device."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch

from hf_sparse_attn.cache.offload.transfers import Transfers

if TYPE_CHECKING:
    from hf_sparse_attn.cache.host.storage import HostStorage

KeysAndValues = tuple[torch.Tensor, torch.Tensor]


class PromptStage:
    """The keys and values of the layer that a pass over several tokens is at, on a device whose layers share it.

    The first pass of a prompt attends to the tensors that the model has just computed; a later one loads the layer's
    earlier tokens. New tokens go to host memory by a stream of their own, while the layer's attention and the next
    layers run.

    Parameters
    ----------
    device
        The device.
    """

    def __init__(self, device: torch.device) -> None:
        self._transfers = Transfers(device)
        self._owner: weakref.ref[HostStorage] | None = None
        self._tokens: KeysAndValues | None = None
        self._in_pass = False

    def begin_pass(self) -> None:
        """Let the device's later work run beside stores until :meth:`end_pass`, for it reads staged tokens only."""
        self.drop()
        self._in_pass = True

    def end_pass(self) -> None:
        """Let the device's later work, which may read host memory, follow the stores; free the staged tokens."""
        self.drop()
        self._in_pass = False
        self._transfers.protect_stored()

    def drop(self, storage: HostStorage | None = None) -> None:
        """Forget the staged tokens: those of a storage if they are staged, or any."""
        if storage is None or self._is_of(storage):
            self._owner = self._tokens = None

    def _is_of(self, storage: HostStorage) -> bool:
        return self._owner is not None and self._owner() is storage

    def take(self, storage: HostStorage, keys: torch.Tensor, values: torch.Tensor, length: int) -> None:
        """Stage new tokens, [batch, kv_heads, tokens, head_dim], behind the earlier ones, and store them on the host.

        ``length`` counts the tokens of a row with them.
        """
        keys, values, begin = keys.detach(), values.detach(), length - keys.shape[2]
        self.drop()
        self._tokens = (keys, values) if begin == 0 else self._joined(storage, begin, (keys, values))
        self._owner = weakref.ref(storage)

        pairs = torch.stack((keys, values), dim=3)  # as the host keeps them, so that a copy is of contiguous pieces
        self._transfers.store(
            lambda: _copy(storage.on_host[:, :, begin:length], pairs), storage.traffic, _num_bytes(pairs)
        )
        self._transfers.lend(pairs)
        if not self._in_pass:
            self._transfers.protect_stored()

    def rows(self, storage: HostStorage, length: int) -> KeysAndValues:
        """Return the first ``length`` tokens of a storage, [batch, kv_heads, length, head_dim], on the device."""
        if self._tokens is None or not self._is_of(storage) or self._tokens[0].shape[2] != length:
            self.drop()
            self._tokens, self._owner = self._joined(storage, length, ()), weakref.ref(storage)
        return self._tokens

    def _joined(self, storage: HostStorage, held: int, new: tuple[torch.Tensor, ...]) -> KeysAndValues:
        """Return the first ``held`` tokens from host memory, followed by new ones."""
        batch, kv_heads, _, head_dim = storage.keys.shape
        length = held + (new[0].shape[2] if new else 0)
        shape = (batch, kv_heads, length, 2, head_dim)
        staged = self._transfers.lend(storage.on_host.new_empty(shape, device=storage.keys.device))
        earlier = staged[:, :, :held]
        event = self._transfers.load(
            lambda: _copy(earlier, storage.on_host[:, :, :held]), storage.traffic, _num_bytes(earlier)
        )
        self._transfers.wait(event, storage.traffic)
        keys, values = staged.unbind(3)
        for target, tokens in zip((keys, values), new, strict=False):  # none to append to loaded ones
            target[:, :, held:] = tokens
        return keys, values


class PromptStages:
    """The stages of a cache and its forks, device by device."""

    def __init__(self) -> None:
        self._on: dict[torch.device, PromptStage] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> PromptStages:
        """Return the object itself: a copied cache takes turns with the original, as a fork does."""
        return self

    def on(self, device: torch.device) -> PromptStage:
        """Return the stage of a device."""
        if device not in self._on:
            self._on[device] = PromptStage(device)
        return self._on[device]

    def begin_pass(self) -> None:
        """See :meth:`PromptStage.begin_pass`."""
        for stage in self._on.values():
            stage.begin_pass()

    def end_pass(self) -> None:
        """See :meth:`PromptStage.end_pass`."""
        for stage in self._on.values():
            stage.end_pass()


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy between the host and the device, in contiguous pieces of the host's memory, so that nothing waits."""
    for row in range(target.shape[0]):
        for head in range(target.shape[1]):
            target[row, head].copy_(source[row, head], non_blocking=True)


def _num_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
