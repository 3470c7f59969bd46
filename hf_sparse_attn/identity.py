"""Identities of models and texts: hashes of configuration, weights and token ids."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

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
        """Identify a model, whether its weights are loaded or offloaded by accelerate.

        Offloaded parameters are read one after the other, so memory need not hold the whole model.

        Raises
        ------
        ValueError
            A parameter is on the ``meta`` device, and accelerate does not keep its values.
        """
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
    parameters = dict(model.named_parameters())
    samples = {name: _sample(model, name, parameter) for name, parameter in parameters.items()}
    for name in sorted(parameters.keys() - _tied_to_earlier(model, parameters, samples)):
        parameter = parameters[name]
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode())
        digest.update(samples[name])
    return digest.hexdigest()


def _sample(model: PreTrainedModel, name: str, parameter: torch.Tensor) -> bytes:
    values = _offloaded_values(model, name) if parameter.is_meta else parameter
    flat = values.detach().flatten()
    sample = flat[:: max(1, flat.numel() // SAMPLED)][:SAMPLED]
    # A map may have the checkpoint's dtype: accelerate casts to the parameter's when the layer runs.
    content: bytes = sample.to(parameter.dtype).to("cpu", torch.float64).numpy().astype("<f8").tobytes()
    return content


def _offloaded_values(model: PreTrainedModel, name: str) -> torch.Tensor:
    for hook, local_name in offload_hooks(model, name):
        value: torch.Tensor | None = (getattr(hook, "weights_map", None) or {}).get(local_name)
        if value is not None and not value.is_meta:
            return value
    # Left out, it would make models with other weights equal, and each would take the other's files for its own.
    raise ValueError(
        f"model must have its weights: {name} is on the meta device, and no hook of accelerate has its values, so they "
        "cannot be compared with those of another model"
    )


def offload_hooks(model: torch.nn.Module, name: str) -> Iterator[tuple[Any, str]]:
    """Yield the hooks of accelerate that may load a parameter, each with the name by which it knows the parameter.

    They are those of its module and, because of ``preload_module_classes``, of the modules around it, the nearest
    first. Each has the name within its own module.
    """
    path = name.split(".")
    for depth in reversed(range(len(path))):
        module = model.get_submodule(".".join(path[:depth]))
        for hook in _single_hooks(getattr(module, "_hf_hook", None)):
            yield hook, ".".join(path[depth:])


def _single_hooks(hook: Any) -> Iterator[Any]:
    if hook is None:
        return
    yield hook
    for inner in getattr(hook, "hooks", ()):  # of a SequentialHook
        yield from _single_hooks(inner)


def _tied_to_earlier(
    model: PreTrainedModel, parameters: dict[str, torch.Tensor], samples: dict[str, bytes]
) -> set[str]:
    """Return the names that only an offloaded model's ``named_parameters`` has: of weights that are tied to others.

    accelerate replaces each parameter by one of its own on ``meta``, so a weight with two names becomes two parameters.
    The two need not be one tensor where they lie, so the model says which are tied. The samples are compared too, since
    a model may be untied by hand.
    """
    source_of = {
        ".".join(filter(None, (prefix, target))): ".".join(filter(None, (prefix, source)))
        for prefix, module in model.named_modules()
        for target, source in (getattr(module, "all_tied_weights_keys", None) or {}).items()
    }
    first: dict[tuple[str, bytes], str] = {}
    again = set()
    for name, parameter in parameters.items():
        earlier = first.setdefault((source_of.get(name, name), samples[name]), name)
        if earlier != name and (parameter.is_meta or parameters[earlier].is_meta):
            again.add(name)
    return again


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
