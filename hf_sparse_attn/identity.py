"""Identities of models and texts: hashes of configuration, weights and token ids."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SAMPLED = 64
"""Elements of every parameter that the hash of the weights covers."""
UNRELATED = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache", "architectures")
"""Settings that do not change what a model computes."""


class ModelIdentity(NamedTuple):
    """A model, as far as its keys and values depend on it."""

    model_id: str
    """Name or path that the model was loaded from; for messages, not compared."""
    config_hash: str
    """SHA-256 of the configuration."""
    weights_hash: str
    """SHA-256 of a sample of every parameter."""
    dtype: str = ""
    """The weights' dtype, for messages, since their hash has it too; empty in files from before it was written."""

    @classmethod
    def of(cls, model: PreTrainedModel) -> ModelIdentity:
        """Identify a model."""
        settings = {
            name: value
            for name, value in model.config.to_dict().items()
            if name not in UNRELATED and not name.startswith("_attn_implementation")
        }
        config = json.dumps(settings, sort_keys=True, default=str)
        dtype = str(model.dtype).removeprefix("torch.")
        return cls(str(model.config._name_or_path), _sha256(config.encode()), _hash_weights(model), dtype)

    def check(self, other: ModelIdentity, what: str) -> None:
        """Check that another model is this one; ``what`` begins the message, such as ``"a.safetensors was written"``.

        Raises
        ------
        ValueError
            It has another configuration, another dtype or other weights.
        """
        for name, differs in (("config_hash", "with another configuration"), ("weights_hash", "with other weights")):
            if getattr(self, name) == getattr(other, name):
                continue
            if name == "weights_hash" and self.dtype and self.dtype != other.dtype:
                raise ValueError(
                    f"{what} by a model in {self.dtype}, but this one is in {other.dtype}: load it with "
                    f"dtype={self.dtype!r}"
                )
            named = (f"{each.model_id!r} (sha256 {getattr(each, name)[:8]}...)" for each in (self, other))
            raise ValueError(f"{what} by a model {differs}: by {', not '.join(named)}")


def _hash_weights(model: PreTrainedModel) -> str:
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        flat = parameter.detach().flatten()
        sample = flat[:: max(1, flat.numel() // SAMPLED)][:SAMPLED]
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode())
        if sample.device.type != "meta":  # offloaded by accelerate
            digest.update(sample.to("cpu", torch.float64).numpy().astype("<f8").tobytes())
    return digest.hexdigest()


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
