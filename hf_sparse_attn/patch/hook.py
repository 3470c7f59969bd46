"""The hooks around a patched decoder: they check its arguments and pass the cache to the attention function."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from hf_sparse_attn.cache.cache import SparseCache
from hf_sparse_attn.cache.forward_pass import ForwardPass
from hf_sparse_attn.cache.padding import causal_mask, shared_padding, token_mask
from hf_sparse_attn.cache_argument import CACHE, OLD_NAME, renamed
from hf_sparse_attn.heads import head_dim_of, kv_heads_of
from hf_sparse_attn.patch.chunked import ChunkedPrompt
from hf_sparse_attn.patch.gap import Gap
from hf_sparse_attn.patch.generation import NO_ATTENTIONS, NO_PAGED_CACHE, check_cache
from hf_sparse_attn.patch.support import NO_TRAINING, check_consecutive, check_positions
from hf_sparse_attn.patched import Patch, configs_of_layers, get_patch, layer_devices, text_model
from hf_sparse_attn.rope import decoder_rotary, max_positions

PAGED_CACHE = "PagedAttentionCache"
PASS_TOKENS = 8192
"""Tokens of a prompt that pass through the model at once, if the method attends from chunks of it.

A pass has the same kernels for one chunk as for many, but for attention, and the host launches them all. More tokens
take more memory for activations.
"""


class DecoderHooks:
    """Hooks before and after a decoder's forward pass. The state of a pass lives in its cache and arguments, not here.

    Parameters
    ----------
    model
        The patched model that the decoder belongs to, also if it is multimodal.
    implementations
        Names of the sparse attention functions, one of which must be the model's attention implementation.
    """

    def __init__(self, model: PreTrainedModel, implementations: tuple[str, ...]) -> None:
        self.model, self.text = model, text_model(model)
        self.implementations = implementations
        self.parameters = list(inspect.signature(self.text.get_decoder().forward).parameters)

    def before(
        self, decoder: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the decoder's arguments, with ``sparse_cache`` added: None if the pass is dense."""
        # Dynamo of PyTorch 2.8 takes every zip as strict.
        kwargs = renamed({**dict(zip(self.parameters[: len(args)], args, strict=True)), **kwargs})
        cache, tokens = kwargs.get(CACHE), _tokens(kwargs)
        if isinstance(cache, SparseCache) and tokens is not None:
            is_step, verifies = tokens.shape[1] == 1, cache.shared.verifies_draft
            if cache.is_traced and (is_step or verifies):
                # The prompt was checked; further checks would become part of the compiled step.
                cache.check_present()
                if is_step:
                    cache.expect_step()
                return (), _behind_prefix({**kwargs, "sparse_cache": cache}, cache)
            if verifies:  # but Dynamo runs it uncompiled, as it does after too many compilations
                cache.shared.verifies_draft = False
                kwargs["attention_mask"] = cache.row_mask(tokens.shape[1])
        patch = get_patch(self.model)
        self._check_state(decoder, kwargs)
        if tokens is None:
            return (), kwargs  # the decoder raises its own error
        if not patch.method.needs_mask and isinstance(kwargs.get("attention_mask"), dict):
            kwargs["attention_mask"] = _mask(kwargs)  # a multimodal model may hand on one for each kind of layer
        cache = self._cache_for(cache, kwargs, patch)
        if cache is None:  # without a cache the pass is dense
            self._check_layers(patch)
            check_positions(self.text.config, patch.method, tokens.shape[1], 0)
            return (), _densely(decoder, kwargs, patch)
        kwargs[CACHE] = cache
        return (), self._begin(decoder, cache, kwargs, patch)

    def after(self, decoder: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """End the pass and return the output for the whole input; ``output`` is None if the pass failed."""
        cache = kwargs.get(CACHE)
        forward_pass = cache.end_call(failed=output is None) if isinstance(cache, SparseCache) else None
        for step in forward_pass.finish if forward_pass is not None and output is not None else ():
            output = step(output)
        return output

    def _check_layers(self, patch: Patch) -> None:
        """Raise if a layer would attend, or rotate, as if the model were not patched: it was put in since."""
        if torch.compiler.is_compiling():
            return
        if patch.rotary is not None and decoder_rotary(self.text) is not patch.rotary:
            raise ValueError(
                f"the rotary module of this patched {type(self.model).__name__} was replaced after patch_model, whose "
                f"method {patch.method.name!r} decides how it rotates; call patch_model(model, ...) again"
            )
        for config in configs_of_layers(self.text):
            if config._attn_implementation not in self.implementations:
                raise ValueError(
                    f"a layer of this patched {type(self.model).__name__} has the attention implementation "
                    f"{config._attn_implementation!r}, which cannot read its cache: it was put into the model, or "
                    "unpatched with another one, after patch_model; call patch_model(model, ...) again"
                )

    def _check_state(self, decoder: torch.nn.Module, kwargs: dict[str, Any]) -> None:
        config = self.text.config
        if config._attn_implementation not in self.implementations:
            raise ValueError(
                f"the attention implementation of this patched {type(self.model).__name__} was set to "
                f"{config._attn_implementation!r}, which cannot read its cache; call unpatch_model(model) to keep this "
                "implementation, or patch_model(model, ...) to patch the model again"
            )
        if self.model.training or decoder.training:
            raise ValueError(NO_TRAINING)
        paged = kwargs.get("cache")  # from a manager of continuous batching that is older than the patch
        if paged is not None and (CACHE == OLD_NAME or type(paged).__name__ == PAGED_CACHE):
            raise ValueError(NO_PAGED_CACHE)
        wants_attentions = kwargs.get("output_attentions")
        if wants_attentions or (wants_attentions is None and config.output_attentions):
            raise ValueError(NO_ATTENTIONS)

    def _cache_for(self, cache: Any, kwargs: dict[str, Any], patch: Patch) -> SparseCache | None:
        """Return the cache of a pass: the given one, a new one, or None without caching."""
        if cache is None:
            use_cache = kwargs.get("use_cache")
            use_cache = self.text.config.use_cache if use_cache is None else use_cache
            return self._new_cache(patch) if use_cache else None
        if patch.takes_prefix and type(cache) is DynamicCache:
            return with_prefix(self._new_cache(patch), cache)
        check_cache(cache, patch, self.text.config)
        checked: SparseCache = cache
        return checked

    def _new_cache(self, patch: Patch) -> SparseCache:
        return SparseCache(self.text.config, patch.method, kv_storage=patch.kv_storage, head_shard=patch.head_shard)

    def _begin(
        self, decoder: torch.nn.Module, cache: SparseCache, kwargs: dict[str, Any], patch: Patch
    ) -> dict[str, Any]:
        """Begin a pass with a cache; return the decoder's arguments."""
        cache.recover()
        if kwargs.get("input_ids") is not None:
            cache.check_question(kwargs["input_ids"])
        kwargs = _with_mask_rows(kwargs)
        kwargs, gap = _close_gap(cache, kwargs)
        kwargs = _behind_prefix(kwargs, cache)
        mask = _mask(kwargs)
        cached, query_length = cache.prefix_tokens + cache.length, _tokens(kwargs).shape[1]
        if query_length == 1 and isinstance(mask, torch.Tensor) and mask.dim() == 4:
            mask = mask[..., : cache.length + 1]  # a multimodal model masks the room of static buffers too
        method, config = patch.method, self.text.config
        if cached == cache.prefix_tokens:  # once for a text, since it visits every module
            self._check_layers(patch)
        check_positions(config, method, query_length, cached)
        cache.check_rows(_tokens(kwargs).shape[0])
        cache.shared.recorder = patch.recorder
        if patch.rope_tables is not None:
            cache.use_rope(patch.rope_tables)  # before the prompt is finished
        forward_pass, is_dense = cache.begin_call(mask, query_length, () if gap is None else gap.left_out)
        patch.counters, patch.shared = cache.counters, cache.shared
        try:
            if cache.kv_storage == "host":
                self._reserve_host(cache, *_tokens(kwargs).shape[:2], patch)
            if is_dense:
                check_positions(config, method, query_length, cached, is_dense)
                kwargs = _densely(decoder, kwargs, patch)
            else:
                kwargs = self._sparsely(decoder, cache, kwargs, patch, forward_pass)
        except BaseException:
            cache.end_call(failed=True)
            raise
        if gap is not None:
            forward_pass.finish.append(gap.open)
        return kwargs

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _reserve_host(self, cache: SparseCache, rows: int, query_length: int, patch: Patch) -> None:
        """Allocate the host memory of a pass, so that no layer runs if there is too little."""
        config = self.text.config
        kv_heads = kv_heads_of(config) // patch.head_shard.size
        shape = (rows, kv_heads, query_length, head_dim_of(config))
        cache.reserve_host(shape, self.text.dtype, partial(layer_devices, self.model))

    def _sparsely(
        self,
        decoder: torch.nn.Module,
        cache: SparseCache,
        kwargs: dict[str, Any],
        patch: Patch,
        forward_pass: ForwardPass,
    ) -> dict[str, Any]:
        """Return the arguments of a sparse pass; feed all but the last chunk of a long prompt first."""
        mask, method, is_decode_step = _mask(kwargs), patch.method, forward_pass.is_decode_step
        kwargs = {**kwargs, "sparse_cache": cache}
        if not method.needs_mask or (is_decode_step and not cache.needs_decode_mask):
            kwargs["attention_mask"] = None  # the layers read by the row bounds
        if is_decode_step:
            return kwargs
        if patch.rope_tables is not None:
            check_consecutive(kwargs.get("position_ids"), mask, method)
        length = _tokens(kwargs).shape[1]
        chunk = cache.shared.prefill_chunk = method.prefill_chunk(max_positions(self.text.config))
        if chunk is None:
            return kwargs
        # Each layer divides its pass by itself, but not a compiled one.
        pass_tokens, padding = chunk, 0
        if not torch.compiler.is_compiling():
            pass_tokens = chunk * max(1, PASS_TOKENS // chunk)
            padding = shared_padding(cache.least_padding, cache.length, length)
        if length <= padding + pass_tokens:
            return kwargs
        prompt = ChunkedPrompt(length, kwargs.get("return_dict") is False)
        forward_pass.finish.append(prompt.join)
        return prompt.feed_all_but_last(decoder.forward, _with_positions(kwargs, cache.fed), pass_tokens, padding)


def _with_mask_rows(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return a decoder's arguments with a row of the attention mask for each row of the batch; a single one is for all.

    Raises
    ------
    ValueError
        The mask has another number of rows.
    """
    mask, rows = _mask(kwargs), _tokens(kwargs).shape[0]
    if not isinstance(mask, torch.Tensor) or mask.dim() not in (2, 4) or mask.shape[0] == rows:
        return kwargs
    if mask.shape[0] != 1:
        raise ValueError(f"attention_mask must have {rows} rows, as the batch has, or 1 for all; got {mask.shape[0]}")
    return {**kwargs, "attention_mask": mask.expand(rows, *mask.shape[1:])}


def _tokens(kwargs: dict[str, Any]) -> Any:
    """Return the tokens or embeddings, [batch, tokens, ...], among a decoder's arguments."""
    tokens = kwargs.get("input_ids")
    return kwargs.get("inputs_embeds") if tokens is None else tokens


def _mask(kwargs: dict[str, Any]) -> Any:
    mask = kwargs.get("attention_mask")
    return mask.get("full_attention") if isinstance(mask, dict) else mask


def _close_gap(cache: SparseCache, kwargs: dict[str, Any]) -> tuple[dict[str, Any], Gap | None]:
    """Remove uncached tokens, of this pass and of earlier ones, from a pass and its mask."""
    mask, length = kwargs.get("attention_mask"), _tokens(kwargs).shape[1]
    if not isinstance(mask, torch.Tensor) or (length == 1 and not cache.left_out):
        return kwargs, None
    is_token, kept = cache.leave_out(token_mask(mask, cache.fed, length, cache.may_look_ahead), length)
    if kept is None:
        return ({**kwargs, "attention_mask": is_token} if cache.left_out else kwargs), None
    gap = Gap(length, kept)
    return {**gap.close(kwargs, cache.fed), "attention_mask": is_token}, gap


def _with_positions(kwargs: dict[str, Any], first: int = 0) -> dict[str, Any]:
    """Return a decoder's arguments with the positions that it would use by default."""
    if kwargs.get("position_ids") is not None:
        return kwargs
    tokens = _tokens(kwargs)
    return {**kwargs, "position_ids": torch.arange(tokens.shape[1], device=tokens.device)[None] + first}


def _behind_prefix(kwargs: dict[str, Any], cache: SparseCache) -> dict[str, Any]:
    """Return a decoder's arguments with positions that count the tokens of the cache's prefix too."""
    if not cache.prefix_tokens:
        return kwargs
    kwargs = _with_positions(kwargs, 0 if cache.is_traced else cache.fed)
    return {**kwargs, "position_ids": kwargs["position_ids"] + cache.prefix_tokens}


def _densely(decoder: torch.nn.Module, kwargs: dict[str, Any], patch: Patch) -> dict[str, Any]:
    """Return the arguments of a dense pass, with the mask and rotation of the stock model."""
    kwargs = {**kwargs, "sparse_cache": None}
    mask = kwargs.get("attention_mask")
    if not patch.method.needs_mask and isinstance(mask, torch.Tensor) and mask.dim() == 2:
        # The mask function of the unmasked implementation would leave it 2-D.
        kwargs = {**kwargs, "attention_mask": causal_mask(mask, _tokens(kwargs).shape[1])}
    if patch.rope_tables is not None:  # the rotary module is disabled, so the attention function rotates
        kwargs = _with_positions(kwargs)
        positions, dtype = kwargs["position_ids"], next(decoder.parameters()).dtype
        kwargs["rotation"] = patch.rope_tables.rotary.forward(positions.new_empty(0, dtype=dtype), positions)
    return kwargs


def with_prefix(cache: SparseCache, prefix: DynamicCache) -> SparseCache:
    """Copy the learned prefix of PEFT's prefix tuning into an empty cache, and return it."""
    for layer_idx, layer in enumerate(prefix.layers):
        if layer.is_initialized:
            cache.append_tokens(layer.keys, layer.values, layer_idx)
    return cache
