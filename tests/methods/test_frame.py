"""The contract of methods: which functions are called, when, and what is counted for them."""

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from transformers import DynamicCache

from hf_sparse_attn import SparseCache, SparseMethod, patch_model, sparse_attention, sparse_attention_stats
from tests.methods.toy import Recent, SmallNorm
from tests.models import POSITIONS, make_model, random_ids, shared_model

GREEDY = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0, "disable_compile": True}


@pytest.fixture
def model():
    """A model that must come back unpatched."""
    model = shared_model("llama")
    yield model
    assert model.config._attn_implementation == "sdpa"


@dataclass(frozen=True)
class Logged(SmallNorm):
    """Logs when a prompt ended, after how many tokens, and when a step was decoded, in every layer."""

    name: ClassVar[str] = "toy-logged"
    log: ClassVar[list[tuple[str, int]]] = []

    def finish_prompt(self, layers):
        self.log.extend(("finish", layer.length) for layer in layers)
        super().finish_prompt(layers)

    def select(self, query, layer, scale):
        self.log.append(("step", layer.length))
        return super().select(query, layer, scale)


@pytest.fixture
def log():
    Logged.log.clear()
    return Logged.log


def by_pass(log, model):
    """The log of a model's layers, one entry for all of them."""
    layers = model.config.num_hidden_layers
    passes = [log[i : i + layers] for i in range(0, len(log), layers)]
    assert all(len(entries) == layers and len(set(entries)) == 1 for entries in passes)
    return [entries[0] for entries in passes]


def steps(first, count):
    return [("step", length) for length in range(first, first + count)]


def padded(lengths):
    ids = random_ids(len(lengths), max(lengths))
    mask = torch.stack([torch.arange(max(lengths)) >= max(lengths) - length for length in lengths]).to(ids)
    return ids * mask, mask


@dataclass(frozen=True)
class Chunked(Recent):
    """Attends densely from seven tokens at once, and logs how many tokens the layer had and the mask showed."""

    name: ClassVar[str] = "toy-chunked"
    log: ClassVar[list[tuple[int, int, tuple[int, ...] | None]]] = []

    def prefill_chunk(self, positions):
        return 7

    def prefill(self, query, layer, scale, mask):
        self.log.append((query.shape[2], layer.length, None if mask is None else tuple(mask.shape[2:])))
        return super().prefill(query, layer, scale, mask)


@pytest.mark.parametrize("needs_mask", [False, True])
@torch.inference_mode()
def test_layers_divide_a_pass_into_the_method_s_chunks(needs_mask, monkeypatch):
    """The rows end with the chunk, and the mask is the chunk's; dense attention from chunks is dense attention."""
    model = shared_model("llama", torch.float64)
    monkeypatch.setattr(Chunked, "needs_mask", needs_mask)
    monkeypatch.setattr(Chunked, "log", [])
    (ids, mask), layers = padded((40, 33, 4)), model.config.num_hidden_layers
    expected = model(ids, attention_mask=mask).logits
    with sparse_attention(model, Chunked(token_budget=16)):
        logits = model(ids, attention_mask=mask).logits
    torch.testing.assert_close(logits[mask.bool()], expected[mask.bool()])
    sizes = [(7, length) for length in range(7, 40, 7)] + [(5, 40)]
    assert Chunked.log == layers * [(*size, size if needs_mask else None) for size in sizes]


@pytest.mark.parametrize("prefill_chunk_size", [None, 7, 20])
@torch.inference_mode()
def test_finish_prompt_comes_once_between_the_prompt_and_the_first_step(prefill_chunk_size, model, log):
    with sparse_attention(model, Logged(token_budget=16)):
        model.generate(random_ids(2, 40), prefill_chunk_size=prefill_chunk_size, **GREEDY)
    assert by_pass(log, model) == [("finish", 40), *steps(41, 5)]


@torch.inference_mode()
def test_finish_prompt_comes_once_after_each_turn(model, log):
    with sparse_attention(model, Logged(token_budget=16)):
        cache = SparseCache.for_model(model)
        first = model.generate(random_ids(1, 40), past_key_values=cache, **GREEDY)
        second = torch.cat([first, random_ids(1, 9, seed=1)], dim=1)
        model.generate(second, past_key_values=cache, attention_mask=torch.ones_like(second), **GREEDY)
    assert by_pass(log, model) == [("finish", 40), *steps(41, 5), ("finish", 55), *steps(56, 5)]


@torch.inference_mode()
def test_finish_prompt_waits_for_the_first_step_of_a_prompt_in_several_passes(model, log):
    ids = random_ids(1, 40)
    with sparse_attention(model, Logged(token_budget=16)):
        cache = SparseCache.for_model(model)
        for part in ids[:, :1], ids[:, 1:15], ids[:, 15:]:
            model(part, past_key_values=cache)
        assert log == []
        for token in random_ids(1, 3).T:
            model(token[None], past_key_values=cache)
    assert by_pass(log, model) == [("finish", 40), *steps(41, 3)]


@torch.inference_mode()
def test_finish_prompt_comes_after_every_prefill_pass_over_static_storage(model, log):
    ids = random_ids(1, 40)
    with sparse_attention(model, Logged(token_budget=16)):
        cache = SparseCache.for_model(model, max_cache_len=60)
        for part in ids[:, :15], ids[:, 15:]:
            model(part, past_key_values=cache)
        assert by_pass(log, model) == [("finish", 15), ("finish", 40)]
        for token in random_ids(1, 3).T:
            model(token[None], past_key_values=cache)
    assert by_pass(log, model)[2:] == steps(41, 3)


@pytest.mark.parametrize("max_cache_len", [None, 60])
@torch.inference_mode()
def test_a_prompt_that_failed_is_not_finished(max_cache_len, model, log):
    def fail(*args):
        raise RuntimeError("out of memory")

    ids = random_ids(1, 40)
    with sparse_attention(model, Logged(token_budget=16)):
        cache = SparseCache.for_model(model, max_cache_len)
        hook = model.get_decoder().layers[2].register_forward_pre_hook(fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            model(ids, past_key_values=cache)
        hook.remove()
        assert log == []
        model(ids[:, :30], past_key_values=cache)
        model(ids[:, 30:31], past_key_values=cache)
    assert by_pass(log, model) == [("finish", 30), *steps(31, 1)]


@pytest.mark.parametrize("max_cache_len", [None, 60], ids=["growing", "static"])
@torch.inference_mode()
def test_a_failed_step_keeps_what_finish_prompt_wrote(max_cache_len, model, log):
    def fail(*args):
        raise RuntimeError("out of memory")

    with sparse_attention(model, Logged(token_budget=16)):
        cache = SparseCache.for_model(model, max_cache_len)
        model(random_ids(1, 40), past_key_values=cache)
        for count in (1, 2):  # the first step after the prompt, and a later one
            hook = model.get_decoder().layers[2].register_forward_pre_hook(fail)
            with pytest.raises(RuntimeError, match="out of memory"):
                model(random_ids(1, 1), past_key_values=cache)
            hook.remove()
            assert all(layer.metadata["norm"][:, :, :40].ne(0).all() for layer in cache.layers)
            model(random_ids(1, 1), past_key_values=cache)
            assert cache.length == 40 + count
    assert [entry for entry in log if entry[0] == "finish"] == [("finish", 40)] * 4


@torch.inference_mode()
def test_a_fork_finishes_the_prompt_for_its_own_method(model, log):
    prefix = SparseCache(model.config, "full", initial_capacity=60)
    model(random_ids(1, 40), past_key_values=prefix)
    with sparse_attention(model, Logged(token_budget=16)):
        for _ in range(2):
            model(random_ids(1, 1), past_key_values=prefix.fork(Logged(token_budget=16)))
        static = SparseCache.for_model(model, max_cache_len=60)
        model(random_ids(1, 40), past_key_values=static)
        model(random_ids(1, 1), past_key_values=static.fork(Logged(token_budget=16)))
    finishes = [("finish", 40), ("step", 41)]
    assert by_pass(log, model) == [*finishes, *finishes, ("finish", 40), ("step", 41)]


@pytest.mark.parametrize("max_cache_len", [None, 60])
@torch.inference_mode()
def test_a_fork_for_the_same_method_keeps_what_finish_prompt_wrote(max_cache_len, model, log):
    with sparse_attention(model, Logged(token_budget=16)):
        cache = SparseCache.for_model(model, max_cache_len)
        model(random_ids(1, 40), past_key_values=cache)
        cache.complete_prompt()
        log.clear()
        metadata = [layer.metadata["norm"].clone() for layer in cache.layers]
        for _ in range(2):
            fork = cache.fork(Logged(token_budget=16))
            assert all(torch.equal(*pair) for pair in zip(metadata, norms(fork), strict=True))
            model(random_ids(1, 1), past_key_values=fork)
        assert all(torch.equal(*pair) for pair in zip(metadata, norms(cache), strict=True))
    assert by_pass(log, model) == [("step", 41), ("step", 41)]


def norms(cache):
    return [layer.metadata["norm"] for layer in cache.layers]


@torch.inference_mode()
def test_a_prompt_that_is_cropped_away_is_not_finished(model, log):
    with sparse_attention(model, Logged(token_budget=16)):
        cache = SparseCache.for_model(model)
        model(random_ids(1, 40), past_key_values=cache)
        model(random_ids(1, 1), past_key_values=cache)
        model(random_ids(1, 10), past_key_values=cache)
        cache.crop(-11)
        model(random_ids(1, 1), past_key_values=cache)
        model(random_ids(1, 10), past_key_values=cache)
        model(random_ids(1, 1), past_key_values=cache)
    assert by_pass(log, model) == [("finish", 40), ("step", 41), ("step", 41), ("finish", 51), ("step", 52)]


@torch.inference_mode()
def test_a_step_reads_by_what_finish_prompt_wrote(model):
    budget, ids = 16, random_ids(2, 40)
    with sparse_attention(model, SmallNorm(token_budget=budget)):
        cache = SparseCache.for_model(model)
        model(ids, past_key_values=cache)
        model(ids[:, :1], past_key_values=cache)
        layer = cache.layers[1]
        indices, _, _ = layer.method.select(layer.keys.new_zeros(2, layer.q_heads, 16), layer, 1.0)
    prompt = layer.keys[:, :, :40].norm(dim=-1)
    smallest = prompt.topk(budget - 1, largest=False).indices.sort().values
    torch.testing.assert_close(indices[..., :-1].long(), smallest)
    assert bool((indices[..., -1] == 40).all())


@pytest.mark.parametrize("method_class", [SmallNorm, Recent])
@torch.inference_mode()
def test_a_covering_budget_is_dense_token_for_token(method_class, model, monkeypatch):
    ids, mask = padded((50, 31))
    cache = DynamicCache(config=model.config)
    expected = model.generate(ids, attention_mask=mask, past_key_values=cache, **GREEDY)
    monkeypatch.setattr(method_class, "covers", lambda self, length: False)
    with sparse_attention(model, method_class(token_budget=POSITIONS)):
        assert torch.equal(model.generate(ids, attention_mask=mask, **GREEDY), expected)
        stats = sparse_attention_stats(model)
    assert stats.kv_bytes == stats.dense_bytes > 0


@torch.inference_mode()
def test_a_method_may_override_decode_alone_and_count_for_itself():
    model = make_model("llama")
    ids, mask = padded((50, 12))
    layers, kv_heads, decoded = model.config.num_hidden_layers, model.config.num_key_value_heads, 5
    patch_model(model, Recent(token_budget=20))
    model.generate(ids, attention_mask=mask, **GREEDY)
    stats = sparse_attention_stats(model)
    assert stats.tokens_read == sum(20 + 13 + step for step in range(decoded)) * kv_heads * layers
    assert stats.layers[0].method_counts == {"rows_cut": decoded, "rows_whole": decoded}
    assert stats.method_counts == {"rows_cut": decoded * layers, "rows_whole": decoded * layers}
    with pytest.raises(NotImplementedError, match="Recent decodes without a selection"):
        Recent().select(None, None, 1.0)


def test_a_method_without_select_or_decode_is_refused_when_it_is_defined():
    with pytest.raises(TypeError, match=r"Nothing must implement select\(\) or decode\(\)"):

        class Nothing(SparseMethod):
            name: ClassVar[str] = "toy-nothing"

            def prefill(self, query, layer, scale, mask):
                return query
