"""YaRN for loaded models: the logits of a model that was loaded with it, longer contexts, and what is refused."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, Gemma3TextConfig, PreTrainedModel

from eval.errors import EvalError
from eval.lossless import measure_lossless
from eval.lossless_config import LosslessConfig
from eval.lossless_table import lossless_markdown
from eval.yarn import Yarn
from hf_sparse_attn.cli.models import load_model


def loaded_with_yarn(model_dir: str, factor: float) -> PreTrainedModel:
    """Load the model with YaRN in its configuration, as a user of Transformers would."""
    config = AutoConfig.from_pretrained(model_dir)
    trained = config.max_position_embeddings
    config.rope_parameters |= {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": trained}
    config.max_position_embeddings = int(factor * trained)
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(model_dir, config=config, dtype=torch.float64)
    return model.eval()


def test_logits_are_those_of_a_model_loaded_with_yarn(model_dir: str) -> None:
    model, _ = load_model(model_dir, torch.float64, "cpu")
    ids = torch.randint(3, 100, (1, 1500), generator=torch.Generator().manual_seed(0))
    plain = model(ids[:, :200]).logits
    Yarn(2.0).apply(model)
    expected = loaded_with_yarn(model_dir, 2.0)
    assert torch.equal(model(ids).logits, expected(ids).logits)
    assert not torch.allclose(model(ids[:, :200]).logits, plain)
    assert model.config.max_position_embeddings == 2048
    assert model.config.rope_parameters == expected.config.rope_parameters


def test_lossless_decoding_beyond_the_trained_length(model_dir: str, data_dir: Path) -> None:
    config = LosslessConfig(
        model=model_dir,
        contexts=(1100,),  # of 1,024 trained positions
        token_budget=(96,),
        draft_tokens=(3,),
        parameters={"page_size": 16},
        new_tokens=5,
        repeats=1,
        yarn=2.0,
        data_dir=data_dir,
        dtype="float32",
        device="cpu",
    )
    report = measure_lossless(config)
    assert report["settings"]["yarn"] == 2.0
    (entry,) = report["results"]
    assert [side["error"] for side in entry["sides"]] == [None] * len(entry["sides"])
    assert all(side["tokens"][0]["in_common"] == 5 for side in entry["sides"])
    assert "--yarn 2 --data-dir D" in lossless_markdown("name", report, "")
    with pytest.raises(EvalError, match="needs 1105 positions; the model has 1024"):
        measure_lossless(replace(config, yarn=None))


@pytest.mark.parametrize("factor", [1.0, 0.0, -2.0, float("inf"), float("nan")])
def test_factors_that_extend_nothing(factor: float) -> None:
    with pytest.raises(EvalError, match=f"yarn={factor!r} is not allowed: a finite number above 1"):
        Yarn(factor)
    with pytest.raises(EvalError, match="is not allowed: a finite number above 1"):
        LosslessConfig(model="m", contexts=(10,), yarn=factor)


def test_a_shape_takes_no_yarn() -> None:
    with pytest.raises(EvalError, match="yarn=2 is not allowed with a shape"):
        LosslessConfig(shape="tiny", contexts=(10,), yarn=2.0)


def test_a_scaled_or_uneven_rope_is_refused_and_left_alone(model_dir: str) -> None:
    scaled = loaded_with_yarn(model_dir, 4.0)
    uneven = AutoModelForCausalLM.from_config(
        Gemma3TextConfig(
            vocab_size=50, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, head_dim=16
        )
    )
    for model in (scaled, uneven):
        before = copy.deepcopy(model.config.to_dict())
        rotary = model.get_decoder().rotary_emb
        with pytest.raises(EvalError, match="yarn=2 needs a model with one plain RoPE"):
            Yarn(2.0).apply(model)
        assert model.config.to_dict() == before
        assert model.get_decoder().rotary_emb is rotary
