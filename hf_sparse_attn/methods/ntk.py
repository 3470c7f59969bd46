"""NTK-aware RoPE: dense attention with rotations that turn more slowly, for prompts beyond the trained length."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from hf_sparse_attn.heads import head_dim_of
from hf_sparse_attn.methods.full import Full
from hf_sparse_attn.rope import check_whole_heads, decoder_rotary, has_rope_by_kind

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


@dataclass(frozen=True)
class NTK(Full):
    """Dense attention with NTK-aware scaled RoPE, for prompts beyond the trained length.

    YaRN's paper (arXiv 2309.00071, sections 3.1 and 3.3) describes it. RoPE turns pair i of the d channels by
    ``position * base ** (-2 i / d)``. Here the base is ``base * factor ** (d / (d - 2))``. The slowest pair then turns
    ``factor`` times more slowly, so that its angles stay in the trained range up to ``factor`` times the trained
    length, and the fastest turns as before. The rotation is that of a stock model with these RoPE settings. Everything
    is read.

    Parameters
    ----------
    token_budget
        Has no effect; it exists because every method has one.
    dense_layers
        Has no effect: all layers are dense, and have the same RoPE.
    factor
        By how much the trained length is extended, at least 1.
    dynamic
        Scale by the length of the sequence, as Transformers' ``rope_type="dynamic"`` does: not at all up to the trained
        length n, and the base by ``(factor * length / n - factor + 1) ** (d / (d - 2))`` beyond it. Cached keys keep
        their rotation while the text grows. If False (default) the scale is fixed.
    """

    name: ClassVar[str] = "ntk"
    summary: ClassVar[str] = "dense attention with NTK-aware scaled RoPE, beyond the trained length"
    paper: ClassVar[str] = "arXiv 2309.00071"
    changes_rope: ClassVar[bool] = True

    factor: float = 4.0
    dynamic: bool = False

    def __post_init__(self) -> None:
        """Check the hyperparameters.

        Raises
        ------
        TypeError
            A value must be a number, a whole number or a bool, and is not.
        ValueError
            A value is out of range.
        """
        super().__post_init__()
        self._check_numbers("factor")
        self._require("factor", 1 <= self.factor < math.inf, "a finite number, at least 1")

    def check_model(self, model: PreTrainedModel) -> None:
        """Check that the model has plain RoPE.

        Raises
        ------
        ValueError
            The model's own RoPE is scaled already, differs between layers, or rotates only a part of the head.
        """
        if has_rope_by_kind(model.config):
            raise ValueError(
                f"{self.name} scales one RoPE, but the layers of {type(model).__name__} have different ones: "
                f"rope_parameters={model.config.rope_parameters}"
            )
        rope_type = (model.config.rope_parameters or {}).get("rope_type", "default")
        if rope_type != "default":
            raise ValueError(
                f"{self.name} scales plain RoPE, but the model's is scaled already: rope_type={rope_type!r}; "
                "supported: 'default'"
            )
        check_whole_heads(model.config, decoder_rotary(model), self.name)

    def rope_config(self, config: PreTrainedConfig) -> PreTrainedConfig:
        """Return a copy of the configuration with NTK-aware RoPE."""
        scaled, settings = copy.copy(config), dict(config.rope_parameters)
        if self.dynamic:
            settings |= {"rope_type": "dynamic", "factor": float(self.factor)}
        else:
            head_dim = head_dim_of(config)
            settings["rope_theta"] *= self.factor ** (head_dim / (head_dim - 2))
            scaled.max_position_embeddings = int(self.factor * config.max_position_embeddings)
        scaled.rope_parameters = settings
        return scaled
