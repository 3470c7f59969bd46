"""The ``hf-sparse-attn unpack`` command: write a GGUF file as a folder of safetensors, which loads in seconds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hf_sparse_attn.cli import options
from hf_sparse_attn.cli.progress import say, waiting
from hf_sparse_attn.cli.terminal import fail, user_errors

File = Annotated[Path, typer.Argument(help="A .gguf file.", metavar="FILE", show_default=False)]
Folder = Annotated[Path, typer.Argument(help="A new folder.", metavar="FOLDER", show_default=False)]
Dtype = Annotated[str, typer.Option(help=f"Dtype of the weights: {', '.join(options.DTYPES)}.", metavar="NAME")]


def unpack(file: File, folder: Folder, dtype: Dtype = "float32") -> None:
    """Write a GGUF file's model as safetensors, for --model of this and other programs.

    Transformers takes minutes to read a GGUF file of some billion weights, and every process takes them again.
    """
    import torch
    from transformers.utils import logging

    from hf_sparse_attn.cli.models import ModelLoadError, load_errors, locate
    from hf_sparse_attn.cli.unpacked import unpack as write

    if dtype not in options.DTYPES:
        fail(f"--dtype {dtype!r} is unknown; allowed: {', '.join(options.DTYPES)}")
    if file.suffix.lower() != ".gguf":
        fail(f"FILE {str(file)!r} {'is not' if file.exists() else 'does not exist; it must be'} a .gguf file")
    target = folder.expanduser()
    if target.exists():
        fail(f"FOLDER {str(folder)!r} exists; name a new one")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    with user_errors(ModelLoadError):
        locate(file)
        with waiting(f"unpacking {file.name}"), load_errors(file):
            write(file.expanduser(), target, getattr(torch, dtype))
    say(f"{folder}: {file.name} as safetensors in {dtype}")
