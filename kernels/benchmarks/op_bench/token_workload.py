"""One layer's buffers for TokenSelect: random keys before RoPE, values, RoPE's tables, and a selection cache."""

from __future__ import annotations

from dataclasses import dataclass, field

import hf_sparse_attn_kernels as ops
import torch

from op_bench.shapes import Settings, Shape
from op_bench.workload import DTYPE

ROPE_THETA = 1e6


@dataclass
class TokenLayer:
    """Tensors that a decode step of one layer, or a chunk of its prefill, reads and writes.

    The buffers already hold the newest tokens. A step writes the same token again, so it can be repeated.
    """

    shape: Shape
    settings: Settings
    query: torch.Tensor
    """[batch, q_heads, head_dim], or [batch, q_heads, queries, head_dim] for a chunk; before RoPE."""
    new_key: torch.Tensor
    """[batch, kv_heads, head_dim]."""
    new_value: torch.Tensor
    keys: torch.Tensor
    """[batch, kv_heads, length, head_dim], before RoPE."""
    values: torch.Tensor
    cos: torch.Tensor
    """float32 [slots, head_dim // 2]."""
    sin: torch.Tensor
    seq_start: torch.Tensor
    seq_end: torch.Tensor
    """int32 [batch]: end of the rows, including the newest tokens."""
    choice_end: torch.Tensor
    """int32 [batch]: end of the tokens to choose from, which excludes a chunk."""
    voting: torch.Tensor
    """[batch, q_heads, head_dim]: the query rotated for the vote, or a chunk's mean rotated query."""
    cached_query: torch.Tensor
    """[batch, q_heads, head_dim]: the query in the op's selection cache."""
    cached_tokens: torch.Tensor
    """int32 [batch, voted_tokens]."""
    cached_valid: torch.Tensor
    """int32 [batch]."""
    counter: torch.Tensor
    """int64 [4], added to by the ops."""
    reuse_counter: torch.Tensor
    """int64 [2]."""
    finished: torch.Tensor
    """int32 [batch, kv_heads]: zero between ops."""
    block_indices: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    block_counts: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    expected: dict[str, torch.Tensor] = field(default_factory=dict)
    """Results that checks computed once."""

    @property
    def choice_length(self) -> int:
        """Tokens of a row to choose from."""
        return choice_length(self.shape)

    @property
    def selection_cache(self) -> dict[str, torch.Tensor]:
        """Selection cache as keyword arguments of the op."""
        return {
            "cached_query": self.cached_query,
            "cached_tokens": self.cached_tokens,
            "cached_valid": self.cached_valid,
        }


def choice_length(shape: Shape) -> int:
    """Return the tokens of a row to choose from: those before a chunk, or all tokens in a decode step."""
    return shape.length - (shape.queries if shape.queries > 1 else 0)


def rope_slots(shape: Shape, settings: Settings) -> int:
    """Return the slots that a selection and its chunk take."""
    return settings.max_tokens + shape.queries


def rope_tables(slots: int, head_dim: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosine and sine of RoPE's angles, float32 [slots, head_dim // 2]."""
    frequencies = ROPE_THETA ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angles = torch.arange(slots, dtype=torch.float64)[:, None] * frequencies
    return angles.cos().float().to(device), angles.sin().float().to(device)


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Apply RoPE to ``x`` [..., head_dim] by tables [..., head_dim // 2], in the tables' dtype."""
    first, second = x.to(cos.dtype).chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def chunk_vote(query: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, recent_tokens: int) -> torch.Tensor:
    """Return the chunk's mean query, token i rotated to recent_tokens + i, in the tables' dtype."""
    at = torch.arange(recent_tokens, recent_tokens + query.shape[2], device=query.device)
    return rotated(query, cos[at], sin[at]).mean(dim=2)


def token_layer_bytes(shape: Shape, settings: Settings) -> int:
    """Return the bytes of a layer's buffers."""
    kept = 2 * shape.batch * shape.kv_heads * shape.length * shape.head_dim
    queries = shape.batch * shape.q_heads * (shape.queries + 2) * shape.head_dim
    tables = 4 * rope_slots(shape, settings) * shape.head_dim
    return (kept + queries) * DTYPE.itemsize + tables + 8 * shape.batch * settings.max_tokens


def make_token_layer(
    shape: Shape, settings: Settings, device: torch.device, seed: int = 0, impl: str | None = None
) -> TokenLayer:
    """Create a layer of normally distributed queries, keys and values.

    Raises
    ------
    ValueError
        All tokens would be chosen.
    """
    if choice_length(shape) <= settings.max_tokens:
        raise ValueError(f"length={shape.length}; allowed: more tokens to choose from than {settings.max_tokens}")
    torch.compiler.reset()  # steps are compiled for each shape, and Dynamo limits their number
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, dtype=DTYPE, device=device, generator=generator)

    keys, values = (normal(shape.batch, shape.kv_heads, shape.length, shape.head_dim) for _ in range(2))
    heads = (shape.batch, shape.q_heads)
    query = normal(*heads, *([shape.queries] if shape.queries > 1 else []), shape.head_dim)
    cos, sin = rope_tables(rope_slots(shape, settings), shape.head_dim, device)
    recent = settings.recent_tokens
    one_query = rotated(query, cos[recent], sin[recent]) if shape.queries == 1 else chunk_vote(query, cos, sin, recent)
    start = torch.zeros(shape.batch, dtype=torch.int32, device=device)
    end = torch.full_like(start, shape.length)
    layer = TokenLayer(
        shape,
        settings,
        query,
        new_key=keys[:, :, -1].clone(),
        new_value=values[:, :, -1].clone(),
        keys=keys,
        values=values,
        cos=cos,
        sin=sin,
        seq_start=start,
        seq_end=end,
        choice_end=torch.full_like(start, choice_length(shape)),
        voting=one_query.to(DTYPE),
        cached_query=normal(*heads, shape.head_dim),
        cached_tokens=_some_tokens(shape, settings, generator),
        cached_valid=torch.ones_like(start),
        counter=torch.zeros(4, dtype=torch.int64, device=device),
        reuse_counter=torch.zeros(2, dtype=torch.int64, device=device),
        finished=torch.zeros(shape.batch, shape.kv_heads, dtype=torch.int32, device=device),
    )
    layer.block_indices, layer.block_counts = ops.select_tokens(
        layer.voting, keys, start, layer.choice_end, **settings.token_choice, finished=layer.finished, impl=impl
    )
    return layer


def _some_tokens(shape: Shape, settings: Settings, generator: torch.Generator) -> torch.Tensor:
    """Choose random candidates, ascending: int32 [batch, voted_tokens]."""
    candidates = choice_length(shape) - settings.sink_tokens - settings.recent_tokens
    values = torch.rand(shape.batch, candidates, device=generator.device, generator=generator)
    places = values.argsort(dim=1)[:, : settings.voted_tokens].sort(dim=1)[0]
    return (places + settings.sink_tokens).int()
