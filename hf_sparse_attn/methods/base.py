"""The contract between a sparse-attention method and the rest of the package."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch
from hf_sparse_attn_kernels import sparse_decode

from hf_sparse_attn.checks import boolean
from hf_sparse_attn.dense import dense_attention
from hf_sparse_attn.methods.merge import merge_attention
from hf_sparse_attn.rope import max_positions

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    from hf_sparse_attn.cache.layer import SparseLayer


class Selection(NamedTuple):
    """The blocks of cached tokens that one decode step reads.

    Blocks are counted from each row's first token (``layer.seq_start``), so left padding never shifts them. All query
    heads of a GQA group read the same blocks.
    """

    block_indices: torch.Tensor
    """int32 [batch, kv_heads, n], or [batch, 1, n] if all KV heads share it: valid entries first, then ``-1``; no
    duplicates."""
    block_counts: torch.Tensor
    """int32 [batch, kv_heads] or [batch, 1]: number of valid entries."""
    block_size: int
    """Tokens in a block; 1 for methods that select single tokens."""


class Offload(NamedTuple):
    """How a method keeps K and V in host memory, by an ``OffloadStorage``."""

    block_size: int
    """Tokens in a block of the method's selections."""
    blocks_at_once: int
    """Maximum number of complete blocks that a KV head must hold at once in a step."""
    held_at_once: str
    """Names these blocks in messages, such as ``"all of a selection"``."""
    gpu_cache_tokens: int
    """Tokens of each offloaded layer and KV head that the pool on the device has room for on average, in all rows."""
    eviction: str
    """Policy of the pool, ``"lru"`` or ``"fifo"``."""

    @property
    def layout(self) -> tuple[int, int, str]:
        """Settings that caches must share to share host memory and pool."""
        return self.block_size, self.gpu_cache_tokens, self.eviction

    def slots(self, layers: int, kv_heads: int) -> int:
        """Return the number of blocks in the pool of so many layers."""
        return self.gpu_cache_tokens // self.block_size * layers * kv_heads


class SelectionSize(NamedTuple):
    """Size of the selections of a method, for a storage in host memory; see ``SparseMethod.selection_size``."""

    block_size: int
    """Tokens in a block."""
    blocks: int | None
    """Maximum number of blocks for a row and KV head; None if it is not fixed."""


@dataclass(frozen=True)
class SparseMethod:
    """A sparse-attention method: hyperparameters as fields, rules as methods, no state.

    All state (keys, values, metadata, lengths) lives in the :class:`~hf_sparse_attn.cache.layer.SparseLayer` that each
    call receives. A subclass adds its paper's parameters as fields and sets the class variables below. It implements
    :meth:`select`, or overrides :meth:`decode`; it may override :meth:`prefill`. Decode steps over static storage are
    compiled, so they must not read lengths on the host: use ``layer.capacity``, ``layer.max_blocks`` and the device
    tensors.

    Parameters
    ----------
    token_budget
        Cached tokens whose K and V a KV head reads in a decode step, sink and recent tokens included.
    dense_layers
        Number of first layers that attend to the whole cache.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    paper: ClassVar[str]
    sparse_phases: ClassVar[tuple[str, ...]] = ("decode",)
    """Phases that the method makes sparse; empty if it reads everything, so that budgets have no effect."""

    # What the method needs of the cache and the patch; each flag has one effect.
    rotates_keys: ClassVar[bool] = False
    """Cache keys before RoPE; the method rotates the keys that it reads by ``layer.rope``."""
    needs_mask: ClassVar[bool] = True
    """Give :meth:`prefill` a mask. If False no mask is made, and prefill uses the row bounds."""
    extends_positions: ClassVar[bool] = False
    """Allow prompts longer than the positions that the model was trained on; :meth:`prompt_limit` may limit them."""
    changes_rope: ClassVar[bool] = False
    """Rotate queries and keys by the RoPE of :meth:`rope_config` instead of the model's own."""
    reads_prefix: ClassVar[bool] = False
    """Attend to ``layer.prefix``, tokens before the rows, beside the layer's own tokens."""
    evicts: ClassVar[bool] = False
    """Forget tokens for good: ``layer.storage`` is then an ``EvictingStorage``, which holds the kept ones only."""
    keeps_generated: ClassVar[bool] = False
    """Evict from the first prompt only: later tokens are all read, beside ``token_budget`` tokens of that prompt."""
    needs_weights: ClassVar[bool] = False
    """Refuse a fork of another method's cache, which has not added up the attention weights of the prompt."""
    needs_queries: ClassVar[bool] = True
    """Refuse a fork of a cache that kept fewer queries than :attr:`keeps_queries`; if False, do without them there."""
    rehearses: ClassVar[bool] = False
    """Give decode steps ``layer.rehearsed_query``, made of the previous attention's input; not in the first layer."""
    lasting_metadata: ClassVar[tuple[str, ...]] = ()
    """Names of metadata that cannot be computed from keys and values: kept by a rebuild, and needed by a fork."""
    appends_metadata: ClassVar[bool] = False
    """Metadata is appended only, so :meth:`crop_metadata` undoes a failed pass over several tokens; if False, it is
    rebuilt from the keys and the prompt finished anew."""
    counts: ClassVar[tuple[str, ...]] = ()
    """Names of the method's own counts in ``layer.counter.own``, shown by the stats next to tokens and bytes."""

    token_budget: int = 1024
    dense_layers: int = 0

    def __init_subclass__(cls, *, partial: bool = False) -> None:
        """Check that the class implements a decode step; a ``partial`` one leaves that to its subclasses.

        Raises
        ------
        TypeError
            The class implements neither ``select`` nor ``decode``.
        """
        super().__init_subclass__()
        if not partial and cls.select is SparseMethod.select and cls.decode is SparseMethod.decode:
            raise TypeError(f"{cls.__name__} must implement select() or decode()")

    def __post_init__(self) -> None:
        """Check the hyperparameters; subclasses extend this.

        Raises
        ------
        TypeError
            A value is of another type than the hyperparameter's: a whole number, unless it is said to be another.
        ValueError
            A value is out of range.
        """
        self._check_types()
        self._require("token_budget", self.token_budget >= 1, "at least 1")
        self._require("dense_layers", self.dense_layers >= 0, "0 or more")
        may_be_dense = self.dense_layers == 0 or not self.rotates_keys
        self._require("dense_layers", may_be_dense, "0: a dense layer would rotate keys beyond the trained positions")

    def _check_types(self) -> None:
        """Check the fields that are whole numbers or bools by their annotations."""
        for field in fields(self):
            value, annotation = getattr(self, field.name), str(getattr(field.type, "__name__", field.type))
            kind = annotation.removesuffix(" | None")
            if kind != annotation and value is None:
                continue
            or_else = "" if kind == annotation else " or None"
            if kind == "int" and (isinstance(value, bool) or not isinstance(value, int)):
                raise TypeError(f"{field.name} must be a whole number{or_else}, got {value!r}")
            if kind == "bool":
                boolean(field.name, value)

    def _check_numbers(self, *parameters: str) -> None:
        for parameter in parameters:
            value = getattr(self, parameter)
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise TypeError(f"{parameter} must be a number, got {value!r}")

    def _require(self, parameter: str, holds: bool, allowed: str) -> None:
        if not holds:
            raise ValueError(f"{self.name}: {parameter} must be {allowed}, got {getattr(self, parameter)!r}")

    def check_model(self, model: PreTrainedModel) -> None:
        """Raise ``ValueError`` if the method does not support a model that the package supports."""

    @property
    def offloading(self) -> Offload | None:
        """How the cache keeps K and V in host memory; None to keep them on the device."""
        return None

    @property
    def resident(self) -> SparseMethod:
        """The same method with K and V on the device."""
        return self

    @property
    def selection_size(self) -> SelectionSize | None:
        """Size of a step's selection if ``kv_storage="host"`` may hold K and V; None if it may not.

        It may if decode steps read K and V by :meth:`attend`, or sparsely in ``layer.present_rows`` (``blocks`` is then
        None), and otherwise only a few tokens: the newest block's. In passes over several tokens
        :meth:`update_metadata` and :meth:`prefill` must read ``layer.rows``, not ``layer.keys`` or ``layer.values``.
        """
        return None

    @property
    def keeps_queries(self) -> int:
        """Number of a prompt's last queries that ``layer.prompt_queries`` keeps for :meth:`finish_prompt`.

        If at least 1, it keeps the mean of all of the prompt's queries too.
        """
        return 0

    @property
    def compiles_verification(self) -> bool:
        """Whether a pass that verifies a draft may be compiled, so that :meth:`finish_prompt` is not called after it.

        :meth:`update_metadata` alone then keeps the metadata up to date, without reading lengths on the host. By
        default it does if the method has no :meth:`finish_prompt`.
        """
        return type(self).finish_prompt is SparseMethod.finish_prompt

    def covers(self, length: int) -> bool:
        """Whether the budget covers ``length`` tokens, so that dense attention costs no more."""
        return length <= self.token_budget

    @property
    def prefills_densely(self) -> bool:
        """Whether :meth:`prefill` is dense under whatever mask it gets."""
        return self.needs_mask and type(self).prefill is SparseMethod.prefill

    def prefill_chunk(self, positions: int) -> int | None:
        """Maximum tokens that :meth:`prefill` attends from at once, for a model with ``positions``; None for no limit.

        Layers divide longer passes. The rows then end with the chunk's last token, though later ones are written.
        """
        return None

    def evicting_heads(self, layer_idx: int) -> tuple[int, ...] | None:
        """Return the KV heads of a layer whose tokens the method evicts, if it ``evicts``; None for all of them."""
        return None

    def rope_slots(self, positions: int) -> int:
        """Number of slots that ``layer.rope`` needs for a model with ``positions`` positions, if ``rotates_keys``."""
        return positions

    def rope_config(self, config: PreTrainedConfig) -> PreTrainedConfig:
        """Return the configuration whose RoPE the patched model has: a copy with other settings if ``changes_rope``."""
        return config

    def prompt_limit(self, config: PreTrainedConfig) -> int | None:
        """Maximum tokens of a prompt, by its positions; None for no limit."""
        return None if self.extends_positions else max_positions(self.rope_config(config))

    def init_metadata(self, layer: SparseLayer) -> dict[str, torch.Tensor]:
        """Allocate the tensors that the method keeps in addition to K and V, for ``layer.capacity`` tokens.

        Every tensor starts with the batch dimension and lies on the device of ``layer.keys``. Only ``layer.layer_idx``,
        ``layer.q_heads`` and the shape, dtype and device of ``layer.keys`` may be read. When a layer grows, this is
        called again, and the old contents are copied into the leading part of the new tensors.
        """
        return {}

    def update_metadata(self, layer: SparseLayer, num_new: int) -> None:
        """Update ``layer.metadata`` in place after ``num_new`` tokens were appended to every row.

        ``num_new`` may be the whole length: then everything is rebuilt.
        """

    def crop_metadata(self, layer: SparseLayer) -> None:
        """Update ``layer.metadata`` in place after tokens were removed from the end of every row."""

    def finish_prompt(self, layers: Sequence[SparseLayer]) -> None:
        """Process a complete prompt: cluster it, evict from it, calibrate.

        Called with all layers that run the method, once before the first decode step after a prompt, however many
        forward passes the prompt took; earlier if ``SparseCache.complete_prompt`` says so. Over static storage, whose
        decode steps may be compiled, called after each of these passes; of a prompt that ``generate()`` feeds in
        chunks, after the last one. Called again when metadata was rebuilt: in a fork for another method, and after a
        failed pass of a prompt. Every pass over several tokens counts as a prompt, also in assisted decoding.
        """

    def decode(
        self, query: torch.Tensor, layer: SparseLayer, new_key: torch.Tensor, new_value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Cache a decode step's token, attend from it, and count the reads in ``layer.counter``.

        By default calls ``layer.append``, :meth:`select`, :meth:`metadata_bytes_read` and :meth:`attend`. Override it
        if selection and attention interleave, or if one op writes and selects. An override that does not call
        :meth:`attend` calls ``layer.note`` with the blocks that it read.

        Ops check their arguments in the first step of a layer, and in steps whose method, shapes, dtypes or devices
        differ from the last one's. In the others :func:`hf_sparse_attn_kernels.skip_checks` is in force.

        Parameters
        ----------
        query
            [batch, q_heads, head_dim], after RoPE, or before it if ``rotates_keys``.
        layer
            Includes the token in its lengths already.
        new_key, new_value
            [batch, kv_heads, head_dim]: the token, to be written at position ``layer.seq_end - 1`` of each row.
        scale
            The model's factor on q.k, usually ``head_dim ** -0.5``.

        Returns
        -------
        torch.Tensor
            [batch, q_heads, head_dim], from :meth:`attend`, ``dense_attention`` or ``layer.with_sinks``.
        """
        layer.append(new_key.unsqueeze(2), new_value.unsqueeze(2))
        selection = self.select(query, layer, scale)
        layer.counter.count_metadata(self.metadata_bytes_read(layer))
        return self.attend(query, layer, selection, scale)

    def prefill(self, query: torch.Tensor, layer: SparseLayer, scale: float, mask: torch.Tensor | None) -> torch.Tensor:
        """Attend from the newest cached tokens, by default densely.

        Parameters
        ----------
        query
            [batch, q_heads, tokens, head_dim] of the last tokens of every row, at most :meth:`prefill_chunk`; before
            RoPE if ``rotates_keys``.
        layer
            Holds the tokens' K and V already.
        scale
            The model's factor on q.k.
        mask
            SDPA's mask, broadcastable to [batch, q_heads, tokens, length]; None for causal attention without padding,
            and if not ``needs_mask``.

        Returns
        -------
        torch.Tensor
            Same shape as ``query``, from ``dense_attention`` or ``layer.with_sinks``; the values at left padding are
            arbitrary.
        """
        return dense_attention(query, layer, scale, mask)

    def select(self, query: torch.Tensor, layer: SparseLayer, scale: float) -> Selection:
        """Choose the blocks that a decode step reads.

        Parameters
        ----------
        query
            [batch, q_heads, head_dim], as for :meth:`decode`.
        layer
            Holds K and V, the current token's included, and the metadata.
        scale
            The model's factor on q.k.
        """
        raise NotImplementedError(f"{type(self).__name__} decodes without a selection")

    def metadata_bytes_read(self, layer: SparseLayer) -> torch.Tensor | int:
        """Bytes of metadata that :meth:`select` reads in the current step, summed over rows and KV heads.

        A device tensor if it depends on the row lengths, since decoding never waits for the device.
        """
        return 0

    def attend(self, query: torch.Tensor, layer: SparseLayer, selection: Selection, scale: float) -> torch.Tensor:
        """Attend exactly to the selected blocks, count the step in ``layer.counter``, and note the selection.

        Takes and returns [batch, q_heads, head_dim]. Selected tokens get contiguous positions if ``rotates_keys``.
        """
        layer.note(selection)
        parts = [
            sparse_decode(
                query,
                present.keys,
                present.values,
                present.block_indices,
                present.block_counts,
                present.seq_start,
                present.seq_end,
                block_size=selection.block_size,
                scale=scale,
                counter=present.counter,
                finished=layer.finished,
                **layer.rotations,
            )
            for present in layer.present(selection)
        ]
        if len(parts) == 1:
            return layer.with_sinks(*parts[0])
        output, lse = merge_attention([(out.unsqueeze(1), lse.unsqueeze(1)) for out, lse in parts])
        return layer.with_sinks(output, lse).to(query.dtype)
