"""DuoAttention: retrieval heads keep all tokens, streaming heads the first and the last ones."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, cast

import torch
from hf_sparse_attn_kernels import block_sparse_prefill, dense_decode

from hf_sparse_attn.cache.split import SplitStorage
from hf_sparse_attn.dense import stock_attention
from hf_sparse_attn.heads import kv_heads_of
from hf_sparse_attn.methods.base import Selection, SparseMethod
from hf_sparse_attn.methods.evicting import DENSE, EvictingMethod, places, storage_of
from hf_sparse_attn.methods.parameter_file import path_text
from hf_sparse_attn.methods.retrieval_heads import Values, checked, read_values, streaming_heads
from hf_sparse_attn.sinks import with_sinks

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from hf_sparse_attn.cache.layer import SparseLayer
    from hf_sparse_attn.cache.storage import Rows

BLOCK_SIZE = 64


@dataclass(frozen=True)
class DuoAttention(EvictingMethod):
    """Keep all tokens in retrieval heads, the first and the last ones in the others (DuoAttention, arXiv 2410.10819).

    Few KV heads need the whole context: retrieval heads. The others, streaming heads, attend to attention sinks and to
    recent tokens, so they need no more cache than these (section 3.1). Which head is which has been learned for a model
    (section 3.2), and comes from a file. Streaming heads stream in the prefill too.

    Parameters
    ----------
    token_budget
        Cached tokens that a streaming head reads: the sinks, and a window of ``token_budget - sink_tokens`` tokens that
        includes the current one. Retrieval heads read all.
    dense_layers
        Number of first layers that keep and read the whole cache.
    heads
        Numbers from 0 (streaming) to 1 (retrieval) for every layer and KV head: the path of a published
        ``full_attention_heads.tsv``, or the numbers themselves [layers, kv_heads]. None: all heads stream.
    threshold
        Heads with smaller numbers stream.
    sparsity
        Share of the heads that stream, those of the least numbers; replaces ``threshold``.
    sink_tokens
        First tokens, always kept; the authors' code has 64.

    Notes
    -----
    The prompt is evicted from when it is complete. Tokens keep the positions at which they were rotated.
    """

    name: ClassVar[str] = "duo_attention"
    summary: ClassVar[str] = "all tokens in retrieval heads; the first and the last ones in the others, which evict"
    paper: ClassVar[str] = "arXiv 2410.10819"
    sparse_phases: ClassVar[tuple[str, ...]] = ("prefill", "decode")

    token_budget: int = 320
    heads: str | os.PathLike[str] | Sequence[Sequence[float]] | torch.Tensor | None = None
    threshold: float = 0.5
    sparsity: float | None = None
    sink_tokens: int = 64

    def __post_init__(self) -> None:
        """Check the hyperparameters; errors as of :class:`SparseMethod`."""
        super().__post_init__()
        allowed = f"between 0 and token_budget - 1 = {self.token_budget - 1}"
        self._require("sink_tokens", 0 <= self.sink_tokens < self.token_budget, allowed)
        self._check_numbers("threshold", *(() if self.sparsity is None else ("sparsity",)))
        self._require("threshold", 0 <= self.threshold <= 1, "between 0 and 1")
        self._require("sparsity", self.sparsity is None or 0 <= self.sparsity <= 1, "None, or between 0 and 1")
        if isinstance(self.heads, (str, os.PathLike)):
            object.__setattr__(self, "heads", path_text("heads", self.heads))
        elif self.heads is not None:
            object.__setattr__(self, "heads", checked(self.heads, "heads"))

    def _values(self) -> Values | None:
        return read_values(self.heads) if isinstance(self.heads, str) else cast("Values | None", self.heads)

    def check_model(self, model: PreTrainedModel) -> None:
        """Check that ``heads`` are those of the model.

        Raises
        ------
        FileNotFoundError
            There is no such file.
        ValueError
            The file has another format, or other numbers of layers or KV heads.
        """
        values, config = self._values(), model.config
        heads = (config.num_hidden_layers, kv_heads_of(config))
        if values is not None and (len(values), len(values[0])) != heads:
            given = f"heads={self.heads!r}" if isinstance(self.heads, str) else "heads"
            raise ValueError(
                f"{given} must be [layers, kv_heads] = {list(heads)} for this model, "
                f"got [{len(values)}, {len(values[0])}]"
            )

    def evicting_heads(self, layer_idx: int) -> tuple[int, ...] | None:
        """Return the streaming heads of a layer."""
        values = self._values()
        return None if values is None else streaming_heads(values, self.threshold, self.sparsity)[layer_idx]

    def priority(self, layer: SparseLayer, query: torch.Tensor | None, scale: float) -> torch.Tensor | None:
        """Return each token's place, and ``inf`` for the sinks; see :meth:`EvictingMethod.priority`."""
        if not _streams(layer):
            return None
        place = places(layer)
        return place.float().masked_fill(place < self.sink_tokens, torch.inf)

    def prefill(self, query: torch.Tensor, layer: SparseLayer, scale: float, mask: torch.Tensor | None) -> torch.Tensor:
        """Attend to the sinks and a window in streaming heads, densely in the others.

        See :meth:`SparseMethod.prefill` for the arguments.
        """
        storage = storage_of(layer)
        is_short = storage.kept is None and self.covers(layer.length - layer.least_padding)
        if is_short or not _streams(layer):
            return SparseMethod.prefill(self, query, layer, scale, mask)
        if storage.kept is not None:
            storage.sort()  # so that a window of slots is one of tokens
        output, sinks = torch.empty_like(query), layer.take_sinks()
        streaming, retrieval = _groups(layer)
        rows = layer.rows
        if storage.kept is None and len(retrieval):
            rows = rows._replace(keys=rows.keys[:, streaming], values=rows.values[:, streaming])
        grouped, result = (_grouped(states, storage.kv_heads) for states in (query, output))
        streamed, lse = self._stream(grouped[:, streaming].flatten(1, 2), rows, scale)
        streamed = with_sinks(streamed, lse, _of_heads(sinks, streaming, storage.kv_heads))
        result[:, streaming] = _grouped(streamed, len(streaming))
        if len(retrieval):
            keys, values = (buffer[:, :, : layer.length] for buffer in _whole(layer, retrieval))
            own = _of_heads(sinks, retrieval, storage.kv_heads)
            attended = stock_attention(grouped[:, retrieval].flatten(1, 2), keys, values, scale, mask, own)
            result[:, retrieval] = _grouped(attended, len(retrieval))
        return output

    def _stream(self, query: torch.Tensor, rows: Rows, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend from queries [batch, heads, tokens, head_dim] to first tokens and window of rows that are in order."""
        batch, heads, queries, _ = query.shape
        window = self.token_budget - self.sink_tokens
        device, reach = query.device, 1 - (1 - window) // BLOCK_SIZE
        first = (rows.seq_end - rows.seq_start - queries).clamp_min(0) // BLOCK_SIZE
        own = first[:, None] + torch.arange((queries + 2 * BLOCK_SIZE - 2) // BLOCK_SIZE, device=device)
        indices = (own - reach + 1).clamp_min(0)[:, :, None] + torch.arange(reach, device=device)
        counts = (own + 1).clamp_max(reach)
        sinks = torch.arange(self.sink_tokens, dtype=torch.int32, device=device).expand(batch, heads, -1).contiguous()
        return block_sparse_prefill(
            query,
            rows.keys,
            rows.values,
            indices.to(torch.int32)[:, None].expand(-1, heads, -1, -1).contiguous(),
            counts.to(torch.int32)[:, None].expand(-1, heads, -1).contiguous(),
            rows.seq_start,
            rows.seq_end,
            block_size=BLOCK_SIZE,
            columns=sinks if self.sink_tokens else None,
            column_counts=torch.full_like(sinks[:, :, 0], self.sink_tokens) if self.sink_tokens else None,
            window=window,
            scale=scale,
        )

    def decode(
        self, query: torch.Tensor, layer: SparseLayer, new_key: torch.Tensor, new_value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Append the token, attend to what each head keeps, and evict; see :meth:`SparseMethod.decode`."""
        if not _streams(layer):
            return DENSE.decode(query, layer, new_key, new_value, scale)
        return super().decode(query, layer, new_key, new_value, scale)

    def _attend_to_kept(self, query: torch.Tensor, layer: SparseLayer, scale: float) -> torch.Tensor:
        storage = storage_of(layer)
        if not isinstance(storage, SplitStorage) or storage.whole is None:
            return super()._attend_to_kept(query, layer, scale)
        kept, lengths, output, sinks = layer.rows, layer.row_lengths(), torch.empty_like(query), layer.take_sinks()
        tokens, (streaming, retrieval) = kept.seq_end - kept.seq_start, storage.groups
        read = tokens.sum() * len(streaming) + lengths.sum() * len(retrieval)
        layer.counter.count_rows(read, lengths.sum() * storage.kv_heads)
        if layer.is_recorded:
            layer.note(_selection(layer, tokens, lengths))
        grouped, result = (_grouped(states, storage.kv_heads) for states in (query, output))
        whole = kept._replace(
            keys=storage.whole.keys, values=storage.whole.values, seq_start=layer.seq_start, seq_end=layer.seq_end
        )
        for heads, rows in ((streaming, kept), (retrieval, whole)):
            if len(heads):
                own = layer.finished.flatten()[: len(query) * len(heads)].view(len(query), -1)
                attended, lse = dense_decode(grouped[:, heads].flatten(1, 2), *rows, scale=scale, finished=own)
                attended = with_sinks(attended, lse, _of_heads(sinks, heads, storage.kv_heads))
                result[:, heads] = _grouped(attended, len(heads))
        return output


def _streams(layer: SparseLayer) -> bool:
    """Whether the layer has streaming heads."""
    storage = storage_of(layer)
    return not isinstance(storage, SplitStorage) or bool(storage.heads)


def _groups(layer: SparseLayer) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the streaming heads and the retrieval heads of a layer, int64."""
    storage = storage_of(layer)
    if isinstance(storage, SplitStorage):
        return storage.groups
    every = torch.arange(storage.kv_heads, device=storage.keys.device)
    return every, every[:0]


def _grouped(states: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """Return [batch, q_heads, ..] as [batch, kv_heads, group, ..]."""
    return states.view(len(states), kv_heads, -1, *states.shape[2:])


def _of_heads(sinks: torch.Tensor | None, heads: torch.Tensor, kv_heads: int) -> torch.Tensor | None:
    """Return the attention sinks, [q_heads] of the layer, of the query heads of some KV heads."""
    return None if sinks is None else sinks.view(kv_heads, -1)[heads].flatten()


def _whole(layer: SparseLayer, retrieval: torch.Tensor) -> Sequence[torch.Tensor]:
    """Return the buffers of keys and values of the retrieval heads."""
    storage = storage_of(layer)
    if isinstance(storage, SplitStorage) and storage.whole is not None:
        return storage.whole.keys, storage.whole.values
    return storage.keys[:, retrieval], storage.values[:, retrieval]


def _selection(layer: SparseLayer, tokens: torch.Tensor, lengths: torch.Tensor) -> Selection:
    """Return what each head reads as a selection of blocks of one, ``tokens`` [batch] in streaming heads."""
    storage = storage_of(layer)
    assert isinstance(storage, SplitStorage)
    assert storage.kept is not None
    streaming, retrieval = storage.groups
    batch, slots = len(tokens), storage.kept.slots
    width = max(slots, layer.length)
    every = torch.arange(width, dtype=torch.int32, device=tokens.device)
    indices = every.where(every < lengths[:, None], -1)[:, None].repeat(1, storage.kv_heads, 1)
    is_token = torch.arange(slots, device=tokens.device) >= layer.rows.seq_start[:, None, None]
    kept = places(layer).where(is_token, -1).sort(dim=2, descending=True).values
    indices[:, streaming] = torch.nn.functional.pad(kept, (0, width - slots), value=-1)
    counts = torch.empty(batch, storage.kv_heads, dtype=torch.int32, device=tokens.device)
    counts[:, streaming], counts[:, retrieval] = tokens[:, None].int(), lengths[:, None].int()
    return Selection(indices, counts, block_size=1)
