"""patch_model, unpatch_model and sparse_attention: changes, their undo, and errors before any work."""

import copy

import pytest
import torch
from transformers import BloomConfig, BloomForCausalLM, DynamicCache, LlamaModel

from hf_sparse_attn import (
    METHODS,
    Quest,
    SparseCache,
    patch_model,
    sparse_attention,
    sparse_attention_stats,
    unpatch_model,
)
from hf_sparse_attn.patched import is_patched, patched_method
from hf_sparse_attn.rope import max_positions
from tests.models import POSITIONS, make_model, random_ids

# Compiled decoding has tests of its own; on CUDA these would take minutes with it.
GREEDY = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "disable_compile": True}


@pytest.fixture
def model():
    return make_model("llama")


def snapshot(model):
    """Return everything in a model that patching may change."""
    return {
        "config": copy.deepcopy(model.config.to_dict()),
        "implementation": model.config._attn_implementation,
        "generation": copy.deepcopy(model.generation_config.to_dict()),
        "attributes": [sorted(module.__dict__) for module in model.modules()],
        "hooks": [
            (list(module._forward_pre_hooks), list(module._forward_hooks), list(module._forward_pre_hooks_with_kwargs))
            for module in model.modules()
        ],
        "forwards": [type(module).forward for module in model.modules()],
    }


def test_unpatching_restores_everything(model):
    before, ids = snapshot(model), random_ids(1, 50)
    expected = model.generate(ids, **GREEDY)
    assert patch_model(model, "quest", token_budget=48) is model
    assert snapshot(model) != before
    model.generate(ids, **GREEDY)
    assert unpatch_model(model) is model
    assert snapshot(model) == before
    assert torch.equal(model.generate(ids, **GREEDY), expected)


def test_unpatching_restores_what_others_set_on_the_instance(model):
    def somebody_elses(*args, **kwargs):
        raise AssertionError

    model._prepare_cache_for_generation = somebody_elses
    unpatch_model(patch_model(model))
    assert model._prepare_cache_for_generation is somebody_elses


def test_eager_model_gets_its_eager_attention_back(model):
    model.set_attn_implementation("eager")
    unpatch_model(patch_model(model))
    assert model.config._attn_implementation == "eager"


def test_patching_twice_replaces_the_method(model):
    patch_model(model, "quest", token_budget=64)
    patch_model(model, Quest(token_budget=128))
    assert patched_method(model) == Quest(token_budget=128)
    assert len(model.model._forward_pre_hooks) == 1
    unpatch_model(model)
    assert not is_patched(model)


def test_context_manager_restores_the_former_state_even_after_an_error(model):
    before = snapshot(model)
    with pytest.raises(RuntimeError, match="inside"), sparse_attention(model, "quest", token_budget=48):
        raise RuntimeError("inside")
    assert snapshot(model) == before

    patch_model(model, "quest", token_budget=64)
    with sparse_attention(model, "quest", token_budget=128):
        assert patched_method(model).token_budget == 128
    assert patched_method(model).token_budget == 64


def test_a_copy_of_a_patched_model_is_independent(model):
    patch_model(model, "quest", token_budget=48)
    twin = copy.deepcopy(model)
    twin.generate(random_ids(1, 80), **GREEDY)
    assert sparse_attention_stats(twin).decode_steps == 7
    assert sparse_attention_stats(model).decode_steps == 0
    unpatch_model(twin)
    assert is_patched(model)


def test_short_batch_runs_dense_and_silently(model, recwarn, caplog):
    patch_model(model, "quest", token_budget=64)
    model.generate(random_ids(2, 20), **GREEDY)
    stats = sparse_attention_stats(model)
    assert stats.kv_fraction == 1.0
    assert stats.metadata_bytes == 0
    assert not [warning for warning in recwarn if "sparse" in str(warning.message)]
    assert not caplog.records


@torch.inference_mode()
def test_a_context_manager_gives_the_former_statistics_back(model):
    patch_model(model, "quest", token_budget=64)
    cache = SparseCache.for_model(model)
    for tokens in (100, 1, 1):
        model(random_ids(1, tokens), past_key_values=cache)
    before = sparse_attention_stats(model)
    assert before.decode_steps == 2
    with sparse_attention(model, "quest", token_budget=32):
        model.generate(random_ids(1, 80), max_new_tokens=6, pad_token_id=0, eos_token_id=None)
        assert sparse_attention_stats(model).decode_steps == 5
    assert sparse_attention_stats(model) == before
    model(random_ids(1, 1), past_key_values=cache)
    assert sparse_attention_stats(model).decode_steps == 3


@pytest.mark.parametrize("bounds_dtype", ["int8", "model"])
def test_stats_count_what_quest_reads(model, bounds_dtype):
    budget, page, length = 64, 16, 200
    patch_model(model, "quest", token_budget=budget, page_size=page, bounds_dtype=bounds_dtype)
    model.generate(random_ids(1, length), **GREEDY)
    stats = sparse_attention_stats(model)
    kv_heads, head_dim, element = 2, 16, 4
    token_bytes = 2 * head_dim * element
    # Per KV head: two bounds a page, in 8 bits with an exponent a page and, once, one a channel.
    page_bytes, once = (2 * head_dim + 1, head_dim) if bounds_dtype == "int8" else (2 * head_dim * element, 0)
    lengths = range(length + 1, length + 8)  # 8 new tokens take 7 decode steps
    for dense in stats.layers[:2]:
        assert dense.kv_bytes == dense.dense_bytes == sum(lengths) * kv_heads * token_bytes
        assert dense.metadata_bytes == 0
    for sparse in stats.layers[2:]:
        # four pages, the last of them partly filled
        tokens = sum((budget // page - 1) * page + (n - 1) % page + 1 for n in lengths) * kv_heads
        assert sparse.tokens_read == tokens
        assert sparse.kv_bytes == tokens * token_bytes
        assert sparse.metadata_bytes == sum(-(-n // page) * page_bytes + once for n in lengths) * kv_heads
    total = sum(layer.kv_bytes + layer.metadata_bytes for layer in stats.layers)
    assert stats.kv_fraction == total / sum(layer.dense_bytes for layer in stats.layers)


def test_without_a_cache_the_model_is_dense(model):
    ids = random_ids(2, 60)
    expected = model(ids, use_cache=False).logits
    patch_model(model, "quest", token_budget=48)
    output = model(ids, use_cache=False)
    assert output.past_key_values is None
    torch.testing.assert_close(output.logits, expected)


def test_plain_forward_makes_a_sparse_cache(model):
    patch_model(model, "quest", token_budget=48)
    assert isinstance(model(random_ids(1, 30)).past_key_values, SparseCache)


def test_bare_decoder_can_be_patched():
    decoder = make_model("llama").model
    assert isinstance(decoder, LlamaModel)
    patch_model(decoder, "quest", token_budget=48)
    cache = decoder(random_ids(1, 90)).past_key_values
    decoder(random_ids(1, 1), past_key_values=cache)
    assert sparse_attention_stats(decoder).kv_fraction < 1
    unpatch_model(decoder)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"method": "qest"}, ValueError, r"unknown method 'qest' \(did you mean 'quest'\?\); known: full, quest"),
        ({"method": 3}, TypeError, r"method must be a name \(full, quest.*\) or a SparseMethod, got 3"),
        ({"token_buget": 64}, ValueError, r"quest has no parameter 'token_buget' \(did you mean 'token_budget'\?\)"),
        ({"token_budget": 15}, ValueError, r"token_budget must be at least one page \(16 tokens\), got 15"),
        ({"token_budget": 0}, ValueError, r"token_budget must be at least 1, got 0"),
        ({"token_budget": -1}, ValueError, r"token_budget must be at least 1, got -1"),
        ({"token_budget": "64"}, TypeError, r"token_budget must be a whole number, got '64'"),
        ({"token_budget": True}, TypeError, r"token_budget must be a whole number, got True"),
        ({"page_size": 12}, ValueError, r"page_size must be a power of two, such as 16, got 12"),
        ({"page_size": 0}, ValueError, r"page_size must be a power of two.*got 0"),
        ({"dense_layers": -1}, ValueError, r"dense_layers must be 0 or more, got -1"),
        ({"dense_layers": 4}, ValueError, r"dense_layers must leave at least one layer .*got 4 for a model of 4"),
        ({"sink_tokens": 1024}, ValueError, r"sink_tokens must be between 0 and 1008.*got 1024"),
        ({"group_reduce": "sum"}, ValueError, r"group_reduce must be one of softmax, mean, max, got 'sum'"),
        ({"bounds_dtype": "int4"}, ValueError, r"bounds_dtype must be one of int8, model, got 'int4'"),
        (
            {"method": Quest(), "token_budget": 64},
            TypeError,
            r"hyperparameters \(token_budget\) are allowed only with a method's name",
        ),
    ],
)
def test_bad_arguments_are_named_and_change_nothing(model, arguments, error, message):
    before = snapshot(model)
    with pytest.raises(error, match=message):
        patch_model(model, **arguments)
    assert snapshot(model) == before
    patch_model(model, "quest", token_budget=128)
    with pytest.raises(error):
        patch_model(model, **arguments)
    assert patched_method(model) == Quest(token_budget=128)


def test_unsupported_models_are_refused():
    bloom = BloomForCausalLM(BloomConfig(vocab_size=97, hidden_size=32, n_layer=3, n_head=2)).eval()
    before = snapshot(bloom)
    message = r"\(model type 'bloom'\) is not supported: .*biases by distance; supported: llama, mistral"
    with pytest.raises(ValueError, match=message):
        patch_model(bloom)
    assert snapshot(bloom) == before
    with pytest.raises(TypeError, match=r"model must be a Transformers model .*, got Linear"):
        patch_model(torch.nn.Linear(2, 2))


def test_a_model_without_full_attention_is_refused():
    mistral = make_model("mistral", sliding_window=32)
    with pytest.raises(ValueError, match=r"every layer .*sliding_window=32.*nothing to make sparse"):
        patch_model(mistral)
    assert not is_patched(mistral)


def test_wide_heads_are_refused():
    with pytest.raises(ValueError, match=r"head_dim 320; at most 256"):
        patch_model(make_model("llama", head_dim=320, num_attention_heads=1, num_key_value_heads=1))


def test_training_is_refused(model):
    model.train()
    with pytest.raises(ValueError, match="training mode"):
        patch_model(model)
    assert not is_patched(model)
    patch_model(model.eval())
    model.train()
    with pytest.raises(ValueError, match="training mode"):
        model(random_ids(1, 10))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"output_attentions": True, "return_dict_in_generate": True}, ValueError, "output_attentions=True"),
        (
            {"cache_implementation": "offloaded"},
            ValueError,
            "='offloaded'.*None, 'dynamic', 'static'",
        ),
        ({"past_key_values": DynamicCache()}, TypeError, r"must be a SparseCache .* got DynamicCache"),
    ],
)
def test_generate_refuses_unsupported_arguments(model, arguments, error, message):
    patch_model(model, "quest", token_budget=48)
    with pytest.raises(error, match=message):
        model.generate(random_ids(1, 30), **GREEDY, **arguments)
    assert model.generate(random_ids(1, 30), **GREEDY).shape == (1, 38)


def test_forward_refuses_unsupported_arguments(model):
    patch_model(model, "quest", token_budget=48)
    ids = random_ids(2, 30)
    with pytest.raises(ValueError, match="output_attentions=True"):
        model(ids, output_attentions=True)
    with pytest.raises(TypeError, match=r"must be a SparseCache .* got DynamicCache"):
        model(ids, past_key_values=DynamicCache())
    other = SparseCache(model.config, Quest(token_budget=96))
    with pytest.raises(ValueError, match=r"created for Quest\(token_budget=96.*patched with Quest\(token_budget=48"):
        model(ids, past_key_values=other)

    mask = torch.ones_like(ids)
    cache = SparseCache.for_model(model)
    with pytest.raises(ValueError, match=r"attention_mask must be 2-D.*got \(2, 1, 30, 30\)"):
        model(ids, attention_mask=torch.ones(2, 1, 30, 30), past_key_values=cache)
    with pytest.raises(ValueError, match="must cover the 0 cached and 30 new tokens, got 29"):
        model(ids, attention_mask=mask[:, :-1], past_key_values=cache)
    with pytest.raises(ValueError, match="must have 2 rows, as the batch has, or 1 for all; got 3"):
        model(ids, attention_mask=mask[[0, 1, 1]], past_key_values=cache)
    assert cache.get_seq_length() == 0
    assert not any(layer.is_initialized for layer in cache.layers)


def test_a_mask_of_one_row_is_that_of_every_row(model):
    ids = random_ids(2, 60)
    mask = torch.ones_like(ids)
    mask[:, :7] = 0
    patch_model(model, "quest", token_budget=48)
    expected = model(ids, attention_mask=mask, past_key_values=SparseCache.for_model(model)).logits
    cache = SparseCache.for_model(model)
    torch.testing.assert_close(model(ids, attention_mask=mask[:1], past_key_values=cache).logits, expected)
    assert list(cache.sparse_layers[0].lengths.starts) == [7, 7]


def test_a_mask_that_disappears_is_refused(model):
    patch_model(model, "quest", token_budget=48)
    ids = random_ids(2, 60)
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    cache = model(ids, attention_mask=mask).past_key_values
    with pytest.raises(ValueError, match=r"attention_mask must be given, got None: .* left padding"):
        model(ids[:, :1], past_key_values=cache)


def test_prompts_beyond_the_positions_are_refused_before_any_work(model):
    patch_model(model, "quest", token_budget=48)
    cache = SparseCache.for_model(model)
    with pytest.raises(
        ValueError, match=rf"prompt has {POSITIONS + 1} tokens, but the model has {POSITIONS} positions"
    ):
        model(random_ids(1, POSITIONS + 1), past_key_values=cache)
    assert not any(layer.is_initialized for layer in cache.layers)
    model(random_ids(1, POSITIONS), past_key_values=cache)
    model(random_ids(1, 1), past_key_values=cache)  # decoding goes on, as in the stock model


def test_rope_scaling_counts_in_the_positions():
    def with_rope(**rope):
        return make_model("llama", rope_parameters={"rope_theta": 10000.0, **rope}).config

    assert max_positions(with_rope(rope_type="default")) == POSITIONS
    assert max_positions(with_rope(rope_type="linear", factor=2.0)) == 2 * POSITIONS
    yarn = with_rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=POSITIONS // 4)
    assert max_positions(yarn) == POSITIONS


def test_functions_for_patched_models_say_so(model):
    for function in (unpatch_model, sparse_attention_stats, SparseCache.for_model):
        with pytest.raises(ValueError, match="LlamaForCausalLM is not patched"):
            function(model)


def test_crop_and_maximum_name_their_values(model):
    patch_model(model)
    cache = model(random_ids(1, 30)).past_key_values
    for bad in (1, -31):
        with pytest.raises(ValueError, match=rf"tokens_to_remove must be between -30 \(all tokens\) and 0, got {bad}"):
            cache.layers[0].crop(bad)
    assert cache.get_seq_length() == 30
    cache.crop(torch.tensor(-3))  # as assisted decoding counts
    assert type(cache.get_seq_length()) is int
    assert cache.get_seq_length() == 27
    for wrong in (100.5, "8192", True):
        with pytest.raises(TypeError, match=f"max_cache_len must be a whole number or None, got {wrong!r}"):
            SparseCache(model.config, max_cache_len=wrong)
    for name in ("initial_capacity", "keep_queries"):
        with pytest.raises(TypeError, match=f"{name} must be a whole number, got 'x'"):
            SparseCache(model.config, **{name: "x"})
        with pytest.raises(ValueError, match=f"{name} must be at least 0, got -1"):
            SparseCache(model.config, **{name: -1})
    with pytest.raises(ValueError, match="max_cache_len must be at least 1 or None, got 0"):
        SparseCache(model.config, "quest", max_cache_len=0)


def test_every_method_is_described():
    for name, method in METHODS.items():
        assert method.name == name
        assert method.summary
        assert method.paper.startswith(("arXiv ", "NeurIPS "))
        assert method.__doc__
        assert bool(method.sparse_phases) == (name not in ("full", "ntk", "self_extend"))
