"""Questions about a prepared context: exact at a target sparsity of 0, over one copy of its keys and values."""

import copy

import pytest
import torch

from hf_sparse_attn import (
    Quest,
    SparseCache,
    prepare_context,
    record_selections,
    sparse_attention,
    sparse_attention_stats,
)
from hf_sparse_attn.patched import is_patched, patched_method
from tests.context.conftest import CONTEXT_TOKENS, SETTINGS
from tests.models import DEVICE, FAMILIES, POSITIONS, random_ids, shared_model

GREEDY = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0, "disable_compile": True}
two_levels = pytest.mark.parametrize("levels", [1, 2])
kinds_of_storage = pytest.mark.parametrize("max_cache_len", [None, 96], ids=["growing", "static"])


def questions(lengths=(14, 6, 9)):
    ids = random_ids(len(lengths), max(lengths), seed=7)
    mask = (torch.arange(max(lengths)) >= max(lengths) - torch.tensor(lengths)[:, None]).long().to(DEVICE)
    return {"input_ids": ids * mask, "attention_mask": mask}


def dense_answers(model, context_ids, asked, **options):
    """Answers of the unpatched model, row by row, to the context followed by a question."""
    answers = []
    for ids, mask in zip(asked["input_ids"], asked["attention_mask"], strict=True):
        prompt = torch.cat([context_ids[0], ids[mask == 1]])[None]
        answers.append(model.generate(prompt, **{**GREEDY, **options})[:, prompt.shape[1] :])
    return torch.cat(answers)


@two_levels
@kinds_of_storage
@torch.inference_mode()
def test_target_0_is_dense_token_for_token(levels, max_cache_len, model, context_ids, contexts):
    asked = questions()
    expected = dense_answers(model, context_ids, asked)
    context = contexts(0.0, levels)
    with sparse_attention(model, context.method):
        cache = context.cache(batch_size=3, max_cache_len=max_cache_len)
        answers = model.generate(**asked, past_key_values=cache, **GREEDY)[:, asked["input_ids"].shape[1] :]
        stats = sparse_attention_stats(model)
    assert torch.equal(answers, expected)
    assert stats.kv_bytes == stats.dense_bytes > 0
    lengths = CONTEXT_TOKENS + asked["attention_mask"].sum(1)
    steps = torch.arange(1, GREEDY["max_new_tokens"])  # the first token comes from the question's prefill
    heads = model.config.num_hidden_layers * model.config.num_key_value_heads
    assert stats.tokens_read == heads * int((lengths[:, None] + steps.to(DEVICE)).sum())


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "llama"])
@torch.inference_mode()
def test_target_0_is_dense_in_every_family(family):
    model, ids, asked = shared_model(family, torch.float64), random_ids(1, 150), questions((9, 5))
    expected = dense_answers(model, ids, asked)
    context = prepare_context(model, ids, target_sparsity=0, **SETTINGS)
    with sparse_attention(model, context.method):
        answers = model.generate(**asked, past_key_values=context.cache(), **GREEDY)[:, 9:]
    assert torch.equal(answers, expected)


@torch.inference_mode()
def test_beams_samples_and_single_tokens(model, context_ids, contexts):
    context, asked = contexts(0.0), questions((1,))
    beams = {"num_beams": 3, "num_return_sequences": 2}
    prompt = torch.cat([context_ids, asked["input_ids"]], dim=1)
    expected = model.generate(prompt, **beams, **GREEDY)[:, prompt.shape[1] :]
    with sparse_attention(model, context.method):
        found = model.generate(**asked, past_key_values=context.cache(), **beams, **GREEDY)[:, 1:]
    assert torch.equal(found, expected)


@kinds_of_storage
@torch.inference_mode()
def test_a_conversation_goes_on_and_goes_back(max_cache_len, model, context_ids, contexts):
    context, asked = contexts(0.0), questions((14,))
    first = dense_answers(model, context_ids, asked)
    with sparse_attention(model, context.method):
        cache = context.cache(max_cache_len=max_cache_len)
        turn = model.generate(**asked, past_key_values=cache, **GREEDY)
        assert torch.equal(turn[:, 14:], first)
        assert cache.get_seq_length() == 14 + 7
        whole = torch.cat([turn, random_ids(1, 11, seed=9)], dim=1)
        mask = torch.ones_like(whole)
        second = model.generate(whole, attention_mask=mask, past_key_values=cache, **GREEDY)[:, whole.shape[1] :]
        cache.crop(-cache.get_seq_length())
        again = model.generate(**asked, past_key_values=cache, **GREEDY)
        assert torch.equal(again, turn)
    assert torch.equal(second, dense_answers(model, context_ids, {"input_ids": whole, "attention_mask": mask}))


@two_levels
@pytest.mark.parametrize("chunk_size", [1, 2, 229, 100])  # of 230 tokens; 229 would leave a single one
@torch.inference_mode()
def test_a_context_in_chunks_is_that_of_one_pass(chunk_size, levels, model, context_ids):
    options = {**SETTINGS, "target_sparsity": 0.5, "levels": levels}
    whole = prepare_context(model, context_ids, **{**options, "chunk_size": CONTEXT_TOKENS})
    found = prepare_context(model, context_ids, **{**options, "chunk_size": chunk_size})
    for name in ("prefill", "decode"):
        torch.testing.assert_close(getattr(found.budget, name), getattr(whole.budget, name))
    for actual, expected in zip(found.queries, whole.queries, strict=True):
        torch.testing.assert_close(actual, expected)
    for actual, expected in zip(found.layers, whole.layers, strict=True):
        torch.testing.assert_close((actual.keys, actual.values), (expected.keys, expected.values))


@torch.inference_mode()
def test_caches_share_one_copy_of_the_context(model, contexts):
    context = contexts(0.5)
    with sparse_attention(model, context.method):
        for batch in (1, 3):
            cache = context.cache(batch_size=batch)
            model.generate(random_ids(batch, 5), past_key_values=cache, **GREEDY)
            for layer, part in zip(cache.layers, context.layers, strict=True):
                assert layer.prefix.keys.data_ptr() == part.keys.data_ptr()
                assert layer.prefix.keys.shape[0] == batch
                assert batch == 1 or layer.prefix.keys.stride(0) == 0
                assert layer.keys.shape[0] == batch
                assert layer.capacity < CONTEXT_TOKENS
            twin = copy.deepcopy(cache)
            assert twin.layers[0].prefix is cache.layers[0].prefix
            assert twin.layers[0].keys.data_ptr() != cache.layers[0].keys.data_ptr()


@two_levels
@kinds_of_storage
@torch.inference_mode()
def test_rows_of_a_batch_are_answered_as_alone(levels, max_cache_len, model, contexts):
    context, asked = contexts(0.7, levels), questions()
    with sparse_attention(model, context.method):
        together = model.generate(**asked, past_key_values=context.cache(3, max_cache_len), **GREEDY)[:, 14:]
        read = sparse_attention_stats(model)
        alone = 0
        for row, length in enumerate((14, 6, 9)):
            ids = asked["input_ids"][row : row + 1, -length:]
            answer = model.generate(ids, past_key_values=context.cache(), **GREEDY)[:, length:]
            assert torch.equal(answer[0], together[row])
            alone += sparse_attention_stats(model).tokens_read
    assert read.tokens_read == alone
    assert 0 < read.kv_bytes < 0.8 * read.dense_bytes
    assert read.metadata_bytes > 0


@two_levels
@torch.inference_mode()
def test_recorded_tokens_are_counted_ones_and_end_with_the_window(levels, model, contexts):
    context = contexts(0.7, levels)
    with sparse_attention(model, context.method), record_selections(model) as record:
        model.generate(random_ids(1, 9), past_key_values=context.cache(), **GREEDY)
        stats = sparse_attention_stats(model)
    reads = [record.reads(layer, step) for layer in record.layers for step in range(record.num_steps)]
    assert sum(int(read.sum()) for read in reads) == stats.tokens_read
    assert all(read[:, CONTEXT_TOKENS - 20 :].all() and read[:, :4].all() for read in reads)
    assert reads[0].shape[1] == CONTEXT_TOKENS + 9 + 1


@torch.inference_mode()
def test_the_budget_caps_what_a_head_reads(model, contexts, context_ids):
    context = prepare_context(model, context_ids, target_sparsity=0.2, token_budget=60, **SETTINGS)
    with sparse_attention(model, context.method), record_selections(model) as record:
        model.generate(random_ids(1, 9), past_key_values=context.cache(), **GREEDY)
    for layer in record.layers:
        for step in range(record.num_steps):
            assert (record.reads(layer, step).sum(1) <= 60).all()


@torch.inference_mode()
def test_the_realised_budget_stands_beside_the_target(contexts):
    for target in (0.0, 0.5, 0.9):
        for levels in (1, 2):
            budget = contexts(target, levels).budget
            assert budget.target_sparsity == target
            assert budget.prefill.shape == budget.decode.shape == (4, 2)
            always = (SETTINGS["window"] + 4) / CONTEXT_TOKENS
            expected = always + (1 - always) * (1 - target)
            assert abs(budget.prefill.mean() - expected) < 0.03  # the threshold falls between clusters


def test_another_target_keeps_the_clusters(contexts):
    context, other = contexts(0.5), contexts(0.9)
    retargeted = context.retarget(0.9)
    assert retargeted.method == other.method
    for layer, expected in zip(retargeted.layers, other.layers, strict=True):
        assert torch.equal(layer.metadata["threshold"], expected.metadata["threshold"])
    assert retargeted.layers[0].keys is context.layers[0].keys
    with pytest.raises(ValueError, match=r"target_sparsity must be at least 0 and below 1, got 1.0"):
        context.retarget(1.0)


@pytest.mark.parametrize("before", [None, "quest"])
def test_preparing_leaves_the_model_as_it_was(before, context_ids):
    model = shared_model("llama", torch.float64)
    patched = sparse_attention(model, before) if before else sparse_attention(model, "full")
    with patched:
        method = patched_method(model)
        prepare_context(model, context_ids, **SETTINGS)
        assert patched_method(model) == method
    assert not is_patched(model)


@torch.inference_mode()
def test_only_a_model_patched_with_the_method_reads_a_context(model, contexts):
    context = contexts(0.5)
    with pytest.raises(ValueError, match="only a model patched with 'squeezed' reads"):
        model.generate(random_ids(1, 5), past_key_values=context.cache(), **GREEDY)
    with (
        sparse_attention(model, "squeezed", target_sparsity=0.8),
        pytest.raises(ValueError, match="past_key_values was created for Squeezed"),
    ):
        model.generate(random_ids(1, 5), past_key_values=context.cache(), **GREEDY)
    with pytest.raises(ValueError, match="cannot read the prefix of a cache of"):
        context.cache().fork("quest")
    with pytest.raises(ValueError, match="method 'quest' does not read a prefix"):
        SparseCache(model.config, "quest", prefix=context.layers)
    with pytest.raises(ValueError, match=r"batch_size must be at least 1 or None, got 0"):
        context.cache(batch_size=0)


@torch.inference_mode()
def test_a_prompt_that_repeats_the_context_is_refused(model, contexts, context_ids):
    context = contexts(0.5)
    prompt = torch.cat([context_ids, random_ids(1, 5)], dim=1)
    with sparse_attention(model, context.method):
        cache = context.cache()
        with pytest.raises(ValueError, match=rf"repeat the {CONTEXT_TOKENS} tokens .* the question alone"):
            model.generate(prompt, past_key_values=cache, **GREEDY)
        assert cache.get_seq_length() == 0
        model.generate(prompt.flip(1), past_key_values=cache, **GREEDY)  # as long, but other tokens
        assert cache.get_seq_length() == CONTEXT_TOKENS + 5 + GREEDY["max_new_tokens"] - 1


@pytest.mark.parametrize("chunk_size", [7, 50, CONTEXT_TOKENS - 1, CONTEXT_TOKENS])
@torch.inference_mode()
def test_a_prompt_in_chunks_that_repeats_the_context_is_refused(chunk_size, model, contexts, context_ids):
    context, question = contexts(0.5), random_ids(1, 5)
    prompt = torch.cat([context_ids, question], dim=1)
    chunks = {"prefill_chunk_size": chunk_size, **GREEDY}
    with sparse_attention(model, context.method):
        expected = model.generate(question, past_key_values=context.cache(), **GREEDY)
        cache = context.cache()
        with pytest.raises(ValueError, match=rf"repeat the {CONTEXT_TOKENS} tokens .* the question alone"):
            model.generate(prompt, past_key_values=cache, **chunks)
        assert cache.get_seq_length() == 0
        assert torch.equal(model.generate(question, past_key_values=cache, **GREEDY), expected)
        cache = context.cache()
        model.generate(prompt.flip(1), past_key_values=cache, **chunks)  # as long, but other tokens


@torch.inference_mode()
def test_padding_after_a_token_and_too_long_questions_are_refused(model, contexts):
    context, asked = contexts(0.5), questions((5, 4))
    asked["attention_mask"][1, -1] = 0
    with sparse_attention(model, context.method):
        with pytest.raises(ValueError, match="padding after a token"):
            model(**asked, past_key_values=context.cache())
        too_long = random_ids(1, POSITIONS - CONTEXT_TOKENS + 1, seed=3)
        with pytest.raises(ValueError, match=rf"the prompt has {POSITIONS + 1} tokens, but the model has {POSITIONS}"):
            model(too_long, past_key_values=context.cache())


@pytest.mark.parametrize(
    ("ids", "options", "message"),
    [
        (torch.arange(2, 26), {}, r"more than sink_tokens \+ window = 24 tokens.*got 24"),
        (torch.ones(2, 50, dtype=torch.long), {}, r"\[tokens\] or \[1, tokens\], got shape \(2, 50\)"),
        (torch.arange(2, 90), {"target_sparsity": 1.0}, "target_sparsity must be at least 0 and below 1, got 1.0"),
        (torch.arange(2, 90), {"target_sparsity": -0.1}, "target_sparsity must be at least 0 and below 1, got -0.1"),
        (torch.arange(2, 90), {"clusters": 1.5}, "no more clusters than keys, got 1.5"),
        (torch.arange(2, 90), {"coarse_clusters": 0.5}, "at most clusters=0.1, got 0.5"),
        (torch.arange(2, 90), {"levels": 3}, "levels must be 1 or 2, got 3"),
        (torch.arange(2, 90), {"chunk_size": 0}, "chunk_size must be at least 1, got 0"),
    ],
)
def test_bad_contexts_are_refused(ids, options, message, model):
    with pytest.raises(ValueError, match=message):
        prepare_context(model, ids, **{**SETTINGS, **options})


def test_other_types_are_refused(model):
    with pytest.raises(TypeError, match="input_ids must be whole numbers"):
        prepare_context(model, torch.rand(1, 50), **SETTINGS)
    with pytest.raises(TypeError, match="input_ids must be whole numbers, got str"):
        prepare_context(model, "Call me Ishmael.", **SETTINGS)
    for other in (None, "llama"):
        with pytest.raises(TypeError, match="model must be a Transformers model"):
            prepare_context(other, torch.arange(50), **SETTINGS)
    with pytest.raises(TypeError, match="method must be a Squeezed"):
        prepare_context(model, torch.arange(50), Quest(), progress=False)
