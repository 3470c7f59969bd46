"""Passkey and needle in natural text, and PG19: contents of their samples, and the perplexity."""

import math

import pytest
import torch

from eval import metrics
from eval.benchmarks import Setup
from eval.benchmarks.haystack import split_sentences
from eval.benchmarks.needle import MAX_NEW_TOKENS, Needle
from eval.benchmarks.passkey import PasskeyRetrieval
from eval.benchmarks.pg19 import PG19
from eval.config import make_config
from eval.engine import Engine, make_variants
from eval.errors import EvalError
from hf_sparse_attn.cli.models import load_model
from tests.eval.tokenizers import tiny_tokenizer


def setup(data_dir, **values):
    settings = {"tokenizer": tiny_tokenizer(), "max_positions": 4000, "data_dir": data_dir, "lengths": (1000,)}
    return Setup(**{**settings, **values})


def test_sentences_end_where_punctuation_and_a_capital_say():
    text = 'It rained. "Go!" he said.\n\nShe went on (slowly). Was it 3.5 miles? No,\nfour.'
    assert split_sentences(text) == [
        "It rained.",
        '"Go!" he said.',
        "She went on (slowly).",
        "Was it 3.5 miles?",
        "No, four.",
    ]


@pytest.mark.parametrize("task", ["filler", "book"])
def test_passkey_is_at_its_depth(data_dir, task):
    tokenizer = tiny_tokenizer()
    for item in PasskeyRetrieval().items(setup(data_dir, tasks=(task,))):
        sample = item.build()
        text = tokenizer.decode(sample.material_ids)
        assert len(sample.material_ids) == item.length == 1000
        assert text.count(sample.references) == 2
        place = len(tokenizer(text[: text.index(sample.references)], add_special_tokens=False)["input_ids"])
        assert abs(place / 1000 - item.depth) < 0.08
        assert item.build() == sample


def test_book_haystacks_differ_between_samples_and_seeds(data_dir):
    first, second = (item.build() for item in PasskeyRetrieval().items(setup(data_dir, tasks=("book",)))[:2])
    (other, *_) = (item.build() for item in PasskeyRetrieval().items(setup(data_dir, tasks=("book",), seed=1)))
    assert first.references != second.references
    assert len({tuple(sample.material_ids[50:90]) for sample in (first, second, other)}) == 3


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("length", [700, 1501])
def test_needle_fills_its_length_and_is_at_its_depth(data_dir, length, chat):
    tokenizer = tiny_tokenizer(chat)
    items = Needle().items(setup(data_dir, tasks=("essay", "book"), lengths=(length,), tokenizer=tokenizer, chat=chat))
    assert [item.depth for item in items] == [0.0, 0.25, 0.5, 0.75, 1.0] * 2
    for item in items:
        sample = item.build()
        used = len(sample.material_ids) + len(sample.question_ids) + MAX_NEW_TOKENS
        assert length - 60 < used <= length
        text = tokenizer.decode([*sample.material_ids, *sample.question_ids])
        hay_start = text.index("asked for it.")
        needle, question = text.index("The best thing to carry"), text.rindex("What is the best thing")
        assert abs((needle - hay_start) / (question - hay_start) - item.depth) < 0.2
        assert sample.references in text
        question_text = tokenizer.decode(sample.question_ids)
        assert "What is the best thing" in question_text
        assert sample.references not in question_text
        assert metrics.score("needle", item.task, sample.references, sample.references) == 1.0
        assert metrics.score("needle", item.task, "nothing of the kind", sample.references) == 0.0


def test_pg19_scores_the_tokens_after_the_material(data_dir):
    options = {"scored": 100}
    (item,) = PG19().items(setup(data_dir, lengths=(700,), options=options))
    sample = item.build()
    assert len(sample.material_ids) + len(sample.question_ids) + len(sample.forced_ids) == 700
    assert len(sample.forced_ids) == 100
    expected = tiny_tokenizer()((data_dir / "book.txt").read_text())["input_ids"][:700]
    assert [*sample.material_ids, *sample.question_ids, *sample.forced_ids] == expected


@pytest.mark.parametrize("chunk", [1, 7])
def test_perplexity_is_that_of_one_full_forward_pass(model_dir, data_dir, chunk):
    model, tokenizer = load_model(model_dir, torch.float32, "cpu")
    (item,) = PG19().items(
        setup(data_dir, tokenizer=tokenizer, lengths=(500,), options={"scored": 130, "chunk": chunk})
    )
    sample = item.build()
    config = make_config({"benchmark": "pg19", "model": "tiny", "method": "quest", "token_budget": 480})
    variants = make_variants(config)[: 2 if chunk == 1 else 1]
    results = [measured for _, _, measured in Engine(model, tokenizer, config).run([(sample, variants)])]
    ids = torch.tensor([[*sample.material_ids, *sample.question_ids, *sample.forced_ids]])
    with torch.inference_mode():
        losses = torch.nn.functional.cross_entropy(
            model(ids).logits[0, -131:-1].double(), ids[0, -130:], reduction="none"
        )
    for measured in results:
        # Quest at 480 of 500 tokens is close, not exact; dense is exact up to rounding.
        tolerance = 1e-5 if measured["kv_fraction"] in (1.0, None) else 0.05
        assert math.isclose(measured["perplexity"], losses.mean().exp().item(), rel_tol=tolerance)
        assert [position for position, _ in measured["nll_by_position"]] == [370, 434, 498]
        assert math.isclose(measured["nll_by_position"][0][1], losses[:64].mean().item(), rel_tol=tolerance)
    if chunk == 1:
        dense, quest = results
        assert dense["kv_bytes"] == dense["dense_bytes"] == quest["dense_bytes"] > quest["kv_bytes"]


def test_book_that_is_too_short_is_that_samples_error(data_dir):
    (item,) = PG19().items(setup(data_dir, lengths=(100_000,), max_positions=200_000))
    with pytest.raises(EvalError, match=r"book 'book' has \d+ tokens, fewer than length=100000"):
        item.build()
