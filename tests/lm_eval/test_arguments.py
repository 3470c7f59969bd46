"""Allowed arguments of --model_args, and errors for the others."""

import inspect
import sys
from dataclasses import fields
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
from lm_eval.api.registry import Registry
from lm_eval.models.huggingface import HFLM

from hf_sparse_attn import METHODS, Quest
from hf_sparse_attn.lm_eval import MODEL_NAME, TARGET, register
from hf_sparse_attn.lm_eval.arguments import ArgumentError, Scheme, split_arguments
from hf_sparse_attn.lm_eval.model import HFSparseLM
from tests.tiny import save_bloom, save_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_model(tmp_path_factory.mktemp("model")))


def test_names_of_arguments_are_taken_once() -> None:
    model_parameters = set(inspect.signature(HFLM).parameters)
    hyperparameters = {field.name for method in METHODS.values() for field in fields(method)}
    ours = {"method", *(field.name for field in fields(Scheme))}
    assert not model_parameters & hyperparameters
    assert not ours & (model_parameters | hyperparameters)


def test_hyperparameters_are_separated_from_other_arguments() -> None:
    arguments = {"dtype": "float32", "page_size": 8, "load_in_8bit": True, "token_budget": 64, "torch_dtype": "auto"}
    method, others = split_arguments(HFLM, "quest", arguments)
    assert method == Quest(token_budget=64, page_size=8)
    assert others == {"dtype": "float32", "load_in_8bit": True, "torch_dtype": "auto"}


@pytest.mark.parametrize("name", METHODS)
def test_every_hyperparameter_can_be_given_as_the_command_line_does(folder: str, name: str) -> None:
    method = METHODS[name]()
    given = ",".join(f"{field.name}={getattr(method, field.name)}" for field in fields(method))
    assert split_arguments(HFLM, name, _parsed(given))[0] == method


def _parsed(text: str) -> dict[str, Any]:
    from lm_eval.utils import simple_parse_args_string

    return dict(simple_parse_args_string(text))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"method": "quset"},
            "unknown method 'quset' (did you mean 'quest'?); known: full, quest, ",
        ),
        ({"method": "quest", "token_budget": 0}, "quest: token_budget must be at least 1, got 0"),
        ({"token_budget": "abc"}, "token_budget must be a whole number, got 'abc'"),
        ({"token_budget": 0.5}, "token_budget must be a whole number, got 0.5"),
        ({"vote": "soft"}, "quest has no parameter 'vote'"),
        ({"page_sze": 8}, "unknown argument 'page_sze' (did you mean 'page_size'?); quest takes token_budget, "),
        ({"decode_lst": 8}, "unknown argument 'decode_lst' (did you mean 'decode_last'?)"),
        ({"budget": 8}, "unknown argument 'budget'; quest takes token_budget, "),
        ({"decode_last": -1}, "decode_last must be a whole number, 0 or more, got -1"),
        ({"rolling_prefill": "all"}, "rolling_prefill must be a whole number, 0 or more, got 'all'"),
        ({"pretrained": None}, "pretrained is missing"),
        ({"pretrained": "/no/such/model"}, "model '/no/such/model' does not exist"),
        ({"pretrained": "nobody/nothing"}, "model 'nobody/nothing' could not be loaded: "),
        ({"dense_layers": 3}, "dense_layers must leave at least one layer to make sparse, got 3"),
    ],
)
def test_bad_arguments(folder: str, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError) as raised:
        HFSparseLM.create_from_arg_obj({"pretrained": folder, **arguments}, {"batch_size": 2, "device": "cpu"})
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)
    assert raised.value.code == str(raised.value)  # printed by the interpreter, which exits with 1
    assert isinstance(raised.value, ValueError)


def test_learned_prompts_are_refused(folder: str, tmp_path: Path) -> None:
    from peft import PromptTuningConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    get_peft_model(AutoModelForCausalLM.from_pretrained(folder), config).save_pretrained(tmp_path)
    with pytest.raises(ArgumentError, match="puts a learned prompt before every token; use LoRA"):
        HFSparseLM(folder, peft=str(tmp_path), device="cpu")


def test_unsupported_models_are_refused(tmp_path: Path) -> None:
    save_bloom(tmp_path)
    with pytest.raises(ArgumentError, match=r"BloomForCausalLM .* is not supported: .*; supported: llama"):
        HFSparseLM(str(tmp_path), device="cpu")


def test_without_lm_eval_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "lm_eval"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(ImportError, match=r"pip install 'hf-sparse-attn\[lm-eval\]'"):
        register()
    monkeypatch.delitem(sys.modules, "hf_sparse_attn.lm_eval.model")
    with pytest.raises(ImportError, match=r"pip install 'hf-sparse-attn\[lm-eval\]'"):
        import hf_sparse_attn.lm_eval.model  # noqa: F401


def test_registered_model_is_found_next_to_lm_evals_own() -> None:
    from lm_eval.api.registry import get_model

    register()
    register()
    assert get_model(MODEL_NAME) is HFSparseLM
    assert get_model("hf") is HFLM


def test_declared_model_is_found_as_lm_eval_records_it() -> None:
    registry: Registry[Any] = Registry("model")
    registry.register(MODEL_NAME, target=EntryPoint(MODEL_NAME, TARGET, "lm_eval.models"))
    assert registry.get(MODEL_NAME) is HFSparseLM
