"""The minimum number of bytes that Squeezed Attention's ops must read and write; see `floors`."""

from __future__ import annotations

from op_bench.shapes import Settings, Shape
from op_bench.squeezed_workload import expected_runs
from op_bench.workload import DTYPE


def _pairs(shape: Shape) -> int:
    return shape.batch * shape.kv_heads


def _contexts(shape: Shape) -> int:
    """Contexts of one KV head: all rows may have the same."""
    return shape.kv_heads * (1 if shape.shared else shape.batch)


def _vector_bytes(shape: Shape) -> int:
    return shape.head_dim * DTYPE.itemsize


def _query_bytes(shape: Shape) -> int:
    return shape.batch * shape.q_heads * shape.queries * _vector_bytes(shape)


def _centroid_bytes(shape: Shape, settings: Settings) -> int:
    """Bytes of all centroids and the sizes of their clusters."""
    return _contexts(shape) * settings.num_clusters(shape) * (_vector_bytes(shape) + 4)


def _weight_bytes(shape: Shape, settings: Settings) -> int:
    return 4 * _pairs(shape) * settings.num_clusters(shape)


def _run_bytes(shape: Shape, settings: Settings) -> int:
    """Bytes of the start and the cluster of every run."""
    return round(8 * _contexts(shape) * expected_runs(shape, settings))


def _chosen_bytes(shape: Shape, settings: Settings) -> int:
    """Bytes of the indices of the chosen runs."""
    return round(4 * _pairs(shape) * (1 - settings.sparsity) * expected_runs(shape, settings))


def tokens_read(shape: Shape, settings: Settings) -> float:
    """Return the expected number of tokens that the rows of a KV head read, each once if they share a context."""
    clustered = settings.context_length(shape) - settings.window
    always = shape.length - clustered
    if shape.shared:  # rows choose independently of one another
        return clustered * (1 - settings.sparsity**shape.batch) + always
    return shape.batch * (clustered * (1 - settings.sparsity) + always)


def _attention_bytes(shape: Shape, settings: Settings) -> int:
    """Bytes of the chosen keys and values, the tail's, the query and the output."""
    read = round(2 * shape.kv_heads * tokens_read(shape, settings)) * _vector_bytes(shape)
    return read + 2 * _query_bytes(shape)


def weights_bytes(shape: Shape, settings: Settings) -> int:
    """Bytes of the centroids, the clusters' sizes, the queries and the weights."""
    return _centroid_bytes(shape, settings) + _query_bytes(shape) + _weight_bytes(shape, settings)


def select_bytes(shape: Shape, settings: Settings) -> int:
    """Bytes of the weights, the runs' starts and clusters, and the indices of the chosen runs."""
    return _weight_bytes(shape, settings) + _run_bytes(shape, settings) + _chosen_bytes(shape, settings)


def lookup_bytes(shape: Shape, settings: Settings) -> int:
    """Bytes of the centroids and sizes, the query, the runs' starts and clusters, and the chosen runs' indices."""
    read = _centroid_bytes(shape, settings) + _query_bytes(shape) + _run_bytes(shape, settings)
    return read + _chosen_bytes(shape, settings)


def attention_bytes(shape: Shape, settings: Settings) -> int:
    """Bytes of the chosen keys and values, the tail's, the queries, the outputs and the indices."""
    return _attention_bytes(shape, settings) + _chosen_bytes(shape, settings)


def step_bytes(shape: Shape, settings: Settings) -> int:
    """Bytes of all three ops; weights and indices stay on the chip."""
    return _centroid_bytes(shape, settings) + _run_bytes(shape, settings) + _attention_bytes(shape, settings)


def dense_bytes(shape: Shape, settings: Settings) -> int:
    """Bytes of all keys and values, the queries and the outputs."""
    return 2 * _contexts(shape) * shape.length * _vector_bytes(shape) + 2 * _query_bytes(shape)
