"""Models over several GPUs: by layers, through accelerate, or by heads, through Transformers' tensor parallelism."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Any

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from eval.errors import EvalError
from eval.processes import Processes, leave
from hf_sparse_attn.cli.models import load_errors, locate
from hf_sparse_attn.cli.progress import hidden_bars
from hf_sparse_attn.cli.weights import NO_CODE, whole_model


class Split(str, Enum):
    """How a model is spread over GPUs."""

    NONE = "none"
    """One device."""
    LAYERS = "layers"
    """``device_map="auto"``: one process, with consecutive layers on each visible GPU."""
    HEADS = "heads"
    """Tensor parallelism: a process for each GPU, started by torchrun, with a part of the heads and of each matrix."""


def build_placed(config: PreTrainedConfig, dtype: torch.dtype, device: torch.device, split: Split) -> PreTrainedModel:
    """Build a model on a device or over several GPUs, with SDPA and the weights of an empty checkpoint.

    However it is placed, the host computes the frequencies of RoPE, as for every loaded model. A GPU rounds some of
    them differently, which moves angles by a thousandth at position 30,000.

    Raises
    ------
    EvalError
        There are not several GPUs or processes.
    """
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]  # an AutoModel needs a checkpoint's name
    settings = {"config": config, "state_dict": {}, "dtype": dtype, "attn_implementation": "sdpa"}
    with hidden_bars():
        return model_class.from_pretrained(None, **settings, **_placement(device, split))


def load_split(name: str, dtype: torch.dtype, split: Split) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a model over several GPUs, in evaluation mode with SDPA, and its tokenizer.

    Parameters
    ----------
    name : str
        As for :func:`~hf_sparse_attn.cli.models.load_model`, but no GGUF file: each process reads its part of the
        weights, which safetensors allow.
    dtype : torch.dtype
        Of the weights.
    split : Split
        ``LAYERS`` or ``HEADS``.

    Raises
    ------
    EvalError
        There are not several GPUs or processes, or the model is a GGUF file.
    ModelLoadError
        The model does not exist or cannot be read.
    """
    source, options = locate(name)
    if options:
        raise EvalError(
            f"split={split.value!r} needs safetensors, got the GGUF file {name!r}: write them with "
            "`hf-sparse-attn unpack`"
        )
    placement = _placement(torch.device("cpu"), split)
    with load_errors(name), hidden_bars():
        tokenizer = AutoTokenizer.from_pretrained(source, **NO_CODE)
        settings = {"dtype": dtype, "attn_implementation": "sdpa", "use_safetensors": True}
        model = whole_model(source, **settings, **placement)
    return model.eval(), tokenizer


def _placement(device: torch.device, split: Split) -> dict[str, Any]:
    """Return the arguments of ``from_pretrained`` that place a model."""
    if split is Split.NONE:
        return {"device_map": device}
    if split is Split.LAYERS:
        if torch.cuda.device_count() < 2:
            raise EvalError(f"split='layers' needs several GPUs, found {torch.cuda.device_count()}")
        return {"device_map": "auto"}
    from transformers.distributed import DistributedConfig

    size = Processes.started().world_size
    if size < 2:
        raise EvalError("split='heads' needs several processes: torchrun --nproc-per-node 2 -m eval speed ...")
    return {"distributed_config": DistributedConfig(tp_size=size)}


@contextmanager
def process_group() -> Iterator[None]:
    """Leave the group of processes, if the model joined one, when the work is done."""
    try:
        yield
    finally:
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            gc.collect()  # NCCL waits for CUDA graphs that hold its work
            leave()


ONE_SHOT = "one-shot"
"""The exchange by torch's own kernels between the GPUs of one host, for which ``ENABLE_INTRA_NODE_COMM=1`` asks."""


def exchange() -> str | None:
    """Return how processes add up their parts: :data:`ONE_SHOT` or the backend; None without a group of processes."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return None
    # torch leaves it to NCCL, without a word, where GPUs are not joined: so its count of them is what tells.
    count = getattr(torch._C._distributed_c10d, "_get_intra_node_comm_usage_counter", lambda: 0)
    return ONE_SHOT if count() else torch.distributed.get_backend()


def wait_for_others() -> None:
    """Wait until every process of a group is here, so that none is timed while it waits for another one."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.barrier()
