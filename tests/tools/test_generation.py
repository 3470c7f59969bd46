"""Transformers' ways to generate: assistants, guidance, embeddings, processors, and the refused ones."""

import copy

import pytest
import torch
from transformers import GenerationConfig, WatermarkingConfig

from hf_sparse_attn import patch_model, sparse_attention, sparse_attention_stats, unpatch_model
from tests.models import random_ids
from tests.tools.checks import (
    FORGETFUL,
    GREEDY,
    SPARSE_METHODS,
    check_tool,
    covers_all,
    exact_model,
    padded_batch,
    quest_first,
    small,
    sparse_methods,
)

PROMPT = {"input_ids": random_ids(1, 150), "attention_mask": torch.ones(1, 150, dtype=torch.long)}


@pytest.fixture(scope="module")
def model():
    return exact_model()


def own_loop(model, *args, **kwargs):
    """Run Transformers' own loop, as an argument of ``custom_generate``."""
    return type(model)._sample(model, *args, **kwargs)


OPTIONS = {
    "sampling": {"do_sample": True, "temperature": 0.9, "top_k": 20, "num_return_sequences": 2},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "sampling with beams": {"num_beams": 2, "do_sample": True},
    "guidance": {"guidance_scale": 1.5, "negative_prompt_ids": random_ids(1, 140, seed=2)},
    "allowed tokens": {"prefix_allowed_tokens_fn": lambda row, ids: list(range(5, 50))},
    "processors": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3, "sequence_bias": {(7,): -9.0}},
    "watermark": {"watermarking_config": WatermarkingConfig()},
    "a loop of one's own": {"custom_generate": own_loop},
    "scores": {"return_dict_in_generate": True, "output_scores": True, "output_hidden_states": True},
}


@quest_first
@pytest.mark.parametrize("name", OPTIONS)
def test_a_way_to_generate(name, method_name, model):
    def run():
        torch.manual_seed(0)
        output = model.generate(**PROMPT, **{**GREEDY, **OPTIONS[name]})
        return output.sequences if name == "scores" else output

    check_tool(run, model, method_name)


@sparse_methods
def test_embeddings_in_place_of_tokens(method_name, model):
    batch = padded_batch()
    prompt = {"inputs_embeds": model.get_input_embeddings()(batch["input_ids"]).detach(), **batch}
    prompt.pop("input_ids")
    check_tool(lambda: model.generate(**prompt, **GREEDY), model, method_name)


def make_assistant(**overrides):
    """Return a model that always drafts five tokens, whatever its confidence."""
    assistant = exact_model(**overrides)
    assistant.generation_config.assistant_confidence_threshold = 0.0
    assistant.generation_config.num_assistant_tokens = 5
    assistant.generation_config.num_assistant_tokens_schedule = "constant"
    return assistant


@pytest.mark.parametrize("method_name", [name for name in SPARSE_METHODS if name not in FORGETFUL])
def test_a_patched_assistant_drafts_sparsely_for_a_dense_model(method_name, model):
    """The generated text is the dense model's, whatever the draft."""
    expected = model.generate(**PROMPT, **GREEDY)
    assistant = make_assistant(seed=1, num_hidden_layers=3)
    patch_model(assistant, method_name, **small(method_name))
    assert torch.equal(model.generate(**PROMPT, assistant_model=assistant, **GREEDY), expected)
    stats = sparse_attention_stats(assistant)
    assert stats.decode_steps > 0
    assert stats.kv_fraction < 1


@pytest.mark.parametrize("method_name", FORGETFUL)
def test_a_draft_that_evicted_cannot_be_rejected(method_name, model):
    assistant = make_assistant(seed=1, num_hidden_layers=3)
    patch_model(assistant, method_name, **small(method_name))
    with pytest.raises(ValueError, match=rf"'{method_name}' cannot return to \d+ tokens: it evicted some"):
        model.generate(**PROMPT, assistant_model=assistant, **GREEDY)


@sparse_methods
def test_a_model_drafts_sparsely_for_itself(method_name, model):
    """A copy that shares the weights drafts; the dense model verifies several tokens in one pass."""
    expected = model.generate(**PROMPT, **GREEDY)
    draft = copy.deepcopy(model, {id(weight): weight for weight in model.parameters()})
    assert draft.lm_head.weight is model.lm_head.weight
    draft.generation_config = make_assistant().generation_config
    passes = []
    hook = model.model.register_forward_hook(lambda *args: passes.append(1))
    for budget in (covers_all,) if method_name in FORGETFUL else (covers_all, small):
        passes.clear()
        patch_model(draft, method_name, **budget(method_name))
        assert torch.equal(model.generate(**PROMPT, assistant_model=draft, **GREEDY), expected)
        if budget is covers_all:
            assert len(passes) == 2  # all drafts are right: five tokens and one, then the rest
    hook.remove()
    assert method_name in FORGETFUL or sparse_attention_stats(draft).kv_fraction < 1
    assert model.config._attn_implementation == "sdpa"


@sparse_methods
@pytest.mark.parametrize("assistant_is_patched", [False, True])
def test_a_patched_model_with_an_assistant(assistant_is_patched, method_name, model):
    expected = model.generate(**PROMPT, **GREEDY)
    assistant = make_assistant(seed=1, num_hidden_layers=3)
    if assistant_is_patched:
        patch_model(assistant, method_name, **(covers_all if method_name in FORGETFUL else small)(method_name))
    with sparse_attention(model, method_name, **covers_all(method_name)):
        assert torch.equal(model.generate(**PROMPT, assistant_model=assistant, **GREEDY), expected)
        assert torch.equal(model.generate(**PROMPT, assistant_model=model, **GREEDY), expected)


@sparse_methods
def test_early_exit(method_name, model):
    expected = model.generate(**PROMPT, **GREEDY)
    with sparse_attention(model, method_name, **covers_all(method_name)):
        assert torch.equal(model.generate(**PROMPT, assistant_early_exit=3, **GREEDY), expected)
    assert model.config.num_hidden_layers == 4


@pytest.mark.parametrize("drafting", [{"prompt_lookup_num_tokens": 3}, {"assistant_model": exact_model()}])
def test_drafts_over_a_cache_with_tokens_are_refused(drafting, model):
    """Transformers feeds the whole text again, stock or patched, over whatever the cache holds."""
    with sparse_attention(model, "quest", token_budget=48):
        first = model.generate(**PROMPT, **GREEDY, return_dict_in_generate=True)
        cache, ids = first.past_key_values, torch.cat([first.sequences, random_ids(1, 8, seed=3)], dim=1)
        held, arguments = cache.get_seq_length(), {"attention_mask": torch.ones_like(ids), **GREEDY}
        with pytest.raises(ValueError, match=f"past_key_values holds {held} tokens, and generate.. with assistant_mod"):
            model.generate(ids, past_key_values=cache, **arguments, **drafting)
        assert cache.get_seq_length() == held
        again = model.generate(ids, past_key_values=cache, **arguments)
        assert torch.equal(again, model.generate(ids, **arguments))


@sparse_methods
def test_steps_between_the_guesses_of_prompt_lookup_are_sparse(method_name, model):
    """Without repetition there is nothing to verify, so each step is a decode step."""
    check_tool(lambda: model.generate(**PROMPT, prompt_lookup_num_tokens=3, **GREEDY), model, method_name)


@pytest.mark.parametrize(
    "options",
    [
        {"penalty_alpha": 0.6, "top_k": 4},
        {"dola_layers": "high"},
        {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5},
        {"num_beams": 2, "force_words_ids": [[5]]},
    ],
    ids=lambda options: next(reversed(options)),
)
def test_modes_that_transformers_has_given_up_are_its_own_error(options, model):
    with sparse_attention(model, "quest", **small("quest")), pytest.raises(ValueError, match="trust_remote_code=True"):
        model.generate(**PROMPT, **{**GREEDY, **options})


@pytest.mark.parametrize("name", ["sliding_window", "hybrid_chunked"])
def test_former_names_of_static_caches(name, model):
    with sparse_attention(model, "quest", **small("quest")):
        expected = model.generate(**PROMPT, cache_implementation="static", **GREEDY)
        assert torch.equal(model.generate(**PROMPT, cache_implementation=name, **GREEDY), expected)


@pytest.mark.parametrize("name", ["offloaded", "offloaded_static", "quantized"])
def test_caches_of_another_kind_are_refused(name, model):
    with (
        sparse_attention(model, "quest", **small("quest")),
        pytest.raises(ValueError, match=rf"cache_implementation='{name}' .* allowed: None, 'dynamic', 'static'"),
    ):
        model.generate(**PROMPT, cache_implementation=name, **GREEDY)


@sparse_methods
def test_continuous_batching_is_refused(method_name):
    model = exact_model()
    config = GenerationConfig(max_new_tokens=3, eos_token_id=-1, pad_token_id=0)
    patch_model(model, method_name, **small(method_name))
    with pytest.raises(ValueError, match=r"continuous batching .* call generate\(\)"):
        model.generate_batch(PROMPT["input_ids"].tolist(), generation_config=config)
    with pytest.raises(ValueError, match=r"continuous batching .* call generate\(\)"):
        model.generate(**PROMPT, cache_implementation="paged", **GREEDY)
    with pytest.raises(ValueError, match=r"continuous batching .* call generate\(\)"):
        # The call of a manager that was created before the model was patched.
        model(PROMPT["input_ids"], cache=type("PagedAttentionCache", (), {})(), use_cache=False)
    kept = model.init_continuous_batching
    unpatch_model(model)
    assert "init_continuous_batching" not in model.__dict__
    for init in (model.init_continuous_batching, kept):
        assert type(init(generation_config=config)).__name__ == "ContinuousBatchingManager"
