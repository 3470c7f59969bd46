"""Attention sinks: learned logits that take part in the softmax of gpt-oss and others, without a value.

Models are in float64, and their sinks weigh about as much as all tokens together: to leave them out changes everything.
"""

from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import ClassVar
from unittest.mock import patch

import pytest
import torch
from hf_sparse_attn_kernels import use_impl
from transformers import AttentionInterface, DynamicCache
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from hf_sparse_attn import (
    METHODS,
    Quest,
    SelfSpeculation,
    SparseCache,
    SparseMethod,
    prepare_context,
    record_selections,
    sparse_attention,
)
from hf_sparse_attn.cache_argument import CACHE
from hf_sparse_attn.sinks import sdpa_attention, with_sinks
from tests.families import PROMPTS, RANDOM, decode, decode_patched, difference, tiny_model
from tests.models import COVERING, SPARSE

FULL_ATTENTION = {
    "layer_types": ["full_attention"] * 3,
    "max_position_embeddings": 512,
    "rope_parameters": {"rope_type": "default", "rope_theta": 150000.0},  # NTK scales no RoPE that is scaled already
}
GPU = "cuda"
REPLAY = "tests_replayed_reads"
SELECTING = ["quest", "keycodes", "arkvale", "psa", "squeezed", "double_sparsity", "streaming_llm", "tova", "snapkv"]
"""Methods whose decode steps read tokens at their own positions, after a dense prefill."""


@cache
def sink_model(windows=False):
    """A tiny model with sinks that take from almost nothing to almost all of a head's attention."""
    with torch.inference_mode(False):
        model = tiny_model("gpt_oss", **({} if windows else FULL_ATTENTION))
    generator = torch.Generator().manual_seed(9)
    for layer in model.model.layers:
        layer.self_attn.sinks.data = 4 + 3 * torch.randn(4, generator=generator, dtype=torch.float64)
    return model


@cache
def dense_decode(windows=False):
    with torch.inference_mode():
        return decode(sink_model(windows=windows))


def covering(method_name):
    return METHODS[method_name](**{"token_budget": 256, **COVERING.get(method_name, {})})


def plain(query, keys, values, mask, sinks, scale):
    """Attention by the definition: a softmax over the tokens and the sink, whose weight is then dropped."""
    group = query.shape[1] // keys.shape[1]
    scores = query @ keys.repeat_interleave(group, 1).mT * scale
    scores = scores.masked_fill(~mask, float("-inf"))
    column = sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
    return torch.cat((scores, column), dim=3).softmax(3)[..., :-1] @ values.repeat_interleave(group, 1)


def random_states(queries, length, dtype=torch.float64, head_dim=16):
    generator = torch.Generator().manual_seed(queries)
    query, keys, values = (
        torch.randn(2, heads, tokens, head_dim, generator=generator, dtype=torch.float64)
        for heads, tokens in ((6, queries), (2, length), (2, length))
    )
    sinks = 3 * torch.randn(6, generator=generator, dtype=torch.float64)
    return tuple(each.to(dtype) for each in (query, keys, values, sinks))


class Module(torch.nn.Module):
    num_key_value_groups, is_causal, layer_idx = 3, True, 0


MASKS = {
    "causal": (23, 23, None),
    "one query": (1, 23, None),
    "one masked query": (1, 23, torch.arange(23)[None, None, None] > torch.tensor([3, 9])[:, None, None, None]),
    "bool": (7, 23, torch.arange(23) <= torch.arange(16, 23)[:, None]),
    "additive": (7, 23, torch.zeros(7, 23, dtype=torch.float64).masked_fill(torch.ones(7, 23).triu(17) > 0, -1e300)),
}


@pytest.mark.parametrize("kind", MASKS)
def test_sdpa_with_sinks_is_a_softmax_over_tokens_and_sinks(kind):
    queries, length, mask = MASKS[kind]
    *states, sinks = random_states(queries, length)
    mask = mask if mask is None else mask.expand(1 if mask.dim() == 2 else 2, 1, queries, length)
    output = sdpa_attention(Module(), *states, mask, sinks, 0.3)
    at = torch.arange(length)
    seen = at <= at[-queries:, None] if mask is None else mask if mask.dtype == torch.bool else mask == 0
    torch.testing.assert_close(output, plain(*states, seen, sinks, 0.3).transpose(1, 2), rtol=1e-12, atol=1e-12)
    without = sdpa_attention(Module(), *states, mask, None, 0.3)
    torch.testing.assert_close(without, plain(*states, seen, sinks - torch.inf, 0.3).transpose(1, 2))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sdpa_keeps_a_sinks_logit_in_low_precision(dtype):
    """A scale that is no power of two, so that the logit over it has no short form."""
    *states, sinks = random_states(9, 9, dtype, head_dim=24)
    sinks = sinks * 3
    mask = torch.ones(9, 9, dtype=torch.bool).tril()
    exact = plain(*(each.double() for each in states), mask, sinks.double(), 24**-0.5)
    eager = plain(*states, mask, sinks, 24**-0.5)
    output = sdpa_attention(Module(), *states, None, sinks, None).transpose(1, 2)
    assert output.dtype == dtype
    assert (output.double() - exact).abs().max() <= 2 * (eager.double() - exact).abs().max()


@pytest.mark.parametrize("tokens", [(), (5,)])
def test_the_log_sum_exp_gives_the_output_with_sinks(tokens):
    *states, sinks = random_states(5, 23)
    mask = torch.ones(5, 23, dtype=torch.bool)
    expected = plain(*states, mask, sinks, 0.3)
    output = plain(*states, mask, sinks - torch.inf, 0.3)
    lse = (states[0] @ states[1].repeat_interleave(3, 1).mT * 0.3).logsumexp(3)
    if not tokens:
        expected, output, lse = (each[:, :, 0] for each in (expected, output, lse))
    torch.testing.assert_close(with_sinks(output, lse, sinks), expected, rtol=1e-12, atol=1e-12)
    assert with_sinks(output, lse, None) is output
    nothing = with_sinks(torch.zeros_like(output), torch.full_like(lse, -torch.inf), sinks)
    assert (nothing == 0).all()


@pytest.mark.parametrize("method_name", METHODS)
@torch.inference_mode()
def test_a_budget_that_covers_everything_equals_the_stock_model(method_name):
    """In both kinds of buffers if the method has both, behind left padding."""
    model, method = sink_model(), covering(method_name)
    with patch.object(METHODS[method_name], "covers", lambda self, length: False):
        found = [difference(decode_patched(model, method, room), dense_decode()) for room in rooms(method)]
    assert found == ["equal"] * len(found)


def rooms(method):
    return (None,) if method.evicts or method.name == "squeezed" else (RANDOM.max_cache_len, None)


@torch.inference_mode()
def test_kv_heads_that_keep_everything_beside_streaming_ones():
    method = METHODS["duo_attention"](token_budget=256, sink_tokens=4, heads=((1, 0), (0, 1), (0, 0)))
    with patch.object(type(method), "covers", lambda self, length: False):
        assert difference(decode_patched(sink_model(), method, None), dense_decode()) == "equal"


@pytest.mark.parametrize("windows", [False, True])
@torch.inference_mode()
def test_dense_layers_and_layers_with_a_window(windows):
    method = Quest(token_budget=256, dense_layers=0 if windows else 2)
    model = sink_model(windows=windows)
    for covers in (True, False):  # the dense shortcut of all layers, and that of dense layers alone
        with patch.object(Quest, "covers", lambda self, length, covers=covers: covers):
            for room in (RANDOM.max_cache_len, None):
                assert difference(decode_patched(model, method, room), dense_decode(windows)) == "equal"


@torch.inference_mode()
def test_sinks_matter(monkeypatch):
    """Without them in the methods' steps or in SDPA, no test of this file that compares tokens would pass."""
    model, method = sink_model(), Quest(token_budget=256, dense_layers=0)
    monkeypatch.setattr(Quest, "covers", lambda self, length: False)
    with monkeypatch.context() as without:
        without.setattr("hf_sparse_attn.cache.layer.with_sinks", lambda output, lse, sinks: output)
        assert difference(decode_patched(model, method, None), dense_decode()) == "tokens differ"
    with monkeypatch.context() as without:
        without.setattr(
            "hf_sparse_attn.dense.sdpa_attention", lambda *given: sdpa_attention(*given[:5], None, given[6])
        )
        assert difference(decode_patched(model, method, None), dense_decode()).startswith("tokens differ")
    assert difference(decode_patched(model, method, None), dense_decode()) == "equal"


def teacher_forced(model, cache=None):
    """Logits of a prompt's last token and of eight steps that are fed given tokens, [steps, rows, vocabulary]."""
    ids = torch.randint(2, 97, (2, 60), generator=torch.Generator().manual_seed(4)).to(model.device)
    output = model(ids[:, :52], use_cache=True, **{CACHE: cache})
    logits = [output.logits[:, -1]]
    for at in range(52, 60):
        output = model(ids[:, at : at + 1], use_cache=True, **{CACHE: output[CACHE]})
        logits.append(output.logits[:, -1])
    return torch.stack(logits).double().cpu()


@pytest.mark.gpu
@pytest.mark.parametrize("method_name", METHODS)
@torch.inference_mode()
def test_bfloat16_on_cuda_is_as_close_to_float64_as_the_stock_model(method_name, monkeypatch):
    """By the Triton kernels; all experts serve each token, so that no rounding chooses others."""
    with torch.inference_mode(False):
        model = tiny_model("gpt_oss", num_experts_per_tok=4, **FULL_ATTENTION)
        for layer, own in zip(model.model.layers, sink_model().model.layers, strict=True):
            layer.self_attn.sinks.data = own.self_attn.sinks.data.clone()
        model = model.bfloat16()
        exact = teacher_forced(deepcopy(model).double())
        model = model.to(GPU)
    stock = (teacher_forced(model) - exact).abs().mean()
    method = covering(method_name)
    monkeypatch.setattr(METHODS[method_name], "covers", lambda self, length: False)
    with use_impl("triton"), sparse_attention(model, method):
        for room in rooms(method):
            found = teacher_forced(model, SparseCache.for_model(model, room))
            assert (found - exact).abs().mean() <= 2 * stock


def prompt(rows=2, tokens=40):
    return torch.randint(2, 97, (rows, tokens), generator=torch.Generator().manual_seed(rows))


OPTIONS = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0, "disable_compile": True}


@pytest.mark.parametrize("method_name", ["quest", "keycodes", "tokenselect", "psa", "squeezed", "streaming_llm"])
@torch.inference_mode()
def test_beams_and_crops(method_name):
    """Beam search changes the rows of the cache, prompt lookup crops it and verifies several tokens at once."""
    model, method = sink_model(), covering(method_name)
    repeated = prompt(1, 20).repeat(1, 3)
    runs = [
        partial(model.generate, prompt(), num_beams=3, num_return_sequences=2, **OPTIONS),
        partial(model.generate, repeated, prompt_lookup_num_tokens=4, **OPTIONS),
    ]
    if method.evicts:
        runs.pop()  # an eviction cannot be undone
    expected = [run() for run in runs]
    with patch.object(METHODS[method_name], "covers", lambda self, length: False), sparse_attention(model, method):
        assert all(torch.equal(run(), tokens) for run, tokens in zip(runs, expected, strict=True))


@torch.inference_mode()
def test_drafts_are_verified_with_sinks():
    model, ids = sink_model(), prompt(1, 60)
    expected = model.generate(ids, **OPTIONS)
    with sparse_attention(model, "quest", token_budget=48, dense_layers=1):
        found = model.generate(ids, custom_generate=SelfSpeculation(draft_tokens=3), **OPTIONS)
    assert torch.equal(found, expected)


@torch.inference_mode()
def test_questions_behind_a_prepared_context():
    model, ids = sink_model(), prompt(1, 60)
    expected = model.generate(ids, **OPTIONS)
    method = METHODS["squeezed"](target_sparsity=0.0, window=8)
    context = prepare_context(model, ids[:, :45], method=method, progress=False)
    with patch.object(METHODS["squeezed"], "covers", lambda self, length: False), sparse_attention(model, method):
        found = model.generate(ids[:, 45:], past_key_values=context.cache(), **OPTIONS)
    assert torch.equal(found, expected[:, 45:])


@torch.inference_mode()
def test_a_few_tokens_that_attend_by_row_bounds(monkeypatch):
    """As several tokens over a long cache do on CUDA; prefilled in two parts, with a pass without a cache beside it."""
    model, ids = sink_model(), prompt(2, 60)
    expected = model(ids).logits
    monkeypatch.setattr("hf_sparse_attn.cache.storage.GrowingStorage.reads_by_bounds", lambda self: True)
    with sparse_attention(model, "quest", token_budget=256, dense_layers=0):
        cache = model(ids[:, :52], use_cache=True).past_key_values
        last = model(ids[:, 52:], past_key_values=cache).logits
        whole = model(ids, use_cache=False).logits
    torch.testing.assert_close(last, expected[:, 52:], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(whole, expected, rtol=1e-9, atol=1e-9)


def replay(module, query, key, value, attention_mask, scaling, s_aux=None, **kwargs):
    """Attend by the definition; in a decode step, to the tokens that were read before, and to the sinks."""
    queries, length = query.shape[2], key.shape[2]
    at = torch.arange(length)
    mask = (at <= at[-queries:, None])[None, None] if attention_mask is None else attention_mask
    if queries == 1:
        step = length - max(PROMPTS) - 1
        reads = torch.zeros(len(query), key.shape[1], 1, length, dtype=torch.bool)
        for row, tokens in enumerate(PROMPTS):
            reads[row, :, 0, max(PROMPTS) - tokens :] = replay.record.reads(module.layer_idx, step, row)
        mask = reads.repeat_interleave(query.shape[1] // key.shape[1], 1)
    return plain(query, key, value, mask, s_aux, scaling).nan_to_num().transpose(1, 2), None


AttentionInterface.register(REPLAY, replay)
AttentionMaskInterface.register(REPLAY, sdpa_mask)


@pytest.mark.parametrize("method_name", SELECTING)
@torch.inference_mode()
def test_sparse_steps_equal_plain_attention_to_what_they_read_and_the_sinks(method_name):
    model = sink_model()
    method = METHODS[method_name](**{"token_budget": 24, **SPARSE.get(method_name, {}), "dense_layers": 0})
    with sparse_attention(model, method), record_selections(model) as record:
        sparse = decode(model)
    assert not record.reads(1, -1).all()  # it leaves tokens out
    model.set_attn_implementation(REPLAY)
    try:
        replay.record = record
        assert difference(decode(model, DynamicCache(config=model.config)), sparse) == "equal"
    finally:
        model.set_attn_implementation("eager")


@pytest.mark.parametrize("offload", ["quest", "psa"])
@torch.inference_mode()
def test_parts_of_a_selection_are_merged_before_the_sinks(offload):
    """An offloaded layer attends to blocks as they come, and merges the parts; one in host memory fetches them."""
    settings = {"psa": {"block_size": 8, "threshold": 1.0}, "quest": {"page_size": 16, "dense_layers": 0}}[offload]
    method = METHODS[offload](token_budget=64, offload=True, gpu_cache_tokens=128, **settings)
    with patch.object(type(method), "covers", lambda self, length: False):
        assert difference(decode_patched(sink_model(), method, None), dense_decode()) == "equal"
        with sparse_attention(sink_model(), replace(method, offload=False, gpu_cache_tokens=None), kv_storage="host"):
            assert difference(decode(sink_model()), dense_decode()) == "equal"


@dataclass(frozen=True)
class Forgetful(SparseMethod):
    """Return an output that no sink took part in."""

    name: ClassVar[str] = "forgetful"
    summary: ClassVar[str] = "nothing"
    paper: ClassVar[str] = "none"

    in_prefill: bool = True

    def covers(self, length):
        return False

    def decode(self, query, layer, new_key, new_value, scale):
        layer.append(new_key.unsqueeze(2), new_value.unsqueeze(2))
        return query

    def prefill(self, query, layer, scale, mask):
        return query if self.in_prefill else super().prefill(query, layer, scale, mask)


@pytest.mark.parametrize("in_prefill", [True, False])
@torch.inference_mode()
def test_a_method_that_leaves_sinks_out_is_an_error(in_prefill):
    model = sink_model()
    with (
        sparse_attention(model, Forgetful(in_prefill=in_prefill)),
        pytest.raises(ValueError, match=r"method 'forgetful' leaves the model's attention sinks out of its softmax"),
    ):
        model.generate(prompt(), **OPTIONS)
    assert difference(decode(model), dense_decode()) == "equal"
