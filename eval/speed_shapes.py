"""Architectures of published models, built with random weights to measure speed without the real ones."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from eval.split import Split, build_placed

_SHAPE_POSITIONS = 1 << 20  # RoPE keeps no table, so positions cost nothing


@dataclass(frozen=True)
class Shape:
    """The architecture of a published model, with the field names of its Transformers configuration."""

    model_type: str
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    rope_theta: float
    tie_word_embeddings: bool = False


SHAPES: dict[str, Shape] = {
    "llama-2-7b": Shape("llama", 4096, 32, 32, 32, 128, 11008, 32000, 1e4),
    "llama-3.1-8b": Shape("llama", 4096, 32, 32, 8, 128, 14336, 128256, 5e5),
    "llama-3.1-70b": Shape("llama", 8192, 80, 64, 8, 128, 28672, 128256, 5e5),
    "qwen2.5-7b": Shape("qwen2", 3584, 28, 28, 4, 128, 18944, 152064, 1e6),
    "mistral-7b": Shape("mistral", 4096, 32, 32, 8, 128, 14336, 32768, 1e6),
    "smollm2-135m": Shape("llama", 576, 30, 9, 3, 64, 1536, 49152, 1e5, tie_word_embeddings=True),
    "tiny": Shape("llama", 64, 4, 4, 2, 16, 128, 97, 1e4),
}


def build_model(
    shape: Shape, dtype: torch.dtype, device: torch.device, seed: int = 0, split: Split = Split.NONE
) -> PreTrainedModel:
    """Build a model of a shape with random weights, in evaluation mode and with SDPA, on a device or split over GPUs.

    It has a million positions and no end-of-sequence token. Weights have the scale of a training start, so outputs are
    finite. A seed gives the same weights however the model is split.
    """
    settings = asdict(shape)
    rope = {"rope_type": "default", "rope_theta": settings.pop("rope_theta")}
    config = AutoConfig.for_model(
        **settings,
        rope_parameters=rope,
        max_position_embeddings=_SHAPE_POSITIONS,
        sliding_window=None,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    if device.type == "meta":
        with device:
            return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa").eval()
    with seeded(device, seed):
        model = build_placed(config, dtype, device, split)
    _draw_matrices(model, config, seed)
    return model.eval()


@torch.no_grad()
def _draw_matrices(model: PreTrainedModel, config: PreTrainedConfig, seed: int) -> None:
    """Draw every matrix from a seed of its own; under tensor parallelism keep this process's part of it."""
    with torch.device("meta"):
        shapes = {name: each.shape for name, each in AutoModelForCausalLM.from_config(config).named_parameters()}
    for name, parameter in model.named_parameters():
        if len(shapes[name]) < 2:
            continue
        own = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        generator = torch.Generator(own.device).manual_seed(zlib.crc32(f"{seed} {name}".encode()))
        whole = torch.empty(shapes[name], dtype=own.dtype, device=own.device)
        whole.normal_(std=config.initializer_range, generator=generator)
        for dim, (size, part) in enumerate(zip(whole.shape, own.shape, strict=True)):
            if size != part:
                whole = whole.chunk(torch.distributed.get_world_size(), dim)[torch.distributed.get_rank()]
        own.copy_(whole)


@contextmanager
def seeded(device: torch.device, seed: int) -> Iterator[None]:
    """Seed the device's generator, and restore its state afterwards."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield
