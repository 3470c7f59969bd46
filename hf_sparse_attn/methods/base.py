"""The contract between a sparse-attention method and the rest of the package."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch
from hf_sparse_attn_kernels import sparse_decode

from hf_sparse_attn.dense import dense_attention

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from hf_sparse_attn.cache.layer import SparseLayer


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
class SparseMethod:
    """A sparse-attention method: its hyperparameters as fields, its rules as methods, no state.

    All state (keys, values, metadata, lengths) lives in the :class:`~hf_sparse_attn.cache.layer.SparseLayer` that each
    call receives. A subclass adds fields for its paper's parameters, sets the class variables below, and implements
    :meth:`select`, or overrides one of the two verbs, :meth:`decode` and :meth:`prefill`. Decode steps over static
    storage are compiled: what runs in them reads no length on the host, but ``layer.capacity``, ``layer.max_blocks``
    and the device tensors.

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
    """Phases that the method makes sparse, for tables; nothing depends on it."""

    # Needs of the frame, each with one effect.
    rotates_keys: ClassVar[bool] = False
    """Keys are cached before RoPE; the method rotates what it reads, by ``layer.rope``."""
    needs_mask: ClassVar[bool] = True
    """:meth:`prefill` gets a mask; else it reads the rows' bounds, and no mask is made."""
    extends_positions: ClassVar[bool] = False
    """Prompts may be longer than the positions that the model was trained on."""
    counts: ClassVar[tuple[str, ...]] = ()
    """Names of what the method counts beside tokens and bytes, in ``layer.counter.own``; stats show them."""

    token_budget: int = 1024
    dense_layers: int = 0

    def __init_subclass__(cls) -> None:
        """Check that the class says what a decode step reads.

        Raises
        ------
        TypeError
            It implements neither ``select`` nor ``decode``.
        """
        super().__init_subclass__()
        if cls.select is SparseMethod.select and cls.decode is SparseMethod.decode:
            raise TypeError(f"{cls.__name__} must implement select() or decode()")

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
        may_be_dense = self.dense_layers == 0 or not self.rotates_keys
        self._require(
            "dense_layers", may_be_dense, "0: a dense layer would rotate keys to positions beyond the trained"
        )

    def _check_whole_numbers(self, but: tuple[str, ...] = ()) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            is_whole = isinstance(value, int) and not isinstance(value, bool)
            if field.type in ("int", int) and field.name not in but and not is_whole:
                raise TypeError(f"{field.name} must be a whole number, got {value!r}")

    def _require(self, parameter: str, holds: bool, allowed: str) -> None:
        if not holds:
            raise ValueError(f"{self.name}: {parameter} must be {allowed}, got {getattr(self, parameter)!r}")

    def check_model(self, model: PreTrainedModel) -> None:
        """Raise ``ValueError`` where the method cannot serve a model that is supported otherwise."""

    def covers(self, length: int) -> bool:
        """Whether a sequence of ``length`` tokens is within the budget, so that dense attention costs no more."""
        return length <= self.token_budget

    def prefill_chunk(self, positions: int) -> int | None:
        """The most tokens that go through all layers at once, of a model with so many positions; None for no limit."""
        return None

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

    def update_metadata(self, layer: SparseLayer, num_new: int) -> None:
        """Bring ``layer.metadata`` up to date, in place, after ``num_new`` tokens were appended to every row.

        ``num_new`` may be the rows' whole length: then everything is made anew.
        """

    def crop_metadata(self, layer: SparseLayer) -> None:
        """Bring ``layer.metadata`` up to date, in place, after tokens were removed from the end of every row."""

    def finish_prompt(self, layer: SparseLayer) -> None:
        """Work on a prompt that is complete: cluster it, evict from it, calibrate.

        Called once before the first decode step behind a prompt, however many forward passes the prompt took; over
        static storage, whose decode steps may be compiled, behind each of these passes. Called again where metadata was
        made anew: in a fork, and where a prompt's pass failed. A pass over several tokens is a prompt, that of assisted
        decoding included.
        """

    def decode(
        self, query: torch.Tensor, layer: SparseLayer, new_key: torch.Tensor, new_value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Cache a decode step's token, attend from it, and count what was read in ``layer.counter``.

        By default ``layer.append``, :meth:`select`, :meth:`metadata_bytes_read` and :meth:`attend`. A method whose
        selection and attention interleave overrides this, and calls ``layer.note`` with what it read; so does one with
        an op that writes and selects at once.

        Parameters
        ----------
        query
            [batch, q_heads, head_dim], after RoPE; before it where ``rotates_keys``.
        layer
            Counts the token in its lengths already.
        new_key, new_value
            [batch, kv_heads, head_dim]: the token, to be written at position ``layer.seq_end - 1`` of each row.
        scale
            The model's factor on q.k, usually ``head_dim ** -0.5``.

        Returns
        -------
        torch.Tensor
            [batch, q_heads, head_dim].
        """
        layer.append(new_key.unsqueeze(2), new_value.unsqueeze(2))
        selection = self.select(query, layer, scale)
        layer.counter.count_metadata(self.metadata_bytes_read(layer))
        return self.attend(query, layer, selection, scale)

    def prefill(self, query: torch.Tensor, layer: SparseLayer, scale: float, mask: torch.Tensor | None) -> torch.Tensor:
        """Attend from tokens that the layer holds already: by default densely, under the mask.

        Parameters
        ----------
        query
            [batch, q_heads, tokens, head_dim] of the last tokens of every row, at most :meth:`prefill_chunk`; before
            RoPE where ``rotates_keys``.
        layer
            Holds the tokens' K and V.
        scale
            The model's factor on q.k.
        mask
            Broadcasts to [batch, q_heads, tokens, length], as SDPA takes it; None for causal attention without padding,
            and where the method does not need it.

        Returns
        -------
        torch.Tensor
            Of query's shape; the values at left padding are of no consequence.
        """
        return dense_attention(query, layer, scale, mask)

    def select(self, query: torch.Tensor, layer: SparseLayer, scale: float) -> Selection:
        """Choose the blocks that a decode step reads.

        Parameters
        ----------
        query
            [batch, q_heads, head_dim], as for :meth:`decode`.
        layer
            Holds K, V (the current token's included) and the metadata.
        scale
            The model's factor on q.k.
        """
        raise NotImplementedError(f"{type(self).__name__} decodes without a selection")

    def metadata_bytes_read(self, layer: SparseLayer) -> torch.Tensor | int:
        """Bytes of metadata that :meth:`select` reads in the current step, all rows and KV heads together.

        A device tensor where it depends on the rows' lengths: the decode path never waits for the device.
        """
        return 0

    def attend(self, query: torch.Tensor, layer: SparseLayer, selection: Selection, scale: float) -> torch.Tensor:
        """Attend to the selected blocks only, count the step in ``layer.counter``, and note the selection.

        [batch, q_heads, head_dim] to the same shape, exact over what is read; where ``rotates_keys``, selected tokens
        get contiguous positions.
        """
        layer.note(selection)
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
