"""Forward passes that skip tokens which nothing attends to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hf_sparse_attn.patch.chunked import SLICED, check_sliceable


class Gap:
    """Removes tokens that nothing attends to from a forward pass, and restores them as zeros in its output.

    Parameters
    ----------
    tokens
        Number of tokens of the forward pass.
    kept
        Indices of the tokens that go through the decoder, ascending.
    """

    def __init__(self, tokens: int, kept: Sequence[int]) -> None:
        self.tokens, self.kept = tokens, list(kept)

    @property
    def left_out(self) -> list[int]:
        """Indices of the tokens that skip the decoder."""
        kept = set(self.kept)
        return [place for place in range(self.tokens) if place not in kept]

    def close(self, arguments: dict[str, Any], first_position: int) -> dict[str, Any]:
        """Return the decoder's arguments for the kept tokens, which keep their positions."""
        check_sliceable(arguments, self.tokens, "padding inside a prompt")
        closed = dict(arguments)
        for name, dim in SLICED.items():
            value = closed.get(name)
            if value is not None:
                closed[name] = value.index_select(dim, torch.tensor(self.kept, device=value.device))
        if closed.get("position_ids") is None:
            tokens = closed["input_ids"] if closed.get("input_ids") is not None else closed["inputs_embeds"]
            closed["position_ids"] = torch.tensor([self.kept], device=tokens.device) + first_position
        return closed

    def open(self, output: Any) -> Any:
        """Widen the hidden states of a decoder's output, a model output or a tuple, to [batch, tokens, hidden]."""
        if isinstance(output, tuple):
            return tuple(self._widen(value) for value in output)
        for name, value in output.items():
            output[name] = self._widen(value)
        return output

    def _widen(self, value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(self._widen(part) for part in value)
        if not isinstance(value, torch.Tensor) or value.dim() != 3:
            return value
        wide = value.new_zeros(value.shape[0], self.tokens, value.shape[2])
        wide[:, self.kept] = value
        return wide
