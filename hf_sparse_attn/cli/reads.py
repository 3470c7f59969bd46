"""Record which tokens a method reads, in a separate run because recording is slow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hf_sparse_attn.cli.compare import Work
from hf_sparse_attn.cli.progress import Stages

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from hf_sparse_attn.methods import SparseMethod

SMALLEST_BLOCK = 16
MOST_BLOCKS = 512
"""Maximum number of blocks across a picture; more would be narrower than a pixel."""


@dataclass(frozen=True)
class Reads:
    """Share of each block's tokens that a method read.

    Parameters
    ----------
    name : str
        The method's column name in the table.
    by_step : torch.Tensor
        float32 [steps, blocks]: mean over layers and KV heads. NaN for blocks that were still empty.
    by_head : torch.Tensor
        float32 [layers * kv_heads, blocks]: mean over the steps in which the block was not empty.
    layers : list of int
        Indices of the recorded layers.
    block_size : int
        Tokens per block.
    """

    name: str
    by_step: torch.Tensor
    by_head: torch.Tensor
    layers: list[int]
    block_size: int


def record_reads(
    model: PreTrainedModel, method: SparseMethod, name: str, work: Work, progress: Stages, index: int = 0
) -> Reads:
    """Answer a prompt once more with a method, and record its decode steps; the model is left unpatched."""
    from hf_sparse_attn import record_selections, sparse_attention

    with progress.stage(f"{name}, recorded", 1, work.unit) as (on_step, on_prompt), sparse_attention(model, method):
        with record_selections(model) as record:
            work.run(model, index, True, on_step)
        on_prompt()
    block_size = SMALLEST_BLOCK
    while block_size * MOST_BLOCKS < len(work.prompts[index]) + work.new_tokens:
        block_size *= 2
    shares = record.block_reads(block_size)
    return Reads(
        name,
        by_step=shares.nanmean(dim=(1, 2)),
        by_head=shares.nanmean(dim=0).flatten(0, 1),
        layers=record.layers,
        block_size=block_size,
    )
