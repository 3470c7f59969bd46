"""KeyCodes with a hyperparameter for each of its choices, in plain torch: what each choice is worth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from hf_sparse_attn_kernels import select_tokens_by_score

from eval.studies.codes import LEAST_SQUARES, Coder, Page
from hf_sparse_attn.methods.base import Selection, SparseMethod

if TYPE_CHECKING:
    from hf_sparse_attn.cache.layer import SparseLayer

EXACT = 16
"""``bits`` of the keys themselves."""
BLOCK = 16
"""Tokens that are chosen together with ``granularity="page"``."""
CHOICES: dict[str, tuple[object, ...]] = {
    "bits": (1, 2, EXACT),
    "key_centre": ("page", "prompt", "none"),
    "query_centre": ("kv_head", "query_head", "none"),
    "group_reduce": ("softmax", "max", "mean"),
    "granularity": ("token", "page"),
    "rotation": (True, False),
    "correction": (True, False, LEAST_SQUARES),
    "query_bits": (6, None),
}
_MOST_HALF = 65504.0


@dataclass(frozen=True)
class KeyCodesStudy(SparseMethod):
    """Choose tokens by codes of their keys, as KeyCodes does with these defaults, or otherwise in one respect or more.

    It is for measurements of accuracy: it counts the bytes that an implementation would read, but its own steps are
    slow, wait for the device, and cannot be compiled.

    Parameters
    ----------
    token_budget, page_size, sink_tokens, dense_layers
        As of :class:`~hf_sparse_attn.KeyCodes`.
    bits
        Bits of a channel's symbol, 1 or 2; 16 scores the keys themselves, which is the best that codes can do.
    key_centre
        What codes are taken around: the mean key of each ``"page"``, in 8 bits, the mean key of the ``"prompt"``, or
        nothing (``"none"``).
    query_centre
        The mean query whose product with each residual is kept exactly: one of each ``"kv_head"``, one of each
        ``"query_head"``, which takes as many numbers a token as a group has heads, or ``"none"``.
    rotation
        Code rotated residuals. Without it, channels are coded as they are, each by its own scale over the prompt.
    correction
        Scale symbols such that their product with the residual is right, for estimates without bias; ``False``: such
        that their norm is right; ``"least_squares"``: such that they are nearest to the residual, for estimates with
        the least squared error, which are too small in the mean.
    group_reduce
        Reduction of the scores of the query heads that share a KV head.
    granularity
        ``"token"``, or ``"page"``: pages of 16 tokens are chosen by the sum of their tokens' softmax, or by their
        greatest score if ``group_reduce`` is no softmax.
    rerank
        Choose so many times the budget by codes, and the budget among these by the keys themselves; 0 or 1 for no
        second choice.
    query_bits
        Bits of a channel of the query that symbols are multiplied with, 6 as in the op, or None for queries that are
        not rounded. Queries in float64 never are. Records without this parameter have queries that were not rounded.
    """

    name: ClassVar[str] = "keycodes_study"
    summary: ClassVar[str] = "KeyCodes with a hyperparameter for each of its choices"
    paper: ClassVar[str] = "arXiv 2405.12497"
    needs_queries: ClassVar[bool] = False

    bits: int = 1
    page_size: int = 64
    key_centre: str = "page"
    query_centre: str = "kv_head"
    rotation: bool = True
    correction: bool | str = True
    group_reduce: str = "softmax"
    granularity: str = "token"
    rerank: int = 0
    sink_tokens: int = 4
    query_bits: int | None = 6

    def __post_init__(self) -> None:
        """Check the hyperparameters.

        Raises
        ------
        TypeError
            A value must be a whole number and is not.
        ValueError
            A value is out of range.
        """
        super().__post_init__()
        for parameter, allowed in CHOICES.items():
            value = getattr(self, parameter)
            is_allowed = any(value == choice and type(value) is type(choice) for choice in allowed)
            self._require(parameter, is_allowed, f"one of {', '.join(map(str, allowed))}")
        self._require("page_size", self.page_size >= BLOCK and self.page_size % BLOCK == 0, f"a multiple of {BLOCK}")
        self._require("rerank", self.rerank >= 0, "0 or more")
        self._require("sink_tokens", 0 <= self.sink_tokens <= BLOCK, f"0 to {BLOCK}")
        first = BLOCK if self.granularity == "page" and self.sink_tokens else self.sink_tokens
        least = first + self.page_size
        self._require("token_budget", self.token_budget >= least, f"at least {least}: what is always read")

    @property
    def keeps_queries(self) -> int:
        """The cache keeps queries for the sake of their mean."""
        return int(self.query_centre != "none" and self.bits != EXACT)

    def init_metadata(self, layer: SparseLayer) -> dict[str, torch.Tensor]:
        """Allocate what :class:`~eval.studies.codes.Coder` keeps of each coded token, page, row and KV head."""
        keys = layer.keys
        batch, kv_heads, capacity, head_dim = keys.shape
        pages = -(-capacity // self.page_size)
        metadata = {"coded": keys.new_zeros(batch, kv_heads, dtype=torch.int32)}
        if self.bits == EXACT:
            return metadata
        tokens = (batch, kv_heads, pages * self.page_size)
        centres = self._centres_of(layer.q_heads // kv_heads)
        metadata["symbols"] = keys.new_zeros(*tokens, head_dim, dtype=torch.int8)
        metadata["factors"] = keys.new_zeros(*tokens, 1, dtype=torch.float16)
        metadata["offsets"] = keys.new_zeros(*tokens, centres, dtype=torch.float16)
        metadata["levels"] = keys.new_zeros(batch, kv_heads, pages, head_dim, dtype=torch.int8)
        metadata["level_scale"] = keys.new_zeros(batch, kv_heads, pages, dtype=torch.float16)
        metadata["prompt_centre"] = keys.new_zeros(batch, kv_heads, head_dim, dtype=torch.float64)
        metadata["channel_scale"] = keys.new_ones(batch, kv_heads, head_dim, dtype=torch.float64)
        metadata["query_centre"] = keys.new_zeros(batch, kv_heads, centres, head_dim, dtype=torch.float32)
        return metadata

    def _centres_of(self, group: int) -> int:
        return {"none": 0, "kv_head": 1, "query_head": group}[self.query_centre]

    def update_metadata(self, layer: SparseLayer, num_new: int) -> None:
        """Code the page that a decode step has filled, and drop all codes before everything is rebuilt."""
        if num_new == 1 and layer.lengths.in_step:
            if layer.lengths.has_padding or layer.length % self.page_size == 0:
                self._encode(layer)
        elif num_new == layer.lengths.known_length:
            layer.metadata["coded"].zero_()

    def crop_metadata(self, layer: SparseLayer) -> None:
        """Drop the codes of pages that are no longer full."""
        coded = layer.metadata["coded"]
        coded.copy_(torch.minimum(coded, (layer.row_lengths() // self.page_size)[:, None]))

    def finish_prompt(self, layers: Sequence[SparseLayer]) -> None:
        """Set the query centre of rows without codes, and code every full page that is not coded yet."""
        for layer in layers:
            if self.keeps_queries and layer.prompt_queries is not None:
                centre, is_coded = layer.metadata["query_centre"], layer.metadata["coded"] > 0
                mean = layer.prompt_queries.mean.view(*centre.shape[:2], -1, centre.shape[3])
                mean = mean.mean(2, keepdim=True) if self.query_centre == "kv_head" else mean
                centre.copy_(torch.where(is_coded[:, :, None, None], centre, mean.to(centre.dtype)))
            self._encode(layer)

    def _encode(self, layer: SparseLayer) -> None:
        """Code the pages that have become full since the last call."""
        coded, full = layer.metadata["coded"], layer.row_lengths() // self.page_size
        first, last = int(coded.min()), int(full.max())
        if self.bits != EXACT and first < last:
            batch, kv_heads, _, head_dim = layer.keys.shape
            tokens = torch.arange(first * self.page_size, last * self.page_size, device=layer.keys.device)
            places = (layer.seq_start[:, None] + tokens).clamp_max(layer.capacity - 1)
            index = places[:, None, :, None].expand(batch, kv_heads, -1, head_dim)
            pages = layer.keys.gather(2, index).view(batch, kv_heads, -1, self.page_size, head_dim).double()
            self._coder.encode(pages, first, full, layer.metadata)
        coded.copy_(full[:, None].expand_as(coded))

    @property
    def _coder(self) -> Coder:
        return Coder(self.bits, self.key_centre, self.rotation, self.correction, self.query_bits)

    def select(self, query: torch.Tensor, layer: SparseLayer, scale: float) -> Selection:
        """Score every coded token and choose the best; see :meth:`SparseMethod.select`."""
        batch, kv_heads = layer.keys.shape[:2]
        exact_dtype = torch.promote_types(query.dtype, torch.float32)
        grouped = query.to(exact_dtype).view(batch, kv_heads, -1, query.shape[2])
        scores = self._reduced(self._estimates(grouped, layer) * scale, self._is_candidate(layer))
        if self.granularity == "page":
            return self._best_pages(scores, layer)
        most = min(self.token_budget * max(1, self.rerank), max(self.token_budget, layer.longest_row))
        block_indices, block_counts = self._best_tokens(scores, layer, most)
        if self.rerank > 1:
            scores = self._scored_by_keys(grouped * scale, block_indices, layer)
            block_indices, block_counts = self._best_tokens(scores, layer, self.token_budget)
        return Selection(block_indices, block_counts, block_size=1)

    def _is_candidate(self, layer: SparseLayer) -> torch.Tensor:
        """Bool [batch, 1, 1, tokens]: whether a token is on a page before that of the row's newest token."""
        begins = (layer.row_lengths() - 1).clamp_min(0) // self.page_size * self.page_size
        return (torch.arange(layer.longest_row, device=begins.device) < begins[:, None])[:, None, None]

    def _estimates(self, query: torch.Tensor, layer: SparseLayer) -> torch.Tensor:
        """Return estimates of q.k, [batch, kv_heads, group, tokens], arbitrary beyond the candidates."""
        if self.bits == EXACT:
            return query @ self._rows(layer.keys, layer).to(query.dtype).transpose(2, 3)
        pages = -(-layer.longest_row // self.page_size)
        estimates = self._coder.estimate(query, Page(layer.metadata, pages, self.page_size))
        return estimates[..., : layer.longest_row]

    @staticmethod
    def _rows(states: torch.Tensor, layer: SparseLayer) -> torch.Tensor:
        """Return keys by their row's tokens, [batch, kv_heads, tokens, head_dim], without left padding."""
        if not layer.lengths.has_padding:
            return states[:, :, : layer.longest_row]
        tokens = layer.seq_start[:, None] + torch.arange(layer.longest_row, device=states.device)
        index = tokens.clamp_max(layer.capacity - 1)[:, None, :, None]
        return states.gather(2, index.expand(*states.shape[:2], -1, states.shape[3]))

    def _reduced(self, logits: torch.Tensor, is_candidate: torch.Tensor) -> torch.Tensor:
        """Reduce logits [batch, kv_heads, group, tokens] over the group, -inf for tokens that are no candidates."""
        logits = logits.masked_fill(~is_candidate, -torch.inf)
        if self.group_reduce == "softmax" and logits.shape[2] > 1:
            reduced = logits.log_softmax(-1).nan_to_num(nan=-torch.inf, neginf=-torch.inf).logsumexp(2)
        else:
            reduced = logits.mean(2) if self.group_reduce == "mean" else logits.amax(2)
        if reduced.dtype == torch.float64:
            return reduced
        return torch.where(is_candidate[:, 0], reduced.clamp(-_MOST_HALF, _MOST_HALF), -torch.inf).half()

    def _best_tokens(self, scores: torch.Tensor, layer: SparseLayer, most: int) -> tuple[torch.Tensor, torch.Tensor]:
        return select_tokens_by_score(
            scores.contiguous(),
            layer.seq_start,
            layer.seq_end,
            max_tokens=most,
            sink_tokens=self.sink_tokens,
            page_size=self.page_size,
        )

    def _scored_by_keys(self, query: torch.Tensor, chosen: torch.Tensor, layer: SparseLayer) -> torch.Tensor:
        """Score the chosen tokens, [batch, kv_heads, n], by their keys; -inf for all others."""
        tokens = chosen.clamp_min(0).long()
        places = (tokens + layer.seq_start[:, None, None])[..., None].expand(*tokens.shape, query.shape[3])
        logits = query @ layer.keys.gather(2, places).to(query.dtype).transpose(2, 3)
        is_candidate = self._is_candidate(layer).expand(*tokens.shape[:2], 1, -1).gather(3, tokens[:, :, None])
        scores = self._reduced(logits, is_candidate & (chosen >= 0)[:, :, None])
        all_scores = scores.new_full((*tokens.shape[:2], layer.longest_row + 1), -torch.inf)
        # Absent entries go to a place of their own, so that they do not overwrite token 0.
        return all_scores.scatter_(2, torch.where(chosen >= 0, tokens, layer.longest_row), scores)[..., :-1]

    def _best_pages(self, scores: torch.Tensor, layer: SparseLayer) -> Selection:
        """Choose blocks of 16 tokens: the first one, those of the newest token's page, and the best."""
        batch, kv_heads, tokens = scores.shape
        blocks = -(-tokens // BLOCK)
        padded = scores.new_full((batch, kv_heads, blocks * BLOCK), -torch.inf)
        padded[..., :tokens] = scores
        by_block = padded.view(batch, kv_heads, blocks, BLOCK).to(torch.promote_types(scores.dtype, torch.float32))
        best = by_block.logsumexp(3) if self.group_reduce == "softmax" else by_block.amax(3)
        lengths = layer.row_lengths()[:, None]
        first = torch.arange(blocks, device=scores.device) * BLOCK
        is_forced = (first >= (lengths - 1) // self.page_size * self.page_size) | (first < self.sink_tokens)
        best = best.masked_fill(is_forced[:, None], torch.inf).masked_fill((first >= lengths)[:, None], -torch.inf)
        found, indices = best.topk(min(self.token_budget // BLOCK, blocks), -1)
        indices = indices.masked_fill(found == -torch.inf, blocks).sort(-1)[0]
        counts = (indices < blocks).sum(-1, dtype=torch.int32)
        return Selection(indices.masked_fill(indices == blocks, -1).int(), counts, BLOCK)

    def metadata_bytes_read(self, layer: SparseLayer) -> torch.Tensor | int:
        """Bytes that an implementation would read to choose: codes and centres, or keys, of all candidates."""
        kv_heads, head_dim = layer.keys.shape[1], layer.keys.shape[3]
        key_bytes = head_dim * layer.keys.element_size()
        pages = ((layer.row_lengths() - 1) // self.page_size).clamp_min(0).long()  # [batch]
        if self.bits == EXACT:
            token_bytes, page_bytes, row_bytes = key_bytes, 0, 0
        else:
            group = layer.q_heads // kv_heads
            token_bytes = self.bits * head_dim // 8 + 2 + 2 * self._centres_of(group)
            page_bytes = head_dim + 2 if self.key_centre == "page" else 0
            row_bytes = 2 * head_dim * ((self.key_centre == "prompt") + (not self.rotation))
        read = (pages * (self.page_size * token_bytes + page_bytes) + row_bytes * (pages > 0)).sum() * kv_heads
        if self.rerank > 1:  # keys that are chosen in the end are counted once, where they are attended to
            beside = self.rerank * self.token_budget - self.token_budget
            left = (layer.row_lengths() - self.token_budget).clamp(0, beside).long()
            read = read + left.sum() * kv_heads * key_bytes
        return read
