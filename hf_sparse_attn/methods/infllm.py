"""InfLLM: a local window, and blocks of the past that are looked up by representative tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from hf_sparse_attn.methods.base import SparseMethod
from hf_sparse_attn.methods.memory_blocks import (
    BlockSplit,
    allocate_memory,
    as_selection,
    choose_blocks,
    represent,
    represent_up_to,
)
from hf_sparse_attn.methods.merge import ChunkPart, Part, attend_from_chunk, attend_to_parts
from hf_sparse_attn.methods.scores import grouped, take_tokens
from hf_sparse_attn.rope import check_rope, decoder_rotary, max_positions, rotated

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from hf_sparse_attn.cache.layer import SparseLayer


@dataclass(frozen=True)
class InfLLM(SparseMethod):
    """Read a local window, the first tokens, and blocks of the past chosen by a few of their keys (InfLLM, 2402.04617).

    Keys are cached before RoPE. A query attends to the last ``n_local`` tokens at their own distances (section 3.1).
    What lies before them is divided into blocks of ``block_size`` tokens. A block is represented by the tokens with the
    highest mean of q.k over the queries after them that had them in their local window: the representative score r_m of
    section 3.2. A query reads the blocks whose representatives have the highest q.k, the relevance score of section
    3.2, summed over all heads, and the first ``n_init`` tokens. All of these count as ``n_local`` tokens away, so no
    distance exceeds the trained ones, however long the context is.

    Prefill runs in chunks of ``chunk_size`` tokens. The queries of a chunk share one choice of blocks, by their mean.

    Parameters
    ----------
    token_budget
        Cached tokens that a decode step reads at most. What ``n_init`` and ``n_local`` leave is for blocks, and for the
        tokens between the last whole block and the local window. If n_init + n_local exceeds two thirds of the budget,
        they shrink in proportion to two thirds. Blocks shrink if fewer than four would fit into the rest. The default
        leaves room for the authors' 16 blocks.
    n_init
        First tokens, always read; the authors' value is 128.
    n_local
        Last tokens, always read, including the current one. At least 1; the authors' value is 4096.
    block_size
        Tokens in a block; the authors' value is 128.
    representatives
        Tokens of a block that represent it; the authors' value is 4.
    chunk_size
        Tokens of the prefill that share a choice of blocks; the authors' value is 512.

    Notes
    -----
    All layers are sparse: ``dense_layers`` must be 0. The representative tokens are those of each KV head, by the sum
    of its group's queries. A decode step's query counts for them once its row exceeds the local window.
    """

    name: ClassVar[str] = "infllm"
    summary: ClassVar[str] = "a local window, and blocks of the past by representative tokens"
    paper: ClassVar[str] = "arXiv 2402.04617"
    sparse_phases: ClassVar[tuple[str, ...]] = ("prefill", "decode")
    rotates_keys: ClassVar[bool] = True
    needs_mask: ClassVar[bool] = False
    extends_positions: ClassVar[bool] = True
    lasting_metadata: ClassVar[tuple[str, ...]] = ("queries",)

    token_budget: int = 6400
    n_init: int = 128
    n_local: int = 4096
    block_size: int = 128
    representatives: int = 4
    chunk_size: int = 512

    def __post_init__(self) -> None:
        """Check the hyperparameters; errors as of :class:`SparseMethod`."""
        super().__post_init__()
        self._require("token_budget", self.token_budget >= 2, "at least 2: the current token and a block")
        self._require("n_init", self.n_init >= 0, "0 or more")
        self._require("n_local", self.n_local >= 1, "at least 1: the current token")
        self._require("block_size", self.block_size >= 1, "at least 1")
        is_part = 1 <= self.representatives <= self.block_size
        self._require("representatives", is_part, f"between 1 and block_size={self.block_size}")
        self._require("chunk_size", self.chunk_size >= 1, "at least 1")

    @property
    def split(self) -> BlockSplit:
        """First tokens, blocks and local window of a decode step."""
        return BlockSplit.of(self.token_budget, self.n_init, self.n_local, self.block_size)

    def check_model(self, model: PreTrainedModel) -> None:
        """Check that the model's positions can be assigned.

        Raises
        ------
        ValueError
            The local window exceeds the trained positions, or the RoPE variant is not supported.
        """
        positions = max_positions(model.config)
        if self.split.last >= positions:
            raise ValueError(
                f"{self.name}: n_local must be below the model's {positions} positions, since remote tokens count as "
                f"n_local tokens away, got {self.split.last}"
            )
        check_rope(model.config, decoder_rotary(model), self.name)

    def covers(self, length: int) -> bool:
        """Whether ``length`` tokens lie within the local window."""
        return length <= self.split.last

    def prefill_chunk(self, positions: int) -> int | None:
        """Tokens per chunk of a prefill."""
        return self.chunk_size

    def rope_slots(self, positions: int) -> int:
        """Slots of a chunk and the local window of its first query; distances within them are below ``n_local``."""
        return self.split.last + max(self.chunk_size, self.split.size)

    def init_metadata(self, layer: SparseLayer) -> dict[str, torch.Tensor]:
        """Allocate the context memory; see :func:`~hf_sparse_attn.methods.memory_blocks.allocate_memory`."""
        return allocate_memory(layer, self.split.size)

    def update_metadata(self, layer: SparseLayer, num_new: int) -> None:
        """Forget queries after the rows' ends, which a failed pass of a prompt leaves, if everything is rebuilt."""
        if not layer.lengths.in_step and num_new == layer.length:
            layer.metadata["queries"][:, :, num_new:] = 0

    def crop_metadata(self, layer: SparseLayer) -> None:
        """Forget the queries of removed tokens, and the blocks that they helped to represent."""
        layer.metadata["queries"][:, :, layer.length :] = 0
        represented = layer.metadata["represented"]
        represented.copy_(torch.minimum(represented, self.split.blocks_before(layer.row_lengths() + 1)))

    def finish_prompt(self, layers: Sequence[SparseLayer]) -> None:
        """Represent all blocks before the next token's local window, so that a decode step adds one at most."""
        for layer in layers:
            blocks = self.split.blocks_before(layer.row_lengths() + 1)
            represent_up_to(layer, self.split, self.representatives, blocks)

    def _as_remote(self, query: torch.Tensor, layer: SparseLayer) -> torch.Tensor:
        """Rotate queries [..., head_dim] as if all keys before RoPE were ``n_local`` away (section 3.2), in float32."""
        (cos, sin), last = layer.rope, self.split.last
        return rotated(query, cos[last] * cos[0], sin[last] * cos[0])  # cos[0] is a RoPE's factor on both sides

    def decode(
        self, query: torch.Tensor, layer: SparseLayer, new_key: torch.Tensor, new_value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Append, choose blocks, and attend to them and to the local window; see :meth:`SparseMethod.decode`."""
        layer.append(new_key.unsqueeze(2), new_value.unsqueeze(2))
        split, lengths = self.split, layer.row_lengths().long()
        blocks = split.blocks_before(lengths)
        if self._completes_a_block(layer):
            represent(layer, split, self.representatives, (blocks - 1).clamp_min(0))
            layer.metadata["represented"].copy_(blocks)
        remote_query = self._as_remote(query, layer)
        chosen = choose_blocks(remote_query, layer, split, blocks)
        window_start = lengths - split.last
        tokens, is_read = split.remote_tokens(chosen, blocks, window_start, split.size - 1)
        local = window_start.clamp_min(0).unsqueeze(1) + torch.arange(split.last, device=query.device)
        in_row = local < lengths.unsqueeze(1)
        seeking = grouped(query, layer.keys.shape[1]).sum(2) * (lengths > split.last)[:, None, None]
        layer.metadata["queries"].index_copy_(2, layer.seq_end[:1].long() - 1, seeking.unsqueeze(2).to(query.dtype))
        _, kv_heads, _, head_dim = layer.keys.shape
        layer.counter.count_metadata(blocks.sum() * (kv_heads * head_dim * layer.keys.element_size()))
        if layer.is_recorded:
            layer.note(as_selection(torch.cat((tokens, local), dim=1), torch.cat((is_read, in_row), dim=1)))
        parts = [
            Part(query, as_selection(local, in_row), layer.rotations),
            Part(remote_query.to(query.dtype), as_selection(tokens, is_read), {}),
        ]
        return attend_to_parts(parts, layer, scale)

    def _completes_a_block(self, layer: SparseLayer) -> bool:
        """Whether the newest token makes a block of some row whole; True where the host does not know.

        Another step would only choose again what is chosen already: every query that a block's tokens meet is known.
        """
        length, split = layer.lengths.known_length, self.split
        if length is None:
            return True
        after = (length - start - split.first - split.last for start in layer.lengths.starts)
        return any(tokens > 0 and tokens % split.size == 0 for tokens in after)

    def prefill(self, query: torch.Tensor, layer: SparseLayer, scale: float, mask: torch.Tensor | None) -> torch.Tensor:
        """Attend from a chunk to the local windows, the first tokens, and the blocks that its mean query chooses.

        See :meth:`SparseMethod.prefill` for the arguments. A prompt within the local window is prefilled densely.
        """
        (cos, sin), last, queries, end = layer.rope, self.split.last, query.shape[2], layer.length
        width = min(last + queries - 1, end)
        slots = torch.arange(end - width, end, device=query.device)
        in_row = slots >= layer.seq_start[:, None]  # [batch, width]
        is_query = in_row[:, -queries:]
        seeking = grouped(query, layer.keys.shape[1]).sum(2).masked_fill(~is_query[:, None, :, None], 0)
        layer.metadata["queries"][:, :, end - queries : end] = seeking
        if self.covers(end - layer.least_padding):
            return super().prefill(query, layer, scale, mask)
        keys, values = (
            buffer[:, :, end - width : end].masked_fill(~in_row[:, None, :, None], 0)
            for buffer in (layer.keys, layer.values)
        )
        distance = slots[-queries:, None] - slots  # [queries, width]
        is_local = (distance >= 0) & (distance < last) & in_row.unsqueeze(1)  # [batch, queries, width]
        turned = rotated(query, cos[width - queries : width], sin[width - queries : width])
        remote_query = self._as_remote(query, layer)
        parts = [
            ChunkPart(turned, rotated(keys, cos[:width], sin[:width]), values, is_local),
            ChunkPart(remote_query, *self._remote(remote_query, layer, is_query)),
        ]
        return attend_from_chunk(parts, layer, scale)

    def _remote(
        self, query: torch.Tensor, layer: SparseLayer, is_query: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Choose the tokens before the local windows that a chunk of queries reads.

        Parameters
        ----------
        query
            [batch, q_heads, queries, head_dim], rotated by :meth:`_as_remote`.
        layer
            Holds the chunk's tokens already.
        is_query
            bool [batch, queries]: the others are padding.

        Returns
        -------
        tuple of torch.Tensor
            Keys and values, [batch, kv_heads, n, head_dim], and which query reads which, bool [batch, queries, n].
        """
        split, queries = self.split, query.shape[2]
        positions = (layer.row_lengths() - queries).long().unsqueeze(1) + torch.arange(queries, device=query.device)
        blocks = split.blocks_before(positions[:, 0] + 1)
        represent_up_to(layer, split, self.representatives, blocks)
        own = query.masked_fill(~is_query[:, None, :, None], 0).sum(2) / is_query.sum(1).clamp_min(1)[:, None, None]
        chosen = choose_blocks(own, layer, split, blocks)
        end = positions[:, -1] + 1 - split.last
        tokens, is_read = split.remote_tokens(chosen, blocks, end, split.size - 1 + queries)
        slots = (layer.seq_start.long()[:, None] + tokens).clamp(0, layer.capacity - 1)
        is_far = positions.unsqueeze(2) - tokens.unsqueeze(1) >= split.last
        keys, values = (
            take_tokens(buffer, slots).masked_fill(~is_read[:, None, :, None], 0)
            for buffer in (layer.keys, layer.values)
        )
        return keys, values, is_read.unsqueeze(1) & is_far
