"""Prefill in chunks: a patched decoder processes a long prompt part by part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers.modeling_outputs import BaseModelOutputWithPast

from hf_sparse_attn.cache.padding import chunk_ends

SLICED = {"input_ids": 1, "inputs_embeds": 1, "position_ids": -1}
"""Arguments of a decoder with a token dimension, and that dimension."""


def check_sliceable(arguments: dict[str, Any], tokens: int, doing: str) -> None:
    """Raise ``ValueError`` if a decoder's arguments say something of each token that cannot be sliced with them.

    ``doing`` begins the message, such as ``"feeding a prompt in chunks"``.
    """
    for name, value in arguments.items():
        is_of_tokens = isinstance(value, torch.Tensor) and value.dim() > 1 and value.shape[1] == tokens
        if is_of_tokens and name not in (*SLICED, "attention_mask"):
            raise ValueError(
                f"{doing} does not support the decoder's argument {name!r}, got a tensor of shape {tuple(value.shape)}"
            )


def without_single_token(chunk_size: int, tokens: int, step: int = 1, shown: torch.Tensor | None = None) -> int:
    """Enlarge the chunks of a prompt until none of them holds a single token, or ends in a hidden one.

    A pass of one token over a cache that holds others is a decode step: it reads sparsely, and the method takes the
    prompt before it for finished. A pass that ends in hidden tokens closes the cache.

    Parameters
    ----------
    chunk_size
        Tokens of a chunk.
    tokens
        Tokens of the prompt that are not cached yet. A prompt of one token stays as it is.
    step
        Tokens by which to enlarge the chunks, repeatedly.
    shown
        bool [tokens], on the CPU: whether any row shows the token. None if one shows them all.

    Returns
    -------
    int
        ``chunk_size`` itself, if its chunks are so; an invalid one is left to whoever cuts the chunks.
    """
    while 0 < chunk_size < tokens and not _are_whole(chunk_size, tokens, shown):
        chunk_size += step
    return chunk_size


def _are_whole(chunk_size: int, tokens: int, shown: torch.Tensor | None) -> bool:
    """Whether all chunks hold two shown tokens or more, and end in one."""
    if chunk_size == 1 or tokens % chunk_size == 1:
        return False
    if shown is None:
        return True
    chunks = torch.split(shown, chunk_size)
    return all(bool(chunk[-1]) and int(chunk.sum()) > 1 for chunk in chunks)


class ChunkedPrompt:
    """A prompt fed in chunks, whose outputs are joined.

    Beyond the cache, memory holds the activations of one chunk and the final hidden states.

    Parameters
    ----------
    length
        Tokens of the prompt.
    as_tuple
        Whether to return a tuple instead of a model output.
    """

    def __init__(self, length: int, as_tuple: bool) -> None:
        self._length, self._as_tuple = length, as_tuple
        self._done = 0
        self._joined: dict[str, Any] = {}

    def feed_all_but_last(
        self, forward: Callable[..., Any], arguments: dict[str, Any], chunk_size: int, padding: int
    ) -> dict[str, Any]:
        """Feed all chunks but the last, and return the arguments of the last. ``padding`` goes with the first."""
        check_sliceable(arguments, self._length, "feeding a prompt in chunks, as this method does,")
        whole = {**arguments, "return_dict": True}
        begin = 0
        for end in chunk_ends(self._length, chunk_size, padding):
            part = {
                name: value.narrow(SLICED[name], begin, end - begin)
                for name, value in whole.items()
                if name in SLICED and value is not None
            }
            if end == self._length:
                return {**whole, **part}
            self._add(forward(**{**whole, **part}))
            begin = end
        raise AssertionError("a prompt has a last chunk")

    def join(self, last: Any) -> Any:
        """Return the output for the whole prompt, given the output for its last chunk."""
        self._add(last)
        result = BaseModelOutputWithPast(**self._joined)
        return result.to_tuple() if self._as_tuple else result

    def _add(self, output: Any) -> None:
        """Copy a chunk's hidden states, [batch, tokens, hidden], into those of the whole prompt."""
        tokens = output.last_hidden_state.shape[1]
        for name, value in output.items():
            if name not in ("last_hidden_state", "hidden_states"):
                self._joined[name] = value  # the cache, the same every time
                continue
            parts = value if isinstance(value, tuple) else (value,)
            if self._done == 0:
                whole = tuple(part.new_empty(part.shape[0], self._length, part.shape[2]) for part in parts)
                self._joined[name] = whole if isinstance(value, tuple) else whole[0]
            whole = self._joined[name] if isinstance(value, tuple) else (self._joined[name],)
            for all_tokens, part in zip(whole, parts, strict=True):
                all_tokens[:, self._done : self._done + tokens] = part
        self._done += tokens
