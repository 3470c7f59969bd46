"""Offline calibration: the heavy channels of a model's keys, found on a text and kept in a file."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from hf_sparse_attn.cache.cache import SparseCache
from hf_sparse_attn.cache_argument import CACHE
from hf_sparse_attn.checks import token_ids
from hf_sparse_attn.methods.channels import STATISTICS, channel_weights, file_key
from hf_sparse_attn.patch.patch import sparse_attention
from hf_sparse_attn.patch.support import check_type
from hf_sparse_attn.patch.tensor_parallel import head_shard_of
from hf_sparse_attn.patched import base_model, text_model
from hf_sparse_attn.whole_file import write_whole

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@torch.inference_mode()
def calibrate_channels(model: PreTrainedModel, input_ids: torch.Tensor, path: str | os.PathLike[str]) -> None:
    """Find the heavy channels of every layer on a text, and write them for ``DoubleSparsity(calibration=path)``.

    A channel's weight is the mean of ``|q_i k_i|`` over all pairs of a query and a key of a head, after RoPE. The file
    has the channels of each head by falling weight, in the form of the authors' own: JSON, with an entry for each
    layer, and others that weigh by ``|q_i|`` and ``|k_i|`` alone.

    Parameters
    ----------
    model
        The model, patched or not.
    input_ids
        int64 [batch, tokens]: texts of one length, without padding. All their queries are kept until the end.
    path
        The file to write. It replaces a former one when it is whole.

    Raises
    ------
    TypeError
        ``model`` is no Transformers model, or ``input_ids`` holds no whole numbers.
    ValueError
        ``input_ids`` is no batch of texts, or has ids that the model does not have, or the model is divided by tensor
        parallelism.
    FileNotFoundError
        There is no folder for ``path``. Nothing is computed.
    OSError
        The file cannot be written, as on a full disk. A former file of this name stays as it was.
    """
    check_type(base_model(model))
    ids = token_ids("input_ids", input_ids, text_model(model).config.vocab_size).to(base_model(model).device)
    if ids.dim() != 2 or not ids.numel():
        raise ValueError(f"input_ids must be [batch, tokens] with at least one token, got {tuple(ids.shape)}")
    if not Path(path).parent.is_dir():
        raise FileNotFoundError(f"path={os.fspath(path)!r} is in a folder that does not exist")
    head_shard_of(model).require_whole("calibrate_channels")
    with sparse_attention(model, "full"):
        cache = SparseCache(text_model(model).config, "full", keep_queries=ids.shape[1])
        model(ids, logits_to_keep=1, **{CACHE: cache})
    entries: dict[str, list[list[int]]] = {}
    for layer in cache.sparse_layers:
        assert layer.prompt_queries is not None
        mean_query, mean_key = (
            states.abs().mean((0, 2), dtype=torch.promote_types(states.dtype, torch.float32))
            for states in (layer.prompt_queries.states, layer.keys[:, :, : layer.length])
        )
        for statistic in STATISTICS:
            weights = channel_weights(mean_query, mean_key, statistic)
            order = weights.argsort(dim=1, descending=True, stable=True)
            entries[file_key(layer.layer_idx, statistic)] = order.tolist()
    write_whole(Path(path), json.dumps(entries).encode("utf-8"))
