"""MInference: a prefill whose heads each follow one of three sparse patterns."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from hf_sparse_attn_kernels import block_sparse_prefill

from hf_sparse_attn.heads import query_heads_of
from hf_sparse_attn.methods.base import SparseMethod
from hf_sparse_attn.methods.full import Full
from hf_sparse_attn.methods.head_patterns import HeadPattern, read_patterns
from hf_sparse_attn.methods.parameter_file import path_text
from hf_sparse_attn.methods.prefill_patterns import HeadView, Pattern, of_budget, of_file

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from hf_sparse_attn.cache.layer import SparseLayer

DENSE = Full()


@dataclass(frozen=True)
class MInference(SparseMethod):
    """Prefill each head by its own sparse pattern, and decode densely (MInference 1.0, arXiv 2407.02490, section 3).

    Every query head follows one of three patterns. An A-shape head attends to the first tokens and to a window. A
    vertical-slash head attends to single tokens that all queries look at, and to tokens at certain distances, both by
    the attention weights of the last 64 queries. A block-sparse head attends, from each block of queries, to the blocks
    of keys with the highest scores of mean query and mean key.

    Which pattern a head follows comes from a file of ``patterns``, or is chosen anew in each pass: the one that holds
    the most weight of the last 64 queries, among patterns that compute at most ``token_budget`` keys for a query.

    Parameters
    ----------
    token_budget
        Keys that a query of the prompt attends to, at most, unless ``patterns`` is given. A prompt within it is
        prefilled densely in any case.
    dense_layers
        Number of first layers that are prefilled densely.
    patterns
        Path of a JSON file with the pattern of every head, in the format of the authors' files; None to choose.
    block_size
        Tokens in a block of queries and of keys, a power of two of at least 16; the paper's value is 64.

    Notes
    -----
    Slashes are rounded up to blocks, which adds only exactly computed weights. Decode steps read the whole cache: the
    method saves time in the prefill alone.
    """

    name: ClassVar[str] = "minference"
    summary: ClassVar[str] = "A-shape, vertical-slash or block-sparse prefill per head; dense decode steps"
    paper: ClassVar[str] = "arXiv 2407.02490"
    sparse_phases: ClassVar[tuple[str, ...]] = ("prefill",)

    token_budget: int = 4096
    patterns: str | os.PathLike[str] | None = None
    block_size: int = 64

    def __post_init__(self) -> None:
        """Check the hyperparameters.

        Raises
        ------
        TypeError
            A value must be a whole number or a path, and is not.
        ValueError
            A value is out of range.
        """
        super().__post_init__()
        if self.patterns is not None:
            object.__setattr__(self, "patterns", path_text("patterns", self.patterns))
        is_block = self.block_size >= 16 and self.block_size & (self.block_size - 1) == 0
        self._require("block_size", is_block, "a power of two of at least 16")
        self._require("token_budget", self.token_budget >= self.block_size, f"at least a block of {self.block_size}")

    def check_model(self, model: PreTrainedModel) -> None:
        """Check that the file of patterns is one of the model.

        Raises
        ------
        FileNotFoundError
            There is no such file.
        ValueError
            The file has another format, or other numbers of layers or heads.
        """
        if self.patterns is None:
            return
        config, layers = model.config, read_patterns(os.fspath(self.patterns))
        heads, wanted = [len(layer) for layer in layers], query_heads_of(config)
        if heads != wanted:
            raise ValueError(f"patterns={self.patterns!r} has {_layers_of(heads)}; the model has {_layers_of(wanted)}")

    def decode(
        self, query: torch.Tensor, layer: SparseLayer, new_key: torch.Tensor, new_value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Append the token and attend to the whole row; see :meth:`SparseMethod.decode`."""
        return DENSE.decode(query, layer, new_key, new_value, scale)

    def prefill(self, query: torch.Tensor, layer: SparseLayer, scale: float, mask: torch.Tensor | None) -> torch.Tensor:
        """Attend by the pattern of each head; see :meth:`SparseMethod.prefill`."""
        if self.covers(layer.length - layer.least_padding):
            return super().prefill(query, layer, scale, mask)
        rows = layer.rows
        heads = [self._of_kv_head(query, rows.keys, layer, head, scale) for head in range(rows.keys.shape[1])]
        blocks, block_counts = _joined([listed(pattern.blocks) for pattern in heads])
        columns, column_counts = _joined([listed(pattern.columns) for pattern in heads])
        output, lse = block_sparse_prefill(
            query,
            rows.keys,
            rows.values,
            blocks,
            block_counts,
            rows.seq_start,
            rows.seq_end,
            block_size=self.block_size,
            columns=columns,
            column_counts=column_counts,
            scale=scale,
        )
        return layer.with_sinks(output, lse)

    def _of_kv_head(
        self, query: torch.Tensor, buffer: torch.Tensor, layer: SparseLayer, head: int, scale: float
    ) -> Pattern:
        """Choose the patterns of the query heads of a KV head, whose keys the layer's ``buffer`` has."""
        group = query.shape[1] // buffer.shape[1]
        heads = slice(head * group, (head + 1) * group)
        keys = buffer[:, head, : layer.length]
        view = HeadView(query[:, heads], keys, layer.seq_start, scale, self.block_size)
        if self.patterns is None:
            candidates = of_budget(view, self.token_budget)
            choice = torch.stack([view.coverage(pattern) for pattern in candidates]).argmax(0)
        else:
            own = layer.head_shard.slice(read_patterns(os.fspath(self.patterns))[layer.layer_idx])[heads]
            kinds: list[HeadPattern] = sorted(set(own))
            candidates = [of_file(view, kind) for kind in kinds]
            choice = torch.tensor([kinds.index(kind) for kind in own], device=query.device).expand(len(keys), -1)
        chosen = _taken(candidates, choice)
        is_short = (view.lengths <= self.token_budget)[:, None, None, None]  # dense, as it would be alone
        return chosen._replace(blocks=chosen.blocks | (view.is_causal & is_short))


def listed(chosen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """List what is chosen in the last dimension of [.., n], ascending: indices int32 [.., most], then -1, and counts.

    Waits for the device to learn the largest number.
    """
    counts = chosen.sum(-1, dtype=torch.int32)
    most = max(1, int(counts.max()))
    place = chosen.cumsum(-1, dtype=torch.int32).where(chosen, most + 1) - 1
    every = torch.arange(chosen.shape[-1], dtype=torch.int32, device=chosen.device)
    indices = torch.full((*chosen.shape[:-1], most + 1), -1, dtype=torch.int32, device=chosen.device)
    indices.scatter_(-1, place.long(), every.expand(chosen.shape))
    return indices[..., :most], counts


def _layers_of(heads: list[int]) -> str:
    """Return in words how many heads the layers have; those of each, if they differ."""
    return f"{len(heads)} layers of {heads[0] if len(set(heads)) == 1 else heads} heads"


def _joined(lists: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Join the lists of the KV heads along the heads, padded with -1 to one width."""
    width = max(indices.shape[-1] for indices, _ in lists)
    padded = [torch.nn.functional.pad(indices, (0, width - indices.shape[-1]), value=-1) for indices, _ in lists]
    return torch.cat(padded, dim=1).contiguous(), torch.cat([counts for _, counts in lists], dim=1)


def _taken(candidates: list[Pattern], choice: torch.Tensor) -> Pattern:
    """Take each row's and head's own candidate, by its number, int64 [batch, group]."""
    taken = candidates[0]
    for number, candidate in enumerate(candidates[1:], start=1):
        own = choice == number
        taken = Pattern(
            torch.where(own[..., None], candidate.columns, taken.columns),
            torch.where(own[..., None, None], candidate.blocks, taken.blocks),
        )
    return taken
