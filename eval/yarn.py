"""YaRN for a loaded model, so that it holds contexts beyond the length that it was trained with."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedModel

from eval.errors import EvalError
from hf_sparse_attn.rope import decoder_rotary, has_rope_by_kind


@dataclass(frozen=True)
class Yarn:
    """Transformers' own YaRN (arXiv 2309.00071, section 3.4), as model cards advise for longer contexts.

    Parameters
    ----------
    factor : float
        By how much the trained length is extended, above 1.
    """

    factor: float

    def __post_init__(self) -> None:
        """Check the factor.

        Raises
        ------
        EvalError
            The factor is not a finite number above 1.
        """
        if not 1 < self.factor < float("inf"):
            raise EvalError(f"yarn={self.factor!r} is not allowed: a finite number above 1")

    def apply(self, model: PreTrainedModel) -> None:
        """Give a model's RoPE the frequencies of YaRN, and its configuration the longer maximum.

        Parameters
        ----------
        model : PreTrainedModel
            A model with plain RoPE, changed in place.

        Raises
        ------
        EvalError
            The model has no RoPE, its RoPE is scaled already, or it differs between layers. The model is unchanged.
        """
        config = model.config
        settings = getattr(config, "rope_parameters", None) or {}
        kind = settings.get("rope_type", "default")
        if not settings or has_rope_by_kind(config) or kind != "default":
            raise EvalError(
                f"yarn={self.factor:g} needs a model with one plain RoPE, whose rope_type is 'default'; "
                f"{type(model).__name__} has rope_parameters={getattr(config, 'rope_parameters', None)!r}"
            )
        trained = config.max_position_embeddings
        config.rope_parameters = {
            **settings,
            "rope_type": "yarn",
            "factor": float(self.factor),
            "original_max_position_embeddings": trained,
        }
        config.max_position_embeddings = int(self.factor * trained)
        rotary = decoder_rotary(model)
        model.get_decoder().rotary_emb = type(rotary)(config=config).to(model.device)
