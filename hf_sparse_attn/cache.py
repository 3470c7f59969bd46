"""The KV cache of a patched model: preallocated keys, values and the method's metadata, layer by layer."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from hf_sparse_attn.methods import SparseMethod, make_method
from hf_sparse_attn.stats import LayerCounter

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

MIN_CAPACITY = 64


class SparseLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer's keys, values and metadata, in place in buffers that double when they are full.

    Row ``b`` holds its tokens at positions ``seq_start[b] .. seq_end[b] - 1`` of the buffers; what lies before is left
    padding, what lies after is unused. Both are device tensors, read by the kernels without a host synchronize.

    Parameters
    ----------
    method
        The sparse-attention method.
    is_dense
        Whether attention in this layer stays dense; then no metadata is kept.
    max_cache_len
        The most tokens that the layer may hold; None for no limit.
    initial_capacity
        Tokens to allocate room for at first.
    """

    is_sliding = False
    is_croppable = True
    is_compileable = False

    keys: torch.Tensor
    """[batch, kv_heads, capacity, head_dim], after RoPE."""
    values: torch.Tensor
    """[batch, kv_heads, capacity, head_dim]."""
    metadata: dict[str, torch.Tensor]
    """The method's own tensors, batch dimension first."""
    seq_start: torch.Tensor
    """int32 [batch]: position of each row's first token."""
    seq_end: torch.Tensor
    """int32 [batch]: position after each row's last token."""

    def __init__(
        self, method: SparseMethod, is_dense: bool, max_cache_len: int | None = None, initial_capacity: int = 0
    ) -> None:
        super().__init__()
        self.method = method
        self.is_dense = is_dense
        self.max_cache_len = max_cache_len
        self.initial_capacity = max_cache_len or max(initial_capacity, MIN_CAPACITY)
        self.length = 0
        self.least_padding = 0
        self.metadata = {}
        self.counter = LayerCounter()
        self._pending_seq_start: torch.Tensor | None = None

    @property
    def capacity(self) -> int:
        """Tokens that the buffers have room for."""
        return self.keys.shape[2]

    def row_lengths(self) -> torch.Tensor:
        """int32 [batch]: the tokens of each row, padding left out."""
        return (self.seq_end - self.seq_start).clamp_min(0)

    def max_blocks(self, block_size: int) -> int:
        """The most blocks that any row can have, known without asking the device."""
        return -(-(self.length - self.least_padding) // block_size)

    def set_padding(self, seq_start: torch.Tensor, least_padding: int) -> None:
        """Say where each row's first token lies; takes effect with the next :meth:`update`."""
        self._pending_seq_start = seq_start
        self.least_padding = least_padding

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocate the buffers for the batch size, heads, dtype and device of the first tokens."""
        self.dtype, self.device = key_states.dtype, key_states.device
        batch = key_states.shape[0]
        capacity = max(self.initial_capacity, key_states.shape[2])
        self.keys = _empty_buffer(key_states, capacity)
        self.values = _empty_buffer(value_states, capacity)
        self.seq_start = torch.zeros(batch, dtype=torch.int32, device=self.device)
        self.seq_end = torch.zeros_like(self.seq_start)
        self.metadata = {} if self.is_dense else self.method.init_metadata(self)
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append tokens to every row and take them into the metadata.

        Parameters
        ----------
        key_states, value_states
            [batch, kv_heads, new tokens, head_dim].

        Returns
        -------
        tuple of torch.Tensor
            Views of all keys and values so far, [batch, kv_heads, length, head_dim].
        """
        if not self.is_initialized or (self.length == 0 and self.keys.shape[0] != key_states.shape[0]):
            self.lazy_initialization(key_states, value_states)
        num_new = key_states.shape[2]
        end = self.length + num_new
        if end > self.capacity:
            self._grow(max(end, 2 * self.capacity))
        self.keys[:, :, self.length : end] = key_states
        self.values[:, :, self.length : end] = value_states
        if self._pending_seq_start is not None:
            self.seq_start.copy_(self._pending_seq_start)
            self._pending_seq_start = None
        self.length = end
        self.seq_end.fill_(end)
        if not self.is_dense:
            self.method.update_metadata(self, num_new)
        return self.keys[:, :, :end], self.values[:, :, :end]

    def _grow(self, capacity: int) -> None:
        if self.max_cache_len is not None:
            capacity = self.max_cache_len  # SparseCache.prepare has refused what would not fit
        self.keys = _enlarged(self.keys, _empty_buffer(self.keys, capacity))
        self.values = _enlarged(self.values, _empty_buffer(self.values, capacity))
        if not self.is_dense:
            grown = self.method.init_metadata(self)
            self.metadata = {name: _enlarged(old, grown[name]) for name, old in self.metadata.items()}

    def get_seq_length(self) -> int:
        """Tokens held per row, left padding counted in."""
        return self.length

    def get_max_length(self) -> int:
        """The most tokens that the layer may hold; -1 for no limit."""
        return -1 if self.max_cache_len is None else self.max_cache_len

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """The attention mask's key length and offset for the next ``query_length`` tokens."""
        return self.length + query_length, 0

    def reset(self) -> None:
        """Forget all tokens, keep the buffers."""
        self.length = 0
        self.least_padding = 0
        if self.is_initialized:
            self.seq_start.zero_()
            self.seq_end.zero_()
            self.metadata = {} if self.is_dense else self.method.init_metadata(self)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last ``-tokens_to_remove`` tokens of every row.

        Raises
        ------
        ValueError
            ``tokens_to_remove`` is positive, or asks for more than there is.
        """
        tokens_to_remove = int(tokens_to_remove)  # assisted decoding counts with a device tensor
        if tokens_to_remove > 0 or -tokens_to_remove > self.length:
            raise ValueError(
                f"tokens_to_remove must be between -{self.length} (all tokens) and 0, got {tokens_to_remove}"
            )
        if tokens_to_remove == 0:
            return
        self.length += tokens_to_remove
        self.seq_end.fill_(self.length)
        if not self.is_dense:
            self.method.crop_metadata(self)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Put row ``beam_idx[b]`` in place of row ``b``, for beam search."""
        self._map_rows(lambda tensor: tensor.index_select(0, beam_idx.to(tensor.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row ``repeats`` times."""
        self._map_rows(lambda tensor: tensor.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep only the rows in ``indices``."""
        self._map_rows(lambda tensor: tensor[indices.to(tensor.device)])

    def fork(self, method: SparseMethod, is_dense: bool) -> SparseLayer:
        """Make a layer for another method over the same keys and values; see :meth:`SparseCache.fork`."""
        fork = copy.copy(self)
        fork.method, fork.is_dense = method, is_dense
        fork.counter = LayerCounter()
        fork.metadata = {}
        if self.is_initialized:
            fork.seq_start, fork.seq_end = self.seq_start.clone(), self.seq_end.clone()
            if not is_dense:
                fork.metadata = method.init_metadata(fork)
                if self.length:
                    method.update_metadata(fork, self.length)
        return fork

    def _map_rows(self, of_rows: Any) -> None:
        if not self.is_initialized:
            return
        for name in ("keys", "values", "seq_start", "seq_end"):
            setattr(self, name, of_rows(getattr(self, name)))
        self.metadata = {name: of_rows(tensor) for name, tensor in self.metadata.items()}


class SparseCache(Cache):  # type: ignore[misc]
    """The cache of a patched model: a :class:`SparseLayer` for each full-attention layer.

    ``generate()`` and a plain ``forward(use_cache=True)`` make their own; make one yourself to keep it over several
    calls, as with any Transformers cache. Sliding-window layers keep Transformers' own layer, and stay dense.

    Parameters
    ----------
    config
        The model's configuration.
    method
        The sparse-attention method, or its name; the same as the model is patched with.
    max_cache_len
        The most tokens that the cache may hold, allocated at once; a prompt that does not fit raises before any work.
        None for buffers that grow by doubling.
    initial_capacity
        Where ``max_cache_len`` is None: tokens to allocate room for at first.

    Raises
    ------
    ValueError
        A layer of the model is neither full nor sliding-window attention.
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
        self._max_cache_len = max_cache_len  # Transformers before 5.18 has a property of the plain name
        self.has_padding = False
        # Transformers itself says which layer is of which kind.
        layers = DynamicCache(config=config).layers
        for layer_idx, layer in enumerate(layers):
            if type(layer) is DynamicLayer:
                is_dense = layer_idx < self.method.dense_layers
                layers[layer_idx] = SparseLayer(self.method, is_dense, max_cache_len, initial_capacity)
            elif type(layer) is not DynamicSlidingWindowLayer:
                raise ValueError(
                    f"layer {layer_idx} keeps a {type(layer).__name__}; "
                    "only full-attention and sliding-window layers are supported"
                )
        super().__init__(layers=layers)

    @classmethod
    def for_model(cls, model: PreTrainedModel, max_cache_len: int | None = None) -> SparseCache:
        """Make an empty cache for a patched model.

        Raises
        ------
        ValueError
            The model is not patched.
        """
        from hf_sparse_attn.patch import patched_method  # patch.py builds on this module

        return cls(model.config, patched_method(model), max_cache_len)

    def fork(self, method: SparseMethod | str) -> SparseCache:
        """Make a cache for another method that starts from the tokens cached here, without copying keys or values.

        Both caches keep their own length and metadata and share the buffers: what one appends overwrites what the
        other appended after the fork. So use one fork after another, each from the same cache, and none beside it; a
        dense prefill then serves any number of methods. What a fork costs is the new method's metadata, and new buffers
        where it outgrows the shared ones (``initial_capacity`` leaves room).

        Raises
        ------
        ValueError
            The method's name is unknown.
        """
        fork = copy.copy(self)
        fork.method = make_method(method)
        fork.layers = [
            layer.fork(fork.method, layer_idx < fork.method.dense_layers)
            if isinstance(layer, SparseLayer)
            else copy.copy(layer)  # a sliding window: its updates make new tensors, they never write in place
            for layer_idx, layer in enumerate(self.layers)
        ]
        return fork

    @property
    def sparse_layers(self) -> list[SparseLayer]:
        """The full-attention layers, dense or sparse."""
        return [layer for layer in self.layers if isinstance(layer, SparseLayer)]

    def prepare(self, attention_mask: torch.Tensor | None, query_length: int) -> None:
        """Check that the next tokens can be cached, and find each row's left padding. Changes nothing if it raises.

        Parameters
        ----------
        attention_mask
            [batch, cached + new tokens], 1 for tokens and 0 for padding; None for no padding.
        query_length
            The number of new tokens. For a single one the padding is taken as known, so nothing waits for the device.

        Raises
        ------
        ValueError
            The tokens do not fit into ``max_cache_len``, or the mask is not 2-D or masks anything but left padding.
        """
        cached = self.get_seq_length()
        if self._max_cache_len is not None and cached + query_length > self._max_cache_len:
            raise ValueError(
                f"{query_length} new tokens do not fit: the cache holds {cached} of max_cache_len={self._max_cache_len}"
            )
        if attention_mask is None:
            if self.has_padding and cached > 0:
                raise ValueError("the cache holds left padding: attention_mask must be given, got None")
            if cached == 0:
                self.has_padding = False
            return
        if not isinstance(attention_mask, torch.Tensor) or attention_mask.dim() != 2:
            shape = tuple(attention_mask.shape) if isinstance(attention_mask, torch.Tensor) else attention_mask
            raise ValueError(f"attention_mask must be 2-D, [batch, tokens], for a patched model; got {shape}")
        if attention_mask.shape[1] != cached + query_length:
            raise ValueError(
                f"attention_mask must cover the {cached} cached and {query_length} new tokens, "
                f"got {attention_mask.shape[1]}"
            )
        if query_length == 1 and cached > 0:
            return
        is_token = attention_mask != 0
        padding = is_token.shape[1] - is_token.sum(dim=1)
        holes = (is_token[:, :-1] & ~is_token[:, 1:]).any(dim=1)
        if bool(holes.any()):
            rows = holes.nonzero().flatten().tolist()
            raise ValueError(
                f"attention_mask has padding after a token in rows {rows}; only left padding is supported: "
                "set tokenizer.padding_side = 'left'"
            )
        least_padding, most_padding = (int(bound) for bound in padding.aminmax())
        self.has_padding = most_padding > 0
        for layer in self.sparse_layers:
            layer.set_padding(padding, least_padding)


def _empty_buffer(like: torch.Tensor, capacity: int) -> torch.Tensor:
    batch, kv_heads, _, head_dim = like.shape
    return like.new_empty(batch, kv_heads, capacity, head_dim)


def _enlarged(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    new[tuple(slice(size) for size in old.shape)] = old
    return new
