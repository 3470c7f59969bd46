"""Files of a public repository, fetched once into the package's cache."""

from __future__ import annotations

from pathlib import Path

from eval.errors import EvalError
from eval.sources import is_offline
from hf_sparse_attn.cli.files import file_sha256

FETCH_TIMEOUT = (4.0, 10.0)
"""Seconds to connect and to wait for data, without a retry."""


def github_url(repository: str, commit: str, path: str) -> str:
    """Return the address of a file at a commit."""
    return f"https://raw.githubusercontent.com/{repository}/{commit}/{path}"


def fetch_file(what: str, url: str, file: Path, instead: str, sha256: str | None = None) -> Path:
    """Fetch a file to a place in the cache, unless it is there.

    Parameters
    ----------
    what : str
        What the file belongs to, for messages.
    url : str
        Its address.
    file : Path
        Its place in the cache.
    instead : str
        The option with which a user gives the file instead.
    sha256 : str, optional
        The file's hash. None if its content is checked by its reader.

    Raises
    ------
    EvalError
        The file is not there, and cannot be fetched or has another hash.
    """
    if file.is_file() and sha256 in (None, file_sha256(file)):
        return file
    help_text = f"put the file at {file}, or {instead}"
    if is_offline():
        reason = "the one in the cache has another sha256, and HF_HUB_OFFLINE is set" if file.is_file() else ""
        raise EvalError(f"{what}: {url} is not fetched because {reason or 'HF_HUB_OFFLINE is set'}; {help_text}")

    import pooch
    import requests

    pooch.get_logger().setLevel("WARNING")  # it names the address, as the error does
    downloader = pooch.HTTPDownloader(progressbar=False, timeout=FETCH_TIMEOUT)
    known_hash = None if sha256 is None else f"sha256:{sha256}"
    try:
        pooch.retrieve(url, known_hash=known_hash, fname=file.name, path=file.parent, downloader=downloader)
    except (requests.RequestException, OSError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise EvalError(f"{what}: {url} cannot be fetched: {reason}; {help_text}") from error
    return file
