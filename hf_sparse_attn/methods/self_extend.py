"""SelfExtend: dense attention in which distant tokens share positions, for prompts beyond the trained length."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from hf_sparse_attn.methods.base import Selection, SparseMethod
from hf_sparse_attn.methods.merge import ChunkPart, Part, attend_from_chunk, attend_to_parts
from hf_sparse_attn.rope import check_rope, decoder_rotary, max_positions, rotated

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    from hf_sparse_attn.cache.layer import SparseLayer


@dataclass(frozen=True)
class SelfExtend(SparseMethod):
    """Dense attention in which tokens beyond a window share positions in groups (SelfExtend, arXiv 2401.01325).

    Keys are cached before RoPE. A query at position i attends to the last ``window`` tokens at their own distances, and
    to a token j before them as if it were ``i // group_size - j // group_size + window - window // group_size`` tokens
    away (algorithm 1; ``self_extend_patch/Llama.py`` of datamllab/LongLM cdbbb06). Both are in one softmax. Distances
    so stay within the n trained positions in texts of up to ``(n - window + window // group_size) * group_size``
    tokens, which is the paper's ``(n - window) * group_size + window`` if ``group_size`` divides ``window``.
    Everything is read.

    Parameters
    ----------
    token_budget
        Has no effect; it exists because every method has one.
    group_size
        Tokens that share a position, beyond the window; 8 in the authors' code.
    window
        Last tokens with their own positions, including the current one, at least 1; 1024 in the authors' code.
    chunk_size
        Tokens that a prompt's forward pass takes at once. It changes memory, not results.

    Notes
    -----
    All layers do so: ``dense_layers`` must be 0, since a dense layer would leave the trained positions. A decode step
    may go beyond the trained distances, as one of dense attention may, to about twice as far; then it is refused.
    """

    name: ClassVar[str] = "self_extend"
    summary: ClassVar[str] = "dense attention with grouped positions beyond a window, beyond the trained length"
    paper: ClassVar[str] = "arXiv 2401.01325"
    sparse_phases: ClassVar[tuple[str, ...]] = ()
    rotates_keys: ClassVar[bool] = True
    needs_mask: ClassVar[bool] = False
    extends_positions: ClassVar[bool] = True

    group_size: int = 8
    window: int = 1024
    chunk_size: int = 512

    def __post_init__(self) -> None:
        """Check the hyperparameters.

        Raises
        ------
        TypeError
            A value must be a whole number and is not.
        ValueError
            A value is out of range.
        """
        super().__post_init__()
        for parameter in ("group_size", "window", "chunk_size"):
            self._require(parameter, getattr(self, parameter) >= 1, "at least 1")

    @property
    def _shift(self) -> int:
        """Added to a query's grouped position (algorithm 1), so that distances go on where the window's end."""
        return self.window - self.window // self.group_size

    def check_model(self, model: PreTrainedModel) -> None:
        """Check that the model's positions can be assigned.

        Raises
        ------
        ValueError
            The window exceeds the trained positions, or the RoPE variant is not supported.
        """
        positions = max_positions(model.config)
        self._require("window", self.window <= positions, f"at most the model's {positions} positions")
        check_rope(model.config, decoder_rotary(model), self.name)

    def covers(self, length: int) -> bool:
        """Whether ``length`` tokens lie within the window."""
        return length <= self.window

    def prompt_limit(self, config: PreTrainedConfig) -> int:
        """Tokens whose distances stay within the trained positions."""
        return max(self.window, (max_positions(config) - self._shift) * self.group_size)

    def prefill_chunk(self, positions: int) -> int | None:
        """Tokens per chunk of a prefill."""
        return self.chunk_size

    def rope_slots(self, positions: int) -> int:
        """Slots of a chunk and its window, and of grouped positions up to twice the trained ones."""
        return max(2 * positions, self.window + self.chunk_size + 1)

    def _check_length(self, tokens: int, slots: int) -> None:
        """Raise if there are no rotations for rows of so many tokens."""
        most = (slots - self._shift) * self.group_size
        if tokens > most:
            raise ValueError(
                f"{self.name}: {tokens} tokens exceed the {most} that group_size={self.group_size} and "
                f"window={self.window} allow this model, beyond its trained distances; give a larger group_size"
            )

    def decode(
        self, query: torch.Tensor, layer: SparseLayer, new_key: torch.Tensor, new_value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Append the token, and attend to the window and to what lies before it; see :meth:`SparseMethod.decode`."""
        layer.append(new_key.unsqueeze(2), new_value.unsqueeze(2))
        layer.note(None)
        (cos, sin), longest, lengths = layer.rope, layer.longest_row, layer.row_lengths().long()
        self._check_length(longest, len(cos))
        before = (lengths - self.window).clamp_min(0)
        near = _consecutive(before, lengths - before, self.window)
        far = _consecutive(torch.zeros_like(before), before, max(1, longest - self.window))
        group = torch.arange(far.block_indices.shape[2], device=query.device) // self.group_size
        # The op turns the query to the position of the last distant token; this turns it by the rest. cos[0] is the
        # factor that some RoPE variants have on both sides.
        left = (lengths - 1) // self.group_size + self._shift - (before - 1).clamp_min(0) // self.group_size
        own = rotated(query, *((table[left] / cos[0]).unsqueeze(1) for table in (cos, sin)))
        parts = [
            Part(query, near, layer.rotations),
            Part(own.to(query.dtype), far, {"rope_cos": cos[group], "rope_sin": sin[group]}),
        ]
        return attend_to_parts(parts, layer, scale)

    def prefill(self, query: torch.Tensor, layer: SparseLayer, scale: float, mask: torch.Tensor | None) -> torch.Tensor:
        """Attend from a chunk to the windows of its queries and to what lies before them.

        See :meth:`SparseMethod.prefill` for the arguments.
        """
        if self.covers(layer.length - layer.least_padding):
            return super().prefill(query, layer, scale, mask)
        (cos, sin), queries, end = layer.rope, query.shape[2], layer.length
        self._check_length(end - layer.least_padding, len(cos))
        width, apart = min(self.window + queries - 1, end), max(0, end - self.window)
        slots = torch.arange(end, device=query.device)
        places = (slots - layer.seq_start[:, None]).clamp_min(0)  # [batch, end]
        group, is_token = places // self.group_size, slots >= layer.seq_start[:, None]
        own, first = group[:, -queries:] + self._shift, end - width

        def turn(states: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            return rotated(states, *(table[positions].unsqueeze(1) for table in (cos, sin)))

        keys, values = (
            buffer[:, :, :end].masked_fill(~is_token[:, None, :, None], 0) for buffer in (layer.keys, layer.values)
        )
        distance = slots[-queries:, None] - slots
        is_near = (distance >= 0) & (distance < self.window) & is_token.unsqueeze(1)
        is_far = (distance >= self.window) & is_token.unsqueeze(1)
        near = ChunkPart(
            turn(query, (slots - first)[None, -queries:]),
            turn(keys[:, :, first:], (slots - first)[None, first:]),
            values[:, :, first:],
            is_near[..., first:],
        )
        far = ChunkPart(
            turn(query, own), turn(keys[:, :, :apart], group[:, :apart]), values[:, :, :apart], is_far[..., :apart]
        )
        return attend_from_chunk([near, far], layer, scale)


def _consecutive(start: torch.Tensor, number: torch.Tensor, most: int) -> Selection:
    """Return ``number`` tokens from ``start`` on, int64 [batch] each, at most ``most`` in a row, for all KV heads."""
    at = torch.arange(most, device=start.device)
    tokens = (start[:, None] + at).masked_fill(at >= number[:, None], -1)
    return Selection(tokens.int().unsqueeze(1), number.int().unsqueeze(1), block_size=1)
