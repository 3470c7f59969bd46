"""The minimum number of bytes that each op must read and write."""

from __future__ import annotations

from op_bench.shapes import Settings, Shape
from op_bench.workload import DTYPE


def _pairs(shape: Shape) -> int:
    return shape.batch * shape.kv_heads


def _bound_bytes(kind: str, shape: Shape, settings: Settings) -> int:
    """Bytes of both bounds of every page with their exponents, without the channel exponents."""
    page = 2 * shape.head_dim * DTYPE.itemsize if kind == "bf16" else 2 * shape.head_dim + 1
    return _pairs(shape) * settings.pages(shape) * page


def metadata_bytes(kind: str, shape: Shape, settings: Settings) -> int:
    """Bytes of all bounds and exponents of every row and KV head."""
    channels = 0 if kind == "bf16" else _pairs(shape) * shape.head_dim
    return _bound_bytes(kind, shape, settings) + channels


def _query_bytes(shape: Shape) -> int:
    return shape.batch * shape.q_heads * shape.head_dim * DTYPE.itemsize


def _token_bytes(shape: Shape) -> int:
    """Bytes of one token's key in all rows and KV heads."""
    return _pairs(shape) * shape.head_dim * DTYPE.itemsize


def _selection_bytes(shape: Shape, settings: Settings) -> int:
    return 4 * _pairs(shape) * (settings.max_blocks + 1)


def prompt_bounds_bytes(kind: str, shape: Shape, settings: Settings) -> int:
    """Bytes of all keys, read once, and of the written bounds."""
    return shape.length * _token_bytes(shape) + metadata_bytes(kind, shape, settings)


def token_bounds_bytes(kind: str, shape: Shape, settings: Settings) -> int:
    """Bytes of one page of keys and its bounds."""
    written = _bound_bytes(kind, shape, settings) // settings.pages(shape)
    return settings.page_size * _token_bytes(shape) + written


def scores_bytes(kind: str, shape: Shape, settings: Settings) -> int:
    """Bytes of all metadata, the query and the scores."""
    written = 4 * _pairs(shape) * settings.pages(shape)
    return metadata_bytes(kind, shape, settings) + _query_bytes(shape) + written


def select_bytes(shape: Shape, settings: Settings) -> int:
    """Bytes of the scores and the selection."""
    return 4 * _pairs(shape) * settings.pages(shape) + _selection_bytes(shape, settings)


def append_and_select_bytes(kind: str, shape: Shape, settings: Settings) -> int:
    """Bytes of all metadata, the query, the new token and the selection; the scores stay on the chip."""
    appended = 4 * _token_bytes(shape)  # key and value, read and written
    read = metadata_bytes(kind, shape, settings) + _query_bytes(shape)
    return read + appended + _selection_bytes(shape, settings)


def sparse_decode_bytes(shape: Shape, settings: Settings) -> int:
    """Bytes of the selected keys and values, the query, the output and the selection."""
    read = 2 * settings.tokens_read(shape) * _token_bytes(shape)
    return read + 2 * _query_bytes(shape) + _selection_bytes(shape, settings)


def dense_bytes(shape: Shape, settings: Settings) -> int:
    """Bytes of all keys and values, the query and the output."""
    return 2 * shape.length * _token_bytes(shape) + 2 * _query_bytes(shape)


def step_bytes(kind: str, shape: Shape, settings: Settings) -> int:
    """Bytes that a whole step must move; the selection stays on the chip."""
    return (
        append_and_select_bytes(kind, shape, settings)
        + sparse_decode_bytes(shape, settings)
        - 2 * _selection_bytes(shape, settings)
    )
