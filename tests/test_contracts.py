"""The contracts of every method on every supported family: a budget that covers everything changes no token.

Tests that compare results under a smaller budget use float64 and the torch references: the tokens of a tiny random
model must not depend on a processor's rounding.
"""

import copy
from contextlib import nullcontext
from functools import cache

import pytest
import torch
from hf_sparse_attn_kernels import use_impl
from transformers import DynamicCache

from hf_sparse_attn import SparseCache, patch_model, sparse_attention, sparse_attention_stats, unpatch_model
from hf_sparse_attn.methods import FULL
from tests.models import (
    COVERING,
    DEVICE,
    FAMILIES,
    METHOD_CLASSES,
    POSITIONS,
    SPARSE,
    make_model,
    random_ids,
    shared_model,
)

GREEDY = {
    "max_new_tokens": 12,
    "do_sample": False,
    "eos_token_id": None,
    "pad_token_id": 0,
    "disable_compile": True,  # compiled decoding has tests of its own; on CUDA these would take minutes with it
}
COVERS_ALL = POSITIONS  # maximum for a method that packs positions

families = pytest.mark.parametrize("family", FAMILIES)
some_families = pytest.mark.parametrize(
    "family", ["llama", *(pytest.param(family, marks=pytest.mark.grid) for family in FAMILIES if family != "llama")]
)
methods = pytest.mark.parametrize("method_name", METHOD_CLASSES)
sparse_methods = pytest.mark.parametrize(
    "method_name", [name for name, method_class in METHOD_CLASSES.items() if "decode" in method_class.sparse_phases]
)


@pytest.fixture
def model(family):
    """The family's model, which must come back unpatched."""
    model = shared_model(family)
    yield model
    assert model.config._attn_implementation == "sdpa"


def exact_model(family="llama"):
    return shared_model(family, torch.float64)


def always_sparse(method_name, monkeypatch, **hyperparameters):
    """Create a method that never takes the dense shortcut, so its kernels run even if everything is selected."""
    method_class = METHOD_CLASSES[method_name]
    monkeypatch.setattr(method_class, "covers", lambda self, length: False)
    return method_class(**{"token_budget": COVERS_ALL, **COVERING.get(method_name, {}), **hyperparameters})


def sparse(method_name):
    """Create a method that leaves most of some hundred tokens out."""
    return METHOD_CLASSES[method_name](**{"token_budget": 48, **SPARSE.get(method_name, {})})


def padded_batch(lengths=(70, 41, 57)):
    ids = random_ids(len(lengths), max(lengths), seed=3)
    mask = torch.ones_like(ids)
    for row, length in enumerate(lengths):
        ids[row, : max(lengths) - length] = 0
        mask[row, : max(lengths) - length] = 0
    return ids, mask


def single(model, make_cache):
    return model.generate(random_ids(1, 83), **GREEDY)


def left_padding(model, make_cache):
    ids, mask = padded_batch()
    return model.generate(ids, attention_mask=mask, **GREEDY)


def beam_search(model, make_cache):
    ids, mask = padded_batch((50, 33))
    return model.generate(ids, attention_mask=mask, num_beams=3, num_return_sequences=2, **GREEDY)


def multi_turn(model, make_cache):
    cache = make_cache()
    first = model.generate(random_ids(2, 40), past_key_values=cache, **GREEDY)
    second = torch.cat([first, random_ids(2, 75, seed=5)], dim=1)
    mask = torch.ones_like(second)  # a generated token may be the padding token
    return model.generate(second, attention_mask=mask, past_key_values=cache, **GREEDY)


def chunked_prefill(model, make_cache):
    ids, mask = padded_batch((70, 9, 57))  # the second row's padding fills whole chunks
    return model.generate(ids, attention_mask=mask, prefill_chunk_size=24, **GREEDY)


def assisted(model, make_cache):
    assistant = make_model("llama", seed=1, num_hidden_layers=1)
    return model.generate(random_ids(1, 60), assistant_model=assistant, num_assistant_tokens=5, **GREEDY)


def prompt_lookup(model, make_cache):
    return model.generate(random_ids(1, 30).repeat(1, 3), prompt_lookup_num_tokens=4, **GREEDY)


def plain_forward(model, make_cache):
    ids = random_ids(2, 90)
    cache = model(ids[:, :60]).past_key_values
    logits = [model(ids[:, i : i + 1], past_key_values=cache).logits for i in range(60, 90)]
    return torch.cat(logits, dim=1).argmax(-1)


SCENARIOS = [single, left_padding, beam_search, multi_turn, chunked_prefill, assisted, prompt_lookup, plain_forward]
ON_EVERY_FAMILY = (left_padding, multi_turn)


@cache
def dense_tokens(family, scenario):
    """Run a scenario on the unpatched model, once for all methods."""
    return scenario(shared_model(family), DynamicCache)


@methods
@pytest.mark.parametrize(
    ("family", "scenario"),
    [
        pytest.param(
            family,
            scenario,
            id=f"{family}-{scenario.__name__}",
            marks=[] if family == "llama" or scenario in ON_EVERY_FAMILY else pytest.mark.grid,
        )
        for family in FAMILIES
        for scenario in SCENARIOS
    ],
)
@torch.inference_mode()
def test_full_budget_is_dense_token_for_token(scenario, family, method_name, model, monkeypatch):
    expected = dense_tokens(family, scenario)
    method = always_sparse(method_name, monkeypatch)
    with sparse_attention(model, method):
        actual = scenario(model, lambda: SparseCache.for_model(model))
        stats = sparse_attention_stats(model)
    assert torch.equal(actual, expected)
    if scenario not in (assisted, prompt_lookup):  # these verify several tokens at a time: no decode steps
        assert stats.decode_steps > 0
        assert stats.kv_bytes == stats.dense_bytes > 0


def bf16_inputs():
    """A prompt, and a padded batch; the logits are returned too."""
    ids, mask = padded_batch()
    returned = {"output_logits": True, "return_dict_in_generate": True}
    return {"inputs": random_ids(1, 83), **returned}, {"inputs": ids, "attention_mask": mask, **returned}


@cache
def dense_bf16_outputs(family):
    """Run them on the unpatched model, once for all methods."""
    return [shared_model(family, torch.bfloat16).generate(**inputs, **GREEDY) for inputs in bf16_inputs()]


@methods
@families
@torch.inference_mode()
def test_bf16_within_the_budget_is_dense_token_for_token(family, method_name):
    model = shared_model(family, torch.bfloat16)
    for inputs, expected in zip(bf16_inputs(), dense_bf16_outputs(family), strict=True):
        with sparse_attention(
            model, METHOD_CLASSES[method_name](token_budget=COVERS_ALL, **COVERING.get(method_name, {}))
        ):
            actual = model.generate(**inputs, **GREEDY)
        if DEVICE == "cpu":  # the same additions in the same order
            assert torch.equal(actual.sequences, expected.sequences)
        else:
            assert_first_difference_is_a_near_tie(actual, expected, model, inputs.get("attention_mask"))


def assert_first_difference_is_a_near_tie(actual, expected, model, mask):
    """Kernels that add in another order may only swap tokens that tie in the dense model's bfloat16."""
    steps, logits = len(expected.logits), torch.stack(expected.logits, dim=1).float()
    prompt_tokens = expected.sequences.shape[1] - steps
    whole_mask = torch.ones_like(expected.sequences)
    if mask is not None:
        whole_mask[:, :prompt_tokens] = mask
    inputs = {"attention_mask": whole_mask, "position_ids": (whole_mask.cumsum(-1) - 1).clamp_min(0)}
    truth = copy.deepcopy(model).float()(expected.sequences, **inputs).logits[:, prompt_tokens - 1 : -1]
    error = (logits - truth).abs().max().item()
    assert error < logits.abs().max() / 8
    tokens, others = (run.sequences[:, prompt_tokens:] for run in (expected, actual))
    for row, (row_tokens, row_others) in enumerate(zip(tokens.tolist(), others.tolist(), strict=True)):
        for step, (token, other) in enumerate(zip(row_tokens, row_others, strict=True)):
            if token != other:
                assert logits[row, step, token] - logits[row, step, other] <= 2 * error
                break


@methods
@some_families
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@torch.inference_mode()
def test_low_precision_error_of_a_sparse_step_is_at_most_dense(dtype, family, method_name, monkeypatch):
    ids = random_ids(8, 70)

    def last_logits(model):
        cache = model(ids[:, :-1]).past_key_values
        return model(ids[:, -1:], past_key_values=cache).logits[:, -1].double()

    exact = last_logits(shared_model(family))
    model = shared_model(family, dtype)
    dense_error = (last_logits(model) - exact).norm()
    with sparse_attention(model, always_sparse(method_name, monkeypatch)):
        sparse_error = (last_logits(model) - exact).norm()
    assert sparse_error <= 1.5 * dense_error


@sparse_methods
@some_families
@torch.inference_mode()
def test_small_budget_reads_less_and_is_never_silently_dense(family, method_name, model):
    ids = random_ids(2, 300)
    with sparse_attention(model, sparse(method_name)):
        model.generate(ids, **GREEDY)
        stats = sparse_attention_stats(model)
    assert stats.decode_steps == GREEDY["max_new_tokens"] - 1
    sparse_layers = [layer for layer in stats.layers if layer.kv_bytes < layer.dense_bytes]
    dense_layers = METHOD_CLASSES[method_name]().dense_layers
    assert len(sparse_layers) == len(stats.layers) - dense_layers
    assert stats.kv_bytes == sum(layer.kv_bytes for layer in stats.layers)
    reads_more = ("toy-mass-threshold", "toy-first-head-streams")  # than the budget, in some heads
    if not (method_name in reads_more or METHOD_CLASSES[method_name].keeps_generated):
        kv_heads, batch = model.config.num_key_value_heads, 2
        for layer in sparse_layers:
            assert layer.tokens_read <= 48 * kv_heads * batch * stats.decode_steps


@methods
@families
@torch.inference_mode()
def test_padding_does_not_change_what_a_row_selects(family, method_name, exact):
    model = exact_model(family)
    lengths = (200, 131, 160)
    ids, mask = padded_batch(lengths)
    with sparse_attention(model, sparse(method_name)):
        together = model.generate(ids, attention_mask=mask, **GREEDY)[:, ids.shape[1] :]
        tokens_together = sparse_attention_stats(model).tokens_read
        tokens_alone = 0
        for row, length in enumerate(lengths):
            alone = model.generate(ids[row : row + 1, -length:], **GREEDY)[:, length:]
            assert torch.equal(alone[0], together[row])
            tokens_alone += sparse_attention_stats(model).tokens_read
    assert tokens_together == tokens_alone


@sparse_methods
@torch.inference_mode()
def test_padding_is_never_read(method_name, monkeypatch):
    model = shared_model("llama")
    ids, mask = padded_batch()
    with sparse_attention(model, always_sparse(method_name, monkeypatch)):
        cache = SparseCache.for_model(model)
        model(ids, attention_mask=mask, past_key_values=cache)
        for layer in cache.layers:
            if layer.method is FULL:  # a dense layer reads padding under the mask, as the stock model does
                continue
            for row, start in enumerate(layer.seq_start.tolist()):
                layer.keys[row, :, :start] = torch.nan
                layer.values[row, :, :start] = torch.nan
            layer.keys[:, :, layer.length + 1 :] = torch.nan
            layer.values[:, :, layer.length + 1 :] = torch.nan
        mask = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)
        logits = model(ids[:, :1], attention_mask=mask, past_key_values=cache).logits
    assert torch.isfinite(logits).all()


@pytest.mark.parametrize(
    "method_name",
    [
        name
        for name, method_class in METHOD_CLASSES.items()
        # MInference: the keys of later layers depend on what the prompt's last queries chose.
        if not (method_class().keeps_queries or method_class.needs_weights or name == "minference")
    ],
)
@torch.inference_mode()
def test_metadata_follows_every_cache_operation(method_name, exact):
    """After crop, reorder, repeat, select and growth, metadata is what a fresh prefill of the same tokens gives."""
    model = exact_model()
    ids = random_ids(3, 150)
    with sparse_attention(model, sparse(method_name)):
        cache = SparseCache.for_model(model)
        model(ids, past_key_values=cache)
        cache.crop(-29)
        cache.reorder_cache(torch.tensor([2, 2, 0], device=DEVICE))
        cache.batch_repeat_interleave(2)
        cache.batch_select_indices(torch.tensor([5, 1], device=DEVICE))
        now = ids[[0, 2], :121]
        step = random_ids(2, 1, seed=9)
        worked_on = model(step, past_key_values=cache).logits
        fresh_cache = SparseCache.for_model(model)
        model(now, past_key_values=fresh_cache)
        fresh = model(step, past_key_values=fresh_cache).logits
        torch.testing.assert_close(worked_on, fresh, rtol=1e-4, atol=1e-4)

        cache.reset()
        model(now, past_key_values=cache)
        torch.testing.assert_close(model(step, past_key_values=cache).logits, fresh, rtol=1e-4, atol=1e-4)


@methods
@torch.inference_mode()
def test_fork_continues_a_prefill_as_its_own_prefill_would(method_name, exact):
    """One prefill, dense or by a method that rotates keys, serves several methods; none sees what another appended."""
    model = exact_model()
    ids, steps = random_ids(1, 150), random_ids(1, 6, seed=4)
    method = sparse(method_name)
    has_own_keys = method.rotates_keys or method.changes_rope
    first = method if has_own_keys or method.needs_weights or "prefill" in method.sparse_phases else "full"
    prefix = SparseCache(model.config, first, initial_capacity=200, keep_queries=method.keeps_queries)
    with sparse_attention(model, first) if first is method or method.keeps_queries else nullcontext():
        model(ids, past_key_values=prefix)

    def decode(cache):
        return torch.cat([model(steps[:, i : i + 1], past_key_values=cache).logits for i in range(6)], dim=1)

    with sparse_attention(model, method):
        own = SparseCache.for_model(model)
        model(ids, past_key_values=own)
        expected = decode(own)
        for _ in range(2):
            fork = prefix.fork(method)
            assert fork.layers[-1].keys.data_ptr() == prefix.layers[-1].keys.data_ptr()
            torch.testing.assert_close(decode(fork), expected, rtol=1e-4, atol=1e-4)
            assert (fork.get_seq_length(), prefix.get_seq_length()) == (156, 150)
        stats = sparse_attention_stats(model)
        assert stats.decode_steps == 6


@torch.inference_mode()
def test_fork_keeps_sliding_windows_apart():
    model = make_model("qwen2", layer_types=["full_attention", "sliding_attention"] * 2, use_sliding_window=True)
    ids, steps = random_ids(1, 60), random_ids(1, 5, seed=4)
    prefix = SparseCache(model.config, "full", initial_capacity=100)
    model(ids, past_key_values=prefix)
    first, second = (
        [model(steps[:, i : i + 1], past_key_values=fork).logits for i in range(5)]
        for fork in (prefix.fork("full"), prefix.fork("full"))
    )
    torch.testing.assert_close(first, second)


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])  # the families whose configurations mix both kinds of layers
@torch.inference_mode()
def test_sliding_window_layers_stay_dense(family):
    kinds = ["full_attention", "sliding_attention"] * 2
    model = make_model(family, layer_types=kinds, use_sliding_window=True, sliding_window=20)
    ids, mask = padded_batch()
    expected = model.generate(ids, attention_mask=mask, **GREEDY)
    patch_model(model, "quest", token_budget=COVERS_ALL)
    assert torch.equal(model.generate(ids, attention_mask=mask, **GREEDY), expected)
    stats = sparse_attention_stats(model)
    unpatch_model(model)
    steps, rows, window = 11, 3, 20
    assert [layer.decode_steps for layer in stats.layers] == [steps] * 4
    for layer in stats.layers[1::2]:
        assert layer.tokens_read == steps * rows * window * model.config.num_key_value_heads
        assert layer.kv_bytes == layer.dense_bytes


@torch.inference_mode()
def test_explicit_maximum_is_kept_and_growth_changes_nothing(exact):
    model = exact_model()
    ids = random_ids(1, 130)
    with sparse_attention(model, "quest", token_budget=64):
        roomy, growing = SparseCache.for_model(model, max_cache_len=200), SparseCache.for_model(model)
        for part in (ids[:, :60], ids[:, 60:], *random_ids(12, 1)):
            part = part.view(1, -1)
            logits = [model(part, past_key_values=cache).logits for cache in (roomy, growing)]
            torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)
        assert [layer.capacity for layer in roomy.layers] == [200] * 4
        before = roomy.get_seq_length()
        with pytest.raises(ValueError, match=r"60 new tokens do not fit.*142 of max_cache_len=200"):
            model(ids[:, :60], past_key_values=roomy)
        assert roomy.get_seq_length() == before


def covering_at_first(method_name):
    """Create a method that leaves nothing out but for its budget of 48 tokens."""
    small = {"page_size": 16, "sink_tokens": 4}  # where the default does not fit into the budget
    fields = METHOD_CLASSES[method_name].__dataclass_fields__
    hyperparameters = {name: value for name, value in small.items() if name in fields}
    return METHOD_CLASSES[method_name](**{"token_budget": 48, **hyperparameters, **COVERING.get(method_name, {})})


@pytest.mark.parametrize(
    "method",
    [
        method
        for name, method_class in METHOD_CLASSES.items()
        if "decode" in method_class.sparse_phases and not (method := covering_at_first(name)).covers(1 << 40)
    ],
    ids=lambda method: method.name,
)
@torch.inference_mode()
def test_a_row_that_outgrows_the_budget_goes_on_as_if_it_had_never_been_covered(method, monkeypatch):
    """The first steps are dense, since they read everything; what they write for later selections must be the same."""
    model = exact_model()
    ids, steps = random_ids(2, 40), random_ids(2, 30, seed=5)
    mask = torch.ones_like(ids)
    mask[0, :13] = 0

    def answers():
        with sparse_attention(model, method), use_impl("reference"):
            cache, wider = SparseCache.for_model(model), mask
            model(ids, attention_mask=mask, past_key_values=cache)
            logits = []
            for token in steps.split(1, dim=1):
                wider = torch.nn.functional.pad(wider, (0, 1), value=1)
                logits.append(model(token, attention_mask=wider, past_key_values=cache).logits)
        return torch.cat(logits, dim=1)

    shortened = answers()
    monkeypatch.setattr(type(method), "covers", lambda self, length: False)
    torch.testing.assert_close(shortened, answers(), rtol=1e-9, atol=1e-9)
