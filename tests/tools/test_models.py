"""Other uses of a model: casting, saving, evaluating, compiling, and creating another from its configuration."""

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM, Trainer, TrainingArguments

from hf_sparse_attn import (
    SparseCache,
    patch_model,
    record_selections,
    sparse_attention,
    sparse_attention_stats,
    unpatch_model,
)
from hf_sparse_attn.patched import is_patched
from tests.models import make_model, random_ids
from tests.tools.checks import GREEDY, check_tool, covers_all, exact_model, padded_batch, small, sparse_methods

CASTS = {
    "half": lambda model: model.half(),
    "to bfloat16": lambda model: model.to(torch.bfloat16),
    "double": lambda model: model.double(),
}


@pytest.mark.one_in(3)
@sparse_methods
@pytest.mark.parametrize("name", CASTS)
def test_casting_a_patched_model(name, method_name):
    """Casting a model casts RoPE's frequencies too, so values derived from them are recomputed."""
    cast, prompt = CASTS[name], padded_batch()
    stock = cast(make_model("llama"))
    model = patch_model(make_model("llama"), method_name, **covers_all(method_name))
    model.generate(**prompt, **GREEDY)
    assert cast(model).dtype == stock.dtype != torch.float32
    assert torch.equal(model.generate(**prompt, **GREEDY), stock.generate(**prompt, **GREEDY))
    unpatch_model(model)
    check_tool(lambda: model.generate(**prompt, **GREEDY), model, method_name)


@sparse_methods
def test_a_patched_model_is_saved_as_a_stock_one(method_name, tmp_path):
    model, prompt = exact_model(), padded_batch()
    expected = model.generate(**prompt, **GREEDY)
    model.save_pretrained(tmp_path / "stock")
    patch_model(model, method_name, **small(method_name))
    model.generate(**prompt, **GREEDY)
    model.save_pretrained(tmp_path / "patched")
    files = {file.name: file.read_bytes() for file in (tmp_path / "stock").iterdir()}
    assert {file.name: file.read_bytes() for file in (tmp_path / "patched").iterdir()} == files
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "patched")
    assert loaded.config._attn_implementation == "sdpa"
    assert torch.equal(loaded.generate(**prompt, **GREEDY), expected)


@sparse_methods
def test_a_model_of_a_patched_models_configuration_is_not_silently_dense(method_name):
    model, prompt = exact_model(), padded_batch()
    patch_model(model, method_name, **small(method_name))
    other = LlamaForCausalLM(model.config).double().eval()
    for use_cache in (True, False):
        with pytest.raises(ValueError, match=r"belongs to a model that is not patched; .* copied from a patched model"):
            other.generate(**prompt, use_cache=use_cache, **GREEDY)
    other.load_state_dict(model.state_dict())
    expected = model.generate(**prompt, **GREEDY)
    patch_model(other, method_name, **small(method_name))
    assert torch.equal(other.generate(**prompt, **GREEDY), expected)
    unpatch_model(other)
    other.set_attn_implementation("sdpa")
    assert torch.equal(other.generate(**prompt, **GREEDY), unpatch_model(model).generate(**prompt, **GREEDY))


@sparse_methods
def test_the_trainer_evaluates_and_predicts(method_name, tmp_path):
    """Evaluation is a prefill; right-padded rows are dense under their mask."""
    model, ids = make_model("llama"), random_ids(4, 60)
    mask = torch.ones_like(ids)
    mask[1, 45:] = 0
    rows = [
        {"input_ids": row, "attention_mask": row_mask, "labels": row.where(row_mask == 1, -100)}
        for row, row_mask in zip(ids, mask, strict=True)
    ]
    arguments = TrainingArguments(tmp_path, report_to=[], use_cpu=True, per_device_eval_batch_size=2, disable_tqdm=True)
    trainer = Trainer(model, arguments, train_dataset=rows, eval_dataset=rows)
    expected, predictions = trainer.evaluate()["eval_loss"], torch.tensor(trainer.predict(rows).predictions)
    patch_model(model, method_name, **covers_all(method_name))
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-5)
    torch.testing.assert_close(torch.tensor(trainer.predict(rows).predictions), predictions, rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match=r"training mode; sparse attention is for inference: call model.eval\(\)"):
        trainer.train()


@sparse_methods
def test_a_compiled_model(method_name):
    """The whole model behind torch.compile, prefill and decode steps, with a static cache."""
    model = exact_model(num_hidden_layers=3)
    prompt = {"input_ids": random_ids(1, 150), "attention_mask": torch.ones(1, 150, dtype=torch.long)}
    options = {**GREEDY, "max_new_tokens": 4, "cache_implementation": "static"}
    with sparse_attention(model, method_name, **small(method_name)):
        expected = model.generate(**prompt, **options)
        stats = sparse_attention_stats(model)
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="eager")
        assert torch.equal(compiled.generate(**prompt, **options), expected)
        assert sparse_attention_stats(model) == stats
        assert stats.kv_fraction < 1


def test_a_model_is_patched_before_it_is_compiled():
    with pytest.raises(TypeError, match="got OptimizedModule"):
        patch_model(torch.compile(make_model("llama"), backend="eager"))


@torch.no_grad()
def test_helpers_take_what_compiling_returns():
    model = patch_model(make_model("llama"), "quest", token_budget=64)
    compiled = torch.compile(model, backend="eager")
    model.generate(random_ids(1, 100), max_new_tokens=2, do_sample=False)
    assert sparse_attention_stats(compiled) == sparse_attention_stats(model)
    assert SparseCache.for_model(compiled).method == SparseCache.for_model(model).method
    with record_selections(compiled) as record:
        compiled.generate(random_ids(1, 100), max_new_tokens=2, do_sample=False)
    assert record.num_steps == 1
    unpatch_model(compiled)
    assert not is_patched(model)
