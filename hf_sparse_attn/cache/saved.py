"""Files of caches: a long prompt is prefilled once, and continued in other processes."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from hf_sparse_attn.cache.contents import Header, check_complete, fill, forms_of, header_of, method_text, tensors_of
from hf_sparse_attn.cache.prefix import hash_token_ids
from hf_sparse_attn.checks import whole_number, whole_numbers
from hf_sparse_attn.heads import head_dim_of, kv_heads_of
from hf_sparse_attn.identity import ModelIdentity
from hf_sparse_attn.patched import base_model, check_model_type, get_patch, layer_devices, text_model
from hf_sparse_attn.tensor_file import TensorFile, damage_named, json_entries, open_tensors, write_tensors

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from hf_sparse_attn.cache.cache import SparseCache

FORMAT = "hf_sparse_attn cache 1"


def save(cache: SparseCache, path: Path, model: PreTrainedModel, input_ids: torch.Tensor | None) -> None:
    """Write a cache; see ``SparseCache.save``."""
    check_model_type(model)
    ids = None if input_ids is None else whole_numbers("input_ids", input_ids)
    cache.head_shard.require_whole("SparseCache.save")
    cache.recover()
    check_complete(cache)
    config, keys = text_model(model).config, cache.sparse_layers[0].keys
    shape = {"layers": len(cache.layers), "KV heads": keys.shape[1], "head_dim": keys.shape[3]}
    of_model = {"layers": config.num_hidden_layers, "KV heads": kv_heads_of(config), "head_dim": head_dim_of(config)}
    if shape != of_model:
        of_cache, given = (", ".join(f"{name} {n}" for name, n in each.items()) for each in (shape, of_model))
        raise ValueError(f"model must be the one that filled the cache, with {of_cache}; it has {given}")
    if ids is not None and tuple(ids.shape) != (len(keys), cache.fed):
        raise ValueError(
            f"input_ids must be the tokens that the cache holds, [{len(keys)}, {cache.fed}], got {list(ids.shape)}"
        )
    texts = {
        "cache": header_of(cache).to_json(),
        "identity": json.dumps(ModelIdentity.of(base_model(model))._asdict()),
        "token_ids_hash": "" if ids is None else hash_token_ids(ids),
    }
    # Copied one by one: the layers of an offloaded cache show their tokens in the same buffers, one after another.
    copies = {
        name: tensor.to("cpu", copy=True, memory_format=torch.contiguous_format) for name, tensor in tensors_of(cache)
    }
    write_tensors(path, FORMAT, texts, copies)


def load(
    cls: type[SparseCache],
    path: Path,
    model: PreTrainedModel,
    input_ids: torch.Tensor | None,
    max_cache_len: int | None,
) -> SparseCache:
    """Read a cache; see ``SparseCache.load``."""
    patch = get_patch(model)
    ids = None if input_ids is None else whole_numbers("input_ids", input_ids)
    if max_cache_len is not None:
        max_cache_len = whole_number("max_cache_len", max_cache_len, 1, " or None")
    patch.head_shard.require_whole("SparseCache.load")
    with open_tensors(path, FORMAT, "a cache") as file:
        header = _checked_header(file, model, ids)
        if header.method != method_text(patch.method):
            raise ValueError(
                f"{path} holds a cache of {header.method}, but the model is patched with {method_text(patch.method)}: "
                "patch it with the method of the cache"
            )
        if patch.method.evicts:
            raise ValueError(f"{path} is damaged: caches of {patch.method.name!r}, which evicts, are never saved")
        if max_cache_len is not None and header.tokens > max_cache_len:
            raise ValueError(f"max_cache_len={max_cache_len} must be at least {header.tokens}, the tokens of {path}")
        config = text_model(model).config
        cache = cls(config, patch.method, max_cache_len, header.tokens, kv_storage=patch.kv_storage)
        if patch.rope_tables is not None:
            cache.use_rope(patch.rope_tables)  # the method may finish the prompt before a pass sets them
        with damage_named(path):
            header.check_layers(cache)
        file.check(forms_of(cache, header, file.form, dtypes_of_values(text_model(model))))
        shape = (header.rows, kv_heads_of(config), header.tokens, head_dim_of(config))
        cache.reserve_host(shape, model.dtype, partial(layer_devices, model))
        fill(cache, header, file.checksums, file.read, layer_devices(model))
    return cache


def _checked_header(file: TensorFile, model: PreTrainedModel, input_ids: torch.Tensor | None) -> Header:
    with damage_named(file.path):
        header, token_ids_hash = Header.from_json(file.header["cache"]), file.header["token_ids_hash"]
        header.check(text_model(model).config.num_hidden_layers)
        identity = ModelIdentity(**json_entries("identity", file.header["identity"], str))
    identity.check(ModelIdentity.of(base_model(model)), f"{file.path} was written")
    if input_ids is not None and not token_ids_hash:
        raise ValueError(f"{file.path} was written without input_ids, so they cannot be compared: leave them out")
    if input_ids is not None and hash_token_ids(input_ids) != token_ids_hash:
        raise ValueError(f"{file.path} holds the cache of other token ids than the given input_ids")
    return header


def dtypes_of_values(text: PreTrainedModel) -> list[torch.dtype]:
    """Return the dtypes that a model's values may have: those of its weights, its own first, and autocast's."""
    of_weights = (weights.dtype for weights in text.parameters() if weights.dtype.itemsize > 1)
    found = (text.dtype, *of_weights, torch.float16, torch.bfloat16)
    return list(dict.fromkeys(dtype for dtype in found if dtype.is_floating_point))
