"""Weights quantized by torchao and bitsandbytes, which attention does not notice."""

import pytest
import torch
from torchao.quantization import (
    Float8WeightOnlyConfig,
    Int8DynamicActivationInt8WeightConfig,
    Int8WeightOnlyConfig,
    quantize_,
)
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, TorchAoConfig

from hf_sparse_attn import patch_model, unpatch_model
from tests.models import make_model
from tests.tools.checks import GREEDY, check_tool, covers_all, padded_batch, quest_first, sparse_methods

CONFIGS = {
    "torchao int8": lambda: TorchAoConfig(Int8WeightOnlyConfig()),
    "torchao int8, activations too": lambda: TorchAoConfig(Int8DynamicActivationInt8WeightConfig()),
    "torchao float8": lambda: TorchAoConfig(Float8WeightOnlyConfig()),
    "bitsandbytes 8 bits": lambda: BitsAndBytesConfig(load_in_8bit=True),
    "bitsandbytes fp4": lambda: BitsAndBytesConfig(load_in_4bit=True),
    "bitsandbytes nf4": lambda: BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4"),
}
WIDE = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "hidden_size": 256,
    "intermediate_size": 256,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    make_model("llama", **WIDE).save_pretrained(folder)
    return folder


@quest_first
@pytest.mark.parametrize("name", CONFIGS)
def test_quantized_weights(name, method_name, folder):
    model = AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=CONFIGS[name](), dtype=torch.bfloat16, device_map="cpu"
    ).eval()
    weight = model.model.layers[0].self_attn.q_proj.weight
    assert type(weight) is not torch.nn.Parameter  # it was quantized
    prompt = padded_batch()
    check_tool(lambda: model.generate(**prompt, **GREEDY), model, method_name)


@sparse_methods
def test_quantizing_a_patched_model(method_name):
    prompt, model = padded_batch(), make_model("llama", **WIDE)
    patch_model(model, method_name, **covers_all(method_name))
    before = model(**prompt).logits
    quantize_(model, Int8WeightOnlyConfig())
    assert not torch.equal(model(**prompt).logits, before)
    output = model.generate(**prompt, **GREEDY)
    assert torch.equal(output, unpatch_model(model).generate(**prompt, **GREEDY))
