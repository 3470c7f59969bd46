"""The contract between a sparse-attention method and the rest of the package."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch
from hf_sparse_attn_kernels import sparse_decode

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from hf_sparse_attn.layer import SparseLayer


class Selection(NamedTuple):
    """The blocks of cached tokens that one decode step reads.

    Blocks are counted from each row's first token (``layer.seq_start``), so left padding never shifts them, and every
    query head of a GQA group reads the same ones.
    """

    block_indices: torch.Tensor
    """int32 [batch, kv_heads, n], or [batch, 1, n] where all KV heads share it: valid entries first, ``-1`` after them,
    no duplicates."""
    block_counts: torch.Tensor
    """int32 [batch, kv_heads] or [batch, 1]: how many entries are valid."""
    block_size: int
    """Tokens in a block; 1 for methods that select single tokens."""


@dataclass(frozen=True)
class SparseMethod(ABC):
    """A sparse-attention method: its hyperparameters as fields, its rules as methods, no state.

    All state (keys, values, metadata, lengths) lives in the :class:`~hf_sparse_attn.cache.SparseLayer` that each call
    receives. A subclass adds fields for its paper's parameters, sets the class variables below, and implements
    :meth:`select`; it overrides the others where it differs. Decode steps over a static cache are compiled: what runs
    in them reads no length on the host, but ``layer.capacity``, ``layer.max_blocks`` and the device tensors.

    Parameters
    ----------
    token_budget
        Cached tokens whose K and V a KV head reads in a decode step, sink and recent tokens included.
    dense_layers
        The first ``dense_layers`` layers attend to the whole cache.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    paper: ClassVar[str]
    sparse_phases: ClassVar[tuple[str, ...]] = ("decode",)
    extends_positions: ClassVar[bool] = False
    """Whether prompts may be longer than the positions that the model was trained on."""
    rotates_keys: ClassVar[bool] = False
    """Whether keys are cached before RoPE; the method then rotates what it reads, by ``layer.rope``."""

    token_budget: int = 1024
    dense_layers: int = 0

    def __post_init__(self) -> None:
        """Check the hyperparameters; subclasses extend this.

        Raises
        ------
        TypeError
            A whole number was expected and something else was given.
        ValueError
            A value is out of range.
        """
        self._check_whole_numbers()
        self._require("token_budget", self.token_budget >= 1, "at least 1")
        self._require("dense_layers", self.dense_layers >= 0, "0 or more")

    def _check_whole_numbers(self, but: tuple[str, ...] = ()) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            is_whole = isinstance(value, int) and not isinstance(value, bool)
            if field.type in ("int", int) and field.name not in but and not is_whole:
                raise TypeError(f"{field.name} must be a whole number, got {value!r}")

    def _require(self, parameter: str, holds: bool, allowed: str) -> None:
        if not holds:
            raise ValueError(f"{self.name}: {parameter} must be {allowed}, got {getattr(self, parameter)!r}")

    def covers(self, length: int) -> bool:
        """Whether a sequence of ``length`` tokens is within the budget, so that dense attention costs no more.

        A method that covers ``sys.maxsize`` tokens attends densely in static caches too.
        """
        return length <= self.token_budget

    @property
    def prefills(self) -> bool:
        """Whether the method attends in the prefill too, by :meth:`prefill`."""
        return "prefill" in self.sparse_phases

    def check_model(self, model: PreTrainedModel) -> None:  # noqa: B027 -- most methods take every supported model
        """Raise ``ValueError`` where the method cannot serve a model that is supported otherwise."""

    def prefill_chunk(self, positions: int) -> int:
        """The most tokens that :meth:`prefill` takes at once, of a model with so many positions."""
        return positions

    def rope_slots(self, positions: int) -> int:
        """Where ``rotates_keys``: how many slots ``layer.rope`` needs, of a model with so many positions."""
        return positions

    def init_metadata(self, layer: SparseLayer) -> dict[str, torch.Tensor]:
        """Allocate what the method keeps beside K and V, for ``layer.capacity`` tokens.

        Every tensor starts with the batch dimension and lies on the device of ``layer.keys``, whose shape, dtype and
        device are, with ``layer.q_heads``, all there is to read yet. When a layer grows, this is called again and the
        old contents are copied into the leading part of the new tensors.
        """
        return {}

    def update_metadata(self, layer: SparseLayer, num_new: int) -> None:  # noqa: B027 -- nothing to do is a fine default
        """Bring ``layer.metadata`` up to date, in place, after ``num_new`` tokens were appended to every row."""

    def crop_metadata(self, layer: SparseLayer) -> None:  # noqa: B027
        """Bring ``layer.metadata`` up to date, in place, after tokens were removed from the end of every row."""

    @abstractmethod
    def select(self, query: torch.Tensor, layer: SparseLayer, scale: float) -> Selection:
        """Choose what a decode step reads.

        Parameters
        ----------
        query
            [batch, q_heads, head_dim], after RoPE.
        layer
            Holds K, V (the current token's included) and the metadata.
        scale
            What the model multiplies q.k with, usually ``head_dim ** -0.5``.
        """

    def metadata_bytes_read(self, layer: SparseLayer) -> torch.Tensor | int:
        """Bytes of metadata that :meth:`select` reads in the current step, all rows and KV heads together.

        A device tensor where it depends on the rows' lengths: the decode path never waits for the device.
        """
        return 0

    def append_and_select(
        self,
        query: torch.Tensor,
        layer: SparseLayer,
        new_key: torch.Tensor,
        new_value: torch.Tensor,
        scale: float,
    ) -> Selection:
        """Cache a decode step's token, choose what the step reads, and count the metadata that choosing read.

        By default :meth:`update_metadata`, :meth:`select` and :meth:`metadata_bytes_read`, one after the other. A
        method with an op for all of it overrides this; the op then chooses what :meth:`select` would.

        Parameters
        ----------
        query
            [batch, q_heads, head_dim], after RoPE.
        layer
            Counts the token in its lengths already.
        new_key, new_value
            [batch, kv_heads, head_dim]: the token, to be written at position ``layer.seq_end - 1`` of each row.
        scale
            What the model multiplies q.k with.
        """
        layer.append(new_key.unsqueeze(2), new_value.unsqueeze(2))
        selection = self.select(query, layer, scale)
        layer.counter.count_metadata(self.metadata_bytes_read(layer))
        return selection

    def attend(self, query: torch.Tensor, layer: SparseLayer, selection: Selection, scale: float) -> torch.Tensor:
        """Attend to the selected blocks only, and count the step in ``layer.counter``.

        [batch, q_heads, head_dim] to the same shape, exact over what is read; where ``rotates_keys``, tokens and query
        rotated to their places among what is read.
        """
        output, _ = sparse_decode(
            query,
            layer.keys,
            layer.values,
            selection.block_indices,
            selection.block_counts,
            layer.seq_start,
            layer.seq_end,
            block_size=selection.block_size,
            scale=scale,
            counter=layer.counter.totals,
            finished=layer.finished,
            **layer.rotations,
        )
        return output

    def prefill(self, query: torch.Tensor, layer: SparseLayer, scale: float) -> torch.Tensor:
        """Attend from the tokens that were appended last; called where ``sparse_phases`` has ``"prefill"``.

        Parameters
        ----------
        query
            [batch, q_heads, tokens, head_dim] of the last tokens of every row, at most :meth:`prefill_chunk`; before
            RoPE where ``rotates_keys``.
        layer
            Holds the tokens' K and V already.
        scale
            What the model multiplies q.k with.

        Returns
        -------
        torch.Tensor
            Of query's shape; what stands for left padding is of no consequence.
        """
        raise NotImplementedError(f"{type(self).__name__} says that it prefills, but has no prefill()")
