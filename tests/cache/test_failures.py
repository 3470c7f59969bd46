"""Failed and interrupted forward passes leave a cache unchanged."""

import pytest
import torch

from hf_sparse_attn import METHODS, SparseCache, TokenSelect, patch_model, sparse_attention, unpatch_model
from hf_sparse_attn.patch import hook
from tests.models import DEVICE, SPARSE, make_model, random_ids

pytestmark = pytest.mark.usefixtures("exact")

every_method = pytest.mark.parametrize("method_name", METHODS)
kinds_of_storage = pytest.mark.parametrize("max_cache_len", [None, 300], ids=["growing", "static"])
# A static cache finishes a prompt after every pass, and a growing one later, so clusters would differ: none are made.
SETTINGS = {**SPARSE, "tokenselect": {"chunk_size": 32}, "squeezed": {}}


def make(method_name, family="llama", **overrides):
    model = make_model(family, dtype=torch.float64, **overrides)
    return patch_model(model, method_name, token_budget=48, **SETTINGS.get(method_name, {}))


class Interrupt:
    """Raises once, at a call of a module."""

    def __init__(self, module, error, at_call=1):
        self.error, self.calls_left = error, at_call
        self.hook = module.register_forward_pre_hook(self)

    def __call__(self, *args):
        self.calls_left -= 1
        if self.calls_left == 0:
            self.hook.remove()
            raise self.error


@pytest.mark.one_in(2)
@every_method
@kinds_of_storage
@pytest.mark.parametrize("error", [RuntimeError("out of memory"), KeyboardInterrupt()], ids=["error", "interrupt"])
@pytest.mark.parametrize("tokens", [1, 40])
@torch.inference_mode()
def test_a_pass_that_fails_midway_leaves_the_cache_as_it_was(method_name, max_cache_len, error, tokens):
    model, ids = make(method_name), random_ids(2, 150)
    mask = torch.ones(2, 250, dtype=torch.long, device=DEVICE)
    mask[1, :17] = 0
    logits = []
    for fails in (False, True):
        cache = SparseCache.for_model(model, max_cache_len)
        model(ids, attention_mask=mask[:, :150], past_key_values=cache)
        if fails:
            later = random_ids(2, tokens, seed=7)
            Interrupt(model.model.layers[2].mlp, error)
            with pytest.raises(type(error)):
                model(later, attention_mask=mask[:, : 150 + tokens], past_key_values=cache)
            assert cache.get_seq_length() == 150
        for number, step in enumerate(random_ids(2, 4, seed=3).split(1, dim=1)):
            output = model(step, attention_mask=mask[:, : 151 + number], past_key_values=cache)
        logits.append(output.logits)
    torch.testing.assert_close(*logits)


@every_method
@kinds_of_storage
@torch.inference_mode()
def test_a_first_pass_that_fails_in_buffers_for_fewer_rows(method_name, max_cache_len):
    model, ids = make(method_name), random_ids(2, 120)
    used, fresh = SparseCache.for_model(model, max_cache_len), SparseCache.for_model(model, max_cache_len)
    model(random_ids(2, 90, seed=5), past_key_values=used)
    used.reset()
    Interrupt(model.model.layers[1].mlp, RuntimeError("out of memory"))
    with pytest.raises(RuntimeError, match="out of memory"):
        model(ids[:1], past_key_values=used)
    assert used.get_seq_length() == 0
    for tokens in (ids, random_ids(2, 1, seed=3)):
        logits = [model(tokens, past_key_values=cache).logits for cache in (used, fresh)]
        torch.testing.assert_close(*logits)


@pytest.mark.parametrize(
    ("operation", "argument"),
    [
        ("reorder_cache", torch.tensor([0, 2])),
        ("batch_select_indices", torch.tensor([2])),
        ("batch_repeat_interleave", -1),
    ],
)
@torch.inference_mode()
def test_rows_that_do_not_exist_change_nothing(operation, argument):
    model, ids = make("quest"), random_ids(2, 100)
    cache = SparseCache.for_model(model)
    model(ids, past_key_values=cache)
    token = random_ids(2, 1, seed=3)
    expected = model(token, past_key_values=cache.fork(cache.method)).logits
    with pytest.raises((IndexError, ValueError)):
        getattr(cache, operation)(argument.to(DEVICE) if isinstance(argument, torch.Tensor) else argument)
    torch.testing.assert_close(model(token, past_key_values=cache).logits, expected)


@torch.inference_mode()
def test_a_failed_pass_undoes_its_whole_prompt(monkeypatch):
    monkeypatch.setattr(hook, "PASS_TOKENS", 1)  # a chunk a pass
    model, ids = make("tokenselect"), random_ids(1, 150)
    cache = SparseCache.for_model(model)
    model(ids[:, :40], past_key_values=cache)
    for at_call in (1, 3):
        Interrupt(model.model.layers[1].mlp, RuntimeError("out of memory"), at_call)
        with pytest.raises(RuntimeError, match="out of memory"):
            model(ids[:, 40:], past_key_values=cache)
        assert cache.get_seq_length() == 40
    fresh = model(ids).logits
    model(ids[:, 40:], past_key_values=cache)
    assert cache.get_seq_length() == 150
    assert fresh.isfinite().all()


@pytest.mark.parametrize("at_call", [1, 3, 11])
@torch.inference_mode()
def test_a_layer_that_fails_between_the_chunks_of_a_pass_undoes_the_pass(at_call, monkeypatch):
    model, ids = make("tokenselect"), random_ids(1, 150)
    cache, other = SparseCache.for_model(model), SparseCache.for_model(model)
    for each in (cache, other):
        model(ids[:, :40], past_key_values=each)
    attend, calls = TokenSelect.prefill, []

    def fail(self, *args):
        calls.append(None)
        if len(calls) == at_call:
            raise RuntimeError("out of memory")
        return attend(self, *args)

    with monkeypatch.context() as patched:
        patched.setattr(TokenSelect, "prefill", fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            model(ids[:, 40:], past_key_values=cache)
    assert cache.get_seq_length() == 40
    assert [layer.length for layer in cache.layers] == [40] * 4
    logits, expected = (model(ids[:, 40:], past_key_values=each).logits for each in (cache, other))
    torch.testing.assert_close(logits, expected)
    step = random_ids(1, 1, seed=1)
    torch.testing.assert_close(*(model(step, past_key_values=each).logits for each in (cache, other)))


@every_method
@torch.inference_mode()
def test_a_padded_call_that_fails_before_the_first_layer_leaves_no_padding(method_name):
    """A token id out of range causes such a failure."""
    model, ids = make(method_name), random_ids(2, 90)
    expected = model(ids).logits
    cache = SparseCache.for_model(model)
    mask = torch.ones_like(ids)
    mask[1, :30] = 0

    def fail(tokens, attention_mask):
        Interrupt(model.model.embed_tokens, IndexError("index out of range"))
        with pytest.raises(IndexError):
            model(tokens, attention_mask=attention_mask, past_key_values=cache)

    fail(ids, mask)
    torch.testing.assert_close(model(ids, past_key_values=cache).logits, expected)
    assert cache.layers[0].seq_start.tolist() == [0, 0]
    fail(ids[:, :1], torch.ones_like(ids[:, :1]).repeat(1, 91))  # after cached tokens too
    moved = torch.cat([mask, torch.ones_like(mask)], dim=1)
    if METHODS[method_name].evicts:
        with pytest.raises(ValueError, match=rf"same padding as before, got \[0, 30\].*'{method_name}' has evicted"):
            model(ids, attention_mask=moved, past_key_values=cache)
    else:
        fail(ids, moved)
    assert cache.layers[0].seq_start.tolist() == [0, 0]
    model(ids[:, :1], past_key_values=cache)


@kinds_of_storage
@pytest.mark.parametrize("error", [RuntimeError("out of memory"), KeyboardInterrupt()], ids=["error", "interrupt"])
@torch.inference_mode()
def test_a_failed_decode_step_does_not_affect_the_next_model(max_cache_len, error):
    """The cache writes an unpatched model's tokens at once and must not hold them back for a method."""
    model, ids, step = make("quest"), random_ids(1, 60), random_ids(1, 1, seed=5)
    cache = SparseCache.for_model(model, max_cache_len)
    model(ids, past_key_values=cache)
    for module in (model.model.embed_tokens, model.model.layers[1].mlp):
        Interrupt(module, error)
        with pytest.raises(type(error)):
            model(step, past_key_values=cache)
    unpatch_model(model)
    cache.crop(0)
    stock = model(torch.cat([ids, step], dim=1)).logits[:, -1:]
    mask = torch.ones(1, 61, dtype=torch.long, device=DEVICE)
    torch.testing.assert_close(model(step, attention_mask=mask, past_key_values=cache).logits, stock)


@torch.inference_mode()
def test_an_unpatched_models_failure_is_reported_at_the_next_use():
    model, ids = make_model("llama", dtype=torch.float64), random_ids(1, 60)
    cache = SparseCache(model.config, "full")
    model(ids, past_key_values=cache)
    Interrupt(model.model.layers[1].mlp, RuntimeError("out of memory"))
    with pytest.raises(RuntimeError, match="out of memory"):
        model(ids[:, :1], past_key_values=cache)
    with pytest.raises(ValueError, match=r"cache is incomplete.* 60 of 61 tokens; call crop\(0\)"):
        model(ids[:, :1], past_key_values=cache)
    cache.crop(0)
    assert cache.get_seq_length() == 60
    expected = model(torch.cat([ids, ids[:, :1]], dim=1)).logits[:, -1:]
    # CUDA computes RoPE's tables, which are float32, in another order for another number of positions.
    torch.testing.assert_close(model(ids[:, :1], past_key_values=cache).logits, expected, rtol=1e-4, atol=1e-5)


@torch.inference_mode()
def test_cropping_a_cache_whose_first_prompt_was_cut_off():
    model, ids = make("quest"), random_ids(2, 60)
    for error in (RuntimeError("out of memory"), KeyboardInterrupt()):
        cache = SparseCache.for_model(model)
        Interrupt(model.model.layers[2].mlp, error)
        with pytest.raises(type(error)):
            model(ids, past_key_values=cache)
        with pytest.raises(ValueError, match=r"tokens_to_remove must be 0, since the cache is empty, got -5"):
            cache.crop(-5)
        cache.crop(0)
        assert cache.get_seq_length() == 0
        assert model(ids[:1, :50], past_key_values=cache).logits.shape == (1, 50, 97)
        assert [layer.length for layer in cache.layers] == [50] * 4
        with pytest.raises(ValueError, match="between -50"):
            cache.crop(-51)
        assert [layer.length for layer in cache.layers] == [50] * 4


@torch.inference_mode()
def test_sliding_windows_are_restored_after_a_failed_pass():
    model = make(
        "quest",
        "qwen2",
        layer_types=["sliding_attention", "full_attention"] * 2,
        use_sliding_window=True,
        sliding_window=20,
        num_hidden_layers=4,
    )
    patch_model(model, "quest", token_budget=48, dense_layers=1)
    ids, steps = random_ids(1, 60), random_ids(1, 3, seed=4)
    logits = []
    for fails in (False, True):
        cache = model(ids).past_key_values
        for step in steps.split(1, dim=1):
            if fails:
                Interrupt(model.model.layers[2].mlp, KeyboardInterrupt())
                with pytest.raises(KeyboardInterrupt):
                    model(step, past_key_values=cache)
            output = model(step, past_key_values=cache)
        logits.append(output.logits)
    torch.testing.assert_close(*logits)


@every_method
@kinds_of_storage
def test_a_cache_made_under_inference_mode_is_continued_outside_it(method_name, max_cache_len):
    model, ids = make(method_name), random_ids(2, 100)
    model.requires_grad_(False)
    mask = torch.ones(2, 110, dtype=torch.long, device=DEVICE)
    mask[1, :17] = 0
    logits = []
    for mode in (torch.no_grad, torch.inference_mode):
        cache = SparseCache.for_model(model, max_cache_len)
        with mode():
            model(ids[:, :40], attention_mask=mask[:, :40], past_key_values=cache)
            model(ids[:, 40:90], attention_mask=mask[:, :90], past_key_values=cache)
            cache.reorder_cache(torch.tensor([1, 0], device=DEVICE))
            cache.batch_repeat_interleave(2)
            cache.crop(-1)
        wide = mask[[1, 1, 0, 0]]
        for at in range(89, 92):
            model(ids[[1, 1, 0, 0], at : at + 1], attention_mask=wide[:, : at + 1], past_key_values=cache)
        output = model(ids[[1, 1, 0, 0], 92:], attention_mask=wide[:, :100], past_key_values=cache)
        cache.fork(cache.method)
        logits.append(output.logits)
    torch.testing.assert_close(*logits)


def test_a_model_patched_in_inference_mode_works_outside_it():
    model, ids = make_model("llama"), random_ids(1, 60)
    model.requires_grad_(False)
    with torch.inference_mode(), sparse_attention(model, "tokenselect", token_budget=32, chunk_size=16):
        cache = model(ids).past_key_values
    patch_model(model, "tokenselect", token_budget=32, chunk_size=16)
    model(ids[:, :1], past_key_values=cache)


@every_method
@kinds_of_storage
@pytest.mark.parametrize("tokens", [1, 80])
@torch.inference_mode()
def test_an_interrupt_after_the_last_layer_restores_the_length(method_name, max_cache_len, tokens, monkeypatch):
    """No hook runs after it and every layer holds the tokens, but masks and positions are derived from the length."""
    monkeypatch.setattr(hook, "PASS_TOKENS", 1)  # a chunk a pass
    model, ids = make(method_name), random_ids(1, 150)
    cache = SparseCache.for_model(model, max_cache_len)
    for cached in (0, 50):
        if cached:
            model(ids[:, :cached], past_key_values=cache)
        passes = 3 if method_name == "tokenselect" and tokens == 80 else 1
        Interrupt(model.model.norm, KeyboardInterrupt(), at_call=passes)
        with pytest.raises(KeyboardInterrupt):
            model(ids[:, cached : cached + tokens], past_key_values=cache)
        assert cache.get_seq_length() == cache.length == cached
    expected = model(ids[:, 50 : 50 + tokens], past_key_values=model(ids[:, :50]).past_key_values).logits
    torch.testing.assert_close(model(ids[:, 50 : 50 + tokens], past_key_values=cache).logits, expected)


@torch.inference_mode()
def test_sliding_windows_can_be_used_after_an_unpatched_models_failure():
    kinds = ["full_attention", "sliding_attention"] * 2
    model = make_model("qwen2", dtype=torch.float64, layer_types=kinds, use_sliding_window=True, sliding_window=20)
    ids = random_ids(1, 60)
    cache = SparseCache(model.config, "full")
    model(ids, past_key_values=cache)
    Interrupt(model.model.layers[1].input_layernorm, RuntimeError("out of memory"))
    with pytest.raises(RuntimeError, match="out of memory"):
        model(ids[:, :1], past_key_values=cache)
    cache.crop(0)
    expected = model(torch.cat([ids, ids[:, :1]], dim=1)).logits[:, -1:]
    torch.testing.assert_close(model(ids[:, :1], past_key_values=cache).logits, expected, rtol=1e-4, atol=1e-5)
    text = torch.cat([ids, ids[:, :1], ids[:, 5:6]], dim=1)
    expected = model(text).logits[:, -1:]
    for tokens in (1, 2):
        Interrupt(model.model.layers[2].mlp, RuntimeError("out of memory"))  # after a window that has moved
        with pytest.raises(RuntimeError, match="out of memory"):
            model(ids[:, :tokens], past_key_values=cache)
        if tokens == 1:  # which a window can take back
            cache.crop(0)
            actual = model(ids[:, 5:6], past_key_values=cache).logits
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
        else:
            with pytest.raises(RuntimeError, match="window of 20 has dropped tokens that would be visible"):
                cache.crop(0)
    cache.reset()
    actual, expected = model(ids, past_key_values=cache).logits, model(ids).logits
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
