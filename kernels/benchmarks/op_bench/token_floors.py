"""The minimum number of bytes that TokenSelect's ops must read and write; see `floors`."""

from __future__ import annotations

from op_bench.shapes import Settings, Shape
from op_bench.token_workload import choice_length
from op_bench.workload import DTYPE


def _token_bytes(shape: Shape) -> int:
    """Bytes of one token's key in all rows and KV heads."""
    return shape.batch * shape.kv_heads * shape.head_dim * DTYPE.itemsize


def _query_bytes(shape: Shape) -> int:
    """Bytes of one query of every row and head."""
    return shape.batch * shape.q_heads * shape.head_dim * DTYPE.itemsize


def _selection_bytes(shape: Shape, settings: Settings) -> int:
    """Bytes of one selection for all heads."""
    return 4 * shape.batch * (settings.max_tokens + 1)


def _table_bytes(slots: int, shape: Shape) -> int:
    """Bytes of cosines and sines, which all rows share."""
    return 4 * slots * shape.head_dim


def vote_bytes(shape: Shape, settings: Settings) -> int:
    """Bytes of the candidates' keys, which the ops count as read."""
    return (choice_length(shape) - settings.sink_tokens - settings.recent_tokens) * _token_bytes(shape)


def select_bytes(shape: Shape, settings: Settings) -> int:
    """Bytes of the candidates' keys, the query and the selection; the votes stay on the chip."""
    return vote_bytes(shape, settings) + _query_bytes(shape) + _selection_bytes(shape, settings)


def decode_bytes(shape: Shape, settings: Settings) -> int:
    """Bytes of the chosen keys and values, RoPE's tables, the query, the output and the selection."""
    read = 2 * settings.max_tokens * _token_bytes(shape) + _table_bytes(settings.max_tokens, shape)
    return read + 2 * _query_bytes(shape) + _selection_bytes(shape, settings)


def prefill_bytes(shape: Shape, settings: Settings) -> int:
    """Bytes of the chosen and the chunk's keys and values, RoPE's tables, queries, outputs and the selection."""
    tokens = settings.max_tokens + shape.queries
    read = 2 * tokens * _token_bytes(shape) + _table_bytes(tokens, shape)
    return read + 2 * shape.queries * _query_bytes(shape) + _selection_bytes(shape, settings)


def step_bytes(shape: Shape, settings: Settings) -> int:
    """Bytes of a decode step that selects: every key once, the chosen values, the new token; the selection stays on
    the chip.
    """
    values = settings.max_tokens * _token_bytes(shape)
    tables = _table_bytes(settings.max_tokens, shape)
    return shape.length * _token_bytes(shape) + values + tables + 2 * _query_bytes(shape) + _append_bytes(shape)


def kept_step_bytes(shape: Shape, settings: Settings) -> int:
    """Bytes of a decode step that reuses its selection: the query, the new token, and the tokens attended to."""
    return decode_bytes(shape, settings) + _query_bytes(shape) + _append_bytes(shape)


def _append_bytes(shape: Shape) -> int:
    """Bytes of the new token's key and value, read and written."""
    return 4 * _token_bytes(shape)


def chunk_bytes(shape: Shape, settings: Settings) -> int:
    """Bytes of a chunk: every key once, the chosen and the chunk's values, tables, queries and outputs."""
    tokens = settings.max_tokens + shape.queries
    read = (shape.length + tokens) * _token_bytes(shape) + _table_bytes(tokens, shape)
    return read + 2 * shape.queries * _query_bytes(shape)
