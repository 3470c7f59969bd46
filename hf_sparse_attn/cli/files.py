"""Checksums of files."""

from __future__ import annotations

import hashlib
from pathlib import Path

BLOCK_BYTES = 1 << 22
"""Bytes of a file that are in memory at a time."""


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file as a hex digest."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()
