"""Double Sparsity: single tokens chosen by a few channels of the keys."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import torch

from hf_sparse_attn.heads import head_dim_of, kv_heads_of, query_heads_of
from hf_sparse_attn.methods.base import Selection, SparseMethod
from hf_sparse_attn.methods.channels import (
    LABEL_BITS,
    MODEL_BITS,
    STATISTICS,
    channel_weights,
    channels_of_file,
    heaviest,
    label_sizes,
    label_values,
    make_labels,
)
from hf_sparse_attn.methods.parameter_file import path_text
from hf_sparse_attn.methods.scores import GROUP_REDUCTIONS, best_tokens, grouped, reduce_group, token_scores

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from hf_sparse_attn.cache.layer import SparseLayer


@dataclass(frozen=True)
class DoubleSparsity(SparseMethod):
    """Read the tokens that score highest by a few heavy channels of their keys (Double Sparsity, arXiv 2408.07092).

    Most of a score q.k comes from few channels, and these are the same for most tokens. Calibration finds the
    ``channels`` heaviest of each KV head. A label cache keeps these channels of every key after RoPE. A step estimates
    q.k by them alone, and reads the tokens with the highest estimates. Prefill stays dense. The formulas are those of
    the authors' code (andy-yang-1/DoubleSparse b0575e6): ``config/offline_calibration.py`` for the channels, and
    ``evaluation/modify_llama.py`` for labels and estimates.

    Parameters
    ----------
    token_budget
        Cached tokens that a KV head reads per step. None is read in any case, not even the newest.
    dense_layers
        Number of first layers that attend to the whole cache; the authors' value is 2.
    channels
        Channels of a label. The authors' code takes from a sixteenth to a half of the head's.
    label_bits
        Bits of a channel of a label: 2, 4 (default), 8, or 16 for the model's dtype. Below 16 a label has levels
        between its least and its greatest channel, and keeps the two as 16 bits each.
    calibration
        A file of channels, as :func:`~hf_sparse_attn.calibrate_channels` or the authors' code writes it. None
        (default) finds the channels of each prompt by its own keys and last queries.
    statistic
        What a channel weighs: ``"qk"`` the mean of ``|q_i k_i|``, ``"q"`` that of ``|q_i|``, ``"k"`` that of ``|k_i|``.
    calibration_queries
        Last queries of the prompt that calibrate, without a file.
    group_reduce
        Reduction of the estimates of the query heads that share a KV head, ``"softmax"``, ``"mean"`` or ``"max"``, as
        in Quest.

    Notes
    -----
    The authors choose channels and tokens for each query head. Here the query heads of a KV head share both, so that
    there is one label for each key. A channel's weight is the mean over all pairs of a query and a key, method 2 of
    their calibration; their files have method 1, each query with its own token's key. Estimates are scaled as q.k is,
    by ``1 / sqrt(head_dim)``, theirs by ``1 / sqrt(channels)``: no head ranks tokens differently for it.
    """

    name: ClassVar[str] = "double_sparsity"
    summary: ClassVar[str] = "top-k tokens by the heaviest channels of the keys"
    paper: ClassVar[str] = "arXiv 2408.07092"

    token_budget: int = 1024
    dense_layers: int = 2
    channels: int = 16
    label_bits: int = 4
    calibration: str | os.PathLike[str] | None = None
    statistic: str = "qk"
    calibration_queries: int = 64
    group_reduce: str = "softmax"

    def __post_init__(self) -> None:
        """Check the hyperparameters; errors as of :class:`SparseMethod`."""
        super().__post_init__()
        if self.calibration is not None:
            object.__setattr__(self, "calibration", path_text("calibration", self.calibration))
        self._require("label_bits", self.label_bits in LABEL_BITS, f"one of {', '.join(map(str, LABEL_BITS))}")
        at_once = max(1, 8 // self.label_bits)
        is_multiple = self.channels >= 1 and self.channels % at_once == 0
        bytes_filled = f": whole bytes of label_bits={self.label_bits}" if at_once > 1 else ""
        self._require("channels", is_multiple, f"a multiple of {at_once}{bytes_filled}")
        self._require("statistic", self.statistic in STATISTICS, f"one of {', '.join(STATISTICS)}")
        self._require("calibration_queries", self.calibration_queries >= 1, "at least 1")
        self._require("group_reduce", self.group_reduce in GROUP_REDUCTIONS, f"one of {', '.join(GROUP_REDUCTIONS)}")

    def check_model(self, model: PreTrainedModel) -> None:
        """Check that the model's heads have so many channels, and that the file of channels is of this model.

        Raises
        ------
        FileNotFoundError
            There is no file ``calibration``.
        ValueError
            ``channels`` exceeds the model's head_dim, or the file is of another model.
        """
        config = model.config
        head_dim = head_dim_of(config)
        self._require("channels", self.channels <= head_dim, f"at most the model's head_dim={head_dim}")
        if self.calibration is None:
            return
        if not Path(self.calibration).is_file():
            raise FileNotFoundError(f"{self.name}: calibration={self.calibration!r} is not a file")
        kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
        for layer_idx, (kind, q_heads) in enumerate(zip(kinds, query_heads_of(config), strict=True)):
            heads = (q_heads, kv_heads_of(config))
            if layer_idx >= self.dense_layers and kind == "full_attention":
                channels_of_file(os.fspath(self.calibration), layer_idx, self.statistic, heads, head_dim)

    @property
    def keeps_queries(self) -> int:
        """The queries that find the heavy channels."""
        return self.calibration_queries if self.calibration is None else 0

    def init_metadata(self, layer: SparseLayer) -> dict[str, torch.Tensor]:
        """Allocate the label cache, and the channels that it holds.

        ``channels`` int64 [batch, kv_heads, channels]; ``labels`` and ``label_range`` [batch, kv_heads, capacity, ...]
        as :func:`~hf_sparse_attn.methods.channels.make_labels` describes them.
        """
        keys = layer.keys
        batch, kv_heads, capacity, head_dim = keys.shape
        if self.calibration is None:
            chosen = torch.arange(self.channels, device=keys.device).expand(kv_heads, -1)
        else:
            shard = layer.head_shard
            heads = (layer.q_heads * shard.size, kv_heads * shard.size)
            weights = channels_of_file(os.fspath(self.calibration), layer.layer_idx, self.statistic, heads, head_dim)
            chosen = heaviest(shard.slice(weights), kv_heads, self.channels).to(keys.device)
        dtypes = {"labels": keys.dtype if self.label_bits == MODEL_BITS else torch.uint8, "label_range": torch.float16}
        labels = {
            name: keys.new_zeros(batch, kv_heads, capacity, size, dtype=dtypes[name])
            for name, size in label_sizes(self.channels, self.label_bits).items()
        }
        return {"channels": chosen.repeat(batch, 1, 1), **labels}

    def update_metadata(self, layer: SparseLayer, num_new: int) -> None:
        """Label the new tokens: a decode step's, or any if the channels are known from a file.

        :meth:`finish_prompt` labels other tokens, once the prompt has been seen.
        """
        if num_new == 1 and layer.lengths.in_step:
            self._label(layer, layer.seq_end[:1].long() - 1)
        elif self.calibration is not None:
            self._label(layer, torch.arange(layer.length - num_new, layer.length, device=layer.keys.device))

    def finish_prompt(self, layers: Sequence[SparseLayer]) -> None:
        """Find the heavy channels of each row, and label all of its tokens."""
        if self.calibration is not None:
            return
        for layer in layers:
            chosen = layer.metadata["channels"]
            chosen.copy_(torch.stack([self._heavy_channels(layer, row) for row in range(len(chosen))]))
            self._label(layer, torch.arange(layer.length, device=layer.keys.device))

    def _heavy_channels(self, layer: SparseLayer, row: int) -> torch.Tensor:
        """Return the heavy channels of a row's keys and last queries, int64 [kv_heads, channels].

        By the keys alone if no query is known: another model cached the tokens, or a crop has removed the last ones.
        """
        keys = layer.keys[row, :, layer.lengths.starts[row] : layer.length]
        dtype = torch.promote_types(keys.dtype, torch.float32)
        mean_key = keys.abs().sum(1, dtype=dtype)
        mean_query = mean_key.new_ones(layer.q_heads, keys.shape[2])
        recent = layer.prompt_queries
        known = 0 if recent is None else min(int(recent.counts[row]), self.calibration_queries)
        if recent is not None and known:
            mean_query = recent.states[row, :, -known:].abs().sum(1, dtype=dtype)
        return heaviest(channel_weights(mean_query, mean_key, self.statistic), keys.shape[0], self.channels)

    def _label(self, layer: SparseLayer, slots: torch.Tensor) -> None:
        """Write the labels of the tokens at the ``slots``, int64 [n], of every row."""
        keys = layer.keys.index_select(2, slots)
        channels = layer.metadata["channels"].unsqueeze(2).expand(-1, -1, keys.shape[2], -1)
        for name, tensor in make_labels(keys.gather(3, channels), self.label_bits).items():
            layer.metadata[name].index_copy_(2, slots, tensor)

    def select(self, query: torch.Tensor, layer: SparseLayer, scale: float) -> Selection:
        """Estimate q.k of every token by the heavy channels and keep the best; see :meth:`SparseMethod.select`."""
        metadata = layer.metadata
        heads = grouped(query, layer.keys.shape[1])
        channels = metadata["channels"].unsqueeze(2).expand(-1, -1, heads.shape[2], -1)
        heavy = heads.gather(3, channels).flatten(1, 2)  # [batch, q_heads, channels]
        labels = label_values(metadata["labels"], metadata.get("label_range"), self.label_bits, heavy.dtype)
        scores = token_scores(heavy, labels, layer, scale)
        return best_tokens(reduce_group(scores, self.group_reduce), layer, self.token_budget)

    def metadata_bytes_read(self, layer: SparseLayer) -> torch.Tensor:
        """Bytes of all labels."""
        kv_heads = layer.keys.shape[1]
        tensors = (layer.metadata[name] for name in label_sizes(self.channels, self.label_bits))
        token_bytes: int = sum(tensor.shape[3] * tensor.element_size() for tensor in tensors)
        return layer.row_lengths().sum() * (kv_heads * token_bytes)
