"""Files of sparse patterns for each head, in the format that MInference publishes."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from hf_sparse_attn.methods.parameter_file import FileState, json_of, state_of

A_SHAPE, VERTICAL_SLASH, BLOCK_SPARSE = "stream_llm", "vertical_and_slash", "block_sparse"
KINDS = (A_SHAPE, VERTICAL_SLASH, BLOCK_SPARSE)


class HeadPattern(NamedTuple):
    """The pattern of a head, under the names of the published files."""

    kind: str
    """``"stream_llm"`` (A-shape), ``"vertical_and_slash"`` or ``"block_sparse"``."""
    first: int
    """First tokens, vertical lines or key blocks."""
    second: int
    """Tokens of the window, or slashes; unused for key blocks."""


Layers = tuple[tuple[HeadPattern, ...], ...]


def read_patterns(path: str) -> Layers:
    """Read the patterns of every layer and query head from a file.

    Parameters
    ----------
    path
        JSON: a list of layers, each ``{"0": [kind, first, second, score], ...}`` with an entry for every query head.
        The score, which the search that wrote the file gave the pattern, is not read.

    Raises
    ------
    FileNotFoundError
        There is no such file.
    ValueError
        The file has another format, or ``path`` has characters that no path may have.
    """
    return _read(path, state_of("patterns", path))


@lru_cache(maxsize=4)
def _read(path: str, state: FileState) -> Layers:
    """Read a file; ``state`` is its present one, so that a new file is read anew."""
    layers = json_of("patterns", path)
    if not isinstance(layers, list) or not layers or not all(isinstance(layer, dict) for layer in layers):
        raise ValueError(f"patterns={path!r} must be a JSON list of one object per layer")
    return tuple(_layer(path, number, layer) for number, layer in enumerate(layers))


def _layer(path: str, number: int, layer: dict[str, object]) -> tuple[HeadPattern, ...]:
    if set(layer) != {str(head) for head in range(len(layer))}:
        raise ValueError(f"patterns={path!r}: layer {number} must have heads 0 to {len(layer) - 1}, got {list(layer)}")
    return tuple(_pattern(path, number, head, layer[str(head)]) for head in range(len(layer)))


def _pattern(path: str, layer: int, head: int, entry: object) -> HeadPattern:
    is_entry = isinstance(entry, list) and len(entry) >= 3 and entry[0] in KINDS
    if is_entry and isinstance(entry, list) and all(type(size) is int and size >= 1 for size in entry[1:3]):
        return HeadPattern(*entry[:3])
    raise ValueError(
        f"patterns={path!r}: head {head} of layer {layer} must be [kind, size, size, score] with a kind of "
        f"{', '.join(KINDS)} and sizes of at least 1, got {entry!r}"
    )
