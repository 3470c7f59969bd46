"""Compare our greedy loop with Transformers' ``generate()``."""

import math

import pytest
import torch
from transformers import DynamicCache

from hf_sparse_attn.cli.greedy import answer, end_of_sequence_ids, log_likelihoods, prefill
from tests.models import random_ids, shared_model
from tests.tiny import make_tokenizer

PROMPT = random_ids(1, 60)


def answered(max_new_tokens, question_tokens=5, **options):
    model = shared_model("llama")
    cache = DynamicCache(config=model.config)
    ids = PROMPT[0].tolist()
    prefill(model, cache, ids[:-question_tokens])
    return answer(model, cache, ids[-question_tokens:], max_new_tokens, **options)


def generated(**options):
    model = shared_model("llama")
    output = model.generate(PROMPT, do_sample=False, pad_token_id=0, **options)
    return output[0, PROMPT.shape[1] :].tolist()


@pytest.mark.parametrize("token_by_token", [True, False])
@pytest.mark.parametrize("question_tokens", [1, 5])
def test_answer_equals_generate(token_by_token, question_tokens):
    given = answered(12, question_tokens, token_by_token=token_by_token)
    assert list(given.token_ids) == generated(max_new_tokens=12, eos_token_id=None)
    assert given.question_steps == (question_tokens if token_by_token else 1)
    assert given.decode_steps == 11


@pytest.mark.parametrize("min_new_tokens", [0, 1, 4])
def test_answer_stops_where_generate_stops(min_new_tokens):
    free = generated(max_new_tokens=12, eos_token_id=None)
    stops = {free[0], free[5]}
    expected = generated(max_new_tokens=12, min_new_tokens=min_new_tokens, eos_token_id=sorted(stops))
    if expected and expected[-1] in stops:
        expected.pop()
    given = answered(12, stop_ids=stops, min_new_tokens=min_new_tokens)
    assert list(given.token_ids) == expected
    assert len(expected) >= min_new_tokens
    assert given.decode_steps == (len(expected) if len(expected) < 12 else 11)


@pytest.mark.parametrize(("question_tokens", "max_new_tokens", "message"), [(5, 0, "max_new_tokens=0"), (60, 3, None)])
def test_bad_input_is_named_and_an_empty_material_is_fine(question_tokens, max_new_tokens, message):
    if message is None:
        assert list(answered(3, question_tokens).token_ids) == generated(max_new_tokens=3, eos_token_id=None)
        return
    with pytest.raises(ValueError, match=message):
        answered(max_new_tokens, question_tokens)
    with pytest.raises(ValueError, match="question_ids is empty"):
        answer(shared_model("llama"), DynamicCache(), [], 3)


@pytest.mark.parametrize("chunk", [1, 4, 100])
@torch.inference_mode()
def test_log_likelihoods_are_those_of_one_pass(chunk):
    model = shared_model("llama")
    ids = PROMPT[0].tolist()
    cache = DynamicCache(config=model.config)
    prefill(model, cache, ids[:40])
    found = list(log_likelihoods(model, cache, ids[40:], chunk))
    expected = model(PROMPT).logits[0, 40:-1].log_softmax(-1).gather(1, PROMPT[0, 41:, None])[:, 0].tolist()
    assert len(found) == 19
    assert all(math.isclose(a, b, abs_tol=1e-4) for a, b in zip(found, expected, strict=True))


def test_end_of_sequence_is_the_generation_configs():
    model, tokenizer = shared_model("llama"), make_tokenizer()
    assert end_of_sequence_ids(model, tokenizer) == set()
    before = model.generation_config.eos_token_id
    try:
        model.generation_config.eos_token_id = [3, 4]
        assert end_of_sequence_ids(model, tokenizer) == {3, 4}
        model.generation_config.eos_token_id = 5
        assert end_of_sequence_ids(model, tokenizer) == {5}
    finally:
        model.generation_config.eos_token_id = before
