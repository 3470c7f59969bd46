"""A context that was prefilled and clustered once, and the caches that questions about it start from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from hf_sparse_attn.cache.cache import SparseCache
from hf_sparse_attn.cache.prefix import Prefix
from hf_sparse_attn.checks import whole_number
from hf_sparse_attn.clusters.thresholds import shares_read, thresholds
from hf_sparse_attn.context import files
from hf_sparse_attn.context.times import PreparationSeconds
from hf_sparse_attn.identity import ModelIdentity
from hf_sparse_attn.methods import Squeezed

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


@dataclass(frozen=True)
class ContextBudget:
    """Share of a context's tokens that each KV head reads, as its last queries choose them."""

    target_sparsity: float
    """Share of the tokens that the threshold was set to leave out, over all layers and heads."""
    prefill: torch.Tensor
    """float32 [layers, kv_heads]: the share that the queries choose together, by the mean of their weights."""
    decode: torch.Tensor
    """float32 [layers, kv_heads]: the mean share that the queries choose one by one."""

    @classmethod
    def measure(
        cls, target_sparsity: float, tokens: int, layers: Iterable[tuple[torch.Tensor, dict[str, torch.Tensor]]]
    ) -> ContextBudget:
        """Measure the shares that the queries of each layer choose, with the layer's index, of ``tokens``."""
        shares = [[part.cpu() for part in shares_read(queries, index, tokens)] for queries, index in layers]
        together, one_by_one = (torch.stack(part) for part in zip(*shares, strict=True))
        return cls(target_sparsity, together, one_by_one)


@dataclass(frozen=True)
class FixedContext:
    """A document, codebase or few-shot prompt, ready to be asked (Squeezed Attention, arXiv 2411.09688).

    Created by :func:`prepare_context`. Holds keys and values in cluster order, the clusters, the threshold, and the
    queries that calibrated it. Caches share all of it; none of it is ever written.
    """

    method: Squeezed
    """The method that a model must be patched with to use the caches."""
    config: PreTrainedConfig
    """The model's configuration."""
    identity: ModelIdentity
    """The model that computed the context."""
    token_ids_hash: str
    """SHA-256 of the token ids."""
    layers: Sequence[Prefix]
    """Keys, values and index of each layer, [1, kv_heads, tokens, head_dim]."""
    queries: Sequence[torch.Tensor]
    """The last ``method.window`` queries of each layer, [q_heads, window, head_dim], times the model's factor on q.k
    and sqrt(head_dim)."""
    seconds: PreparationSeconds
    """How long the preparation took."""
    notes: Mapping[str, str] = field(default_factory=dict)
    """Texts of your own that are saved with it; set them with ``dataclasses.replace(context, notes=...)``."""

    @property
    def num_tokens(self) -> int:
        """Tokens of the context."""
        return self.layers[0].tokens

    @property
    def num_bytes(self) -> int:
        """Bytes of keys, values and index on their devices."""
        tensors = [tensor for layer in self.layers for tensor in (layer.keys, layer.values, *layer.metadata.values())]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    @cached_property
    def budget(self) -> ContextBudget:
        """The share of the context that each layer and KV head reads, beside the target."""
        indices = [first_rows(layer.metadata) for layer in self.layers]
        layers = zip(self.queries, indices, strict=True)
        return ContextBudget.measure(self.method.target_sparsity, self.num_tokens, layers)

    def cache(self, batch_size: int | None = None, max_cache_len: int | None = None) -> SparseCache:
        """Create a cache for a batch of questions, which begins with the context.

        Pass it to ``generate()`` or a forward pass of a model patched with :attr:`method`, with the tokens of the
        questions alone. Token ids, masks, positions and lengths of the call count from the end of the context.

        Parameters
        ----------
        batch_size
            Questions of the batch, to allocate buffers now; None waits for the first call.
        max_cache_len
            Maximum number of tokens of a question and its answer, for static buffers: ``generate()`` then compiles
            its decode steps on CUDA. None for buffers that grow.

        Raises
        ------
        TypeError
            ``batch_size`` or ``max_cache_len`` is no whole number.
        ValueError
            One of them is below 1.
        """
        if batch_size is not None:
            batch_size = whole_number("batch_size", batch_size, 1, " or None")
        cache = SparseCache(
            self.config, self.method, max_cache_len, prefix=self.layers, prefix_hash=self.token_ids_hash
        )
        if batch_size is not None:
            for layer, part in zip(cache.sparse_layers, self.layers, strict=True):
                none = part.keys[:, :, :0].expand(batch_size, -1, -1, -1)
                layer.lazy_initialization(none, none)
        return cache

    def retarget(self, target_sparsity: float) -> FixedContext:
        """Return the same context with the threshold for another target; keys, values and clusters are shared.

        Raises
        ------
        ValueError
            ``target_sparsity`` is outside [0, 1).
        """
        method = replace(self.method, target_sparsity=target_sparsity)
        found = thresholds(self.queries, [first_rows(layer.metadata) for layer in self.layers], target_sparsity)
        layers = [with_thresholds(layer, found) for layer in self.layers]
        return replace(self, method=method, layers=layers)

    def save(self, path: str | Path) -> None:
        """Write the context to a safetensors file, under a temporary name that is renamed at the end.

        Raises
        ------
        OSError
            The file cannot be written, as on a full disk. A former file of this name stays as it was.
        """
        files.write(self, Path(path))

    @classmethod
    def load(cls, path: str | Path, model: PreTrainedModel, input_ids: torch.Tensor | None = None) -> FixedContext:
        """Read a context that :meth:`save` wrote, to the devices of the model's layers.

        Parameters
        ----------
        path
            The file.
        model
            The model that prepared the context, patched or not.
        input_ids
            The context's token ids, [tokens] or [1, tokens], to check that they are the ones in the file.

        Raises
        ------
        TypeError
            ``model`` is no Transformers model, or ``input_ids`` holds no whole numbers.
        ValueError
            ``input_ids`` has another shape. The file is damaged, cut off or no context, or belongs to another model,
            other token ids or another version of the format. Or the model is divided by tensor parallelism.
        OSError
            The file cannot be read.
        """
        return files.read(cls, Path(path), model, input_ids)


def with_thresholds(layer: Prefix, found: dict[str, torch.Tensor]) -> Prefix:
    """Return a layer with other thresholds, scalars by name."""
    copies = {name: value.to(layer.keys.device, copy=True)[None] for name, value in found.items()}
    return replace(layer, metadata={**layer.metadata, **copies})


def first_rows(metadata: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors of an index without their first dimension."""
    return {name: tensor[0] for name, tensor in metadata.items()}
