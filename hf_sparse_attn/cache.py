"""The KV cache of a patched model, layer by layer."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import torch
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from hf_sparse_attn.layer import SparseLayer
from hf_sparse_attn.methods import SparseMethod, make_method
from hf_sparse_attn.rope import RopeTables
from hf_sparse_attn.rows import Rows

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

__all__ = ["SparseCache", "SparseLayer"]


class SparseCache(Cache):  # type: ignore[misc]
    """The cache of a patched model: a :class:`SparseLayer` for each full-attention layer.

    ``generate()`` and a plain ``forward(use_cache=True)`` make their own; make one yourself to keep it over several
    calls, as with any Transformers cache. Sliding-window layers keep Transformers' own layer, and stay dense.

    With ``max_cache_len`` the cache is static: its buffers keep their addresses and no Python value follows the length,
    so that ``generate()`` compiles the decode step, and on CUDA captures it in a graph. What does not fit raises: a
    prompt before any work, decoding at the step that finds the cache full, and ``generate()`` where it compiles before
    the prompt, since a compiled step cannot tell that the cache is full.

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
        self._max_cache_len = max_cache_len  # Transformers before 5.18 has a property of the plain name
        self.is_static = max_cache_len is not None
        self.has_padding = False
        self._rows_by_device: dict[torch.device, Rows] = {}
        # Transformers itself says which layer is of which kind.
        layers = DynamicCache(config=config).layers
        for layer_idx, layer in enumerate(layers):
            if type(layer) is DynamicLayer:
                is_dense = layer_idx < self.method.dense_layers
                layers[layer_idx] = SparseLayer(
                    self.method,
                    is_dense,
                    max_cache_len,
                    initial_capacity,
                    self._rows_by_device,
                    config.num_attention_heads,
                )
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
            The method's name is unknown, or one of the two methods caches keys before RoPE and the other after it.
        """
        made = make_method(method)
        if made.rotates_keys != self.method.rotates_keys:
            kinds = ("after RoPE", "before RoPE")
            raise ValueError(
                f"method={made.name!r} needs keys {kinds[made.rotates_keys]}, but the cache of {self.method.name!r} "
                f"holds them {kinds[self.method.rotates_keys]}: prefill a cache of its own"
            )
        fork = copy.copy(self)
        fork.method = made
        fork._rows_by_device = {}  # filled by the layers, the first on a device before the others
        fork.layers = [
            layer.fork(fork.method, layer_idx < fork.method.dense_layers, fork._rows_by_device)
            if isinstance(layer, SparseLayer)
            else copy.copy(layer)  # a sliding window: its updates make new tensors, they never write in place
            for layer_idx, layer in enumerate(self.layers)
        ]
        return fork

    @property
    def sparse_layers(self) -> list[SparseLayer]:
        """The full-attention layers, dense or sparse."""
        return [layer for layer in self.layers if isinstance(layer, SparseLayer)]

    @property
    def needs_decode_mask(self) -> bool:
        """Whether a decode step needs a mask of the padding: not where all layers read by ``seq_start``."""
        return self.has_padding and not all(
            isinstance(layer, SparseLayer)
            and (layer.is_static or (layer.is_initialized and layer.device.type == "cuda"))
            for layer in self.layers
        )

    def get_query_offset(self, layer_idx: int = 0) -> int | torch.Tensor:
        """The position of the next token, for masks; a device scalar where only the device knows."""
        layer = self.layers[layer_idx]
        offset: int | torch.Tensor = (
            layer.get_query_offset() if isinstance(layer, SparseLayer) else layer.get_seq_length()
        )
        return offset

    def use_rope(self, tables: RopeTables) -> None:
        """Take the patched model's rotations, for a method with ``rotates_keys``."""
        for layer in self.sparse_layers:
            if layer.rope_tables is not tables:
                layer.rope_tables = tables
                if layer.is_initialized:
                    layer.rope = tables.take(layer.rope) if hasattr(layer, "rope") else tables.on(layer.device)

    def announce_step(self) -> None:
        """Say that the coming forward pass is a patched model's: its attention function appends single tokens."""
        for rows in self._rows_by_device.values():
            rows.announce_step()

    def prepare(self, attention_mask: torch.Tensor | None, query_length: int) -> None:
        """Check that the next tokens can be cached, and find each row's left padding. Changes nothing if it raises.

        Parameters
        ----------
        attention_mask
            [batch, cached + new tokens], 1 for tokens and 0 for padding; for a static cache also the mask that
            ``generate()`` makes of it, bool [batch, 1, new tokens, cached + new tokens]; None for no padding.
        query_length
            The number of new tokens. For a single one the padding is taken as known, so nothing waits for the device.

        Raises
        ------
        ValueError
            The tokens do not fit into ``max_cache_len``, or the mask is of another shape or masks anything but left
            padding.
        """
        cached = self.get_seq_length()
        if self._max_cache_len is not None and cached + query_length > self._max_cache_len:
            raise ValueError(
                f"{query_length} new tokens do not fit: the cache holds {cached} of max_cache_len={self._max_cache_len}"
            )
        if query_length == 1 and cached > 0 and self.is_static:
            return  # generate() hands on no mask
        if attention_mask is None:
            if self.has_padding and cached > 0:
                raise ValueError("the cache holds left padding: attention_mask must be given, got None")
            self.has_padding = False
            return
        if self.is_static:
            attention_mask = _last_query_row(attention_mask)
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
            layer.set_padding(padding, least_padding, self.has_padding)


def _last_query_row(attention_mask: torch.Tensor) -> torch.Tensor:
    """Turn the causal mask that ``generate()`` made for a static cache back into the 2-D mask it was made of.

    Raises
    ------
    ValueError
        The mask is not causal over what its last query attends to.
    """
    if not isinstance(attention_mask, torch.Tensor) or attention_mask.dim() != 4 or attention_mask.dtype != torch.bool:
        return attention_mask
    mask = attention_mask[:, 0]  # [batch, query, key]
    is_token, queries = mask[:, -1], mask.shape[1]
    seen = is_token.cumsum(dim=1)[:, -queries:]  # the keys that a causal mask lets each query attend to
    if bool(((mask.sum(dim=2) != seen) & is_token[:, -queries:]).any()):
        raise ValueError(
            f"attention_mask must be 2-D, [batch, tokens], or causal for a patched model; got a mask of shape "
            f"{tuple(attention_mask.shape)} that is not causal over left-padded tokens"
        )
    return is_token
