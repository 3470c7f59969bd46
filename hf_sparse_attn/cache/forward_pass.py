"""A forward pass of a patched model over a cache: its mask, and the way back if it fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from hf_sparse_attn.cache.lengths import Lengths
from hf_sparse_attn.cache.padding import LEFT_PADDING, Padding, disagrees, left_padding, rows_with_holes, token_mask

if TYPE_CHECKING:
    from hf_sparse_attn.cache.cache import SparseCache


class ForwardPass:
    """Remembers what a pass changes in a cache beside appending tokens, so that it can be taken back.

    Parameters
    ----------
    cache
        As it is before the pass.
    query_length
        Tokens that the pass is to cache.
    """

    def __init__(self, cache: SparseCache, query_length: int) -> None:
        self.cached, self.query_length = cache.length, query_length
        self.is_decode_step = query_length == 1 and self.cached > 0
        self.finish: list[Callable[[Any], Any]] = []
        """Turn the decoder's output into the caller's, one after the other."""
        self._cache = cache
        self.left_out = cache.left_out
        self._closed_from = cache.closed_from
        self.moved_rows = False
        """Whether rows that hold tokens begin elsewhere than before the pass."""
        self._recorder = cache.shared.recorder
        self._recorded = 0 if self._recorder is None else self._recorder.num_steps
        self._former_padding: list[tuple[Lengths, Padding]] = []
        # A sliding window's updates make new tensors: its attributes are all its state.
        self._windows: list[tuple[Any, dict[str, Any]]] = [
            (layer, dict(layer.__dict__)) for layer in cache.layers if layer.is_sliding
        ]

    def take_mask(self, attention_mask: torch.Tensor | None) -> bool:
        """Check the mask of the pass and give the cache its padding; changes nothing if it raises.

        Returns
        -------
        bool
            Whether there is padding after a token, so that the pass must be dense, under its mask.

        Raises
        ------
        ValueError
            The mask is of a wrong shape, is missing where the cache holds padding, or hides what it may not.
        """
        cache = self._cache
        if attention_mask is None:
            # generate() hands on no mask to the decode steps of a static cache.
            if self.cached > 0 and cache.has_padding and not (self.is_decode_step and cache.is_compileable):
                raise ValueError("the cache holds left padding: attention_mask must be given, got None")
            return False
        is_token = token_mask(attention_mask, self.cached, self.query_length)
        if self.is_decode_step and self._follows(is_token):
            return False
        cache.shared.check_masks()
        rows = rows_with_holes(is_token)
        if rows and (self.is_decode_step or (cache.method.rotates_keys and self.cached > 0)):
            raise ValueError(
                f"attention_mask has padding after a token in rows {rows}; behind cached tokens {LEFT_PADDING}"
            )
        if rows:
            cache.closed_from = self.cached
            return True
        self._set_padding(left_padding(is_token))
        return False

    def _follows(self, is_token: torch.Tensor) -> bool:
        """Whether a decode step's mask is what the rows' bounds say. A device is not waited for: it takes a note."""
        for lengths in self._cache.lengths:
            if lengths.seq_start.device == is_token.device:
                disagreed = disagrees(is_token, lengths.seq_start)
                if is_token.device.type == "cpu":
                    return not bool(disagreed)
                lengths.note_mask(disagreed)
        return is_token.device.type != "cpu"

    def _set_padding(self, padding: Padding) -> None:
        """Give the rows their padding; where a row that holds tokens begins elsewhere now, rebuild its metadata."""
        if self.cached == 0:
            self._cache.shared.padding = padding  # there may be no rows yet: the first layer on each device takes it
            return
        for lengths in self._cache.lengths:
            former = lengths.padding()
            start = padding.seq_start.to(former.seq_start.device)
            moved = bool(((start != former.seq_start) & (torch.minimum(start, former.seq_start) < self.cached)).any())
            self._former_padding.append((lengths, former))
            lengths.set_padding(padding)
            for layer in self._cache.sparse_layers if moved else ():
                if layer.lengths is lengths:
                    layer.rebuild_metadata()
            self.moved_rows |= moved
        if self.moved_rows:
            self._cache.reopen_prompt()

    def take_back(self) -> None:
        """Put back what the pass has changed, but for the tokens that layers have appended."""
        for lengths, padding in self._former_padding:
            lengths.set_padding(padding)
        if self._recorder is not None:
            self._recorder.cut(self._recorded)
        for layer, state in self._windows:
            layer.__dict__.clear()
            layer.__dict__.update(state)
        self._cache.left_out, self._cache.closed_from = self.left_out, self._closed_from
