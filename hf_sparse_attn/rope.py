"""Rotary position embeddings by slot: rotation tables, and a hook that disables the model's own rotation.

A method with ``rotates_keys`` caches keys before RoPE and rotates the tokens that it reads to contiguous positions,
their slots. The model's own rotation must then do nothing.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from hf_sparse_attn.cache.lasting import lasting_tensors, mark_static
from hf_sparse_attn.heads import head_dim_of

SUPPORTED_ROPE_TYPES = ("default", "linear", "llama3", "yarn")


class Rope(NamedTuple):
    """The rotations of slots 0 to ``len(cos) - 1``, on one device."""

    cos: torch.Tensor
    """float32 [slots, head_dim // 2]."""
    sin: torch.Tensor
    """float32 [slots, head_dim // 2]."""


class RopeTables:
    """The rotations of a model's rotary module, cached for each device.

    Parameters
    ----------
    rotary
        The decoder's rotary module.
    slots
        Number of positions.
    """

    def __init__(self, rotary: torch.nn.Module, slots: int) -> None:
        self.rotary, self._slots = rotary, slots
        self._on: dict[torch.device, Rope] = {}
        self._frequencies = _frequencies(rotary)

    def take(self, rope: Rope) -> Rope:
        """Return the tables on the device of ``rope``: ``rope`` itself if its values are equal.

        Keeping the address spares compiled steps another recording.
        """
        own = self.on(rope.cos.device)
        if own is not rope and all(map(torch.equal, own, rope)):
            self._on[rope.cos.device] = own = rope
        return own

    def refresh(self) -> None:
        """Forget the tables if the model was moved, or cast, which rounds its frequencies, also if it was cast back."""
        frequencies = _frequencies(self.rotary)
        if frequencies is not self._frequencies:
            self._on.clear()
            self._frequencies = frequencies

    def on(self, device: torch.device) -> Rope:
        """Return the tables on a device, which all its layers share."""
        if device not in self._on:
            with lasting_tensors():
                tables = _half_tables(self.rotary, self._slots)
                self._on[device] = Rope(*(mark_static(table.to(device).contiguous()) for table in tables))
        return self._on[device]


class OtherRope:
    """Forward hook that replaces a rotary module's output by that of one with another configuration.

    The model keeps its own module, with all of its state.

    Parameters
    ----------
    rotary
        The decoder's rotary module.
    config
        The configuration of the other one.
    """

    def __init__(self, rotary: torch.nn.Module, config: PreTrainedConfig) -> None:
        self._config = config
        self._other = self._create(rotary)

    def _create(self, rotary: torch.nn.Module) -> torch.nn.Module:
        """Create the other module, on the device and in the dtype of the model's own."""
        like = _frequencies(rotary)
        kind: Any = type(rotary)
        with lasting_tensors():
            other: torch.nn.Module = kind(self._config).to(like.device, like.dtype)
            for tensor in other.buffers():
                mark_static(tensor)
        return other

    def __call__(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosine and sine for the arguments of the model's own module."""
        like, own = _frequencies(module), _frequencies(self._other)
        has_moved = (like.device, like.dtype) != (own.device, own.dtype)
        if has_moved or (depends_on_length(self._config) and _begins_prompt(*args[1:], **kwargs)):
            self._other = self._create(module)
        tables: tuple[torch.Tensor, torch.Tensor] = self._other.forward(*args, **kwargs)
        return tables


def _begins_prompt(position_ids: torch.Tensor, x: torch.Tensor | None = None) -> bool:
    """Whether a pass is the first over a prompt: its frequencies must not depend on the prompt before."""
    return position_ids.shape[-1] > 1 and int(position_ids.min()) == 0


def rotate_nothing(
    module: torch.nn.Module, arguments: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Replace a rotary module's output by cosine 1 and sine 0, as a forward hook."""
    cos, sin = output
    return torch.ones_like(cos), torch.zeros_like(sin)


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Apply RoPE to ``x`` [..., head_dim] by tables broadcastable to [..., head_dim // 2].

    Computes and returns float32, or float64 for float64.
    """
    first, second = x.to(torch.promote_types(x.dtype, torch.float32)).chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def rotated_as_model(x: torch.Tensor, rope: Rope, positions: torch.Tensor) -> torch.Tensor:
    """Apply RoPE to ``x`` [batch, heads, tokens, head_dim] at positions [batch or 1, tokens].

    Rounds as Transformers does, in the dtype of ``x``.
    """
    return rotated_by(x, *(torch.cat([table, table], dim=-1)[positions].to(x.dtype) for table in rope))


def rotated_by(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Apply RoPE to ``x`` [batch, heads, tokens, head_dim] by tables [batch or 1, tokens, head_dim].

    Tables of gpt-oss have ``head_dim // 2`` channels, which both halves of a head share.
    """
    if 2 * cos.shape[-1] == x.shape[-1]:
        cos, sin = (torch.cat([table, table], dim=-1) for table in (cos, sin))
    first, second = x.chunk(2, dim=-1)
    return x * cos[:, None] + torch.cat([-second, first], dim=-1) * sin[:, None]


def decoder_rotary(model: PreTrainedModel) -> torch.nn.Module:
    """Return the decoder's rotary module."""
    rotary: torch.nn.Module = model.get_decoder().rotary_emb
    return rotary


def check_rope(config: PreTrainedConfig, rotary: torch.nn.Module, method_name: str) -> None:
    """Check that a model's RoPE allows rotation by slot.

    Raises
    ------
    ValueError
        The RoPE variant depends on the length (dynamic NTK, LongRoPE), is unknown, or rotates only a part of the head.
    """
    rope_type = _rope_settings(config).get("rope_type", "default")
    if rope_type not in SUPPORTED_ROPE_TYPES:
        raise ValueError(
            f"{method_name} rotates keys by slot, which rope_type={rope_type!r} does not allow: its frequencies depend "
            f"on the length of the sequence (dynamic NTK, LongRoPE) or are unknown; supported: "
            f"{', '.join(SUPPORTED_ROPE_TYPES)}"
        )
    check_whole_heads(config, rotary, method_name)


def check_whole_heads(config: PreTrainedConfig, rotary: torch.nn.Module, method_name: str) -> None:
    """Check that a model's RoPE rotates all of a head's dimensions.

    Raises
    ------
    ValueError
        It rotates only a part of the head.
    """
    rotated_dims = 2 * _half_tables(rotary, 1)[0].shape[-1]
    if rotated_dims != head_dim_of(config):
        raise ValueError(
            f"{method_name} rotates whole heads, but the model's RoPE covers {rotated_dims} of "
            f"head_dim={head_dim_of(config)} (partial_rotary_factor)"
        )


def _frequencies(rotary: torch.nn.Module) -> torch.Tensor:
    """Return the buffer from which a rotary module computes its output."""
    return next(iter(rotary.buffers()))


def _half_tables(rotary: torch.nn.Module, slots: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosine and sine of the first ``slots`` positions, float32 [slots, rotated dimensions / 2]."""
    frequencies = _frequencies(rotary)
    device = frequencies.device
    with torch.no_grad():  # forward, not __call__: a hook may disable the rotation
        tables = rotary.forward(
            torch.zeros(1, dtype=torch.float32, device=device), torch.arange(slots, device=device)[None]
        )
    cos, sin = (table[0, :, : len(frequencies)] for table in tables)  # most modules repeat them, gpt-oss's does not
    return cos, sin


def max_positions(config: PreTrainedConfig) -> int:
    """Return the number of positions that a model supports, including RoPE scaling that the config leaves out.

    Raises
    ------
    ValueError
        The configuration states no number of positions.
    """
    rope = _rope_settings(config)
    limit: int | None = getattr(config, "max_position_embeddings", None)
    if limit is None:
        raise ValueError(
            f"the configuration of model type {config.model_type!r} has no max_position_embeddings, so how long a "
            "prompt may be is not known"
        )
    if rope.get("rope_type") in ("linear", "dynamic", "yarn"):
        trained = rope.get("original_max_position_embeddings") or limit
        limit = max(limit, int(trained * rope.get("factor", 1.0)))
    return limit


def depends_on_length(config: PreTrainedConfig) -> bool:
    """Whether the frequencies of a model's RoPE are those of the longest sequence so far (dynamic NTK)."""
    return any(rope.get("rope_type") == "dynamic" for rope in _ropes(config))


def rope_changes(config: PreTrainedConfig) -> list[tuple[str, int]]:
    """Return each RoPE whose frequencies depend on the length: its type, and the positions before they change.

    Those of LongRoPE change once, those of dynamic NTK with every further token.
    """
    own = config.max_position_embeddings
    changes = []
    for rope in _ropes(config):
        original = rope.get("original_max_position_embeddings") or own
        if rope.get("rope_type") == "longrope":
            changes.append(("longrope", original))
        elif rope.get("rope_type") == "dynamic":
            changes.append(("dynamic", min(original, own)))
    return changes


def _ropes(config: PreTrainedConfig) -> list[dict[str, Any]]:
    """Return the settings of RoPE: of each kind of layers that has its own, or of all layers."""
    settings = getattr(config, "rope_parameters", None) or {}
    # Transformers 5.16 puts a rope_type of its own beside those of the kinds, if no layer has one of them.
    return [kind for kind in settings.values() if isinstance(kind, dict)] or [settings]


def has_rope_by_kind(config: PreTrainedConfig) -> bool:
    """Whether full-attention and sliding-window layers each have a RoPE of their own."""
    settings = getattr(config, "rope_parameters", None) or {}
    return any(isinstance(kind, dict) for kind in settings.values())


def _rope_settings(config: PreTrainedConfig) -> dict[str, Any]:
    """Return the settings of the RoPE, of the full-attention layers if each kind of layer has its own."""
    settings: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    if has_rope_by_kind(config):
        settings = settings.get("full_attention") or {}
    return settings
