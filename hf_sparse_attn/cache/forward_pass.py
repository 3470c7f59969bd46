"""A forward pass of a patched model over a cache: its mask, and its undo."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from hf_sparse_attn.cache.lengths import Lengths
from hf_sparse_attn.cache.padding import LEFT_PADDING, Padding, disagrees, left_padding, rows_with_holes, token_mask

if TYPE_CHECKING:
    from hf_sparse_attn.cache.cache import SparseCache
    from hf_sparse_attn.methods import SparseMethod


class ForwardPass:
    """Undo record of a pass: everything that it changes in a cache except for appended tokens.

    Parameters
    ----------
    cache
        The cache before the pass.
    query_length
        Tokens that the pass will cache.
    """

    def __init__(self, cache: SparseCache, query_length: int) -> None:
        self.cached, self.query_length = cache.length, query_length
        self.is_decode_step = query_length == 1 and self.cached > 0
        self.finish: list[Callable[[Any], Any]] = []
        """Functions applied in turn to the decoder's output."""
        self._cache = cache
        self.left_out = cache.left_out
        self._closed_from = cache.closed_from
        self.has_finished = False
        """Whether the method may have begun to finish a prompt with the tokens of the pass."""
        self.moved_rows = False
        """Whether the pass changed the start of a row that holds tokens."""
        self._recorder = cache.shared.recorder
        self._recorded = 0 if self._recorder is None else self._recorder.num_steps
        self._former_padding: list[tuple[Lengths, Padding]] = []
        self.remember_layers()
        # A sliding window's updates create new tensors, so a shallow copy of its attributes is its state.
        self._windows: list[tuple[Any, dict[str, Any]]] = [
            (layer, dict(layer.__dict__)) for layer in cache.layers if layer.is_sliding
        ]

    def remember_layers(self) -> None:
        """Record what the layers hold, to return to it: before the pass, and once the prompt before it is finished."""
        cache = self._cache
        self._queries = [(layer, layer.prompt_queries) for layer in cache.sparse_layers]
        storages = [(layer.storage, layer.storage.state()) for layer in cache.sparse_layers]
        # In one step: storages in which a prompt was finished, beside one that is still open, would finish it twice.
        self._storages, self._prompt = storages, (cache.shared.prompt_is_open, cache.finished_at)

    def take_mask(self, attention_mask: torch.Tensor | None) -> bool:
        """Check the mask of the pass and set the cache's padding. Changes nothing if it raises.

        Returns
        -------
        bool
            Whether padding after a token forces the pass to be dense.

        Raises
        ------
        ValueError
            The mask has a wrong shape or another number of rows than the cached tokens, hides cached tokens, or is None
            although the cache holds padding.
        """
        cache = self._cache
        if attention_mask is None:
            # generate() passes no mask to the decode steps of a static cache.
            if self.cached > 0 and cache.has_padding and not (self.is_decode_step and cache.is_compileable):
                raise ValueError("attention_mask must be given, got None: the cache holds left padding")
            return False
        is_token = token_mask(attention_mask, self.cached, self.query_length, cache.may_look_ahead)
        self._check_batch(len(is_token))
        if self.is_decode_step and self._follows(is_token):
            return False
        cache.shared.check_masks()
        rows = rows_with_holes(is_token)
        needs_rows = cache.has_evicted or (cache.method.rotates_keys and self.cached > 0)
        if rows and (self.is_decode_step or cache.prefix_tokens or needs_rows):
            raise ValueError(
                f"attention_mask has padding after a token in rows {rows}; after cached tokens {LEFT_PADDING}"
            )
        if rows:
            cache.closed_from = self.cached
            return True
        self._set_padding(left_padding(is_token))
        return False

    def _check_batch(self, batch: int) -> None:
        """Raise if the pass has another number of rows than the cached tokens. A cache without any takes any number."""
        for lengths in self._cache.lengths if self.cached else ():
            if (rows := len(lengths.seq_start)) != batch:
                raise ValueError(f"new tokens must have the cache's batch size {rows}, got {batch}")

    def _follows(self, is_token: torch.Tensor) -> bool:
        """Whether a decode step's mask agrees with the row bounds. A CUDA device notes the answer without a wait."""
        for lengths in self._cache.lengths:
            if lengths.seq_start.device == is_token.device:
                disagreed = disagrees(is_token, lengths.seq_start)
                if is_token.device.type == "cpu":
                    return not bool(disagreed)
                lengths.note_mask(disagreed)
        return is_token.device.type != "cpu"

    def _set_padding(self, padding: Padding) -> None:
        """Set the padding; rebuild the metadata if the start of a row that holds tokens moved."""
        if self.cached == 0:
            self._cache.shared.padding = padding  # rows may not exist yet: the first layer on each device takes it
            return
        for lengths in self._cache.lengths:
            former = lengths.padding()
            start = padding.seq_start.to(former.seq_start.device)
            moved = bool(((start != former.seq_start) & (torch.minimum(start, former.seq_start) < self.cached)).any())
            if moved and self._cache.has_evicted:
                raise ValueError(
                    f"attention_mask must show the same padding as before, got {start.tolist()} tokens of it after "
                    f"{former.seq_start.tolist()}: {self._cache.method.name!r} has evicted tokens by the former mask"
                )
            self._former_padding.append((lengths, former))
            lengths.set_padding(padding)
            for layer in self._cache.sparse_layers if moved else ():
                if layer.lengths is lengths:
                    layer.rebuild_metadata()
            self.moved_rows |= moved
        if self.moved_rows:
            self._cache.reopen_prompt()

    def keeps_metadata(self, method: SparseMethod) -> bool:
        """Whether metadata is cut back with the rows to undo the pass, instead of being rebuilt."""
        is_appended = method.appends_metadata and not self.has_finished
        return self.cached > 0 and not self.moved_rows and (self.is_decode_step or is_appended)

    def restore_prompt(self) -> None:
        """Restore whether the prompt is open. A prompt that a decode step has finished stays finished."""
        self._cache.shared.prompt_is_open, self._cache.finished_at = self._prompt

    def undo(self) -> None:
        """Undo the changes of the pass, except for tokens that layers have appended."""
        for lengths, padding in self._former_padding:
            lengths.set_padding(padding)
        if self._recorder is not None:
            self._recorder.cut(self._recorded)
        for layer, queries in self._queries:
            layer.prompt_queries = queries
        for storage, stored in self._storages:
            if stored is not None and self.cached:  # else the cut to 0 undoes it, also in buffers for other rows
                storage.restore(stored)
        for layer, state in self._windows:
            layer.__dict__.clear()
            layer.__dict__.update(state)
        self._cache.left_out, self._cache.closed_from = self.left_out, self._closed_from
