"""The state of a patched model: shared configurations, switched implementations, hooks and wrappers of others."""

import functools
import inspect
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from hf_sparse_attn_kernels import use_impl
from transformers import DynamicCache, LlamaForCausalLM

from hf_sparse_attn import METHODS, SparseCache, patch_model, sparse_attention, sparse_attention_stats, unpatch_model
from hf_sparse_attn.patched import is_patched, patched_method
from tests.models import COVERING, DEVICE, make_model, random_ids

GREEDY = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0, "disable_compile": True}
SMALL = {
    "full": {},
    "quest": {"token_budget": 48},
    "arkvale": {"token_budget": 48, "page_size": 16},
    "psa": {"token_budget": 48, "block_size": 8, "microbatch": 2},
    "squeezed": {"token_budget": 48, "window": 8, "clusters": 0.1},
    "keycodes": {"token_budget": 48, "page_size": 16},
    "rabitqcache": {"token_budget": 48, "page_size": 16, "sink_tokens": 16},
    "tokenselect": {"token_budget": 48, "chunk_size": 32},
    "oracle_topk": {"token_budget": 48},
    "double_sparsity": {"token_budget": 48, "channels": 4},
    "infllm": {"token_budget": 48, "chunk_size": 32},
    "infinigen": {"token_budget": 48, "alpha": 2.0},
    "ntk": {"factor": 1.0},  # dense attention
    "self_extend": {"group_size": 4, "window": 20, "chunk_size": 32},
    "streaming_llm": {"token_budget": 48},
    "tova": {"token_budget": 48},
    "h2o": {"token_budget": 48},
    "snapkv": {"token_budget": 48},
    "minference": {"token_budget": 48, "block_size": 16},
    "duo_attention": {"token_budget": 48, "sink_tokens": 4, "heads": ((1, 0), (0, 1), (0, 0), (0, 1))},
}
every_method = pytest.mark.parametrize("method_name", METHODS)


@pytest.fixture
def model():
    return make_model("llama")


def twins():
    """Two models that share one configuration object."""
    first = make_model("llama")
    second = LlamaForCausalLM(first.config).to(DEVICE).eval()
    assert first.config is second.config is second.model.layers[0].self_attn.config
    return first, second


@every_method
@torch.inference_mode()
def test_a_switched_attention_implementation_is_refused_and_destroys_nothing(model, method_name):
    ids = random_ids(1, 70)
    patch_model(model, method_name, **SMALL[method_name])
    cache = model(ids).past_key_values
    keys = cache.layers[3].keys[:, :, :70].clone()
    for name in ("sdpa", "eager"):
        model.set_attn_implementation(name)
        with pytest.raises(ValueError, match=rf"of this patched LlamaForCausalLM was set to '{name}'.*unpatch_model"):
            model(ids[:, :1], past_key_values=cache)
        with pytest.raises(ValueError, match="was set to"):
            model.generate(ids, **GREEDY)
        cache.crop(0)
        assert cache.get_seq_length() == 70
        assert torch.equal(cache.layers[3].keys[:, :, :70], keys)
    patch_model(model, method_name, **SMALL[method_name])  # again
    model(ids[:, :1], past_key_values=cache)
    model.set_attn_implementation("eager")
    unpatch_model(model)
    assert model.config._attn_implementation == "eager"  # a choice made while it was patched stays
    stock = model(ids).logits
    model.set_attn_implementation("sdpa")
    torch.testing.assert_close(model(ids).logits, stock, rtol=1e-4, atol=1e-4)


@every_method
@torch.inference_mode()
def test_patching_one_of_two_models_that_share_a_config_leaves_the_other(method_name):
    first, second = twins()
    config = first.config
    ids, mask = random_ids(2, 80), torch.ones(2, 80, dtype=torch.long, device=DEVICE)
    mask[1, :30] = 0
    static = {**GREEDY, "attention_mask": mask, "cache_implementation": "static"}
    expected = [model.generate(ids, **static) for model in (first, second)]
    patch_model(first, method_name, **SMALL[method_name])
    assert second.config._attn_implementation == "sdpa"
    assert torch.equal(second.generate(ids, **static), expected[1])
    first.generate(ids, **static)
    patch_model(second, "full")
    assert torch.equal(second.generate(ids, **{**static, "cache_implementation": None}), expected[1])
    unpatch_model(first)
    assert torch.equal(first.generate(ids, **static), expected[0])
    assert torch.equal(second.generate(ids, **{**static, "cache_implementation": None}), expected[1])
    assert sparse_attention_stats(second).decode_steps == 7
    unpatch_model(second)
    assert first.config is second.config is config is first.model.layers[2].self_attn.config
    assert config._attn_implementation == "sdpa"


def test_changes_to_the_config_of_a_patched_model_stay(model):
    config = model.config
    patch_model(model)
    model.config.use_cache = False
    model.config.something_new = 3
    unpatch_model(model)
    assert model.config is config
    assert config.use_cache is False
    assert config.something_new == 3


class CountCalls(ModelHook):
    """An accelerate hook, as offloading and device maps attach them."""

    def __init__(self):
        self.calls = 0

    def pre_forward(self, module, *args, **kwargs):
        self.calls += 1
        return args, kwargs


@every_method
@torch.inference_mode()
def test_a_forward_wrapper_set_after_patching_survives_unpatching(model, method_name):
    ids = random_ids(1, 90)
    expected = model(ids).logits
    patch_model(model, method_name, **SMALL[method_name])
    plain = model.model.forward
    calls = []

    @functools.wraps(plain)
    def wrapper(*args, **kwargs):
        calls.append(1)
        return plain(*args, **kwargs)

    model.model.forward = wrapper
    counter = CountCalls()
    add_hook_to_module(model.model, counter)
    with sparse_attention(model, "quest", token_budget=64):
        model(ids)
    model(ids)
    unpatch_model(model)
    before = len(calls)
    torch.testing.assert_close(model(ids).logits, expected)
    assert len(calls) == before + 1
    assert counter.calls == len(calls)
    remove_hook_from_module(model.model)
    assert model.model.forward is wrapper
    patch_model(model, method_name, **SMALL[method_name])
    model.generate(ids, **GREEDY)


@torch.inference_mode()
def test_hooks_of_others_see_whole_prompts(model):
    seen = []
    model.model.register_forward_hook(lambda module, args, output: seen.append(output.last_hidden_state.shape[1]))
    patch_model(model, "tokenselect", **SMALL["tokenselect"])
    model.model.register_forward_hook(lambda module, args, output: seen.append(output.last_hidden_state.shape[1]))
    model(random_ids(1, 90))
    assert seen == [90, 90]


def test_a_wrapper_of_the_cache_preparation_stays_and_finds_the_stock_one(model):
    ids = random_ids(1, 60)
    expected = model.generate(ids, **GREEDY)
    patch_model(model)
    ours, calls = model._prepare_cache_for_generation, []

    def wrapper(*args, **kwargs):
        calls.append(1)
        return ours(*args, **kwargs)

    model._prepare_cache_for_generation = wrapper
    unpatch_model(model)
    assert model._prepare_cache_for_generation is wrapper
    output = model.generate(ids, **GREEDY, return_dict_in_generate=True)
    assert torch.equal(output.sequences, expected)
    assert isinstance(output.past_key_values, DynamicCache)
    assert calls == [1]


def test_training_mode_inside_a_nested_block_hides_no_exception_and_keeps_no_method(model):
    patch_model(model, "quest", token_budget=64)

    def fail_in_training_mode():
        with sparse_attention(model, "quest", token_budget=128):
            model.train()
            raise RuntimeError("the user's own")

    with pytest.raises(RuntimeError, match="the user's own"):
        fail_in_training_mode()
    assert patched_method(model).token_budget == 64
    with sparse_attention(model.eval(), "tokenselect", token_budget=48):
        model.train()
    assert patched_method(model).name == "quest"
    with sparse_attention(model.eval(), "tokenselect", token_budget=48):
        unpatch_model(model)
    assert patched_method(model).name == "quest"
    unpatch_model(model)
    with sparse_attention(model, "quest"):
        unpatch_model(model)
    assert not is_patched(model)


@every_method
def test_the_decoder_keeps_its_signature(model, method_name):
    before = inspect.signature(model.model.forward)
    patch_model(model, method_name, **SMALL[method_name])
    assert inspect.signature(model.model.forward) == before
    assert "forward" not in model.model.__dict__


@every_method
@torch.inference_mode()
def test_generate_without_a_cache_is_dense(method_name):
    model = make_model("llama", dtype=torch.float64)
    ids = random_ids(2, 80)
    mask = torch.ones_like(ids)
    mask[1, :30] = 0
    expected = model.generate(ids, attention_mask=mask, **GREEDY)
    with sparse_attention(model, method_name, **SMALL[method_name]), use_impl("reference"):
        actual = model.generate(ids, attention_mask=mask, use_cache=False, **GREEDY)
        assert torch.equal(actual, expected)
        assert sparse_attention_stats(model).decode_steps == 0
        model.generate(ids, attention_mask=mask, **GREEDY)
        assert sparse_attention_stats(model).decode_steps == 7


@every_method
@torch.inference_mode()
def test_a_static_cache_implementation_is_a_static_sparse_cache(method_name):
    model = make_model("llama", dtype=torch.float64)
    ids = random_ids(2, 80)
    mask = torch.ones_like(ids)
    mask[1, :30] = 0
    options = {**GREEDY, "attention_mask": mask, "return_dict_in_generate": True}
    with sparse_attention(model, method_name, **SMALL[method_name]), use_impl("reference"):
        growing = model.generate(ids, **options)
        static = model.generate(ids, cache_implementation="static", **options)
        beams = model.generate(ids, cache_implementation="static", num_beams=2, **options)
        assert torch.equal(beams.sequences, model.generate(ids, num_beams=2, **options).sequences)
    assert torch.equal(static.sequences, growing.sequences)
    assert isinstance(static.past_key_values, SparseCache)
    assert static.past_key_values.max_cache_len == 128
    assert METHODS[method_name].evicts or static.past_key_values.layers[0].capacity == 128
    assert growing.past_key_values.max_cache_len == -1
    patch_model(model, method_name, **SMALL[method_name])
    with pytest.raises(ValueError, match="cache_implementation='static' and past_key_values exclude each other"):
        model.generate(ids, cache_implementation="static", past_key_values=SparseCache.for_model(model), **GREEDY)


@torch.inference_mode()
@pytest.mark.parametrize("cached", [0, 60])
@torch.inference_mode()
def test_a_cache_without_caching_is_refused(cached, model):
    patch_model(model, "quest", token_budget=48)
    cache, ids = SparseCache.for_model(model), random_ids(1, 66)
    if cached:
        model(ids[:, :cached], past_key_values=cache)
    with pytest.raises(ValueError, match=r"use_cache=False and past_key_values exclude each other"):
        model.generate(ids, past_key_values=cache, use_cache=False, **GREEDY)
    assert cache.get_seq_length() == cached
    expected = model.generate(ids, **GREEDY)
    assert torch.equal(model.generate(ids, past_key_values=cache, **GREEDY), expected)


def test_stats_follow_the_layers_of_the_model():
    kinds = ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]
    model = make_model("qwen2", layer_types=kinds, use_sliding_window=True, sliding_window=20, num_hidden_layers=4)
    patch_model(model, "quest", token_budget=48)
    model.generate(random_ids(1, 120), **GREEDY)
    stats = sparse_attention_stats(model)
    assert [layer.decode_steps for layer in stats.layers] == [7] * 4
    assert [layer.tokens_read == 7 * 20 for layer in stats.layers] == [True, False, False, True]
    assert [layer.kv_bytes < layer.dense_bytes for layer in stats.layers] == [False, False, True, False]
    assert stats.dense_bytes == sum(layer.dense_bytes for layer in stats.layers)


@every_method
@pytest.mark.parametrize("options", [{}, {"num_beams": 2}, {"cache_implementation": "static"}], ids=str)
@torch.inference_mode()
def test_a_pad_id_in_the_text_of_a_prompt_without_a_mask(method_name, options):
    """Transformers masks those tokens, in the middle of the text: nothing attends to them, so they are not cached."""
    model, ids = make_model("llama", dtype=torch.float64), random_ids(1, 70)
    ids[0, [0, 20, 21, 50]] = 0
    stock = {key: value for key, value in options.items() if key != "cache_implementation"}
    expected = model.generate(ids, **GREEDY, **stock)
    parameters = {**SMALL[method_name], "token_budget": 256, **COVERING.get(method_name, {})}
    with sparse_attention(model, method_name, **parameters), use_impl("reference"):
        output = model.generate(ids, **GREEDY, **options, return_dict_in_generate=True)
        assert torch.equal(output.sequences, expected)
        assert output.past_key_values.get_seq_length() == 77
        assert output.past_key_values.length == 73
        second = torch.cat([expected[:1], random_ids(1, 5, seed=8)], dim=1)
        if not stock:  # a second turn, then a crop to before the first turn's gap
            cache = output.past_key_values
            again = model.generate(second, past_key_values=cache, **{**GREEDY, "max_new_tokens": 3})
            cache.crop(-(cache.get_seq_length() - 30))
            assert (cache.get_seq_length(), cache.length) == (30, 27)
    if not stock:
        assert torch.equal(again, model.generate(second, **{**GREEDY, "max_new_tokens": 3}))


@every_method
@torch.inference_mode()
def test_hidden_states_of_tokens_that_are_not_cached_are_zero(method_name):
    model, ids = make_model("llama", dtype=torch.float64), random_ids(2, 70)
    mask = torch.ones_like(ids)
    mask[:, [20, 21, 50]] = 0
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    inputs = {"attention_mask": mask, "position_ids": positions, "output_hidden_states": True}
    expected = model.model(ids, **inputs)
    with (
        sparse_attention(
            model, method_name, **{**SMALL[method_name], "token_budget": 256, **COVERING.get(method_name, {})}
        ),
        use_impl("reference"),
    ):
        actual = model.model(ids, **inputs)
        as_tuple = model.model(ids, return_dict=False, **inputs)
    for states, stock in zip((*actual.hidden_states, as_tuple[0]), (*expected.hidden_states, expected[0]), strict=True):
        # RoPE's tables are float32 in every model.
        torch.testing.assert_close(states[mask == 1], stock[mask == 1], rtol=1e-4, atol=1e-5)
        assert (states[mask == 0] == 0).all()


def _pickling_error(model):
    try:
        pickle.dumps(model)
    except AttributeError as error:
        return str(error)
    return None


@every_method
@pytest.mark.parametrize("is_used", [False, True])
@torch.inference_mode()
def test_a_patched_model_can_be_pickled(model, method_name, is_used):
    ids = random_ids(1, 60)
    error = _pickling_error(model)  # of Transformers 5.20 with the package `kernels`, whose modules are local classes
    patch_model(model, method_name, **SMALL[method_name])
    if error is not None:
        assert _pickling_error(model) == error
        return
    if is_used:
        model.generate(ids, **GREEDY)
    twin = pickle.loads(pickle.dumps(model))
    assert torch.equal(twin.generate(ids, **GREEDY), model.generate(ids, **GREEDY))
    unpatch_model(twin)
    assert is_patched(model)


@every_method
def test_threads_may_share_a_patched_model(method_name):
    """The state of a pass lies in its cache and arguments, not on the model."""
    model = make_model("llama", dtype=torch.float64)
    prompts = [random_ids(1, 40 + 7 * number, seed=number) for number in range(3)]
    patch_model(model, method_name, **SMALL[method_name])

    def run(ids, use_cache=True):
        with use_impl("reference"):
            return model.generate(ids, use_cache=use_cache, **GREEDY)

    expected = [run(ids) for ids in prompts]
    dense = run(prompts[0], use_cache=False)
    with ThreadPoolExecutor(4) as pool:
        for _ in range(3):
            stock = pool.submit(run, prompts[0], False)
            assert all(map(torch.equal, pool.map(run, prompts), expected))
            assert torch.equal(stock.result(), dense)


@every_method
@torch.inference_mode()
def test_a_pass_inside_a_pass_leaves_the_outer_one_alone(method_name):
    model = make_model("llama", dtype=torch.float64)
    ids, others = random_ids(1, 80), random_ids(1, 50, seed=3)
    patch_model(model, method_name, **SMALL[method_name])
    with use_impl("reference"):
        expected = model(ids).logits
        expected_inside = model(others).logits
        inside = []

        def call(module, args):
            hook.remove()
            inside.append(model(others).logits)

        hook = model.model.layers[1].register_forward_pre_hook(call)
        torch.testing.assert_close(model(ids).logits, expected)
    torch.testing.assert_close(inside, [expected_inside])


@pytest.fixture
def hidden():
    """A patched model and the cache of a prompt with hidden tokens, which the cache leaves out but counts."""
    model = patch_model(make_model("llama", dtype=torch.float64), "quest", token_budget=256)
    cache, ids = SparseCache.for_model(model), random_ids(1, 70)
    mask = torch.ones_like(ids)
    mask[:, [20, 21, 50]] = 0
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    with torch.inference_mode():
        model(ids, attention_mask=mask, position_ids=positions, past_key_values=cache)
    assert (cache.get_seq_length(), cache.length) == (70, 67)
    return model, cache


@torch.inference_mode()
def test_a_reset_forgets_what_was_left_out(hidden):
    model, cache = hidden
    cache.reset()
    assert cache.get_seq_length() == 0
    ids = random_ids(1, 40, seed=2)
    torch.testing.assert_close(model(ids, past_key_values=cache).logits, model(ids, use_cache=False).logits)


@torch.inference_mode()
def test_a_failed_pass_leaves_nothing_out(hidden):
    model, cache = hidden
    mask = torch.ones(1, 75, dtype=torch.long, device=DEVICE)
    mask[:, [20, 21, 50, 72]] = 0
    hook = model.get_decoder().layers[2].register_forward_pre_hook(lambda *arguments: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(random_ids(1, 5, seed=1), attention_mask=mask, past_key_values=cache)
    hook.remove()
    assert (cache.get_seq_length(), cache.length) == (70, 67)


def test_a_saved_cache_knows_what_was_left_out(hidden, tmp_path):
    model, cache = hidden
    cache.save(tmp_path / "cache", model)
    loaded = SparseCache.load(tmp_path / "cache", model)
    assert (loaded.get_seq_length(), loaded.length) == (70, 67)
