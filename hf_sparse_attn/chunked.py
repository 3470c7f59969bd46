"""Prefill in chunks: a patched decoder feeds itself a long prompt part by part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers.modeling_outputs import BaseModelOutputWithPast

SLICED = {"input_ids": 1, "inputs_embeds": 1, "position_ids": -1}
"""Arguments of a decoder that go with its tokens, and the dimension that counts them."""


class ChunkedForward:
    """Stands in for a decoder's ``forward``: more tokens than ``chunk_size`` go through all layers part by part.

    What a prompt takes beside the cache is then its last hidden states; activations are those of one chunk.

    Parameters
    ----------
    forward
        The decoder's own.
    chunk_size
        The most tokens that it is given at once.
    """

    def __init__(self, forward: Callable[..., Any], chunk_size: int) -> None:
        self.stock_forward = forward
        self.chunk_size = chunk_size

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what one forward pass would, the outputs of the chunks joined."""
        tokens = kwargs.get("input_ids")
        if tokens is None:
            tokens = kwargs.get("inputs_embeds")
        if tokens is None or tokens.shape[1] <= self.chunk_size or kwargs.get("past_key_values") is None:
            return self.stock_forward(*args, **kwargs)
        as_tuple = kwargs.get("return_dict") is False
        length = tokens.shape[1]
        joined: dict[str, Any] = {}
        for begin in range(0, length, self.chunk_size):
            end = min(begin + self.chunk_size, length)
            part = {
                name: value.narrow(SLICED[name], begin, end - begin)
                for name, value in kwargs.items()
                if name in SLICED and value is not None
            }
            output = self.stock_forward(*args, **{**kwargs, **part, "return_dict": True})
            _join(joined, output, begin, length)
        result = BaseModelOutputWithPast(**joined)
        return result.to_tuple() if as_tuple else result


def _join(joined: dict[str, Any], output: Any, begin: int, length: int) -> None:
    """Write a chunk's hidden states, [batch, tokens, hidden], to those of the whole prompt, made with the first."""
    for name, value in output.items():
        if name in ("last_hidden_state", "hidden_states"):
            parts = value if isinstance(value, tuple) else (value,)
            if begin == 0:
                whole = tuple(part.new_empty(part.shape[0], length, part.shape[2]) for part in parts)
                joined[name] = whole if isinstance(value, tuple) else whole[0]
            whole = joined[name] if isinstance(value, tuple) else (joined[name],)
            for all_tokens, part in zip(whole, parts, strict=True):
                all_tokens[:, begin : begin + part.shape[1]] = part
        else:
            joined[name] = value  # the cache, the same every time
