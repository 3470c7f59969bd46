"""Answers that are much longer than their prompts: what is generated becomes pages, which later steps choose from."""

import pytest
import torch
from hf_sparse_attn_kernels import encode_keys, use_impl

from hf_sparse_attn import SparseCache, record_selections, sparse_attention, sparse_attention_stats
from hf_sparse_attn.methods import make_method
from tests.models import DEVICE, make_model, random_ids

PROMPT, ANSWER, PADDING = 40, 310, 23
PAGE, BUDGET = 16, 96
LENGTH = PROMPT + ANSWER - 1
"""Cached tokens at the end: the last one of an answer is not fed."""
METHODS = {
    "quest": {"page_size": PAGE, "dense_layers": 0},
    "keycodes": {"page_size": PAGE},
}


def method_of(name, token_budget):
    return make_method(name, token_budget=token_budget, **METHODS[name])


def answer(model, cache=None):
    """Answer two prompts, one of them padded, greedily and in float64."""
    ids = random_ids(2, PROMPT)
    mask = torch.ones_like(ids)
    ids[1, :PADDING] = mask[1, :PADDING] = 0
    options = {"max_new_tokens": ANSWER, "do_sample": False, "eos_token_id": None, "disable_compile": True}
    with use_impl("reference"):
        return model.generate(ids, attention_mask=mask, past_key_values=cache, **options)[:, PROMPT:]


@pytest.fixture(scope="module")
def model():
    return make_model("llama", dtype=torch.float64, num_hidden_layers=2)


@pytest.fixture(scope="module")
def dense(model):
    return answer(model)


@pytest.fixture(scope="module", params=METHODS)
def answered(request, model):
    """The method, the cache after a long answer, the record of its reads, and its statistics."""
    method = method_of(request.param, BUDGET)
    with sparse_attention(model, method), record_selections(model) as record:
        cache = SparseCache.for_model(model)
        answer(model, cache)
        return method, cache, record, sparse_attention_stats(model)


@pytest.mark.parametrize("name", METHODS)
def test_a_budget_for_everything_gives_the_answer_of_dense_attention(name, model, dense):
    with sparse_attention(model, method_of(name, 512)):
        assert torch.equal(answer(model), dense)


def test_pages_of_generated_tokens_have_metadata(answered):
    """Bounds are within a level of the keys', and codes are to the bit those of all pages coded at once."""
    method, cache, _, _ = answered
    for layer in cache.layers:
        for row, padding in enumerate((0, PADDING)):
            pages = (LENGTH - padding) // PAGE
            metadata = {name: tensor[row : row + 1] for name, tensor in layer.metadata.items()}
            keys = layer.keys[row : row + 1, :, padding : padding + pages * PAGE]
            if method.name == "quest":
                _check_bounds(keys[0], metadata, pages)
            else:
                assert metadata["coded"].tolist() == [[pages] * 2]
                _check_codes(keys, metadata, method)


def _check_bounds(keys, metadata, pages):
    exponents = metadata["channel_exponent"][0, :, None, :].double() + metadata["page_exponent"][0, :, :pages, None]
    level = 2.0**exponents
    in_pages = keys.unflatten(1, (pages, PAGE))
    for name, exact, sign in (("page_min", in_pages.amin(2), 1), ("page_max", in_pages.amax(2), -1)):
        slack = sign * (exact - metadata[name][0, :, :pages].double() * level)
        assert (slack >= 0).all()
        assert (slack < level).all()


def _check_codes(keys, metadata, method):
    tokens, pages = keys.shape[2], keys.shape[2] // PAGE
    held = {name: metadata[name][:, :, :tokens] for name in ("codes", "factors")}
    held |= {name: metadata[name][:, :, :pages] for name in ("centres", "centre_scale")}
    fresh = {name: torch.zeros_like(tensor) for name, tensor in held.items()}
    bounds = torch.tensor([0, tokens], dtype=torch.int32, device=DEVICE)
    encode_keys(
        keys,
        **fresh,
        coded=torch.zeros_like(metadata["coded"]),
        query_centre=metadata["query_centre"],
        seq_start=bounds[:1],
        seq_end=bounds[1:],
        page_size=PAGE,
        bits=method.bits,
        correction=method.correction,
        impl="reference",
    )
    for name, tensor in held.items():
        assert torch.equal(tensor, fresh[name]), name


def test_steps_choose_among_pages_of_generated_tokens(answered):
    _, cache, record, stats = answered
    layers = len(cache.layers)
    for row, padding in enumerate((0, PADDING)):
        first_page = -(-(PROMPT - padding) // PAGE)  # the first whose tokens were all generated
        last_page = (LENGTH - padding) // PAGE - 1
        chosen = torch.zeros(layers, 2, last_page + 1, PAGE, dtype=torch.bool, device=DEVICE)
        left_out = torch.zeros_like(chosen)
        for step in range(ANSWER - 1):
            for layer in range(layers):
                reads = record.reads(layer, step, row).to(DEVICE)
                older = (reads.shape[1] - 1) // PAGE  # pages before the newest, which is always read
                assert (reads.sum(1) <= BUDGET).all()
                earlier = reads[:, : older * PAGE].unflatten(1, (older, PAGE))
                chosen[layer, :, :older] |= earlier
                left_out[layer, :, :older] |= ~earlier
        generated = slice(first_page, last_page)  # the last full page may never have been an older one
        # Each such page was read from at some step, by some head of each layer, and was left out at others.
        assert chosen[:, :, generated].any(3).any(1).all()
        assert left_out[:, :, generated].any(3).any(1).all()
    assert stats.kv_fraction < 0.75


def test_most_of_what_the_last_steps_read_was_generated(answered):
    _, cache, record, _ = answered
    for layer in range(len(cache.layers)):
        for step in range(ANSWER - 20, ANSWER - 1):
            reads = record.reads(layer, step)
            older = reads[:, PROMPT : (reads.shape[1] - 1) // PAGE * PAGE]
            assert (older.sum(1) > BUDGET // 3).all()
