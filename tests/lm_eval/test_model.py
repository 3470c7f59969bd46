"""Compare hf-sparse with lm_eval's hf at full budget, and with single sequences at small budgets."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from hf_sparse_attn import SparseCache
from hf_sparse_attn.cli.greedy import log_likelihoods, prefill
from hf_sparse_attn.lm_eval.arguments import Scheme
from hf_sparse_attn.lm_eval.model import HFSparseLM
from tests.tiny import save_model

METHODS: dict[str, dict[str, Any]] = {
    "full": {},
    "quest": {"token_budget": 512, "page_size": 8, "dense_layers": 1},
    "tokenselect": {"k": 512, "n_init": 16, "n_local": 16},
}
SMALL = {"method": "quest", "token_budget": 24, "page_size": 4, "sink_tokens": 4, "dense_layers": 1}
LOADING = {"dtype": "float64", "device": "cpu", "batch_size": 3}
WORDS = ["The", "sea", "is", "calm", "wind", "low", "day", "long", "We", "sail", "on", "Out", "home"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_model(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def dense(folder: str) -> HFLM:
    return HFLM(folder, **LOADING)


def text(words: int, seed: int = 0) -> str:
    return " ".join(random.Random(seed).choices(WORDS, k=words))


def requests(kind: str, arguments: list[tuple[Any, ...]], task: str = "task") -> list[Instance]:
    return [Instance(kind, {}, each, index, metadata=(task, index, 1)) for index, each in enumerate(arguments)]


def choices() -> list[Instance]:
    """Contexts of several lengths, including an empty one, with answers that share their first tokens."""
    contexts = ["", "We", text(9), text(20, 1), text(30, 2)]
    answers = (" a", " b", " sail", " the wind is low", " home again")
    return requests("loglikelihood", [(context, answer) for context in contexts for answer in answers])


def prompts(longest: int = 40) -> list[Instance]:
    generation = {"until": ["x", "e "], "max_gen_toks": 12, "do_sample": False}
    return requests("generate_until", [(text(words, words), generation) for words in (3, 25, longest, 8)])


def assert_same_scores(found: list[tuple[float, bool]], expected: list[tuple[float, bool]]) -> None:
    torch.testing.assert_close([score for score, _ in found], [score for score, _ in expected], rtol=0, atol=1e-9)
    assert [is_greedy for _, is_greedy in found] == [is_greedy for _, is_greedy in expected]


@pytest.mark.parametrize("method", METHODS)
def test_scores_are_dense_attentions_where_the_budget_covers_all(folder: str, dense: HFLM, method: str) -> None:
    sparse = HFSparseLM(folder, method=method, **METHODS[method], **LOADING)
    assert_same_scores(sparse.loglikelihood(choices()), dense.loglikelihood(choices()))
    assert sparse.get_model_info()["kv_fraction"] == 1


def test_greedy_continuations_are_recognized(folder: str, dense: HFLM) -> None:
    context = dense.tok_encode(text(30))
    prompt = torch.tensor([context])
    *_, one, two, three = dense.model.generate(prompt, attention_mask=prompt > -1, max_new_tokens=3).tolist()[0]
    other = (three + 1) % len(dense.tokenizer)
    continuations = [[one, two, three], [one, two, other], [one, other, three], [one], [other]]
    pairs = [((str(tokens), ""), context, tokens) for tokens in continuations]
    found = HFSparseLM(folder, **LOADING, **METHODS["quest"])._loglikelihood_tokens(pairs)
    assert_same_scores(found, dense._loglikelihood_tokens(pairs))
    assert [is_greedy for _, is_greedy in found] == [True, False, False, True, False]


def test_contexts_are_cut_to_max_length_as_by_hf(folder: str) -> None:
    pairs = requests("loglikelihood", [(text(60), " sail on"), (text(20), " sail on"), (text(60), " home")])
    found = HFSparseLM(folder, **LOADING, max_length=64).loglikelihood(pairs)
    assert_same_scores(found, HFLM(folder, **LOADING, max_length=64).loglikelihood(pairs))


@pytest.mark.parametrize("rolling_prefill", [0, 1, 20, 1000])
def test_rolling_scores_are_dense_attentions(folder: str, rolling_prefill: int) -> None:
    texts = requests("loglikelihood_rolling", [(text(12),), (text(40, 1),), (text(3, 2),)])
    sparse = HFSparseLM(folder, rolling_prefill=rolling_prefill, **METHODS["quest"], **LOADING, max_length=48)
    expected = HFLM(folder, **LOADING, max_length=48).loglikelihood_rolling(texts)
    torch.testing.assert_close(sparse.loglikelihood_rolling(texts), expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("decode_last", [0, 1, 5, 1000])
def test_generated_text_is_dense_attentions(folder: str, dense: HFLM, decode_last: int) -> None:
    sparse = HFSparseLM(folder, decode_last=decode_last, **METHODS["quest"], **LOADING)
    assert sparse.generate_until(prompts()) == dense.generate_until(prompts())
    assert sparse.get_model_info()["decode_steps"] > decode_last % 1000


@pytest.mark.parametrize("decode_last", [0, 7])
def test_scores_under_a_small_budget_are_those_of_single_sequences(folder: str, dense: HFLM, decode_last: int) -> None:
    sparse = HFSparseLM(folder, decode_last=decode_last, **SMALL, **LOADING)
    expected = []
    for request in choices():
        context, continuation = map(sparse.tok_encode, request.args)
        context = context or [sparse.prefix_token_id]
        prefilled = max(len(context) - max(1, decode_last), 0)
        cache = SparseCache.for_model(sparse.model)
        prefill(sparse.model, cache, context[:prefilled])
        scores = list(log_likelihoods(sparse.model, cache, context[prefilled:] + continuation))
        expected.append(sum(scores[-len(continuation) :]))
    found = [score for score, _ in sparse.loglikelihood(choices())]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)  # the reference's softmax is in float32
    dense_scores = [score for score, _ in dense.loglikelihood(choices())]
    assert max(abs(ours - theirs) for ours, theirs in zip(found, dense_scores, strict=True)) > 1e-2


def test_decoding_the_end_of_the_prompt_reads_less(folder: str) -> None:
    found = {}
    for decode_last in (0, 30):
        sparse = HFSparseLM(folder, decode_last=decode_last, **SMALL, **LOADING)
        sparse.generate_until(prompts())
        found[decode_last] = sparse.get_model_info()
    assert found[30]["decode_steps"] > found[0]["decode_steps"]
    assert found[30]["dense_bytes"] > found[0]["dense_bytes"]
    assert found[30]["kv_fraction"] < 1


@pytest.mark.parametrize("batch_size", [1, "auto"])
def test_results_do_not_depend_on_the_batch_size(folder: str, batch_size: int | str) -> None:
    some = HFSparseLM(folder, **SMALL, **{**LOADING, "batch_size": batch_size}, max_batch_size=4, max_length=200)
    others = HFSparseLM(folder, **SMALL, **{**LOADING, "batch_size": 8}, max_length=200)
    assert_same_scores(some.loglikelihood(choices()), others.loglikelihood(choices()))
    assert some.generate_until(prompts(20)) == others.generate_until(prompts(20))


def test_reads_are_counted_by_task(folder: str) -> None:
    sparse = HFSparseLM(folder, **SMALL, **LOADING)
    mixed = requests("loglikelihood", [(text(50, seed), " sail on") for seed in range(4)], "long")
    alone = HFSparseLM(folder, **SMALL, **LOADING).loglikelihood(mixed)
    found = sparse.loglikelihood([mixed[0], *requests("loglikelihood", [("We", " sail on")], "short"), *mixed[1:]])
    assert_same_scores([found[0], *found[2:]], alone)
    info = sparse.get_model_info()
    assert info["kv_fraction_by_task"]["long"] < info["kv_fraction"] < info["kv_fraction_by_task"]["short"] == 1
    assert info["kv_fraction"] == (info["kv_bytes"] + info["metadata_bytes"]) / info["dense_bytes"]
    assert info["sparse_attention"].items() >= {"method": "quest", "page_size": 4, "decode_last": 0}.items()


def test_nothing_decoded_has_no_fraction(folder: str) -> None:
    assert HFSparseLM(folder, **LOADING).get_model_info()["kv_fraction"] is None


def test_reads_of_several_processes_are_summed(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    alone, first, second = (HFSparseLM(folder, **SMALL, **LOADING) for _ in range(3))
    monkeypatch.setattr(first, "_world_size", 2)
    monkeypatch.setattr(first, "gather_object", lambda own: [own, own])
    monkeypatch.setattr(second, "gather_object", lambda own: None)
    for model in (alone, first, second):
        model.loglikelihood(choices())
    assert first.get_model_info()["dense_bytes"] == 2 * alone.get_model_info()["dense_bytes"] > 0
    assert first.get_model_info()["kv_fraction_by_task"] == {}
    assert second.reads_by_task == {}


def test_one_prefill_serves_the_choices_of_a_context(folder: str) -> None:
    sparse = HFSparseLM(folder, **SMALL, **{**LOADING, "batch_size": 4})
    fed = []
    sparse.model.register_forward_pre_hook(
        lambda _, args, kwargs: fed.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    context = text(20)
    sparse.loglikelihood(requests("loglikelihood", [(context, f" {letter} on") for letter in "abcd"]))
    prefilled, *steps = fed
    assert prefilled == (1, len(sparse.tok_encode(context)) - 1)
    assert set(steps) == {(4, 1)}
    fed.clear()
    sparse.loglikelihood(requests("loglikelihood", [(context, letter) for letter in "abcd"]))
    assert fed == [prefilled, (1, 1)]  # all letters share the tokens that predict them


@pytest.mark.parametrize(
    ("scheme", "context", "inputs", "is_rolling", "prefilled"),
    [
        (Scheme(), 10, 14, False, 9),
        (Scheme(), 1, 5, False, 0),
        (Scheme(decode_last=4), 10, 14, False, 6),
        (Scheme(decode_last=40), 10, 14, False, 0),
        (Scheme(rolling_prefill=12), 10, 14, False, 9),
        (Scheme(rolling_prefill=12), 1, 14, True, 12),
        (Scheme(rolling_prefill=12), 1, 8, True, 7),
        (Scheme(rolling_prefill=3), 10, 14, True, 9),
    ],
)
def test_prefilled_tokens(scheme: Scheme, context: int, inputs: int, is_rolling: bool, prefilled: int) -> None:
    assert scheme.prefill(context, inputs, is_rolling) == prefilled


def test_a_model_object_is_patched_in_place(folder: str, dense: HFLM) -> None:
    stock = HFLM(folder, **LOADING)
    sparse = HFSparseLM(stock.model, tokenizer=stock.tokenizer, batch_size=3, **METHODS["quest"])
    assert_same_scores(sparse.loglikelihood(choices()), dense.loglikelihood(choices()))


def test_lora_goes_through(folder: str, tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    get_peft_model(AutoModelForCausalLM.from_pretrained(folder), LoraConfig(init_lora_weights=False)).save_pretrained(
        tmp_path
    )
    options = {**LOADING, "peft": str(tmp_path)}
    found = HFSparseLM(folder, **METHODS["quest"], **options).loglikelihood(choices())
    assert_same_scores(found, HFLM(folder, **options).loglikelihood(choices()))
