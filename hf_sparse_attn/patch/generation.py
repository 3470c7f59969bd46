"""The cache that ``generate()`` builds for a patched model: static if it compiles its decode steps."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import transformers
from packaging.version import Version
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.generation import GenerationMode

from hf_sparse_attn.cache.cache import SparseCache
from hf_sparse_attn.cache.padding import LEFT_PADDING, can_be_left_out, rows_with_holes
from hf_sparse_attn.cache.storage import MIN_CAPACITY
from hf_sparse_attn.cache_argument import CACHE
from hf_sparse_attn.head_shard import HeadShard
from hf_sparse_attn.heads import heads_of_layers
from hf_sparse_attn.patch.chunked import without_single_token
from hf_sparse_attn.patch.interrupted import forget_interrupted_run
from hf_sparse_attn.patched import Patch, get_patch, is_multimodal, is_patched, patched_method, text_model
from hf_sparse_attn.rope import depends_on_length, max_positions

NO_ATTENTIONS = "output_attentions=True is not supported: sparse attention computes no full attention weights"

NO_PAGED_CACHE = (
    "continuous batching (generate_batch, cache_implementation='paged') is not supported by a patched model: "
    "Transformers' paged cache hands attention all keys and values instead of pages to choose from, and keeps no "
    "metadata of its pages (see docs/serving.md); call generate() with a batch, or unpatch_model(model) first"
)


class StandIn:
    """Replacement of a model's method, in force while the model is patched.

    Parameters
    ----------
    model
        A patched model.
    stock
        The replaced method, called once the model is no longer patched.
    """

    def __init__(self, model: PreTrainedModel, stock: Callable[..., Any]) -> None:
        self.model, self.stock = model, stock

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the replacement, or the stock method if a user's wrapper still refers to this object."""
        return self.replacement(*args, **kwargs) if is_patched(self.model) else self.stock(*args, **kwargs)

    def replacement(self, *args: Any, **kwargs: Any) -> Any:
        """Take the place of the stock method."""
        raise NotImplementedError


class RefuseContinuousBatching(StandIn):
    """Replacement of ``model.init_continuous_batching``, which ``generate_batch`` calls first."""

    def replacement(self, *args: Any, **kwargs: Any) -> Any:
        """Raise ``ValueError``."""
        raise ValueError(NO_PAGED_CACHE)


MODE_OF_CALL = "_mode_of_call"
"""Attribute of a call's configuration: its mode with all arguments, an assistant among them."""


FORMER_STATIC_NAMES = ("sliding_window", "hybrid", "hybrid_chunked")
"""Names of ``cache_implementation`` that Transformers still takes for ``"static"``, for older checkpoints' sake."""


class PrepareCache(StandIn):
    """Replacement of ``model._prepare_cache_for_generation`` that gives ``generate()`` a :class:`SparseCache`."""

    def replacement(
        self,
        generation_config: Any,
        model_kwargs: dict[str, Any],
        generation_mode: Any,
        batch_size: int,
        max_cache_length: int,
        **kwargs: Any,
    ) -> None:
        """Write the cache to ``model_kwargs``, as the stock method does."""
        decoder = text_model(self.model).get_decoder()
        if getattr(decoder, "_orig_mod", decoder) is not get_patch(self.model).decoder:  # or a compiled one
            raise ValueError(
                f"the decoder of this patched {type(self.model).__name__} was replaced after patch_model, and the new "
                "one would read every token; call patch_model(model, ...) again"
            )
        if generation_config.output_attentions:
            raise ValueError(NO_ATTENTIONS)
        if generation_config.use_cache is False and model_kwargs.get(CACHE) is not None:
            raise ValueError(
                "use_cache=False and past_key_values exclude each other: without caching every step feeds the whole "
                "text, and the given cache would take it again each time; give one"
            )
        setattr(generation_config, MODE_OF_CALL, generation_mode)  # for this call only: generate() works on a copy
        if generation_config.cache_implementation in FORMER_STATIC_NAMES:
            generation_config.cache_implementation = "static"
        cache, wanted = model_kwargs.get(CACHE), generation_config.cache_implementation
        if wanted not in (None, "dynamic", "static"):
            raise ValueError(
                f"cache_implementation={wanted!r} is not supported by a patched model, which builds a SparseCache; "
                "allowed: None, 'dynamic', 'static'"
            )
        if cache is not None and wanted is not None:
            raise ValueError(f"cache_implementation={wanted!r} and past_key_values exclude each other; give one")
        is_recorded = get_patch(self.model).recorder is not None
        if is_recorded or not _may_compile(self.model, generation_config, generation_mode):
            generation_config.disable_compile = True
        else:
            forget_interrupted_run(self.model.device)
        if generation_config.use_cache is False:
            return None  # without a cache every pass is dense
        _check_padding(model_kwargs.get("attention_mask"))
        if cache is None:
            cache = self._new_cache(generation_config, max_cache_length)
            model_kwargs[CACHE] = cache
        else:
            check_cache(cache, get_patch(self.model), text_model(self.model).config)
            cache.recover()
            if generation_mode == GenerationMode.ASSISTED_GENERATION and cache.length > 0:
                raise ValueError(
                    f"past_key_values holds {cache.length} tokens, and generate() with assistant_model, "
                    "prompt_lookup_num_tokens or assistant_early_exit would feed them to it again: give no "
                    "past_key_values or an empty one, or draft with custom_generate=SelfSpeculation()"
                )
            if self.model._valid_auto_compile_criteria(model_kwargs, generation_config):
                _check_room(cache, generation_config, model_kwargs, max_cache_length)
            cache._is_user_defined = True  # stops generate() from feeding the cached tokens again
        cache.prompt_end = 0
        if generation_config.prefill_chunk_size is not None:  # changed for this call only, too
            self._check_chunks()
            cache.prompt_end = _mask_length(generation_config, model_kwargs)
            generation_config.prefill_chunk_size = self._chunk_size(generation_config, model_kwargs, cache)
        if generation_config.is_assistant:
            cache.activate_past_recording()
        return None

    def _check_chunks(self) -> None:
        """Raise if PEFT puts learned tokens before the prompt, whose inputs cannot be cut into chunks."""
        owner = getattr(self.model.prepare_inputs_for_generation, "__self__", None)  # PEFT's during its generate()
        if getattr(getattr(owner, "active_peft_config", None), "is_prompt_learning", False):
            raise ValueError(
                "prefill_chunk_size is not supported by PEFT's prompt learning, such as prompt and prefix tuning: "
                "leave it out"
            )

    def _chunk_size(self, generation_config: Any, model_kwargs: dict[str, Any], cache: SparseCache) -> int:
        """Return the tokens of the prompt's chunks, none of which is a single token that would be a decode step."""
        new = _mask_length(generation_config, model_kwargs) - cache.fed
        # Multiples of a method's own chunks stay multiples, so that these begin where they do in a prompt fed at once.
        own = get_patch(self.model).method.prefill_chunk(max_positions(text_model(self.model).config))
        shown = _shown(model_kwargs.get("attention_mask"), new)
        return without_single_token(generation_config.prefill_chunk_size, new, own or 1, shown)

    def _new_cache(self, generation_config: Any, max_cache_length: int) -> SparseCache:
        """Create a static cache if ``generate()`` compiles its decode step or asks for one, else a growing cache."""
        patch = get_patch(self.model)
        make = partial(
            SparseCache,
            text_model(self.model).config,
            patch.method,
            kv_storage=patch.kv_storage,
            head_shard=patch.head_shard,
        )
        tokens = max(max_cache_length, generation_config.max_cache_len or 0)  # as in a stock static cache
        wanted = generation_config.cache_implementation
        if wanted == "static" or (wanted is None and not generation_config.disable_compile):
            static = make(static_capacity(tokens))
            if wanted == "static" or self.model._valid_auto_compile_criteria({CACHE: static}, generation_config):
                return static
        return make(initial_capacity=max_cache_length)


def _check_padding(attention_mask: Any) -> None:
    """Raise on padding after a token: a prompt could be dense under its mask, but decode steps could not follow."""
    if isinstance(attention_mask, torch.Tensor) and attention_mask.dim() == 2:
        is_token = attention_mask != 0
        rows = rows_with_holes(is_token)
        if rows and not can_be_left_out(is_token, is_token.shape[1]):
            raise ValueError(f"attention_mask has padding after a token in rows {rows}; {LEFT_PADDING}")


def static_capacity(tokens: int) -> int:
    """Round a cache's length up, beyond 1,024 tokens by at most 6 %.

    Prompts of similar length then share a size. A compiled step serves every size, but each needs its own CUDA graph.
    """
    granule = max(MIN_CAPACITY, (1 << tokens.bit_length() - 1) // 16)
    return -(-tokens // granule) * granule


def _may_compile(model: PreTrainedModel, generation_config: Any, generation_mode: Any) -> bool:
    """Whether ``generate()`` may compile: only decode steps are supported, on one device, of models that allow it.

    The steps of divided heads are compiled if a ``compile_config`` asks for it: Inductor was seen to take minutes.
    """
    return (
        generation_mode in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
        and not generation_config.is_assistant
        and generation_config.prefill_chunk_size is None  # Transformers compiles the chunks too
        and (get_patch(model).head_shard.is_whole or generation_config.compile_config is not None)
        and is_step_one_graph(model)
    )


def is_step_one_graph(model: PreTrainedModel) -> bool:
    """Whether a decode step of a patched model over a static cache is this process's work on one device alone.

    Under tensor parallelism the devices exchange their parts without the host. Before Transformers 5.23, a step of a
    model that reads images is given which tokens of the whole text are those of images: each time another shape.
    """
    if is_multimodal(model) and Version(transformers.__version__) < Version("5.23"):
        return False
    rope_config = patched_method(model).rope_config(text_model(model).config)
    return (
        bool(model._can_compile_fullgraph)
        and not depends_on_length(rope_config)  # the host computes its frequencies
        and not is_split_by_layers(model)
    )


def is_split_by_layers(model: PreTrainedModel) -> bool:
    """Whether accelerate has put parts of a model on several devices."""
    return len(set(map(str, getattr(model, "hf_device_map", {}).values()))) > 1


def _shown(attention_mask: Any, new: int) -> torch.Tensor | None:
    """Return whether any row's mask shows each new token, bool [new]; None if all are shown but common left padding."""
    if not isinstance(attention_mask, torch.Tensor) or attention_mask.dim() != 2:
        return None
    is_token = (attention_mask != 0).any(dim=0).cpu()
    is_token[: int(is_token.int().argmax())] = True  # padding before all rows is not left out of the cache
    shown = is_token[-new:] if new > 0 else is_token[:0]
    return None if bool(shown.all()) else shown


def _mask_length(generation_config: Any, model_kwargs: dict[str, Any]) -> int:
    """Return how many tokens the mask shows: those fed before and the new ones, however few ids are given.

    Transformers drops a mask without padding, and notes its length.
    """
    mask = model_kwargs.get("attention_mask")
    return getattr(generation_config, "_mask_length", 0) if mask is None else int(mask.shape[1])


def _check_room(
    cache: SparseCache, generation_config: Any, model_kwargs: dict[str, Any], max_cache_length: int
) -> None:
    """Raise if compiled steps, which do not check, would write past the end of a static cache."""
    fed_or_cached = _mask_length(generation_config, model_kwargs)
    needed = max(max_cache_length, fed_or_cached + (generation_config.max_new_tokens or 1) - 1)
    if needed > cache.get_max_length():
        raise ValueError(
            f"generate() may cache {needed} tokens, but past_key_values has max_cache_len={cache.get_max_length()}, "
            "and a compiled decode step cannot tell that it is full: create a larger cache, generate fewer tokens, or "
            "set disable_compile=True"
        )


def check_cache(cache: Any, patch: Patch, config: PreTrainedConfig) -> None:
    """Raise if a cache does not belong to a model that is patched so, and has this text configuration."""
    if not isinstance(cache, SparseCache):
        raise TypeError(
            f"past_key_values must be a SparseCache for a patched model, got {type(cache).__name__}; "
            "create one with SparseCache.for_model(model), or with PEFT's prefix tuning, patch the PEFT model itself; "
            "if the patched model is part of the one that generates, patch that one instead"
        )
    if cache.method != patch.method:
        raise ValueError(
            f"past_key_values was created for {cache.method}, but the model is patched with {patch.method}"
        )
    if cache.head_shard != patch.head_shard:
        raise ValueError(
            f"past_key_values was created for {_in_words(cache.head_shard)}, but the model has "
            f"{_in_words(patch.head_shard)}: create it with SparseCache.for_model(model)"
        )
    if cache.heads != (heads := heads_of_layers(config)):
        raise ValueError(
            f"past_key_values was created for a model of {cache.heads}, but this one has {heads}: create it with "
            "SparseCache.for_model(model)"
        )


def _in_words(shard: HeadShard) -> str:
    return "all KV heads" if shard.is_whole else f"part {shard.rank + 1} of {shard.size} of the KV heads"
