"""Common parts of the methods that evict: the cache keeps a fixed number of tokens, and forgets the others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from hf_sparse_attn_kernels import dense_decode

from hf_sparse_attn.cache.evicting import EvictingStorage
from hf_sparse_attn.cache.storage import MIN_CAPACITY
from hf_sparse_attn.dense import mask_by_bounds, stock_attention
from hf_sparse_attn.methods.base import Selection, SparseMethod
from hf_sparse_attn.methods.full import Full

if TYPE_CHECKING:
    from hf_sparse_attn.cache.layer import SparseLayer

DENSE = Full()
MAX_WEIGHTS = 1 << 26
"""Attention weights that are computed at once: 256 MiB in float32."""


@dataclass(frozen=True)
class EvictingMethod(SparseMethod, partial=True):
    """A method that keeps ``token_budget`` tokens of each row and KV head, and frees the memory of the others.

    The prompt is prefilled densely. Then, and after every decode step, the tokens of the lowest :meth:`priority` go,
    so that a step reads at most ``token_budget`` tokens, its own included. A method with ``keeps_generated`` evicts
    once, after the first prompt. Passes over several tokens read what is kept and one another.
    """

    evicts: ClassVar[bool] = True

    def priority(self, layer: SparseLayer, query: torch.Tensor | None, scale: float) -> torch.Tensor | None:
        """Return which tokens to keep first, [batch, kv_heads or 1, slots]; ``inf`` for those that must stay.

        None at the end of a prompt leaves the eviction to the first decode step.

        Parameters
        ----------
        layer
            ``storage`` holds the tokens, in slots.
        query
            [batch, q_heads, head_dim] of the newest token in a decode step; None at the end of a prompt.
        scale
            The model's factor on q.k in a decode step.

        Raises
        ------
        ValueError
            The prompt's queries or weights are needed, and an unpatched model has fed it.
        """
        raise NotImplementedError(f"{type(self).__name__} must define priority")

    def watch(self, query: torch.Tensor, layer: SparseLayer, scale: float) -> None:
        """Take note of the queries of a pass, [batch, q_heads, tokens, head_dim], whose tokens are cached already."""

    def finish_prompt(self, layers: Sequence[SparseLayer]) -> None:
        """Evict all but the tokens of the highest priority, and free their memory."""
        keep = self.token_budget if self.keeps_generated else self.token_budget - 1
        for layer in layers:
            storage, lengths = storage_of(layer), layer.lengths
            is_due = storage.finished_at is None or not self.keeps_generated
            priority = None
            if is_due and storage.most_tokens(lengths) > keep:
                priority = self.priority(layer, None, 0.0)
            if priority is not None:
                storage.evict(priority, keep, keep + (MIN_CAPACITY if self.keeps_generated else 1), lengths)
            if storage.finished_at is None:
                storage.finished_at = lengths.length
            layer.prompt_queries = None  # those of the next prompt must follow one another

    def prefill(self, query: torch.Tensor, layer: SparseLayer, scale: float, mask: torch.Tensor | None) -> torch.Tensor:
        """Attend densely to the kept tokens and, causally, to one another; see :meth:`SparseMethod.prefill`."""
        storage = storage_of(layer)
        if storage.kept is None:
            output = super().prefill(query, layer, scale, mask)
        else:
            keys, values = storage.visible(layer.lengths, query.shape[2])
            mask = _causal_mask(query.shape[2], layer)
            output = stock_attention(query, keys, values, scale, mask, layer.take_sinks())
        self.watch(query, layer, scale)
        return output

    def decode(
        self, query: torch.Tensor, layer: SparseLayer, new_key: torch.Tensor, new_value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Append the token, attend to what is kept, and evict a token; see :meth:`SparseMethod.decode`."""
        storage = storage_of(layer)
        if storage.kept is None and self.covers(storage.planned_length(layer.lengths)):
            output = DENSE.decode(query, layer, new_key, new_value, scale)
        else:
            layer.append(new_key.unsqueeze(2), new_value.unsqueeze(2))
            output = self._attend_to_kept(query, layer, scale)
        self.watch(query.unsqueeze(2), layer, scale)
        if not self.keeps_generated:
            self._evict_one(query, layer, scale)
        return output

    def _attend_to_kept(self, query: torch.Tensor, layer: SparseLayer, scale: float) -> torch.Tensor:
        rows = layer.rows
        tokens = rows.seq_end - rows.seq_start
        layer.counter.count_rows(tokens.sum() * rows.keys.shape[1], layer.row_lengths().sum() * rows.keys.shape[1])
        if layer.is_recorded:
            layer.note(_selection(layer, tokens))
        output, lse = dense_decode(
            query, rows.keys, rows.values, rows.seq_start, rows.seq_end, scale=scale, finished=layer.finished
        )
        return layer.with_sinks(output, lse)

    def _evict_one(self, query: torch.Tensor, layer: SparseLayer, scale: float) -> None:
        """Evict one token of each row and KV head that has ``token_budget`` of them."""
        storage, lengths = storage_of(layer), layer.lengths
        held = storage.most_tokens(lengths)
        if held < self.token_budget:
            return
        priority = self.priority(layer, query, scale)
        assert priority is not None
        if storage.kept is None or held > self.token_budget:
            storage.evict(priority, self.token_budget - 1, self.token_budget, lengths)
        else:
            storage.open(priority)


def storage_of(layer: SparseLayer) -> EvictingStorage:
    """Return the storage of a layer whose method evicts."""
    assert isinstance(layer.storage, EvictingStorage)
    return layer.storage


def key_bytes(layer: SparseLayer) -> torch.Tensor:
    """Return the bytes of all keys held, which a method reads again for the weights that no attention op returns."""
    rows = layer.rows
    return (rows.seq_end - rows.seq_start).sum() * (rows.keys[0, :, 0].numel() * rows.keys.element_size())


def places(layer: SparseLayer) -> torch.Tensor:
    """Return each slot's place in its row, int32 [batch, kv_heads or 1, slots], counted from the row's first token."""
    return storage_of(layer).positions(layer.lengths) - layer.seq_start[:, None, None]


def attention_weights(query: torch.Tensor, layer: SparseLayer, scale: float) -> Iterator[torch.Tensor]:
    """Compute the attention weights of the newest tokens' queries over the slots, some queries at a time.

    Parameters
    ----------
    query
        [batch, q_heads, tokens, head_dim], of the tokens in the last slots, or of one token wherever its slot is.
    layer
        Holds these tokens' keys too.
    scale
        Factor on q.k.

    Yields
    ------
    torch.Tensor
        [batch, kv_heads, group, queries, slots], float32, or float64 for float64 queries; 0 where a token sees nothing.
    """
    tokens = query.shape[2]
    keys, _ = storage_of(layer).visible(layer.lengths, tokens)
    keys = keys.to(torch.promote_types(query.dtype, torch.float32))
    batch, kv_heads, slots, head_dim = keys.shape
    grouped = query.reshape(batch, kv_heads, -1, tokens, head_dim).to(keys.dtype)
    at = torch.arange(slots, device=keys.device)
    is_token = (at >= layer.rows.seq_start[:, None])[:, None, None, None]
    at_once = max(1, MAX_WEIGHTS // (batch * query.shape[1] * slots))
    for begin in range(0, tokens, at_once):
        part = grouped[:, :, :, begin : begin + at_once]
        newest = slots if tokens == 1 else slots - tokens + begin + 1  # slots that the first of the queries may see
        is_visible = is_token & (at < newest + torch.arange(part.shape[3], device=keys.device)[:, None])
        scores = (part.flatten(2, 3) @ keys.transpose(2, 3) * scale).view(*part.shape[:4], slots)
        yield scores.masked_fill(~is_visible, -torch.inf).softmax(-1).masked_fill(~is_visible, 0)  # of nothing: NaN


def _causal_mask(queries: int, layer: SparseLayer) -> torch.Tensor | None:
    storage = storage_of(layer)
    first = layer.rows.seq_start if layer.lengths.has_padding else None
    return mask_by_bounds(queries, storage.slots(layer.lengths), first, layer.keys.device)


def _selection(layer: SparseLayer, tokens: torch.Tensor) -> Selection:
    """Return the kept tokens, ``tokens`` [batch] in each row, as a selection of blocks of one."""
    batch, kv_heads = layer.keys.shape[:2]
    slots = torch.arange(storage_of(layer).slots(layer.lengths), device=layer.keys.device)
    is_token = slots >= layer.rows.seq_start[:, None, None]
    chosen = places(layer).where(is_token, -1).expand(batch, kv_heads, -1).sort(dim=2, descending=True).values
    return Selection(chosen, tokens[:, None].expand(batch, kv_heads).to(torch.int32), block_size=1)
