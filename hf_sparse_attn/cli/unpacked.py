"""Keep a GGUF model as safetensors too: Transformers takes 20 s and more for SmolLM2's GGUF file, 1 s for these."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from hf_sparse_attn.cli.files import file_sha256

if TYPE_CHECKING:
    import torch

CHECKSUMS = "checksums.json"


def unpacked(file: Path, sha256: str) -> Path | None:
    """Return the folder with a GGUF file's model as safetensors; write it unless a valid one is there.

    The folder lies beside the file and has its name, without the suffix. It appears only when it is complete. It is
    replaced if it is damaged, or was written from another file or by another version of Transformers.

    Parameters
    ----------
    file : Path
        A GGUF file.
    sha256 : str
        Its hex digest.

    Returns
    -------
    Path or None
        A directory for ``from_pretrained``: float32 weights, configuration and tokenizer. None, with a warning, if it
        cannot be written.
    """
    from filelock import FileLock

    target = file.with_suffix("")
    origin = {"gguf": sha256, "transformers": version("transformers")}
    if _is_valid(target, origin):
        return target
    try:
        with FileLock(file.with_name(f".{file.stem}.lock")):
            if not _is_valid(target, origin):  # another process may have written it
                with _written(file, target, origin) as complete:
                    shutil.rmtree(target, ignore_errors=True)
                    os.replace(complete, target)
    except OSError as error:
        warnings.warn(
            f"{target} cannot be written ({error}); the model is read from {file.name}, more slowly", stacklevel=2
        )
        return None
    return target


def unpack(file: Path, folder: Path, dtype: torch.dtype | None = None) -> None:
    """Write a GGUF file's model as safetensors to a new folder, which appears only when it is complete.

    Parameters
    ----------
    file : Path
        A GGUF file.
    folder : Path
        The folder, for ``from_pretrained``: weights, configuration, tokenizer and their checksums. The folder above it
        is created if it is missing.
    dtype : torch.dtype, optional
        Dtype of the weights, float32 by default.

    Raises
    ------
    FileExistsError
        The folder exists.
    OSError
        The folder cannot be written.
    """
    if folder.exists():
        raise FileExistsError(f"folder={str(folder)!r} exists; name a new one")
    folder.parent.mkdir(parents=True, exist_ok=True)
    origin = {"gguf": file_sha256(file), "transformers": version("transformers")}
    with _written(file, folder, origin, dtype) as complete:
        if folder.exists():  # made in the meantime; an empty one would be replaced
            raise FileExistsError(f"folder={str(folder)!r} exists; name a new one")
        os.replace(complete, folder)


@contextmanager
def _written(file: Path, folder: Path, origin: dict[str, str], dtype: torch.dtype | None = None) -> Iterator[Path]:
    """Write the files for a folder to another one beside it, which is gone after the block unless it was renamed."""
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as scratch:
        complete = Path(scratch) / folder.name
        _write(file, complete, origin, dtype)
        yield complete


def _write(file: Path, folder: Path, origin: dict[str, str], dtype: torch.dtype | None = None) -> None:
    import torch
    from transformers import AutoTokenizer

    from hf_sparse_attn.cli.weights import NO_CODE, whole_model

    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name, **NO_CODE)
    model = whole_model(file.parent, gguf_file=file.name, dtype=dtype or torch.float32)
    # Since 5.23, Transformers marks the model as quantized, though its weights are not, and refuses to save it.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    sums = {path.name: file_sha256(path) for path in sorted(folder.iterdir())}
    (folder / CHECKSUMS).write_text(json.dumps({**origin, "files": sums}, indent=1) + "\n", encoding="utf-8")


def _is_valid(folder: Path, origin: dict[str, str]) -> bool:
    try:
        kept = json.loads((folder / CHECKSUMS).read_text(encoding="utf-8"))
        sums = kept.pop("files")
        return bool(kept == origin and sums == {name: file_sha256(folder / name) for name in sums})
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
