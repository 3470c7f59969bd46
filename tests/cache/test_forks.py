"""What a cache and its fork do to each other: nothing, as long as no tokens are appended to both."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable

import pytest
import torch

from hf_sparse_attn import DuoAttention, KeyCodes, Quest, SnapKV, SparseCache, StreamingLLM, sparse_attention
from hf_sparse_attn.methods.base import SparseMethod
from tests.models import make_model, random_ids

PROMPT, NEXT, OTHER = random_ids(2, 60), random_ids(2, 5, seed=5), random_ids(2, 50, seed=6)
PAGES = {"token_budget": 24, "page_size": 4, "dense_layers": 0}
CASES = {
    "quest": (Quest(**PAGES), {}),
    "keycodes": (KeyCodes(token_budget=48, page_size=16), {}),
    "host": (Quest(**PAGES), {"kv_storage": "host"}),
    "offload": (Quest(**PAGES, offload=True, gpu_cache_tokens=240), {}),
    "streaming_llm, covered": (StreamingLLM(token_budget=200), {}),
    "streaming_llm": (StreamingLLM(token_budget=32), {}),
    "duo_attention": (DuoAttention(token_budget=32, sink_tokens=4, heads=((1, 0), (0, 1))), {}),
}


def decode(model, cache, tokens):
    return torch.cat([model(tokens[:, at : at + 1], past_key_values=cache).logits for at in range(tokens.shape[1])], 1)


CHANGES: dict[str, Callable] = {
    "crop": lambda model, cache: (cache.crop(-20), decode(model, cache, OTHER[:, :10])),
    "crop all": lambda model, cache: (cache.crop(-60), model(OTHER, past_key_values=cache)),
    "reset": lambda model, cache: (cache.reset(), model(OTHER, past_key_values=cache)),
    "reorder": lambda model, cache: cache.reorder_cache(torch.tensor([1, 0])),
    "select": lambda model, cache: cache.batch_select_indices(torch.tensor([1, 1])),
    "park": lambda model, cache: cache.park(),
}


@pytest.fixture(scope="module")
def model():
    return make_model("llama", dtype=torch.float64, num_hidden_layers=2)


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


def prefilled(model, room: int | None) -> SparseCache:
    cache = SparseCache.for_model(model, room)
    model(PROMPT, past_key_values=cache)
    return cache


SETTINGS = [
    pytest.param(case, change, room, id=f"{case}, {change}, {'growing' if room is None else 'static'}")
    for case, (method, _) in CASES.items()
    for change in CHANGES
    for room in (None, 128)
    if room is None or not (method.evicts or method.offloading)  # they have no static cache
    if "crop" not in change or not method.evicts or "covered" in case  # evicted tokens do not come back
]


@pytest.mark.parametrize("changed", ["source", "fork"])
@pytest.mark.parametrize(("case", "change", "room"), SETTINGS)
def test_what_one_does_to_its_tokens_the_other_does_not_see(model, case, change, room, changed):
    method, storage = CASES[case]
    with sparse_attention(model, method, **storage):
        expected = decode(model, prefilled(model, room), NEXT)
        source = prefilled(model, room)
        fork = source.fork(method)
        acting, other = (source, fork) if changed == "source" else (fork, source)
        CHANGES[change](model, acting)
        torch.testing.assert_close(decode(model, other, NEXT), expected, rtol=0, atol=1e-9)


def test_forks_of_a_fork_are_told_apart(model):
    method: SparseMethod = CASES["quest"][0]
    with sparse_attention(model, method):
        expected = decode(model, prefilled(model, None), NEXT)
        first = prefilled(model, None).fork(method)
        second = first.fork(method)
        CHANGES["crop"](model, first)
        torch.testing.assert_close(decode(model, second, NEXT), expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("case", ["quest", "host", "offload"])
@pytest.mark.parametrize("steps", [1, 2, 3, 6])
@pytest.mark.parametrize("tokens", [2, 5, 9])
def test_a_turn_after_a_side_question_in_a_fork(model, case, steps, tokens):
    """The fork's newest block is not full, and has not left the device, when the next turn is written."""
    method, storage = CASES[case]
    turn = OTHER[:, 20 : 20 + tokens]

    def answer(cache):
        model(turn, past_key_values=cache)
        return decode(model, cache, NEXT)

    with sparse_attention(model, method, **storage):
        expected = answer(prefilled(model, None))
        source = prefilled(model, None)
        fork = source.fork(method)
        decode(model, fork, OTHER[:, :steps])
        torch.testing.assert_close(answer(source), expected, rtol=0, atol=1e-9)
        assert fork.get_seq_length() == 60 + steps


@pytest.mark.parametrize("room", [None, 128], ids=["growing", "static"])
def test_a_fork_that_is_gone_costs_no_copy(model, room):
    method = CASES["quest"][0]
    with sparse_attention(model, method):
        source = prefilled(model, room)
        address = source.sparse_layers[0].keys.data_ptr()
        fork = source.fork(method)
        del fork
        gc.collect()
        source.crop(-20)
        assert source.sparse_layers[0].keys.data_ptr() == address
        fork = source.fork(method)
        source.crop(-20)
        assert source.sparse_layers[0].keys.data_ptr() != address
        assert fork.sparse_layers[0].keys.data_ptr() == address
        address = source.sparse_layers[0].keys.data_ptr()
        source.crop(-5)  # its own by now
        assert source.sparse_layers[0].keys.data_ptr() == address


@pytest.mark.parametrize(
    ("case", "room"),
    [
        pytest.param(case, room, id=f"{case}, {'growing' if room is None else 'static'}")
        for case, (method, _) in CASES.items()
        for room in (None, 128)
        if case not in ("streaming_llm", "duo_attention")  # the crop below asks for evicted tokens
        if room is None or not (method.evicts or method.offloading)
    ],
)
def test_a_copy_that_was_made_in_inference_mode_serves_any_mode(model, case, room):
    """Transformers shows how to keep a prompt by ``copy.deepcopy(cache)``."""
    method, storage = CASES[case]
    with sparse_attention(model, method, **storage):
        expected = decode(model, prefilled(model, room), NEXT)
        with torch.inference_mode():
            copied = copy.deepcopy(prefilled(model, room))
        torch.testing.assert_close(decode(model, copied, NEXT), expected, rtol=0, atol=1e-9)
        copied.crop(-5)
        copied.reorder_cache(torch.tensor([1, 0]))
        expected = expected[[1, 0]]
        torch.testing.assert_close(decode(model, copied, NEXT[[1, 0]]), expected, rtol=0, atol=1e-9)


@torch.inference_mode()
def test_a_fork_keeps_as_many_queries_for_its_own_forks():
    model = make_model("llama")
    cache = SparseCache(model.config, "full", keep_queries=8)
    with sparse_attention(model, "full"):
        model(PROMPT, past_key_values=cache)
        fork = cache.fork("full")
        model(NEXT, past_key_values=fork)
        assert fork.fork(SnapKV(token_budget=16, window=8)).method.window == 8


@pytest.mark.parametrize("max_cache_len", [None, 100], ids=["growing", "static"])
@torch.inference_mode()
def test_a_fork_of_a_cache_that_lost_its_buffers_has_lengths_of_its_own(max_cache_len, monkeypatch):
    def fail(*arguments):
        raise MemoryError

    model = make_model("llama", dtype=torch.float64)
    with sparse_attention(model, Quest(token_budget=96, page_size=4, dense_layers=0)):
        cache = SparseCache.for_model(model, max_cache_len=max_cache_len)
        model(PROMPT, past_key_values=cache)
        with monkeypatch.context() as patch:
            patch.setattr(cache.sparse_layers[1].storage, "replace_all", fail)
            with pytest.raises(MemoryError):
                cache.batch_select_indices(torch.tensor([0]))
        cache.reset()
        fork = cache.fork(cache.method)
        mask = torch.ones(2, 50, dtype=torch.long, device=OTHER.device)
        mask[0, :9] = 0
        model(OTHER, attention_mask=mask, past_key_values=cache)
        rows = torch.cat((PROMPT, PROMPT[:1]))
        logits = model(rows, past_key_values=fork).logits
        torch.testing.assert_close(logits, model(rows, use_cache=False).logits)
        assert (cache.lengths[0].length, cache.lengths[0].starts, fork.lengths[0].length) == (50, (9, 0), 60)
