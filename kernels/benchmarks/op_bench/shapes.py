"""What is measured: shapes of one decode step, and the settings of the selection."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """One layer's attention in a decode step: one query token per row, ``length`` cached tokens in every row."""

    q_heads: int
    kv_heads: int
    head_dim: int
    batch: int
    length: int
    """Tokens of every row, the newest included."""

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.q_heads // self.kv_heads

    @property
    def length_label(self) -> str:
        """The length as ``32K``."""
        return f"{self.length // 1024}K" if self.length % 1024 == 0 else str(self.length)

    @property
    def configuration(self) -> str:
        """Everything but the length."""
        return f"q{self.q_heads}-kv{self.kv_heads}-d{self.head_dim}-b{self.batch}"

    @property
    def name(self) -> str:
        """As ``--shape`` takes it."""
        return f"{self.configuration}-{self.length_label}"


@dataclass(frozen=True)
class Settings:
    """Quest's, as in the measured target: 2,048 tokens in pages of 16, the first and the newest page always read."""

    token_budget: int = 2048
    page_size: int = 16
    sink_blocks: int = 1
    recent_blocks: int = 1

    @property
    def max_blocks(self) -> int:
        """Pages that a KV head reads."""
        return self.token_budget // self.page_size

    @property
    def budget(self) -> dict[str, int]:
        """What is chosen, as the ops' keyword arguments."""
        return {
            "max_blocks": self.max_blocks,
            "sink_blocks": self.sink_blocks,
            "recent_blocks": self.recent_blocks,
        }

    def pages(self, shape: Shape) -> int:
        """Pages of a row."""
        return -(-shape.length // self.page_size)

    def tokens_read(self, shape: Shape) -> int:
        """Tokens that a KV head reads of a row."""
        return min(self.token_budget, shape.length)


def _shapes(q_heads: int, kv_heads: int, head_dim: int, batch: int, kilotokens: Sequence[int]) -> tuple[Shape, ...]:
    return tuple(Shape(q_heads, kv_heads, head_dim, batch, 1024 * count) for count in kilotokens)


SHAPES = (
    *_shapes(32, 32, 128, 1, (8, 32, 128, 512)),  # Llama-2-7B
    *_shapes(32, 8, 128, 1, (8, 32, 128, 512)),  # Llama-3.1-8B
    *_shapes(32, 8, 128, 8, (8, 32, 128)),
    *_shapes(32, 8, 128, 32, (8, 32)),
    *_shapes(32, 8, 64, 1, (32, 128)),
)

QUICK_SHAPES = (Shape(32, 32, 128, 1, 8192), Shape(32, 8, 128, 1, 32768), Shape(32, 8, 128, 8, 8192))


def matching_shapes(shapes: Sequence[Shape], filters: Sequence[str]) -> list[Shape]:
    """The shapes whose name contains one of ``filters``; all of them without any.

    Raises
    ------
    ValueError
        No shape matches one of the filters.
    """
    for text in filters:
        if not any(text in shape.name for shape in shapes):
            raise ValueError(f"--shape {text!r} matches none of {', '.join(shape.name for shape in shapes)}")
    return [shape for shape in shapes if not filters or any(text in shape.name for text in filters)]
