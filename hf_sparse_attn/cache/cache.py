"""The KV cache of a patched model, layer by layer."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from hf_sparse_attn.cache.forward_pass import ForwardPass
from hf_sparse_attn.cache.layer import SparseLayer, length_after_crop
from hf_sparse_attn.cache.lengths import Lengths, Shared
from hf_sparse_attn.cache.padding import can_be_left_out, rows_with_holes
from hf_sparse_attn.cache.storage import GrowingStorage, StaticStorage, Storage
from hf_sparse_attn.methods import FULL, SparseMethod, make_method
from hf_sparse_attn.patched import base_model, patched_method
from hf_sparse_attn.rope import RopeTables
from hf_sparse_attn.stats import LayerCounter

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


class SparseCache(Cache):  # type: ignore[misc]
    """The cache of a patched model: a :class:`SparseLayer` for each full-attention layer.

    ``generate()`` and a plain ``forward(use_cache=True)`` make their own; make one yourself to keep it over several
    calls, as with any Transformers cache. Sliding-window layers keep Transformers' own layer, and stay dense.

    With ``max_cache_len`` the cache is static: its buffers keep their addresses and no Python value follows the length,
    so that ``generate()`` compiles the decode step, and on CUDA captures it in a graph. What does not fit raises: a
    prompt before any work, decoding at the step that finds the cache full, and ``generate()`` where it compiles before
    the prompt, since a compiled step cannot tell that the cache is full.

    A forward pass that fails leaves the cache as it was before that pass.

    Parameters
    ----------
    config
        The model's configuration.
    method
        The sparse-attention method, or its name; the same as the model is patched with.
    max_cache_len
        The most tokens that the cache may hold, allocated at once. None for buffers that grow: twofold at first, later
        by an eighth.
    initial_capacity
        Where ``max_cache_len`` is None: tokens to allocate room for at first.

    Raises
    ------
    ValueError
        ``max_cache_len`` is below 1, or a layer of the model is neither full nor sliding-window attention.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        method: SparseMethod | str = "quest",
        max_cache_len: int | None = None,
        initial_capacity: int = 0,
    ) -> None:
        if max_cache_len is not None and max_cache_len < 1:
            raise ValueError(f"max_cache_len must be at least 1 or None, got {max_cache_len}")
        self.method = make_method(method)

        def storage() -> Storage:
            return GrowingStorage(initial_capacity) if max_cache_len is None else StaticStorage(max_cache_len)

        self.shared = Shared()
        self._pass: ForwardPass | None = None
        self._prompt_is_open = False
        self._finished_at = 0
        self.closed_from: int | None = None
        """Tokens cached before a pass that left padding on the right, behind which nothing can be decoded."""
        self.left_out: list[int] = []
        """Positions of tokens that were fed and are not cached; see :meth:`leave_out`."""
        # Transformers itself says which layer is of which kind.
        layers = DynamicCache(config=config).layers
        for layer_idx, layer in enumerate(layers):
            if type(layer) is DynamicLayer:
                method_here = FULL if layer_idx < self.method.dense_layers else self.method
                layers[layer_idx] = SparseLayer(
                    method_here, storage(), self.shared, config.num_attention_heads, layer_idx
                )
            elif type(layer) is not DynamicSlidingWindowLayer:
                raise ValueError(
                    f"layer {layer_idx} keeps a {type(layer).__name__}; "
                    "only full-attention and sliding-window layers are supported"
                )
        super().__init__(layers=layers)
        self.counters = _counters(layers)

    @classmethod
    def for_model(cls, model: PreTrainedModel, max_cache_len: int | None = None) -> SparseCache:
        """Make an empty cache for a patched model.

        Raises
        ------
        ValueError
            The model is not patched.
        """
        return cls(base_model(model).config, patched_method(model), max_cache_len)

    def fork(self, method: SparseMethod | str) -> SparseCache:
        """Make a cache for another method that starts from the tokens cached here, without copying keys or values.

        Both caches keep their own length and metadata and share the buffers: what one appends overwrites what the
        other appended after the fork. So use one fork after another, each from the same cache, and none beside it; a
        dense prefill then serves any number of methods. What a fork costs is the new method's metadata, and new buffers
        where it outgrows the shared ones (``initial_capacity`` leaves room) or gives up tokens or rows that it shares.

        Raises
        ------
        ValueError
            The method's name is unknown, or one of the two methods caches keys before RoPE and the other after it.
        """
        new_method = make_method(method)
        if new_method.rotates_keys != self.method.rotates_keys:
            kinds = ("after RoPE", "before RoPE")
            raise ValueError(
                f"method={new_method.name!r} needs keys {kinds[new_method.rotates_keys]}, but the cache of "
                f"{self.method.name!r} holds them {kinds[self.method.rotates_keys]}: prefill a cache of its own"
            )
        self.recover()
        fork = copy.copy(self)
        fork.method = new_method
        fork.shared = Shared()
        fork.shared.lengths = {device: lengths.copy() for device, lengths in self.shared.lengths.items()}
        fork.layers = [
            layer.fork(FULL if layer_idx < new_method.dense_layers else new_method, fork.shared)
            if isinstance(layer, SparseLayer)
            else copy.copy(layer)  # a sliding window: its updates make new tensors, they never write in place
            for layer_idx, layer in enumerate(self.layers)
        ]
        fork.counters = _counters(fork.layers)
        if fork.length:
            fork.reopen_prompt()
        return fork

    @property
    def sparse_layers(self) -> list[SparseLayer]:
        """The full-attention layers, dense or sparse."""
        return [layer for layer in self.layers if isinstance(layer, SparseLayer)]

    @property
    def max_cache_len(self) -> int:
        """The most tokens that the cache may hold; -1 for no limit. PEFT asks for it by this name."""
        return min(layer.get_max_length() for layer in self.sparse_layers)

    @property
    def lengths(self) -> list[Lengths]:
        """The rows' lengths, one record for each device that layers are on."""
        return list(self.shared.lengths.values())

    @property
    def has_padding(self) -> bool:
        """Whether any row has left padding."""
        return any(lengths.has_padding for lengths in self.lengths)

    @property
    def is_traced(self) -> bool:
        """Whether a decode step over this cache is being compiled."""
        return self.is_compileable and any(lengths.is_traced for lengths in self.lengths)

    @property
    def length(self) -> int:
        """Tokens cached per row in every layer, left padding included.

        What a forward pass has left that failed, or is in progress, does not count. Waits for the device where compiled
        steps have run.
        """
        if self._pass is not None:
            return self._pass.cached
        return min(int(layer.get_seq_length()) for layer in self.layers)

    def get_seq_length(self, layer_idx: int = 0) -> int | torch.Tensor:
        """Tokens fed per row, left padding included; in a compiled step a device scalar."""
        length: int | torch.Tensor = self.layers[layer_idx].get_seq_length() if self.is_traced else self.length
        return length + len(self.left_out if self._pass is None else self._pass.left_out)

    def get_query_offset(self, layer_idx: int = 0) -> int | torch.Tensor:
        """The position of the next token, for masks; a device scalar where only the device knows."""
        layer = self.layers[layer_idx]
        offset: int | torch.Tensor = (
            layer.get_query_offset() if isinstance(layer, SparseLayer) else layer.get_seq_length()
        )
        return offset + self._left_out_of_masks

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """The attention mask's key length and offset for the next ``query_length`` tokens."""
        length, offset = super().get_mask_sizes(query_length, layer_idx)
        return length + self._left_out_of_masks, offset

    @property
    def _left_out_of_masks(self) -> int:
        """Tokens that are not cached, but in the masks that ``generate()`` makes; those of a pass are without them."""
        return len(self.left_out) if self._pass is None else 0

    @property
    def needs_decode_mask(self) -> bool:
        """Whether a decode step needs a mask: sliding-window layers do, for padding; the others read by their rows."""
        return self.has_padding and len(self.sparse_layers) < len(self.layers)

    def use_rope(self, tables: RopeTables) -> None:
        """Take the patched model's rotations, for a method with ``rotates_keys``."""
        for layer in self.sparse_layers:
            layer.use_rope(tables)

    def begin_call(
        self, attention_mask: torch.Tensor | None, query_length: int, left_out: Sequence[int] = ()
    ) -> tuple[ForwardPass, bool]:
        """Prepare for a forward pass of a patched model: check that its tokens can be cached, and find the padding.

        Goes behind :meth:`recover`, and changes nothing if it raises. :meth:`end_call` ends the pass; where that is
        never called, as after an interrupt, the next use of the cache drops what the pass has left.

        Parameters
        ----------
        attention_mask
            [batch, cached + new tokens], 1 for tokens and 0 for padding; for a static cache also the mask that
            ``generate()`` makes of it, bool [batch, 1, new tokens, cached + new tokens]; None for no padding.
        query_length
            The number of new tokens. A single one is a decode step, which does not wait for a device: on CUDA a mask
            that hides cached tokens is reported by ``Shared.check_masks``, at the next point that waits.
        left_out
            Places, behind the tokens fed so far, of tokens that are fed now and not cached; see :meth:`leave_out`.

        Returns
        -------
        tuple
            The pass, and whether it must be dense, under its mask: there is padding after a token. The cache is of no
            further use then, until it is cut back to what it held before.

        Raises
        ------
        ValueError
            The tokens do not fit into ``max_cache_len``, or the mask is of another shape or hides what it may not.
        """
        cached = self.length
        if self.closed_from is not None:
            raise ValueError(
                "the cache holds padding on the right, behind which nothing can be decoded: pad on the left "
                f"(tokenizer.padding_side = 'left'), or cut it back to {self.closed_from} tokens with crop or reset"
            )
        self.sparse_layers[0].check_room(cached, query_length)
        forward_pass = ForwardPass(self, query_length)
        is_dense = forward_pass.take_mask(attention_mask)
        self._pass = forward_pass
        self.left_out = [*self.left_out, *(self.fed + place for place in left_out)]
        if forward_pass.is_decode_step:
            if self._prompt_is_open:
                self._finish_prompt()
            self.expect_step()
        return forward_pass, is_dense

    @property
    def fed(self) -> int:
        """Tokens fed per row, left padding included, and those that :meth:`leave_out` found."""
        return self.length + len(self.left_out)

    def leave_out(self, is_token: torch.Tensor, query_length: int) -> tuple[torch.Tensor, list[int] | None]:
        """Find tokens that the mask hides in every row, behind a token: nothing attends to them, so none is cached.

        Parameters
        ----------
        is_token
            bool [batch, tokens fed before + new tokens].
        query_length
            The number of new tokens.

        Returns
        -------
        tuple
            The mask of the tokens that are cached and are to be, for :meth:`begin_call`; and where some of the new
            tokens are to be left out, the places of the others among them.
        """
        if self.left_out:
            fed = torch.ones(is_token.shape[1], dtype=torch.bool)
            fed[self.left_out] = False
            is_token = is_token[:, fed.nonzero().flatten().to(is_token.device)]
        if query_length == 1 or not rows_with_holes(is_token) or not can_be_left_out(is_token, query_length):
            return is_token, None
        kept = is_token[0, -query_length:].nonzero().flatten().tolist()
        return is_token.new_ones(len(is_token), is_token.shape[1] - query_length + len(kept)), kept

    def end_call(self, failed: bool = False) -> ForwardPass | None:
        """End a forward pass, and return it; None for a compiled step. One that failed leaves no trace."""
        forward_pass = self._pass
        if failed:
            self.recover()
        self._pass = self.shared.padding = None
        self.forget_step()
        if not failed and forward_pass is not None and not forward_pass.is_decode_step and self.closed_from is None:
            self.reopen_prompt()
        return forward_pass

    def expect_step(self) -> None:
        """Say that the next token is a patched model's: its attention function hands it to the decode verb."""
        for lengths in self.lengths:
            lengths.expects_step = True

    def recover(self) -> None:
        """Drop what a forward pass that failed, or was interrupted, has left."""
        for layer in self.sparse_layers:
            layer.settle()
        cached, forward_pass = self.length, self._pass
        self._pass = self.shared.padding = None
        if forward_pass is not None:
            forward_pass.take_back()
            cached = forward_pass.cached  # a prompt's first chunks may have passed
        elif all(lengths.known_length in (None, cached) for lengths in self.lengths):
            return
        for lengths in self.lengths:
            lengths.cut(cached)
        keeps_metadata = forward_pass is not None and forward_pass.is_decode_step and not forward_pass.moved_rows
        for layer in self.sparse_layers:
            layer.roll_back(keeps_metadata)
        if not keeps_metadata and cached:
            self.reopen_prompt()

    def forget_step(self) -> None:
        """Take back :meth:`expect_step`."""
        for lengths in self.lengths:
            lengths.expects_step = False

    def reopen_prompt(self) -> None:
        """Let the method finish the prompt anew: before the next decode step, or now where that may be compiled."""
        self._prompt_is_open = True
        if self.is_compileable:
            self._finish_prompt()

    def _finish_prompt(self) -> None:
        for layer in self.sparse_layers:
            layer.finish_prompt()
        self._prompt_is_open, self._finished_at = False, self.length

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last ``-tokens_to_remove`` tokens of every row.

        Raises
        ------
        ValueError
            ``tokens_to_remove`` is positive, or asks for more than there is; nothing is removed then.
        RuntimeError
            A sliding window has moved on, and cannot go back.
        """
        self.recover()
        still_fed = length_after_crop(self.fed, tokens_to_remove)
        left_out = [position for position in self.left_out if position < still_fed]
        length = still_fed - len(left_out)
        for layer in self.layers:
            if layer.is_sliding:  # first, since a window that has passed the tokens refuses
                surplus = layer.get_seq_length() - length
                if surplus or layer.record_past:
                    layer.crop(-surplus)
        for layer in self.sparse_layers:
            layer.cut(length)
        self.left_out = left_out
        if self.closed_from is not None and length <= self.closed_from:
            self.closed_from = None
        if length <= self._finished_at:
            self._prompt_is_open = False  # the prompt behind the finished one is gone

    def reset(self) -> None:
        """Forget all tokens, keep the buffers."""
        self.recover()
        super().reset()
        for layer in self.layers:
            if layer.is_sliding and layer.is_initialized:  # Transformers' own keeps the window's tokens, as zeros
                layer.keys, layer.values = layer.keys[:, :, :0], layer.values[:, :, :0]
        self.closed_from, self.left_out = None, []
        self._prompt_is_open, self._finished_at = False, 0

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Put row ``beam_idx[b]`` in place of row ``b``, for beam search."""
        self.recover()
        super().reorder_cache(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row ``repeats`` times."""
        self.recover()
        super().batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep only the rows in ``indices``."""
        self.recover()
        super().batch_select_indices(indices)


def _counters(layers: list[Any]) -> list[LayerCounter]:
    return [layer.counter if isinstance(layer, SparseLayer) else LayerCounter() for layer in layers]
