"""Common parts of the methods that score single tokens by codes of a few bits a key channel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from hf_sparse_attn_kernels import code_scores, encode_keys
from hf_sparse_attn_kernels.codes.centre import centre_levels
from hf_sparse_attn_kernels.codes.constants import make_constants

from hf_sparse_attn.heads import head_dim_of
from hf_sparse_attn.methods.base import SparseMethod

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from hf_sparse_attn.cache.layer import SparseLayer

PAGE_MULTIPLE = 16
CHANNEL_MULTIPLE = 8


@dataclass(frozen=True)
class CodedMethod(SparseMethod, partial=True):
    """A method that keeps a code of every key but those of the newest page, and scores tokens by the codes.

    A page is ``page_size`` tokens that follow one another, counted from the row's first token. It is coded once it is
    full, with RaBitQ's code (arXiv 2405.12497); see :func:`hf_sparse_attn_kernels.encode_keys`. A subclass has the
    field ``page_size``, may have ``bits``, ``correction`` and ``query_centre``, and chooses tokens by :meth:`estimate`.
    """

    appends_metadata: ClassVar[bool] = True
    needs_queries: ClassVar[bool] = False
    shared_centre: ClassVar[bool] = False
    """Code all pages of a KV head around the mean of the prompt's keys, instead of each around its own mean."""

    @property
    def page_size(self) -> int:
        """Tokens that are coded together, a field of every subclass."""
        raise NotImplementedError(f"{type(self).__name__} must have the field page_size")

    @property
    def bits(self) -> int:
        """Bits of a channel's symbol."""
        return 1

    @property
    def correction(self) -> str:
        """Which factor scales a key's symbols; see :func:`hf_sparse_attn_kernels.encode_keys`."""
        return "unbiased"

    @property
    def query_centre(self) -> bool:
        """Whether the exact product of each residual with the mean query is kept."""
        return True

    def _require_page_size(self) -> None:
        """Raise ``ValueError`` unless tiles of the kernels lie within a page."""
        is_multiple = self.page_size >= PAGE_MULTIPLE and self.page_size % PAGE_MULTIPLE == 0
        self._require("page_size", is_multiple, f"a multiple of {PAGE_MULTIPLE}")

    def check_model(self, model: PreTrainedModel) -> None:
        """Check that a key's code fills whole bytes.

        Raises
        ------
        ValueError
            The model's head_dim is not a multiple of 8.
        """
        head_dim = head_dim_of(model.config)
        if head_dim % CHANNEL_MULTIPLE:
            raise ValueError(f"{self.name}: head_dim must be a multiple of {CHANNEL_MULTIPLE}, got {head_dim}")

    @property
    def keeps_queries(self) -> int:
        """The cache keeps queries for the sake of their mean, the query centre."""
        return int(self.query_centre)

    def init_metadata(self, layer: SparseLayer) -> dict[str, torch.Tensor]:
        """Allocate the codes under the names of the ops' arguments, for ``pages`` of ``page_size`` tokens.

        ``codes`` uint8 [batch, kv_heads, pages * page_size, bits, head_dim / 8] and ``factors`` float16 [batch,
        kv_heads, pages * page_size, 2], or 1 without ``query_centre``; ``centres`` int8 [batch, kv_heads, pages,
        head_dim] and ``centre_scale`` float16 [batch, kv_heads, pages], or 1 for ``pages`` if they are shared;
        ``coded`` int32 [batch, kv_heads], the number of pages coded so far; ``query_centre`` float32 [batch, kv_heads,
        head_dim].
        """
        keys = layer.keys
        batch, kv_heads, capacity, head_dim = keys.shape
        make_constants(head_dim, keys.device)  # now, since decode steps may be recorded as CUDA graphs
        pages = -(-capacity // self.page_size)
        tokens = (batch, kv_heads, pages * self.page_size)
        centres = (batch, kv_heads, 1 if self.shared_centre else pages)
        metadata = {
            "codes": keys.new_empty(*tokens, self.bits, head_dim // 8, dtype=torch.uint8),
            "factors": keys.new_empty(*tokens, 1 + self.query_centre, dtype=torch.float16),
            "centres": keys.new_zeros(*centres, head_dim, dtype=torch.int8),
            "centre_scale": keys.new_zeros(*centres, dtype=torch.float16),
            "coded": keys.new_zeros(batch, kv_heads, dtype=torch.int32),
        }
        if self.query_centre:
            metadata["query_centre"] = keys.new_zeros(batch, kv_heads, head_dim, dtype=torch.float32)
        return metadata

    @property
    def compiles_verification(self) -> bool:
        """A verified draft is coded like the tokens of decode steps, around the query centre of the prompt."""
        return True

    def update_metadata(self, layer: SparseLayer, num_new: int) -> None:
        """Code the pages that a decode step or a compiled pass has filled; drop all codes before a rebuild.

        :meth:`finish_prompt` codes the pages of other tokens, once the queries are known.
        """
        if (num_new == 1 and layer.lengths.in_step) or layer.verifies_draft:
            self._encode(layer, max_pages=-(-num_new // self.page_size))
        elif num_new == layer.lengths.known_length:
            layer.metadata["coded"].zero_()

    def crop_metadata(self, layer: SparseLayer) -> None:
        """Drop the codes of pages that are no longer full."""
        coded = layer.metadata["coded"]
        coded.copy_(torch.minimum(coded, (layer.row_lengths() // self.page_size).unsqueeze(1)))

    def finish_prompt(self, layers: Sequence[SparseLayer]) -> None:
        """Code every full page that is not coded yet; set the centres of the rows in which none was."""
        for layer in layers:
            if self.query_centre:
                self._centre_queries(layer)
            if self.shared_centre:
                self._centre_keys(layer)
            self._encode(layer)

    def _centre_queries(self, layer: SparseLayer) -> None:
        """Write the mean query of each KV head's group, 0 where no query is known; rows with codes keep theirs."""
        centre = layer.metadata["query_centre"]
        if layer.prompt_queries is None:
            mean = torch.zeros_like(centre)
        else:
            mean = layer.prompt_queries.mean.view(*centre.shape[:2], -1, centre.shape[2]).mean(2).to(centre.dtype)
        is_coded = layer.metadata["coded"] > 0
        centre.copy_(torch.where(is_coded.unsqueeze(2), centre, mean))

    def _centre_keys(self, layer: SparseLayer) -> None:
        """Write the mean key of each KV head as its one centre; rows with codes keep theirs."""
        keys, dtype = layer.keys, torch.promote_types(layer.keys.dtype, torch.float32)
        total = torch.stack(
            [keys[row, :, start : layer.length].sum(1, dtype=dtype) for row, start in enumerate(layer.lengths.starts)]
        )
        levels, scale = centre_levels(total / layer.row_lengths().clamp_min(1)[:, None, None])
        is_coded = (layer.metadata["coded"] > 0).unsqueeze(2)
        centres, centre_scale = layer.metadata["centres"], layer.metadata["centre_scale"]
        centres.copy_(torch.where(is_coded.unsqueeze(3), centres, levels.unsqueeze(2)))
        centre_scale.copy_(torch.where(is_coded, centre_scale, scale.unsqueeze(2)))

    def _encode(self, layer: SparseLayer, max_pages: int | None = None) -> None:
        encode_keys(
            layer.keys,
            seq_start=layer.seq_start,
            seq_end=layer.seq_end,
            page_size=self.page_size,
            bits=self.bits,
            correction=self.correction,
            shared_centre=self.shared_centre,
            max_pages=max_pages,
            **layer.metadata,
        )

    def scored_tokens(self, layer: SparseLayer) -> int:
        """Return the tokens of all pages that any row may have: ``num_tokens`` of the ops.

        The codes have room for whole pages, while a row, or a static buffer, may have any length. Kernels keep scores
        of 2 bytes, the KV heads one after another. Pages are multiples of 16 tokens, so those of each KV head begin at
        a multiple of 32 bytes and are read and written several at once; of an odd length, each needs its own access.
        """
        if layer.longest_row == layer.capacity:
            # Static buffers: the same number, but compiled steps need no guard that it is within the codes.
            room: int = layer.metadata["codes"].shape[2]
            return room
        return layer.max_blocks(self.page_size) * self.page_size

    def estimate(
        self, query: torch.Tensor, layer: SparseLayer, scale: float, group_reduce: str, first_page: int = 0
    ) -> torch.Tensor:
        """Return the estimated score of every token of the pages from ``first_page`` to that of the newest token.

        float16 [batch, kv_heads, tokens], as :func:`hf_sparse_attn_kernels.code_scores` describes them.
        """
        scores: torch.Tensor = code_scores(
            query,
            **{name: tensor for name, tensor in layer.metadata.items() if name != "coded"},
            seq_start=layer.seq_start,
            seq_end=layer.seq_end,
            page_size=self.page_size,
            bits=self.bits,
            shared_centre=self.shared_centre,
            first_page=first_page,
            scale=scale,
            group_reduce=group_reduce,
            num_tokens=self.scored_tokens(layer),
            counter=layer.counter.totals,
        )
        return scores
