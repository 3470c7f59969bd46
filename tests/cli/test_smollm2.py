"""Real weights: SmolLM2-135M finds the passkey reading a quarter of the KV cache; a window does not."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from transformers import DynamicCache

from hf_sparse_attn import Quest, SparseCache, patch_model, sparse_attention, sparse_attention_stats, unpatch_model
from hf_sparse_attn.cli.greedy import prefill
from hf_sparse_attn.cli.models import load_model
from hf_sparse_attn.cli.passkey import answer_passkey, make_passkey
from hf_sparse_attn.rope import max_positions
from tests.methods.toy import Window

BOOK = Path(__file__).parents[1] / "eval/golden/books/10146.txt"
TOKENS = 1000
BUDGET = 128
DEPTHS = (0.1, 0.25, 0.4, 0.55, 0.7)  # all of them outside the last 128 tokens

pytestmark = pytest.mark.weights
on_each_device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


@pytest.fixture(scope="module")
def loaded():
    """Return a function that loads SmolLM2 and its tokenizer once per device, in fp32 on CPU and bf16 on CUDA."""
    models = {}

    def load(device):
        if device not in models:
            models[device] = load_model("smollm2", device=device)
        return models[device]

    return load


@on_each_device
def test_passkey_with_a_quarter_of_the_cache(loaded, device):
    model, tokenizer = loaded(device)
    quest = Quest(token_budget=BUDGET)
    window = Window(token_budget=BUDGET, dense_layers=quest.dense_layers)
    found = {"dense": 0, "quest": 0, "window": 0}
    for seed, depth in enumerate(DEPTHS):
        passkey = make_passkey(tokenizer, TOKENS, depth, seed)
        prefix = SparseCache(model.config, "full")
        prefill(model, prefix, passkey.material_ids)
        question = replace(passkey, material_ids=())  # the material is in the cache: one prefill serves all
        answer = answer_passkey(model, tokenizer, question, prefix.fork("full"))
        found["dense"] += passkey.found_in(answer.text)
        for name, method in (("quest", quest), ("window", window)):
            with sparse_attention(model, method):
                answer = answer_passkey(model, tokenizer, question, prefix.fork(method))
                stats = sparse_attention_stats(model)
            found[name] += passkey.found_in(answer.text)
            assert stats.decode_steps == answer.decode_steps
            assert stats.kv_fraction <= 0.27
    assert found["dense"] >= 4
    assert found["quest"] >= found["dense"]
    assert found["window"] == 0


@on_each_device
@torch.inference_mode()
def test_patch_generate_stats_unpatch_generate(loaded, device):
    model, tokenizer = loaded(device)
    passkey = make_passkey(tokenizer, 500, 0.5, seed=1)
    prompt = torch.tensor([[*passkey.material_ids, *passkey.question_ids]], device=device)

    def generate():
        return model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=12, do_sample=False)

    dense = generate()
    patch_model(model, "quest", token_budget=4096)
    assert torch.equal(generate(), dense)
    patch_model(model, "quest", token_budget=128)
    sparse = generate()
    stats = sparse_attention_stats(model)
    unpatch_model(model)
    assert torch.equal(generate(), dense)
    assert torch.equal(sparse[:, : prompt.shape[1]], prompt)
    assert stats.kv_fraction < 0.45


@dataclass(frozen=True)
class ComparedQuest(Quest):
    """Quest with 8-bit bounds that counts the pages exact bounds select, and how many of those it selects too."""

    agreed: ClassVar[list[int]] = []
    chosen: ClassVar[list[int]] = []

    def decode(self, query, layer, new_key, new_value, scale):
        output = super().decode(query, layer, new_key, new_value, scale)
        exact_quest = Quest(token_budget=self.token_budget, bounds_dtype="model")
        exact = exact_quest.select(query, layer.fork(exact_quest, layer._shared), scale)
        pages = self.select(query, layer, scale).block_indices[..., None]
        self.agreed.append(int(((pages == exact.block_indices[..., None, :]) & (pages >= 0)).sum()))
        self.chosen.append(int(exact.block_counts.sum()))
        return output


@torch.inference_mode()
def test_eight_bit_bounds_choose_as_well_when_the_prompts_first_call_is_one_token(loaded):
    model, tokenizer = loaded("cpu")
    ids = tokenizer(BOOK.read_text(encoding="utf-8"), return_tensors="pt").input_ids[:, :608]
    prompt, steps = ids[:, :600], ids[:, 600:]
    agreement = {}
    for first_call in (600, 1):
        ComparedQuest.agreed.clear()
        ComparedQuest.chosen.clear()
        with sparse_attention(model, ComparedQuest(token_budget=128)):
            cache = SparseCache.for_model(model)
            for part in prompt.split([first_call, 600 - first_call], dim=1):
                if part.shape[1]:
                    model(part, past_key_values=cache)
            for step in steps.T:
                model(step[None], past_key_values=cache)
        agreement[first_call] = sum(ComparedQuest.agreed) / sum(ComparedQuest.chosen)
    assert agreement[600] >= 0.95
    assert agreement[1] >= max(0.95, agreement[600] - 0.01)


@pytest.mark.gpu
def test_tokenselect_finds_the_passkey_at_twice_the_trained_length(loaded):
    model, tokenizer = loaded("cuda")
    assert max_positions(model.config) == 8192
    found = {"dense": 0, "tokenselect": 0}
    for seed, depth in enumerate((0.1, 0.3, 0.5, 0.7, 0.9)):
        passkey = make_passkey(tokenizer, 16_000, depth, seed)
        answer = answer_passkey(model, tokenizer, passkey, DynamicCache(config=model.config))
        found["dense"] += passkey.found_in(answer.text)
        with sparse_attention(model, "tokenselect", token_budget=1024):
            answer = answer_passkey(model, tokenizer, passkey, SparseCache.for_model(model))
        found["tokenselect"] += passkey.found_in(answer.text)
    assert found["dense"] == 0
    assert found["tokenselect"] >= 4
