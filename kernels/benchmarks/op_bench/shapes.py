"""Settings of the measurements: shapes of a decode step or a chunk of the prefill, and budgets of the selections."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


def length_label(tokens: int) -> str:
    """A number of tokens as ``32K`` or ``1M``."""
    for unit, letter in ((1 << 20, "M"), (1 << 10, "K")):
        if tokens % unit == 0:
            return f"{tokens // unit}{letter}"
    return str(tokens)


@dataclass(frozen=True)
class Shape:
    """The shape of one layer's attention, from the newest tokens of every row to ``length`` cached tokens."""

    q_heads: int
    kv_heads: int
    head_dim: int
    batch: int
    length: int
    """Tokens of every row, including the newest."""
    queries: int = 1
    """Newest tokens of a row, whose queries attend: one in a decode step, a chunk in the prefill."""
    shared: bool = False
    """Whether all rows have the same tokens in the same memory: keys and values of batch stride 0."""

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.q_heads // self.kv_heads

    @property
    def length_label(self) -> str:
        """The length as ``32K`` or ``1M``."""
        return length_label(self.length)

    @property
    def configuration(self) -> str:
        """Everything but the length."""
        chunk = f"-c{self.queries}" if self.queries > 1 else ""
        shared = "-shared" if self.shared else ""
        return f"q{self.q_heads}-kv{self.kv_heads}-d{self.head_dim}-b{self.batch}{chunk}{shared}"

    @property
    def name(self) -> str:
        """Name of the shape for ``--shape``."""
        return f"{self.configuration}-{self.length_label}"


@dataclass(frozen=True)
class Settings:
    """Settings of the measured targets.

    Quest reads 2,048 tokens in pages of 16, the first and the newest page always. The others' are those
    of their papers; Progressive Sparse Attention comes to read as many tokens as Quest.
    """

    token_budget: int = 2048
    page_size: int = 16
    sink_blocks: int = 1
    recent_blocks: int = 1
    sink_tokens: int = 128
    """TokenSelect's n_init: the first tokens, always read."""
    voted_tokens: int = 2048
    """TokenSelect's k: tokens chosen by vote."""
    recent_tokens: int = 512
    """TokenSelect's n_local: the last tokens, always read."""
    sparsity: float = 0.9
    """Squeezed Attention's share of the clustered tokens that is not read, over all heads."""
    clusters: float = 0.05
    """Squeezed Attention's clusters, as a share of the clustered tokens."""
    window: int = 100
    """Last tokens of the fixed context, which are not clustered and always read."""
    tail_tokens: int = 256
    """Tokens after the fixed context in a decode step, always read. In a prefill they are the queries' tokens."""

    block_size: int = 32
    """Tokens of Progressive Sparse Attention's blocks."""
    microbatch: int = 8
    """Blocks that it reads at a time."""
    threshold: float = 0.95
    """Share of the attention weight after which it stops."""

    code_budget: int = 1024
    """Tokens that a KV head reads when key codes choose them, sinks and the newest page included."""
    code_page: int = 64
    """Tokens that share a centre of the key codes."""
    code_sinks: int = 4
    """First tokens, always read."""
    code_bits: int = 1
    """Bits of a channel."""

    top_p: float = 0.95
    """RaBitQCache's share of the estimated attention weight to read, within ``code_budget`` tokens."""
    top_p_page: int = 128
    """Tokens that it codes at a time, and first tokens that it always reads."""

    @property
    def max_blocks(self) -> int:
        """Number of pages that a KV head reads."""
        return self.token_budget // self.page_size

    @property
    def budget(self) -> dict[str, int]:
        """Return the selection's settings, as the ops' keyword arguments."""
        return {
            "max_blocks": self.max_blocks,
            "sink_blocks": self.sink_blocks,
            "recent_blocks": self.recent_blocks,
        }

    @property
    def max_tokens(self) -> int:
        """Tokens that TokenSelect chooses, one set for all heads."""
        return self.sink_tokens + self.voted_tokens + self.recent_tokens

    @property
    def token_choice(self) -> dict[str, int]:
        """Return TokenSelect's settings, as the op's keyword arguments."""
        return {
            "max_tokens": self.max_tokens,
            "sink_tokens": self.sink_tokens,
            "recent_tokens": self.recent_tokens,
        }

    def context_length(self, shape: Shape) -> int:
        """Tokens of a row's fixed context."""
        return shape.length - (shape.queries if shape.queries > 1 else self.tail_tokens)

    def num_clusters(self, shape: Shape) -> int:
        """Clusters of a KV head."""
        return max(1, round(self.clusters * (self.context_length(shape) - self.window)))

    def pages(self, shape: Shape) -> int:
        """Pages of a row."""
        return -(-shape.length // self.page_size)

    def tokens_read(self, shape: Shape) -> int:
        """Tokens that a KV head reads of a row."""
        return min(self.token_budget, shape.length)


def _shapes(
    q_heads: int, kv_heads: int, head_dim: int, batch: int, kilotokens: Sequence[int], queries: int = 1
) -> tuple[Shape, ...]:
    return tuple(Shape(q_heads, kv_heads, head_dim, batch, 1024 * count, queries) for count in kilotokens)


DECODE_SHAPES = (
    *_shapes(32, 32, 128, 1, (8, 32, 128, 512)),  # Llama-2-7B
    *_shapes(32, 8, 128, 1, (8, 32, 128, 512)),  # Llama-3.1-8B
    *_shapes(32, 8, 128, 8, (8, 32, 128)),
    *_shapes(32, 8, 128, 32, (8, 32)),
    *_shapes(32, 8, 64, 1, (32, 128)),
    *_shapes(28, 4, 128, 1, (32, 128)),  # Qwen2-7B
)
QUICK_DECODE_SHAPES = (Shape(32, 32, 128, 1, 8192), Shape(32, 8, 128, 1, 32768), Shape(32, 8, 128, 8, 8192))

CLUSTER_SHAPES = (
    *_shapes(32, 8, 128, 1, (8, 32, 128, 512)),
    *_shapes(32, 32, 128, 1, (32, 128)),
    *_shapes(28, 4, 128, 1, (128,)),
    *_shapes(32, 8, 128, 8, (128,)),
)
TEXT_SHAPES = (
    *_shapes(32, 8, 128, 1, (128, 512)),
    *_shapes(32, 32, 128, 1, (128,)),
    *_shapes(28, 4, 128, 1, (128,)),
    *_shapes(32, 8, 128, 8, (128,)),
)
"""Shapes at which whole steps are measured with keys as in a text, too."""
QUICK_CLUSTER_SHAPES = (Shape(32, 8, 128, 1, 131072),)
CLUSTER_TUNED_SHAPES = (
    *_shapes(32, 8, 128, 32, (8, 32)),
    *(shape for shape in DECODE_SHAPES if shape.head_dim == 128 and shape.batch < 32 and shape not in CLUSTER_SHAPES),
)

TOKEN_DECODE_SHAPES = (
    *_shapes(32, 32, 128, 1, (32, 128, 512)),
    *_shapes(32, 8, 128, 1, (8, 32, 128, 512)),
    *_shapes(32, 8, 128, 8, (8, 32, 128)),
    *_shapes(28, 4, 128, 1, (8, 32, 128, 512, 1024)),  # Qwen2-7B
)
QUICK_TOKEN_DECODE_SHAPES = (Shape(32, 8, 128, 1, 32768),)

CHUNK_SHAPES = _shapes(28, 4, 128, 1, (32, 128, 512, 1024), queries=512)
QUICK_CHUNK_SHAPES = (Shape(28, 4, 128, 1, 131072, 512),)

SQUEEZED_SHAPES = (
    *_shapes(32, 32, 128, 1, (32, 128, 512)),
    *_shapes(32, 8, 128, 1, (32, 128, 512)),
    Shape(32, 8, 128, 8, 131072, shared=True),
    *_shapes(28, 4, 128, 1, (128,)),
)
QUICK_SQUEEZED_SHAPES = (Shape(32, 8, 128, 1, 131072),)

SQUEEZED_PREFILL_SHAPES = (
    *_shapes(32, 32, 128, 1, (512,), queries=1024),
    *_shapes(32, 32, 128, 1, (512,), queries=4096),
    *_shapes(32, 8, 128, 1, (128,), queries=256),
    *_shapes(32, 8, 128, 1, (128,), queries=1024),
)
QUICK_SQUEEZED_PREFILL_SHAPES = (Shape(32, 8, 128, 1, 131072, 1024),)


PROGRESSIVE_SHAPES = (
    *_shapes(32, 32, 128, 1, (32, 128, 512)),
    *_shapes(32, 8, 128, 1, (8, 32, 128, 512)),
    *_shapes(32, 8, 128, 8, (8, 32, 128)),
    *_shapes(28, 4, 128, 1, (32, 128)),
)
QUICK_PROGRESSIVE_SHAPES = (Shape(32, 8, 128, 1, 32768),)

CODE_SHAPES = (
    *_shapes(32, 32, 128, 1, (32, 128, 512)),
    *_shapes(32, 8, 128, 1, (8, 32, 128, 512)),
    *_shapes(32, 8, 128, 8, (8, 32, 128)),
    *_shapes(32, 8, 64, 1, (128,)),
    *_shapes(28, 4, 128, 1, (32, 128)),
)
QUICK_CODE_SHAPES = (Shape(32, 8, 128, 1, 131072),)
CODE_STEP_SHAPES = (*CLUSTER_SHAPES, *_shapes(28, 4, 128, 1, (32,)))
CODE_STEP_TUNED_SHAPES = tuple(
    shape for shape in CODE_SHAPES if shape.head_dim == 128 and shape not in CODE_STEP_SHAPES
)

LOAD_SHAPES = (*_shapes(32, 8, 128, 1, (32,)), *_shapes(28, 4, 128, 1, (32,)))
QUICK_LOAD_SHAPES = (Shape(32, 8, 128, 1, 32768),)


def matching_shapes(shapes: Sequence[Shape], filters: Sequence[str]) -> list[Shape]:
    """Return the shapes whose name contains one of ``filters``, or all shapes without filters.

    Raises
    ------
    ValueError
        No shape matches one of the filters.
    """
    for text in filters:
        if not any(text in shape.name for shape in shapes):
            raise ValueError(f"--shape {text!r} matches none of {', '.join(shape.name for shape in shapes)}")
    return [shape for shape in shapes if not filters or any(text in shape.name for text in filters)]
