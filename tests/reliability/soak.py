"""Decode for long over one cache, with operations in turns, and watch memory and results."""

from __future__ import annotations

import gc
import os
import time
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_sparse_attn import SparseCache, patch_model, unpatch_model
from tests.models import DEVICE, SPARSE

VOCABULARY, ROWS, PROMPT = 97, 2, 200
WARM_UP = 0.25
"""Share of the samples that may still grow."""
RSS_TOLERANCE = 16 * 2**20
"""Bytes of resident memory by which later samples may exceed those of the warm-up: the allocator's own."""


class Chat:
    """A cache, and the passes that filled it, to fill another one in the same way."""

    def __init__(self, model: Any, generator: torch.Generator) -> None:
        self.model, self.generator = model, generator
        self.cache, self.passes = SparseCache.for_model(model), []

    def feed(self, tokens: int) -> torch.Tensor:
        """Feed random tokens, and return the logits after the last one."""
        self.passes.append(torch.randint(2, VOCABULARY, (ROWS, tokens), generator=self.generator).to(DEVICE))
        logits: torch.Tensor = self.model(self.passes[-1], past_key_values=self.cache, logits_to_keep=1).logits
        return logits

    def crop(self) -> None:
        """Remove the last steps."""
        removed = len(self.passes) // 4
        self.passes = self.passes[: len(self.passes) - removed]
        self.cache.crop(-removed)

    def reorder(self) -> None:
        """Exchange the rows."""
        self.cache.reorder_cache(torch.tensor([1, 0], device=DEVICE))
        self.passes = [ids.flip(0) for ids in self.passes]

    def fork(self) -> None:
        """Go on with a fork, and drop the cache."""
        self.cache = self.cache.fork(self.cache.method)

    def reset(self) -> None:
        """Begin anew."""
        self.cache.reset()
        self.passes = []

    def error(self) -> float:
        """Return the largest difference of a step's logits from those over a cache that is filled anew."""
        logits, fresh = self.feed(1), SparseCache.for_model(self.model)
        for ids in self.passes:
            expected = self.model(ids, past_key_values=fresh, logits_to_keep=1).logits
        return float((logits - expected).abs().max())


def soak(method: str, tokens: int, chat_tokens: int, checks: int, seconds: float) -> dict[str, Any]:
    """Decode over one cache until a number of tokens, or a time, is reached.

    Each chat is a prompt and single steps up to ``chat_tokens``. Then comes one of crop, reorder and fork, and further
    steps; the next chat begins with a reset. Memory is sampled after each reset.

    Returns
    -------
    dict
        ``tokens`` decoded in each row, ``operations`` by name, ``samples`` of memory, the ``largest_error`` of the
        checks, and whether the samples are ``flat``.
    """
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=2 * chat_tokens,
        initializer_range=0.2,
    )
    model = LlamaForCausalLM(config).to(DEVICE, torch.float64).eval()
    patch_model(model, method, token_budget=64, **SPARSE.get(method, {}))
    chat = Chat(model, torch.Generator().manual_seed(0))
    turns, begin = (chat.crop, chat.reorder, chat.fork), time.monotonic()
    decoded, turn, errors, samples = 0, 0, [], []
    counts = dict.fromkeys(("crop", "reorder", "fork", "reset"), 0)
    with torch.inference_mode():
        while decoded < tokens and time.monotonic() - begin < seconds:
            chat.feed(min(PROMPT, chat_tokens // 2))
            for _ in range(2):
                while chat.cache.get_seq_length() < chat_tokens:
                    chat.feed(1)
                    decoded += 1
                change = turns[turn % len(turns)]
                change()
                counts[change.__name__] += 1
                turn += 1
                for _ in range(chat_tokens // 8):
                    chat.feed(1)
                    decoded += 1
                if len(errors) < checks * decoded / tokens:
                    errors.append(chat.error())
            chat.reset()
            counts["reset"] += 1
            samples.append(sample_memory(decoded))
    unpatch_model(model)
    return {
        "method": method,
        "tokens": decoded,
        "rows": ROWS,
        "chat_tokens": chat_tokens,
        "seconds": round(time.monotonic() - begin, 1),
        "operations": counts,
        "checks": len(errors),
        "largest_error": max(errors, default=0.0),
        "flat": are_flat(samples),
        "samples": samples,
    }


def sample_memory(decoded: int) -> dict[str, int]:
    """Return what the process holds: bytes, tensors, and objects of the library's classes."""
    gc.collect()
    objects = gc.get_objects()
    kinds = [type(each) for each in objects]
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "tokens": decoded,
        "rss_bytes": pages * os.sysconf("SC_PAGE_SIZE"),
        "device_bytes": torch.cuda.memory_allocated() if torch.cuda.is_available() else 0,
        "tensors": sum(issubclass(kind, torch.Tensor) for kind in kinds),
        "objects": sum(str(kind.__module__).startswith("hf_sparse_attn") for kind in kinds),
    }


def are_flat(samples: list[dict[str, int]]) -> bool:
    """Whether no sample exceeds those of the warm-up: not at all in objects, hardly in resident memory."""
    warm = max(1, int(len(samples) * WARM_UP))
    first, later = samples[:warm], samples[warm:]
    tolerances = {"rss_bytes": RSS_TOLERANCE, "device_bytes": 0, "tensors": 0, "objects": 0}
    return all(
        max(sample[name] for sample in later) <= max(sample[name] for sample in first) + tolerance
        for name, tolerance in tolerances.items()
        if later
    )
