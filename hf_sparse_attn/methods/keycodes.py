"""KeyCodes: single tokens chosen by codes of one or two bits a key channel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from hf_sparse_attn_kernels import append_and_select_tokens, code_scores, encode_keys, select_tokens_by_score

from hf_sparse_attn.methods.base import Selection, SparseMethod
from hf_sparse_attn.rope import head_dim_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from hf_sparse_attn.cache.layer import SparseLayer

BITS = (1, 2)
GROUP_REDUCTIONS = ("softmax", "max")
PAGE_MULTIPLE = 16
CHANNEL_MULTIPLE = 8


@dataclass(frozen=True)
class KeyCodes(SparseMethod):
    """Read the tokens whose keys score highest by codes of one or two bits a channel (RaBitQ, arXiv 2405.12497).

    Each full page keeps the mean c of its keys after RoPE, in 8 bits. The code of a key k is that of its residual
    r = k - c, rotated by a fixed orthogonal matrix R: a symbol of ``bits`` bits for each channel of R r, and a factor a
    with which a s, s being the symbols, estimates R r without bias along R r. A step estimates q.k of every coded token
    as ``q.c + m.r + a (R (q - m)).s``, where m is the mean of the prompt's queries and m.r is kept exactly. It reads
    the tokens with the highest estimates, the first ``sink_tokens``, and the page of the newest token. Prefill stays
    dense.

    RaBitQCache (arXiv 2606.31519) brought such codes to KV caches. Ours differ: a centre for each page instead of one
    for the prompt, one selection for each KV head, a fixed budget, and no dense layers.

    Parameters
    ----------
    token_budget
        Cached tokens that a KV head reads per step: at least ``sink_tokens`` and one page.
    bits
        Bits of a channel's symbol, 1 or 2. With 2 the codes take twice the bytes and estimate more accurately.
    page_size
        Tokens that share a centre: a multiple of 16. A page is coded when it is full; until then it is read whole.
    group_reduce
        Reduction of the estimates of the query heads that share a KV head. ``"softmax"`` normalises each head's
        estimates over the candidates before summing, so no head dominates. ``"max"`` takes the greatest.
    sink_tokens
        First tokens, always read.
    query_centre
        Keep the exact product of each residual with the mean query, 16 bits a token. The codes then estimate only what
        is left of the query. The mean is that of the prompt's queries when a row's first page is coded.
    dense_layers
        Number of first layers that attend to the whole cache.

    Notes
    -----
    The budget counts everything that is read. Generated tokens are coded too.
    """

    name: ClassVar[str] = "keycodes"
    summary: ClassVar[str] = "top-k tokens by codes of one or two bits a key channel"
    paper: ClassVar[str] = "arXiv 2405.12497"
    needs_queries: ClassVar[bool] = False

    token_budget: int = 1024
    dense_layers: int = 0
    bits: int = 1
    page_size: int = 64
    group_reduce: str = "softmax"
    sink_tokens: int = 4
    query_centre: bool = True

    def __post_init__(self) -> None:
        """Check the hyperparameters.

        Raises
        ------
        TypeError
            A value must be a whole number, or True or False, and is not.
        ValueError
            A value is out of range.
        """
        super().__post_init__()
        self._require("bits", self.bits in BITS, f"one of {', '.join(map(str, BITS))}")
        is_multiple = self.page_size >= PAGE_MULTIPLE and self.page_size % PAGE_MULTIPLE == 0
        self._require("page_size", is_multiple, f"a multiple of {PAGE_MULTIPLE}")
        self._require("group_reduce", self.group_reduce in GROUP_REDUCTIONS, f"one of {', '.join(GROUP_REDUCTIONS)}")
        self._require("sink_tokens", self.sink_tokens >= 0, "0 or more")
        always_read = self.sink_tokens + self.page_size
        self._require(
            "token_budget",
            self.token_budget >= always_read,
            f"at least {always_read}: the first sink_tokens={self.sink_tokens} and a page of {self.page_size}",
        )
        if not isinstance(self.query_centre, bool):
            raise TypeError(f"query_centre must be True or False, got {self.query_centre!r}")

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
        head_dim] and ``centre_scale`` float16 [batch, kv_heads, pages]; ``coded`` int32 [batch, kv_heads], the number
        of pages coded so far; ``query_centre`` float32 [batch, kv_heads, head_dim].
        """
        keys = layer.keys
        batch, kv_heads, capacity, head_dim = keys.shape
        pages = -(-capacity // self.page_size)
        tokens = (batch, kv_heads, pages * self.page_size)
        metadata = {
            "codes": keys.new_empty(*tokens, self.bits, head_dim // 8, dtype=torch.uint8),
            "factors": keys.new_empty(*tokens, 1 + self.query_centre, dtype=torch.float16),
            "centres": keys.new_empty(batch, kv_heads, pages, head_dim, dtype=torch.int8),
            "centre_scale": keys.new_empty(batch, kv_heads, pages, dtype=torch.float16),
            "coded": keys.new_zeros(batch, kv_heads, dtype=torch.int32),
        }
        if self.query_centre:
            metadata["query_centre"] = keys.new_zeros(batch, kv_heads, head_dim, dtype=torch.float32)
        return metadata

    def update_metadata(self, layer: SparseLayer, num_new: int) -> None:
        """Code the page that a decode step has filled, and drop all codes before everything is rebuilt.

        :meth:`finish_prompt` codes the pages of other tokens, once the queries are known.
        """
        if num_new == 1 and layer.lengths.in_step:
            self._encode(layer, max_pages=1)
        elif num_new == layer.lengths.known_length:
            layer.metadata["coded"].zero_()

    def crop_metadata(self, layer: SparseLayer) -> None:
        """Drop the codes of pages that are no longer full."""
        coded = layer.metadata["coded"]
        coded.copy_(torch.minimum(coded, (layer.row_lengths() // self.page_size).unsqueeze(1)))

    def finish_prompt(self, layers: Sequence[SparseLayer]) -> None:
        """Code every full page that is not coded yet; set the query centre of rows in which none was."""
        for layer in layers:
            if self.query_centre:
                self._centre_queries(layer)
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

    def _encode(self, layer: SparseLayer, max_pages: int | None = None) -> None:
        encode_keys(
            layer.keys,
            seq_start=layer.seq_start,
            seq_end=layer.seq_end,
            page_size=self.page_size,
            bits=self.bits,
            max_pages=max_pages,
            **layer.metadata,
        )

    def decode(
        self, query: torch.Tensor, layer: SparseLayer, new_key: torch.Tensor, new_value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Append, code, score and select in one op, then attend; see :meth:`SparseMethod.decode`."""
        newest = layer.newest
        block_indices, block_counts = append_and_select_tokens(
            query,
            new_key,
            new_value,
            newest.keys,
            newest.values,
            seq_start=newest.seq_start,
            seq_end=newest.seq_end,
            page_size=self.page_size,
            max_tokens=self.token_budget,
            sink_tokens=self.sink_tokens,
            bits=self.bits,
            scale=scale,
            group_reduce=self.group_reduce,
            num_tokens=layer.longest_row,
            counter=layer.counter.totals,
            **layer.metadata,
        )
        return self.attend(query, layer, Selection(block_indices, block_counts, block_size=1), scale)

    def select(self, query: torch.Tensor, layer: SparseLayer, scale: float) -> Selection:
        """Estimate the score of every coded token and keep the best; see :meth:`SparseMethod.select`."""
        scores = code_scores(
            query,
            **{name: tensor for name, tensor in layer.metadata.items() if name != "coded"},
            seq_start=layer.seq_start,
            seq_end=layer.seq_end,
            page_size=self.page_size,
            bits=self.bits,
            scale=scale,
            group_reduce=self.group_reduce,
            num_tokens=layer.longest_row,
            counter=layer.counter.totals,
        )
        block_indices, block_counts = select_tokens_by_score(
            scores,
            layer.seq_start,
            layer.seq_end,
            max_tokens=self.token_budget,
            sink_tokens=self.sink_tokens,
            page_size=self.page_size,
        )
        return Selection(block_indices, block_counts, block_size=1)
