"""Prompts in chunks of ``generate()``: tokens and counts are those of one pass, whatever the last chunk would hold."""

import copy
import itertools

import pytest
import torch
from transformers import GenerationConfig

from hf_sparse_attn import SparseCache, sparse_attention, sparse_attention_stats
from hf_sparse_attn.patch.chunked import without_single_token
from tests.models import SPARSE, random_ids

pytestmark = pytest.mark.usefixtures("exact")

GREEDY = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0, "disable_compile": True}
PROMPT_TOKENS = 91
CHUNKS = [1, 2, 30, 90]
"""All leave a single token of the prompt for the last chunk."""
OWN_CHUNK = 32
each_method = pytest.mark.parametrize("method_name", ["quest", "squeezed", "snapkv", "psa"])


def small(method_name):
    return {"token_budget": 40, **SPARSE.get(method_name, {})}


def counts(model):
    stats = sparse_attention_stats(model)
    return stats.decode_steps, stats.kv_fraction


def padded(lengths):
    ids = random_ids(len(lengths), max(lengths))
    mask = torch.stack([torch.arange(max(lengths)) >= max(lengths) - length for length in lengths]).to(ids)
    return {"input_ids": ids * mask, "attention_mask": mask}


def check_chunks(model, method_name, prompt, max_cache_len, chunk):
    with sparse_attention(model, method_name, **small(method_name)):
        expected = model.generate(**prompt, **GREEDY, past_key_values=SparseCache.for_model(model, max_cache_len))
        expected_counts = counts(model)
        cache = SparseCache.for_model(model, max_cache_len)
        found = model.generate(**prompt, **GREEDY, past_key_values=cache, prefill_chunk_size=chunk)
        assert torch.equal(found, expected)
        assert counts(model) == expected_counts
    assert expected_counts[0] == GREEDY["max_new_tokens"] - 1
    assert expected_counts[1] < 1


@each_method
@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("lengths", [(PROMPT_TOKENS,), (PROMPT_TOKENS, 9)], ids=["one row", "padded"])
@torch.inference_mode()
def test_a_prompt_in_chunks_is_that_of_one_pass(lengths, chunk, method_name, model):
    check_chunks(model, method_name, padded(lengths), None, chunk)


@each_method
@pytest.mark.parametrize("chunk", [1, 13, 30])
@torch.inference_mode()
def test_padded_prompts_in_chunks_over_static_caches(chunk, method_name, model):
    check_chunks(model, method_name, padded((PROMPT_TOKENS, 9)), 192, chunk)


@torch.inference_mode()
def test_a_prompt_that_broke_off_between_chunks_is_finished_with_what_follows(model, monkeypatch):
    """The cache of a call that ended after its first chunk serves as one that was given that chunk alone."""
    prompt, rest = random_ids(1, 60), random_ids(1, 31, seed=1)
    with sparse_attention(model, "squeezed", **small("squeezed")):
        expected_cache, cache = (SparseCache.for_model(model, 192) for _ in range(2))
        model(prompt, past_key_values=expected_cache)
        expected_cache.reopen_prompt()
        forward = model.forward

        def once(*arguments, **options):
            monkeypatch.setattr(model, "forward", fail)
            return forward(*arguments, **options)

        def fail(*arguments, **options):
            raise KeyboardInterrupt

        monkeypatch.setattr(model, "forward", once)
        text = torch.cat([prompt, rest], dim=1)
        with pytest.raises(KeyboardInterrupt):
            model.generate(text, past_key_values=cache, **GREEDY, prefill_chunk_size=60)
        monkeypatch.undo()
        assert cache.get_seq_length() == 60
        answers = []
        for each in (expected_cache, cache):
            each.complete_prompt()
            answers.append(model.generate(text, past_key_values=each, **GREEDY))
        assert torch.equal(*answers)


@pytest.mark.parametrize("method_name", ["quest", "snapkv"])
@pytest.mark.parametrize("chunk", [3, 4, 21, 24])
@pytest.mark.parametrize("max_cache_len", [None, 128], ids=["growing", "static"])
@torch.inference_mode()
def test_chunks_neither_end_nor_shrink_to_one_token_in_a_hole(max_cache_len, chunk, method_name, model):
    """``generate()`` hides padding tokens in the text itself, and none of them is cached."""
    ids = random_ids(1, 60)
    ids[:, 20:25] = ids[:, 40:43] = GREEDY["pad_token_id"]
    check_chunks(model, method_name, {"input_ids": ids}, max_cache_len, chunk)


@pytest.mark.parametrize("emptied", [lambda cache: cache.reset(), lambda cache: cache.crop(-cache.get_seq_length())])
@torch.inference_mode()
def test_a_later_prompt_ends_with_its_own_pass(emptied, model):
    with sparse_attention(model, "quest", **small("quest")):
        cache = SparseCache.for_model(model, 192)
        model.generate(random_ids(1, 91), past_key_values=cache, **GREEDY, prefill_chunk_size=30)
        emptied(cache)
        model(random_ids(1, 24), past_key_values=cache)
        assert not cache.shared.prompt_is_open


# Squeezed chooses anew for each chunk of a question. A chunk of 18 grows to all 19 new tokens.
@pytest.mark.parametrize(
    ("method_name", "chunk"), [*itertools.product(("quest", "snapkv", "psa"), (1, 6, 18)), ("squeezed", 18)]
)
@pytest.mark.parametrize("gives_all", [True, False], ids=["whole text", "new tokens"])
@torch.inference_mode()
def test_only_new_tokens_count_over_a_kept_cache(chunk, gives_all, method_name, model):
    first, more = random_ids(1, 70), random_ids(1, 18, seed=1)

    def turns(**options):
        cache = SparseCache.for_model(model)
        text = torch.cat([model.generate(first, past_key_values=cache, **GREEDY), more], dim=1)
        new = text.shape[1] - cache.get_seq_length()
        assert new == 19
        options |= {"attention_mask": torch.ones_like(text), "past_key_values": cache}
        ids = text if gives_all else text[:, -new:]
        return model.generate(ids, **GREEDY, **options)[:, ids.shape[1] :], counts(model)

    with sparse_attention(model, method_name, **small(method_name)):
        expected, expected_counts = turns()
        found, found_counts = turns(prefill_chunk_size=chunk)
    assert torch.equal(found, expected)
    assert found_counts == expected_counts
    assert expected_counts[0] == 2 * (GREEDY["max_new_tokens"] - 1)


@pytest.mark.parametrize("method_name", ["tokenselect", "infllm", "self_extend"])
@pytest.mark.parametrize("chunks", [1, 2, 3])
@torch.inference_mode()
def test_a_method_s_own_chunks_stay_where_they_are(chunks, method_name, model):
    ids = random_ids(1, 6 * OWN_CHUNK + 1)
    method = {**SPARSE.get(method_name, {}), "chunk_size": OWN_CHUNK}
    if method_name != "self_extend":
        method["token_budget"] = 40
    with sparse_attention(model, method_name, **method):
        expected, expected_counts = model.generate(ids, **GREEDY), counts(model)
        found = model.generate(ids, **GREEDY, prefill_chunk_size=chunks * OWN_CHUNK)
        assert torch.equal(found, expected)
        assert counts(model) == expected_counts


@torch.inference_mode()
def test_the_given_configuration_stays(model):
    given = GenerationConfig(**GREEDY, prefill_chunk_size=90)
    former, ids = copy.deepcopy(given), random_ids(1, PROMPT_TOKENS)
    with sparse_attention(model, "quest", **small("quest")):
        model.generate(ids, generation_config=given)
    assert given == former
    assert given.prefill_chunk_size == 90


def test_chunks_grow_only_where_a_single_token_would_be_left():
    for tokens in range(1, 60):
        for chunk in range(1, 70):
            grown = without_single_token(chunk, tokens)
            sizes = [len(part) for part in torch.arange(tokens).split(grown)]
            assert 1 not in sizes or tokens == 1
            for smaller in range(chunk, grown):
                assert 1 in [len(part) for part in torch.arange(tokens).split(smaller)]
    assert without_single_token(32, 193, step=32) == 128
    assert without_single_token(0, 9) == 0  # left to Transformers, which refuses it
