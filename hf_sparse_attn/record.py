"""Record the blocks that decode steps read, for heatmaps and debugging."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from hf_sparse_attn.checks import whole_number
from hf_sparse_attn.methods.base import Selection
from hf_sparse_attn.patched import get_patch, is_patched

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from hf_sparse_attn.cache.layer import SparseLayer


@dataclass(frozen=True)
class _LayerStep:
    """One decode step of one layer, on the host."""

    selection: Selection | None
    row_lengths: torch.Tensor
    kv_heads: int


class SelectionRecord:
    """The selections of decode steps, by layer.

    Filled by :func:`record_selections`. Only decode steps are recorded, not prefills. Tokens are numbered from each
    row's first token, or from the first token of the cache's prefix; left padding is not counted. Layers with a sliding
    window are not recorded. Under tensor parallelism a process records its own KV heads.
    """

    def __init__(self) -> None:
        self._steps: dict[int, list[_LayerStep]] = {}

    @property
    def layers(self) -> list[int]:
        """Indices of the recorded layers, ascending."""
        return sorted(self._steps)

    @property
    def num_steps(self) -> int:
        """Number of decode steps that every recorded layer has finished."""
        return min((len(steps) for steps in self._steps.values()), default=0)

    def selections(self, layer: int) -> list[Selection | None]:
        """Return one layer's selections on the CPU, one per step; None for a step that read everything.

        Raises
        ------
        ValueError
            No decode step of this layer was recorded.
        """
        return [step.selection for step in self._layer(layer)]

    def reads(self, layer: int, step: int, row: int = 0) -> torch.Tensor:
        """Return which cached tokens each KV head of a layer read in one decode step.

        Parameters
        ----------
        layer
            Index of the layer in the model.
        step
            Decode step, from 0; negative values count from the last one.
        row
            Row of the batch.

        Returns
        -------
        torch.Tensor
            bool [kv_heads, tokens]; ``tokens`` is the row's length at that step, including the current token.

        Raises
        ------
        ValueError
            ``layer``, ``step`` or ``row`` is out of range.
        """
        recorded, step, row = self._layer(layer), whole_number("step", step), whole_number("row", row)
        if not -len(recorded) <= step < len(recorded):
            raise ValueError(f"step must be between {-len(recorded)} and {len(recorded) - 1}, got {step}")
        recorded_step = recorded[step]
        if not 0 <= row < len(recorded_step.row_lengths):
            raise ValueError(f"row must be between 0 and {len(recorded_step.row_lengths) - 1}, got {row}")
        return _tokens_read(recorded_step, row)

    def block_reads(self, block_size: int = 16, row: int = 0) -> torch.Tensor:
        """Return the share of tokens read in each block, for a heatmap.

        Parameters
        ----------
        block_size
            Tokens per block of the heatmap, at least 1. It need not be the method's block size.
        row
            Row of the batch.

        Returns
        -------
        torch.Tensor
            float32 [steps, layers, kv_heads, blocks], with layers in the order of :attr:`layers`. NaN for blocks that
            were still empty.

        Raises
        ------
        ValueError
            ``block_size`` is below 1, ``row`` is out of range, or nothing was recorded.
        """
        block_size = whole_number("block_size", block_size, 1)
        if not self.num_steps:
            raise ValueError("no decode step was recorded; generate at least two tokens while recording")
        steps = [
            [_block_shares(self.reads(layer, step, row), block_size) for layer in self.layers]
            for step in range(self.num_steps)
        ]
        blocks = max(shares.shape[1] for layers in steps for shares in layers)
        kv_heads = max(shares.shape[0] for layers in steps for shares in layers)
        result = torch.full((len(steps), len(self.layers), kv_heads, blocks), torch.nan, dtype=torch.float32)
        for step, layers in enumerate(steps):
            for position, shares in enumerate(layers):
                result[step, position, : shares.shape[0], : shares.shape[1]] = shares
        return result

    def add(self, layer: SparseLayer, selection: Selection | None) -> None:
        """Record one layer's current decode step, waiting for the device.

        Raises
        ------
        RuntimeError
            The step is being compiled.
        """
        if torch.compiler.is_compiling():
            raise RuntimeError("record_selections cannot record a compiled decode step; pass disable_compile=True")
        if selection is not None:
            selection = selection._replace(
                block_indices=selection.block_indices.cpu(), block_counts=selection.block_counts.cpu()
            )
        before = 0 if layer.prefix is None else layer.prefix.tokens
        row_lengths = (layer.seq_end - layer.seq_start).cpu() + before
        self._steps.setdefault(layer.layer_idx, []).append(_LayerStep(selection, row_lengths, layer.storage.kv_heads))

    def cut(self, num_steps: int) -> None:
        """Keep only the first ``num_steps`` decode steps, to drop those of a failed forward pass."""
        self._steps = {layer: steps[:num_steps] for layer, steps in self._steps.items() if num_steps}

    def _layer(self, layer: int) -> list[_LayerStep]:
        if layer not in self._steps:
            raise ValueError(f"layer must be one of the recorded layers {self.layers}, got {layer}")
        return self._steps[layer][: self.num_steps]


@contextmanager
def record_selections(model: PreTrainedModel) -> Iterator[SelectionRecord]:
    """Record which blocks the decode steps of a patched model read, inside a ``with`` block.

    Inside the block ``generate()`` does not compile its decode steps and every layer waits for the device, so timings
    are meaningless. Recording continues if the model is patched with another method inside the block, and ends if it is
    unpatched.

    Parameters
    ----------
    model
        A patched model.

    Yields
    ------
    SelectionRecord

    Raises
    ------
    ValueError
        The model is not patched, or is already being recorded.
    RuntimeError
        The model was unpatched inside the block and patched again, so that later steps were not recorded.

    Examples
    --------
    >>> with record_selections(model) as record:
    ...     model.generate(**inputs, max_new_tokens=32)
    >>> record.block_reads(block_size=16).nanmean(dim=(0, 2))  # [layers, blocks]
    """
    if get_patch(model).recorder is not None:
        raise ValueError(f"this {type(model).__name__} is already being recorded")
    record = SelectionRecord()
    get_patch(model).recorder = record
    try:
        yield record
        if is_patched(model) and get_patch(model).recorder is not record:
            raise RuntimeError(
                f"this {type(model).__name__} was unpatched while it was recorded, which ended the recording, and "
                "patched again: call patch_model without unpatch_model before it"
            )
    finally:
        if is_patched(model) and get_patch(model).recorder is record:
            get_patch(model).recorder = None


def _tokens_read(step: _LayerStep, row: int) -> torch.Tensor:
    """Return bool [kv_heads, tokens] for one row."""
    length = int(step.row_lengths[row])
    if step.selection is None:
        return torch.ones(step.kv_heads, length, dtype=torch.bool)
    size = step.selection.block_size
    indices = step.selection.block_indices[row].long()  # [kv_heads or 1, n]
    is_valid = torch.arange(indices.shape[1]) < step.selection.block_counts[row].unsqueeze(1)
    blocks = torch.zeros(len(indices), -(-length // size) + 1, dtype=torch.bool)
    blocks.scatter_(1, indices.where(is_valid, torch.tensor(blocks.shape[1] - 1)), True)  # extra block for padding
    return blocks[:, :-1].repeat_interleave(size, dim=1)[:, :length].expand(step.kv_heads, -1)


def _block_shares(reads: torch.Tensor, block_size: int) -> torch.Tensor:
    """Reduce bool [kv_heads, tokens] to the share of True in each block, float32 [kv_heads, blocks]."""
    tokens = reads.shape[1]
    padded = torch.nn.functional.pad(reads.float(), (0, -tokens % block_size))
    sizes = torch.full((padded.shape[1] // block_size,), float(block_size), dtype=torch.float32)
    sizes[-1] -= -tokens % block_size
    shares: torch.Tensor = padded.reshape(len(padded), -1, block_size).sum(-1) / sizes
    return shares
