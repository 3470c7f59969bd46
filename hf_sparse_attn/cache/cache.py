"""The KV cache of a patched model, layer by layer."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from hf_sparse_attn.cache import saved
from hf_sparse_attn.cache.forward_pass import ForwardPass
from hf_sparse_attn.cache.host.prompts import PromptStages
from hf_sparse_attn.cache.host.reserve import grow, reserve_first
from hf_sparse_attn.cache.host.room import check_kv_storage
from hf_sparse_attn.cache.host.storage import GrowingHostStorage, HostStorage, StaticHostStorage
from hf_sparse_attn.cache.lasting import lasting_tensors
from hf_sparse_attn.cache.layer import SparseLayer, length_after_crop
from hf_sparse_attn.cache.lengths import Lengths, Shared
from hf_sparse_attn.cache.offload.blocks import SharedBlocks
from hf_sparse_attn.cache.offload.storage import OffloadStorage
from hf_sparse_attn.cache.padding import can_be_left_out, rows_with_holes
from hf_sparse_attn.cache.parked import Exchange, ParkedTensors
from hf_sparse_attn.cache.prefix import Prefix, hash_token_ids
from hf_sparse_attn.cache.split import evicting_storage
from hf_sparse_attn.cache.storage import GrowingStorage, StaticStorage, Storage
from hf_sparse_attn.cache.window import WindowLayer
from hf_sparse_attn.checks import whole_number, whole_numbers
from hf_sparse_attn.head_shard import WHOLE, HeadShard
from hf_sparse_attn.heads import heads_of_layers
from hf_sparse_attn.methods import FULL, SparseMethod, make_method
from hf_sparse_attn.patched import get_patch, text_model
from hf_sparse_attn.precision import uncast
from hf_sparse_attn.rope import RopeTables
from hf_sparse_attn.stats import LayerCounter

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


class SparseCache(Cache):  # type: ignore[misc]
    """The cache of a patched model: a :class:`SparseLayer` for each full-attention layer.

    ``generate()`` and a plain ``forward(use_cache=True)`` create their own. Create one yourself to keep it across
    calls, as with any Transformers cache. Sliding-window layers keep Transformers' own layer and stay dense.

    With ``max_cache_len`` the cache is static: buffers keep their addresses and no Python value depends on the length.
    ``generate()`` can then compile the decode step and, on CUDA, capture it in a graph. A prompt that does not fit
    fails before any work, a decode step fails when the cache is full. A compiled step cannot tell that the cache is
    full, so ``generate()`` checks for room before the prompt if it compiles.

    A method with ``offload`` keeps keys and values in host memory, and a method that evicts keeps those of some tokens
    only. Such a cache takes ``max_cache_len``, but its steps are not compiled.

    A forward pass that fails leaves the cache as it was before that pass.

    Parameters
    ----------
    config
        The model's configuration.
    method
        The sparse-attention method, or its name. It must equal the method that the model is patched with.
    max_cache_len
        Maximum number of tokens, allocated at once. None for buffers that double at first and later grow by an eighth.
    initial_capacity
        Tokens to allocate room for at first, if ``max_cache_len`` is None.
    prefix
        Tokens before every row, stored once: a :class:`Prefix` for each layer. The cache then counts only the tokens
        after them, and so do its masks and lengths; the patched model adds their number to the positions.
    prefix_hash
        Hash of the prefix's token ids (``hash_token_ids``), to refuse a call that repeats them.
    keep_queries
        Last queries of a prompt to keep for forks: the ``keeps_queries`` of their methods. A patched model keeps them,
        and with them the mean of all of the prompt's queries.
    kv_storage
        Where keys and values lie: ``"device"``, or ``"host"`` for host memory, which the kernels of decode steps
        read themselves. Metadata and dense layers stay on the device.
    head_shard
        The part of the KV heads that this process has under tensor parallelism; :meth:`for_model` knows it.

    Raises
    ------
    TypeError
        ``max_cache_len``, ``initial_capacity`` or ``keep_queries`` is no whole number.
    ValueError
        One of them is below its least value, a layer of the model is neither full nor sliding-window attention,
        ``prefix`` fits neither the method nor the layers, or the method does not support ``kv_storage``.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        method: SparseMethod | str = "quest",
        max_cache_len: int | None = None,
        initial_capacity: int = 0,
        prefix: Sequence[Prefix] | None = None,
        prefix_hash: str | None = None,
        keep_queries: int = 0,
        kv_storage: str = "device",
        head_shard: HeadShard = WHOLE,
    ) -> None:
        if max_cache_len is not None:
            max_cache_len = whole_number("max_cache_len", max_cache_len, 1, " or None")
        initial_capacity = whole_number("initial_capacity", initial_capacity, 0)
        keep_queries = whole_number("keep_queries", keep_queries, 0)
        self.method = make_method(method)
        check_kv_storage(kv_storage, self.method)
        self.kv_storage, self.head_shard = kv_storage, head_shard
        self.heads = heads_of_layers(config)
        """Of the models that the cache is for; under tensor parallelism, of all processes."""
        kv_heads, q_heads = self.heads.kv_heads // head_shard.size, self.heads.q_heads
        self._stages = PromptStages()

        offload = self.method.offloading
        self._offloaded = None if offload is None else SharedBlocks(offload, kv_heads)

        # Transformers decides which layers have sliding windows.
        layers = DynamicCache(config=config).layers
        has_windows = any(type(layer) is DynamicSlidingWindowLayer for layer in layers)

        def storage(method: SparseMethod, layer_idx: int) -> Storage:
            if method.evicts:
                heads = head_shard.own(method.evicting_heads(layer_idx), kv_heads)
                return evicting_storage(heads, initial_capacity, max_cache_len)
            if kv_storage == "host" and method is not FULL:
                if max_cache_len is None:
                    return GrowingHostStorage(self._stages, method.selection_size, initial_capacity)
                return StaticHostStorage(self._stages, method.selection_size, max_cache_len)
            if self._offloaded is None and not self.method.evicts and not has_windows:
                return GrowingStorage(initial_capacity) if max_cache_len is None else StaticStorage(max_cache_len)
            room = (max_cache_len or initial_capacity, max_cache_len)
            # Beside layers that cannot be compiled, an unpatched model masks nothing after the last token.
            if self._offloaded is None or method is FULL:
                return GrowingStorage(*room)
            return OffloadStorage(self._offloaded, *room)

        self.shared = Shared()
        self._pass: ForwardPass | None = None
        self.is_parked = False
        """Whether the contents are in host memory; see :meth:`park`."""
        self._parked_windows: dict[Any, ParkedTensors] = {}
        self._is_recovering = False
        self._cut_off: str | None = None
        """The operation on all layers that is in progress, or failed midway."""
        self.finished_at = 0
        """Tokens cached when the method last finished a prompt, or when a pass that reopened it began."""
        self.prompt_end = 0
        """Tokens fed per row, left padding included, with which a prompt in chunks ends; a static cache's prompt is not
        finished before, but by a decode step. 0 if each pass may be the last one of a prompt."""
        self._asked: torch.Tensor | None = None
        """The first ids of a prompt in chunks, [tokens], until they are as many as the prefix has."""
        self.closed_from: int | None = None
        """Tokens cached before a pass that left padding after a token, after which decoding is impossible."""
        self.attention_input: torch.Tensor | None = None
        """[batch, 1, hidden]: the last attention's input in a decode step of a method that rehearses, until the next
        one takes it."""
        self.left_out: list[int] = []
        """Positions of tokens that were fed but not cached; see :meth:`leave_out`."""
        for layer_idx, layer in enumerate(layers):
            if type(layer) is DynamicLayer:
                method_here = FULL if layer_idx < self.method.dense_layers else self.method
                layers[layer_idx] = SparseLayer(
                    method_here,
                    storage(method_here, layer_idx),
                    self.shared,
                    q_heads[layer_idx] // head_shard.size,
                    layer_idx,
                    keep_queries,
                    head_shard,
                    kv_heads,
                )
            elif type(layer) is DynamicSlidingWindowLayer:
                layers[layer_idx] = WindowLayer(sliding_window=layer.sliding_window)
            else:
                raise ValueError(
                    f"layer {layer_idx} keeps a {type(layer).__name__}; "
                    "only full-attention and sliding-window layers are supported"
                )
        super().__init__(layers=layers)
        self._is_static: bool = self.is_compileable
        self.counters = _counters(layers)
        self.prefix_tokens = 0
        """Tokens before every row that are not counted among its own."""
        self.prefix_hash = prefix_hash
        if prefix is not None:
            self._take_prefix(prefix)

    @classmethod
    def for_model(cls, model: PreTrainedModel, max_cache_len: int | None = None, keep_queries: int = 0) -> SparseCache:
        """Create an empty cache for a patched model; ``max_cache_len`` and ``keep_queries`` as for the constructor.

        Raises
        ------
        TypeError
            ``max_cache_len`` is no whole number.
        ValueError
            The model is not patched, or ``max_cache_len`` is below 1.
        """
        patch = get_patch(model)
        return cls(
            text_model(model).config,
            patch.method,
            max_cache_len,
            keep_queries=keep_queries,
            kv_storage=patch.kv_storage,
            head_shard=patch.head_shard,
        )

    def save(self, path: str | Path, model: PreTrainedModel, input_ids: torch.Tensor | None = None) -> None:
        """Write keys, values and metadata to a file, to go on from these tokens in another process.

        The file is in the safetensors format and has a checksum for every tensor. An earlier file is replaced when the
        new one is whole.

        Parameters
        ----------
        path
            The file to write.
        model
            The model that filled the cache.
        input_ids
            The cached tokens [batch, tokens], for :meth:`load` to compare; None to leave that out.

        Raises
        ------
        ValueError
            The cache is empty, begins with a fixed context, or its method evicts tokens; ``input_ids`` have another
            shape than the cached tokens; the cache has a part of the heads only, under tensor parallelism.
        OSError
            The file cannot be written.
        """
        saved.save(self, Path(path), model, input_ids)

    @classmethod
    def load(
        cls,
        path: str | Path,
        model: PreTrainedModel,
        input_ids: torch.Tensor | None = None,
        max_cache_len: int | None = None,
    ) -> SparseCache:
        """Read a cache that :meth:`save` wrote, for a model that is patched with its method.

        Keys and values are put where the patch keeps them, each layer's on the layer's device.

        Parameters
        ----------
        path
            The file.
        model
            The patched model.
        input_ids
            The tokens that the cache should hold [batch, tokens], to compare with those of :meth:`save`.
        max_cache_len
            As for the constructor.

        Raises
        ------
        ValueError
            The file is damaged, cut off or no cache; it belongs to another model, other weights or token ids, or
            another method or other parameters than the patch has; the tokens exceed ``max_cache_len``; the model is
            not patched, or has a part of the heads only, under tensor parallelism.
        RuntimeError
            Keys and values are to lie in host memory, and it does not suffice or cannot be pinned.
        OSError
            The file cannot be read.
        """
        return saved.load(cls, Path(path), model, input_ids, max_cache_len)

    def __deepcopy__(self, memo: dict[int, Any]) -> SparseCache:
        """Return a cache with tensors of its own, for use in any mode, as copies of Transformers' caches are."""
        twin = self.__class__.__new__(self.__class__)
        memo[id(self)] = twin
        with lasting_tensors():
            twin.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return twin

    def fork(self, method: SparseMethod | str) -> SparseCache:
        """Create a cache for a method that starts with the tokens cached here, without copying keys or values.

        The caches share buffers but not lengths and metadata: tokens appended to one overwrite those appended to the
        other after the fork. Use forks of a cache one after another, never together. One dense prefill then serves any
        number of methods. A fork for another method builds its metadata, and the method finishes the prompt anew. A
        fork for the cache's own method copies the metadata, so that one prepared context serves any number of
        questions. A fork copies the buffers once it outgrows them (``initial_capacity`` leaves room). Either cache
        copies them before it removes tokens or changes rows that the other has too, if that still exists.

        Raises
        ------
        ValueError
            Unknown method name, one method caches keys before RoPE and the other after it, one of them changes RoPE,
            the method needs more queries than the cache keeps, or the queries of all tokens, the methods offload
            differently, the method does not support the cache's ``kv_storage``, the cache has a prefix, which belongs
            to its method, tokens were evicted, or the method needs the prompt's attention weights.
        """
        new_method = make_method(method)
        check_kv_storage(self.kv_storage, new_method)
        own, other = self.method.offloading, new_method.offloading
        if (own and own.layout) != (other and other.layout):
            raise ValueError(
                f"method={new_method} keeps keys and values elsewhere than the cache of {self.method}: offload, "
                "gpu_cache_tokens, eviction and the size of a block must agree"
            )
        if other is not None and new_method.dense_layers > self.method.dense_layers:
            raise ValueError(
                f"method={new_method} with dense_layers={new_method.dense_layers} needs keys and values on the device "
                f"that the cache of {self.method} offloads: at most its dense_layers={self.method.dense_layers}"
            )
        if self.prefix_tokens and new_method != self.method:
            raise ValueError(f"method={new_method} cannot read the prefix of a cache of {self.method}")
        if new_method.rotates_keys != self.method.rotates_keys:
            kinds = ("after RoPE", "before RoPE")
            raise ValueError(
                f"method={new_method.name!r} needs keys {kinds[new_method.rotates_keys]}, but the cache of "
                f"{self.method.name!r} holds them {kinds[self.method.rotates_keys]}: prefill a cache of its own"
            )
        if new_method != self.method and (new_method.changes_rope or self.method.changes_rope):
            raise ValueError(
                f"method={new_method} rotates keys in another way than the cache of {self.method}: prefill a cache of "
                "its own"
            )
        missing = sorted(set(new_method.lasting_metadata) - set(self.method.lasting_metadata))
        if missing:
            raise ValueError(
                f"method={new_method.name!r} needs the {', '.join(missing)} of all tokens, which a cache of "
                f"{self.method.name!r} does not keep: prefill a cache of its own"
            )
        selecting = [layer for layer in self.sparse_layers if layer.layer_idx >= new_method.dense_layers]
        kept = min((layer.keep_queries for layer in selecting), default=new_method.keeps_queries)
        if new_method.needs_queries and new_method.keeps_queries > kept:
            raise ValueError(
                f"method={new_method.name!r} needs the last {new_method.keeps_queries} queries of the prompt, but the "
                f"cache keeps {kept}: create it with keep_queries={new_method.keeps_queries}, for a patched model"
            )
        if new_method.needs_weights and new_method != self.method:
            raise ValueError(
                f"method={new_method.name!r} needs the attention weights of the whole prompt, which the cache of "
                f"{self.method.name!r} has not added up: prefill a cache of its own"
            )
        self.recover()
        if self.has_evicted and new_method != self.method:
            raise ValueError(
                f"method={new_method.name!r} needs every token, but {self.method.name!r} has evicted some: prefill a "
                "cache of its own"
            )
        fork = copy.copy(self)
        fork.method, fork._parked_windows, fork.prompt_end = new_method, {}, 0
        fork.shared = Shared()
        fork.shared.prompt_is_open = self.shared.prompt_is_open
        fork.shared.lengths = {device: lengths.copy() for device, lengths in self.shared.lengths.items()}
        fork.layers = [
            layer.fork(FULL if layer_idx < new_method.dense_layers else new_method, fork.shared)
            if isinstance(layer, SparseLayer)
            else copy.copy(layer)  # a sliding window never writes in place: updates create new tensors
            for layer_idx, layer in enumerate(self.layers)
        ]
        fork._is_static = fork.is_compileable
        fork.counters = _counters(fork.layers)
        if fork.length and new_method != self.method:
            fork.reopen_prompt()
        return fork

    def _take_prefix(self, prefix: Sequence[Prefix]) -> None:
        if not self.method.reads_prefix:
            raise ValueError(f"method {self.method.name!r} does not read a prefix")
        counts = {layer.tokens for layer in prefix}
        if len(self.sparse_layers) < len(self.layers) or len(prefix) != len(self.layers) or len(counts) != 1:
            raise ValueError(
                f"prefix must have one length and full attention in each of the {len(self.layers)} layers, got "
                f"{len(prefix)} layers of {sorted(counts)} tokens"
            )
        self.prefix_tokens = counts.pop()
        for layer, part in zip(self.sparse_layers, prefix, strict=True):
            layer.prefix = part

    def check_question(self, token_ids: torch.Tensor) -> None:
        """Raise ``ValueError`` if the first tokens after the prefix, [batch, tokens], repeat it.

        Those of a prompt in chunks are put together over the passes. The error leaves the cache empty.
        """
        if self.prefix_hash is None:
            return
        before, self._asked = self._asked, None
        asked = token_ids[0]
        if self.length:
            if before is None or before.shape[0] != self.length or not self.prompt_end:
                return  # what was fed first is not known, or is long enough to have been compared
            asked = torch.cat([before, asked])
        if asked.shape[0] < self.prefix_tokens:
            self._asked = asked if self.prompt_end else None
        elif hash_token_ids(asked[: self.prefix_tokens]) == self.prefix_hash:
            self.reset()
            raise ValueError(
                f"input_ids repeat the {self.prefix_tokens} tokens that the cache begins with: give the tokens of the "
                "question alone"
            )

    @property
    def sparse_layers(self) -> list[SparseLayer]:
        """The full-attention layers, dense or sparse."""
        return [layer for layer in self.layers if isinstance(layer, SparseLayer)]

    @property
    def has_evicted(self) -> bool:
        """Whether the method has evicted tokens, so that no pass can read them any more."""
        return any(layer.storage.least_length > 0 for layer in self.sparse_layers)

    @property
    def max_cache_len(self) -> int:
        """Maximum number of tokens; -1 for no limit. PEFT reads this name."""
        return min(layer.get_max_length() for layer in self.sparse_layers)

    @property
    def lengths(self) -> list[Lengths]:
        """The lengths of the rows, once for each device that holds layers."""
        return list(self.shared.lengths.values())

    @property
    def has_padding(self) -> bool:
        """Whether any row has left padding."""
        return any(lengths.has_padding for lengths in self.lengths)

    @property
    def least_padding(self) -> int:
        """Left padding of the row with the least, also of a first pass before any layer has run."""
        if self.lengths:
            return self.lengths[0].least_padding
        return 0 if self.shared.padding is None else self.shared.padding.least

    @property
    def is_traced(self) -> bool:
        """Whether a decode step over this cache is being compiled, or recorded as a CUDA graph."""
        # Not is_compileable, which asks every layer: the compiler would trace that for every layer.
        is_traced = torch.compiler.is_compiling() or self.shared.is_captured
        return is_traced and self._is_static and len(self.shared.lengths) > 0

    @property
    def length(self) -> int:
        """Tokens cached per row in every layer, left padding included.

        Excludes tokens of a pass in progress, and of one that failed. Waits for the device after compiled steps.
        """
        return self._held if self._pass is None else self._pass.cached

    @property
    def _held(self) -> int:
        """Tokens per row in every layer, those of a pass in progress included once all layers have them."""
        return min(int(layer.get_seq_length()) for layer in self.layers)

    def get_seq_length(self, layer_idx: int = 0) -> int | torch.Tensor:
        """Tokens fed per row, left padding included; a device scalar in a compiled step."""
        length: int | torch.Tensor = self.layers[layer_idx].get_seq_length() if self.is_traced else self.length
        return length + len(self.left_out if self._pass is None else self._pass.left_out)

    def get_query_offset(self, layer_idx: int = 0) -> int | torch.Tensor:
        """Position of the next token, for masks; a device scalar after compiled steps."""
        layer = self.layers[layer_idx]
        offset: int | torch.Tensor = (
            layer.get_query_offset() if isinstance(layer, SparseLayer) else layer.get_seq_length()
        )
        return offset + self._left_out_of_masks

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Key length and offset of the attention mask for the next ``query_length`` tokens."""
        length, offset = super().get_mask_sizes(query_length, layer_idx)
        return length + self._left_out_of_masks, offset

    @property
    def _left_out_of_masks(self) -> int:
        """Uncached tokens that the masks of ``generate()`` include; the mask of a pass in progress excludes them."""
        return len(self.left_out) if self._pass is None else 0

    @property
    def may_look_ahead(self) -> bool:
        """Whether tokens of the next pass may attend to later ones, as the mask of an image's tokens lets them."""
        return not self.length and not self.prefix_tokens and self.method.prefills_densely

    @property
    def needs_decode_mask(self) -> bool:
        """Whether a decode step needs a mask: sliding-window layers with padding do, others read by row bounds."""
        return self.has_padding and len(self.sparse_layers) < len(self.layers)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append tokens to one layer and return its keys and values; see :meth:`SparseLayer.update`.

        Raises
        ------
        ValueError
            The model is not patched, and would read the cache otherwise than the method: the cache has a prefix or has
            evicted tokens, or its keys are not those of the model's own RoPE.
        """
        if self._pass is None and not self.is_traced:
            self._check_unpatched()
            return self.append_tokens(key_states, value_states, layer_idx, *args, **kwargs)
        visible: tuple[torch.Tensor, torch.Tensor] = super().update(
            key_states, value_states, layer_idx, *args, **kwargs
        )
        return visible

    def append_tokens(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append tokens to one layer as the patched model would, outside a pass; see :meth:`SparseLayer.update`.

        A method with ``rotates_keys`` takes keys before RoPE.
        """
        self.unpark()
        self._stages.end_pass()
        visible: tuple[torch.Tensor, torch.Tensor] = super().update(
            key_states, value_states, layer_idx, *args, **kwargs
        )
        return visible

    def _check_unpatched(self) -> None:
        """Raise ``ValueError`` unless a model that is not patched reads the cache as the method does."""
        name = self.method.name
        needs_patch = "call patch_model(model, cache.method) first"
        if self.prefix_tokens:
            raise ValueError(
                f"this cache has a prefix of {self.prefix_tokens} tokens, which only a model patched with {name!r} "
                f"reads: {needs_patch}"
            )
        if self.has_evicted:
            raise ValueError(
                f"{name!r} has evicted tokens of this cache, so only a model patched with it can continue: "
                f"{needs_patch}"
            )
        if self.method.rotates_keys or self.method.changes_rope:
            kind = "before RoPE" if self.method.rotates_keys else "after a RoPE of its own"
            raise ValueError(
                f"{name!r} caches keys {kind}, so only a model patched with it can use this cache: {needs_patch}"
            )

    def use_rope(self, tables: RopeTables) -> None:
        """Set the patched model's rotations, for a method with ``rotates_keys``."""
        tables.refresh()
        for layer in self.sparse_layers:
            layer.use_rope(tables)

    def begin_call(
        self, attention_mask: torch.Tensor | None, query_length: int, left_out: Sequence[int] = ()
    ) -> tuple[ForwardPass, bool]:
        """Begin a forward pass of a patched model: check room and mask, and set the padding.

        Call :meth:`recover` first. Changes nothing if it raises. :meth:`end_call` ends the pass. If it is never called,
        as after an interrupt, the next use of the cache drops the pass.

        Parameters
        ----------
        attention_mask
            [batch, cached + new tokens], 1 for tokens and 0 for padding; None for no padding. A static cache also takes
            the causal mask that ``generate()`` derives from it, bool [batch, 1, new tokens, cached + new tokens].
        query_length
            Number of new tokens. A single one is a decode step, which never waits for a CUDA device: there
            ``Shared.check_masks`` reports a mask that hides cached tokens later.
        left_out
            Indices among the new tokens of those that are not cached; see :meth:`leave_out`.

        Returns
        -------
        tuple
            The pass, and whether padding after a token forces it to be dense. The cache is then unusable until it is
            cut back to its former length.

        Raises
        ------
        ValueError
            The tokens exceed ``max_cache_len``, or the mask has a wrong shape or hides cached tokens.
        """
        cached = self.length
        if self.closed_from is not None:
            raise ValueError(
                "the cache holds padding after a token, so it cannot be extended: pad on the left "
                "(tokenizer.padding_side = 'left'); if a PEFT model puts learned tokens before the padding, use "
                f"prompts of one length; or cut the cache back to {self.closed_from} tokens with crop or reset"
            )
        if not self.sparse_layers:
            raise ValueError("every layer of this cache has a sliding window; there is nothing to make sparse")
        self.sparse_layers[0].check_room(cached, query_length)
        forward_pass = ForwardPass(self, query_length)
        is_dense = forward_pass.take_mask(attention_mask)
        if not self.shared.prompt_is_open:
            self.finished_at = cached  # decode steps keep up what the method made of the prompt
        self._pass = forward_pass
        self._stages.begin_pass()
        self.left_out = [*self.left_out, *(self.fed + place for place in left_out)]
        if forward_pass.is_decode_step:
            if self.shared.prompt_is_open:
                self._finish_prompt()
                forward_pass.remember_layers()
            self.expect_step()
        return forward_pass, is_dense

    def check_rows(self, rows: int) -> None:
        """Raise ``ValueError`` if the device cannot hold at once what a step over so many rows reads."""
        if self._offloaded is not None and self.method.offloading is not None:
            self._offloaded.check_rows(rows, self.method.offloading)

    def reserve_host(self, shape: Sequence[int], dtype: torch.dtype, devices: Callable[[], list[torch.device]]) -> None:
        """Allocate the host memory of the pass that has begun, before any layer runs. Do nothing without any.

        Parameters
        ----------
        shape
            That of the keys of the pass: batch, kv_heads, tokens, head_dim.
        dtype
            Their dtype.
        devices
            Returns the device of each of the model's layers.

        Raises
        ------
        RuntimeError
            Host memory does not suffice, or cannot be pinned. Undo the pass by :meth:`end_call`.
        """
        if self.kv_storage == "device":
            return
        layers = [layer for layer in self.sparse_layers if isinstance(layer.storage, HostStorage)]
        if self.length:
            grow(layers, self.length + shape[2])
        else:
            reserve_first(layers, shape, dtype, devices())

    @property
    def fed(self) -> int:
        """Tokens fed per row, including left padding and the uncached tokens of :meth:`leave_out`."""
        return self.length + len(self.left_out)

    def leave_out(self, is_token: torch.Tensor, query_length: int) -> tuple[torch.Tensor, list[int] | None]:
        """Find new tokens that the mask hides in every row, after a visible one. None attends to them: skip them.

        Parameters
        ----------
        is_token
            bool [batch, tokens fed before + new tokens].
        query_length
            Number of new tokens.

        Returns
        -------
        tuple
            The mask of cached and kept tokens, for :meth:`begin_call`; and the indices of the kept new tokens, or None
            if all are kept.
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
        """End a forward pass and return it; None for a compiled step. Undo the pass if it failed."""
        forward_pass = self._pass
        if forward_pass is not None:
            self._stages.end_pass()
        if failed:
            self.prompt_end = 0
            # A pass over a parked cache has changed nothing; after an operation cut off, only a reset helps. While a
            # CUDA graph is recorded the lengths cannot be read; the next use of the cache recovers it.
            if self._cut_off is None and not self.is_parked and not self.shared.is_captured:
                self.recover()
        elif forward_pass is not None and not forward_pass.is_decode_step and self.closed_from is None:
            is_whole = self._held + len(self.left_out) >= self.prompt_end
            forward_pass.has_finished = self.is_compileable and is_whole
            try:
                self._check_layers_agree()
                self.shared.prompt_is_open = True
                if forward_pass.has_finished:
                    self._finish_prompt()
                if is_whole:
                    self.prompt_end = 0
            except BaseException:
                self.recover()
                raise
        self._pass = self.shared.padding = None
        self.forget_step()
        return forward_pass

    def _check_layers_agree(self) -> None:
        """Raise if a layer has not got the tokens of a pass: the model that has run has none for it."""
        lengths = [int(layer.get_seq_length()) for layer in self.layers]
        if min(lengths) != max(lengths):
            missing = [number for number, length in enumerate(lengths) if length < max(lengths)]
            raise ValueError(
                f"past_key_values has {len(lengths)} layers, of which the model that has run has none for "
                f"{', '.join(map(str, missing))} (counted from 0): its layers do not agree with its configuration, or "
                "have changed since it was patched; patch it again once they agree"
            )

    @property
    def compiles_verification(self) -> bool:
        """Whether a pass that verifies a draft may be compiled: its layers then read by row bounds on the device."""
        return (
            self.is_compileable
            and self.kv_storage == "device"
            and not self.left_out
            and len(self.sparse_layers) == len(self.layers)
            and self.method.compiles_verification
        )

    @contextmanager
    def verifying(self) -> Iterator[None]:
        """Announce compiled passes over several tokens that verify drafts; see :attr:`compiles_verification`."""
        self.shared.verifies_draft = True
        try:
            yield
        finally:
            self.shared.verifies_draft = False

    @contextmanager
    def captured(self) -> Iterator[None]:
        """Run decode steps as a CUDA graph repeats them: by lengths on the device alone, without checks.

        Raises
        ------
        ValueError
            The cache is not static, holds no tokens, or has layers on several devices.
        """
        if not self.is_compileable or len(self.lengths) != 1:
            kind = f"one on {len(self.lengths)} devices" if self.is_compileable else "one that grows"
            raise ValueError(
                f"a CUDA graph of a decode step needs a static cache that holds a prompt on one device, got {kind}: "
                "create it with SparseCache.for_model(model, max_cache_len=...)"
            )
        (lengths,) = self.lengths
        self.shared.is_captured = lengths.is_captured = True
        try:
            yield
        finally:
            self.shared.is_captured = lengths.is_captured = False

    def note_replay(self) -> None:
        """Take note that a CUDA graph has repeated a :meth:`captured` pass: the host no longer knows the lengths."""
        for lengths in self.lengths:
            lengths.forget()
        for layer in self.sparse_layers:
            layer.mark_written()

    def row_mask(self, num_new: int) -> torch.Tensor | None:
        """Return the mask of cached and new tokens, bool [batch, tokens]; None if no row has padding."""
        if not self.has_padding:
            return None
        seq_start = self.lengths[0].seq_start
        return torch.arange(self.length + num_new, device=seq_start.device) >= seq_start[:, None]

    def check_present(self) -> None:
        """Raise ``ValueError`` if the cache is parked: a compiled step cannot move it back."""
        if self.is_parked:
            raise ValueError("the cache is parked, and a compiled step cannot move it back: call cache.unpark() first")

    def expect_step(self) -> None:
        """Announce a decode step of a patched model, whose token the method's ``decode`` writes."""
        for lengths in self.lengths:
            lengths.expects_step = True

    def park(self) -> None:
        """Move the contents to host memory, and free the device's, until the cache is used again.

        A server that keeps a cache for each chat parks those that are not in use. Keys, values, metadata and the
        prompt's queries go to host memory, which is pinned for CUDA devices. Whatever uses the cache next moves them
        back first: a forward pass, ``generate()``, or a method such as :meth:`crop`, :meth:`save` or :meth:`fork`.
        :meth:`unpark` does so ahead of time. Tokens, lengths and statistics stay as they were.

        Keys and values that are in host memory already stay there: then the device's metadata moves, and its pool of
        blocks is freed. A prefix stays on the device, for the prepared context that it belongs to.

        Buffers that a fork shares stay on the device for the fork, and the parked cache comes back with its own. A
        static cache comes back at other addresses, so compiled steps record their CUDA graph again.

        Raises
        ------
        RuntimeError
            Host memory does not suffice. The cache is then as it was.
        """
        if self.is_parked:
            return
        self.recover()
        self._stages.end_pass()
        try:
            self.is_parked = True
            for layer in self.sparse_layers:
                layer.offload()
            for layer in self.layers:
                if layer.is_sliding and layer.is_initialized:
                    self._parked_windows[layer] = ParkedTensors(partial(_exchange_window, layer))
        except BaseException:
            self.unpark()
            raise

    def unpark(self) -> None:
        """Move a parked cache back to its devices. Does nothing to another one.

        Raises
        ------
        torch.OutOfMemoryError, RuntimeError
            A device's memory does not suffice. The cache stays parked, and can be used once there is enough.
        """
        if not self.is_parked:
            return
        for layer in self.sparse_layers:
            layer.prefetch()
        for layer, parked in list(self._parked_windows.items()):
            parked.restore(partial(_exchange_window, layer), before=lambda: None)
            del self._parked_windows[layer]
        self.is_parked = False

    def recover(self) -> None:
        """Undo a forward pass that failed or was interrupted; move a parked cache back.

        Raises
        ------
        ValueError
            An operation such as :meth:`reorder_cache` failed midway, so that only :meth:`reset` helps.
        """
        if self._cut_off is not None:
            raise ValueError(
                f"{self._cut_off} failed midway, so the layers of this cache no longer agree: call reset() on it, and "
                "feed its tokens again"
            )
        self.unpark()
        for layer in self.sparse_layers:
            layer.settle()
        # The layers' minimum without a pass only: during one, all may hold a prompt's first chunks.
        cached, forward_pass = self.length, self._pass
        self.shared.padding = self.attention_input = None
        if forward_pass is not None:
            self._stages.end_pass()
            forward_pass.undo()
        elif not self._is_recovering and all(lengths.known_length in (None, cached) for lengths in self.lengths):
            return
        self._is_recovering = True
        for lengths in self.lengths:
            lengths.cut(cached)
        keeps_metadata = forward_pass is not None and forward_pass.keeps_metadata(self.method)
        for layer in self.sparse_layers:
            layer.roll_back(keeps_metadata)
        if forward_pass is not None and (keeps_metadata or not cached):
            forward_pass.restore_prompt()
        elif cached:
            self.reopen_prompt()
        # Not before: memory may run out here too, and the next use then begins anew.
        self._pass, self._is_recovering = None, False

    def forget_step(self) -> None:
        """Undo :meth:`expect_step`."""
        for lengths in self.lengths:
            lengths.expects_step = False

    def complete_prompt(self) -> None:
        """Let the method finish the prompt now, so that the next pass is a question about it.

        Without this call the prompt ends before the first decode step, however many passes it took.
        """
        self.recover()
        if not self.shared.prompt_is_open:
            return
        storages = [(layer.storage, layer.storage.state()) for layer in self.sparse_layers]
        try:
            self._finish_prompt()
        except BaseException:
            for storage, state in storages:
                if state is not None:
                    storage.restore(state)
            raise

    def reopen_prompt(self) -> None:
        """Let the method finish the prompt again: now if decode steps may be compiled, else before the next one."""
        self.shared.prompt_is_open = True
        if self.is_compileable:
            self._finish_prompt()

    def _finish_prompt(self) -> None:
        by_method: dict[SparseMethod, list[SparseLayer]] = {}
        for layer in self.sparse_layers:
            if layer.is_initialized:
                by_method.setdefault(layer.method, []).append(layer)
        for method, layers in by_method.items():
            with uncast(layers[0].device):
                method.finish_prompt(layers)
        self.shared.prompt_is_open, self.finished_at = False, self._held

    def _try_rows(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Raise what a change to rows that do not exist raises, before any layer is changed.

        On the host, which waits for the device's indices: CUDA does not survive one out of range.
        """
        for lengths in self.lengths:
            change(torch.arange(len(lengths.seq_start)))

    @contextmanager
    def _changing(self, operation: str) -> Iterator[None]:
        """Remember an operation that changes layer after layer until it is complete."""
        self._cut_off = operation
        yield
        self._cut_off = None

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last ``-tokens_to_remove`` tokens of every row.

        Raises
        ------
        TypeError
            ``tokens_to_remove`` is no whole number.
        ValueError
            ``tokens_to_remove`` is positive or exceeds the cached tokens, or the method has evicted tokens at a greater
            length. Nothing is removed.
        RuntimeError
            A sliding-window layer has already dropped tokens that would become visible again.
        """
        self.recover()
        still_fed = length_after_crop(self.fed, tokens_to_remove)
        left_out = [position for position in self.left_out if position < still_fed]
        length = still_fed - len(left_out)
        for layer in self.sparse_layers:
            layer.check_cut(length)
        windows = [layer for layer in self.layers if layer.is_sliding and layer.is_initialized]
        for layer in windows:
            layer.check_crop(layer.get_seq_length() - length)
        for layer in windows:
            surplus = layer.get_seq_length() - length
            if surplus or layer.record_past:
                layer.crop(-surplus)
        with self._changing("crop"):
            for layer in self.sparse_layers:
                layer.cut(length)
            self.left_out, self.prompt_end = left_out, 0
            if self.closed_from is not None and length <= self.closed_from:
                self.closed_from = None
            if length <= self.finished_at:
                self.shared.prompt_is_open = False  # the unfinished prompt is gone
                self.finished_at = length

    def reset(self) -> None:
        """Remove all tokens; keep the buffers, unless an operation failed midway."""
        if self._cut_off is None:
            self.recover()
        else:
            for layer in self.sparse_layers:
                layer.discard()
        with self._changing("reset"):
            super().reset()
            for layer in self.layers:
                if layer.is_sliding and layer.is_initialized:  # Transformers' reset keeps a window of zeros
                    layer.keys, layer.values = layer.keys[:, :, :0], layer.values[:, :, :0]
            self.closed_from, self.left_out = None, []
            self.shared.prompt_is_open, self.finished_at, self.prompt_end = False, 0, 0

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Replace row ``b`` by row ``beam_idx[b]``, for beam search.

        Parameters
        ----------
        beam_idx
            int [batch]: for each row the one that takes its place, on any device.

        Raises
        ------
        TypeError
            ``beam_idx`` holds no whole numbers.
        IndexError
            There is no such row. Nothing is changed.
        """
        beam_idx = whole_numbers("beam_idx", beam_idx)
        self.recover()
        self._try_rows(lambda starts: starts.index_select(0, beam_idx.to(starts.device)))
        with self._changing("reorder_cache"):
            super().reorder_cache(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row ``repeats`` times, copies next to each other.

        Raises
        ------
        TypeError
            ``repeats`` is no whole number.
        ValueError
            It is below 1.
        """
        repeats = whole_number("repeats", repeats, 1)
        self.recover()
        self._try_rows(lambda starts: starts.repeat_interleave(repeats))
        with self._changing("batch_repeat_interleave"):
            super().batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep only the rows in ``indices``, in their order.

        Parameters
        ----------
        indices
            int [rows to keep] or bool [batch], on any device.

        Raises
        ------
        TypeError
            ``indices`` holds neither whole numbers nor a mask of the rows.
        ValueError
            No row is left.
        IndexError
            There is no such row. Nothing is changed.
        """
        if isinstance(indices, torch.Tensor) and indices.dtype == torch.bool:
            indices = indices.nonzero().flatten()
        indices = whole_numbers("indices", indices)
        if not indices.numel():
            raise ValueError("indices must keep at least one row, got none")
        self.recover()
        self._try_rows(lambda starts: starts[indices.to(starts.device)])
        with self._changing("batch_select_indices"):
            super().batch_select_indices(indices)


def _exchange_window(layer: Any, change: Exchange) -> None:
    """Replace the tensors of Transformers' layer with a sliding window."""
    layer.keys, layer.values = change(layer.keys), change(layer.values)


def _counters(layers: list[Any]) -> list[LayerCounter]:
    return [layer.counter if isinstance(layer, SparseLayer) else LayerCounter() for layer in layers]
