"""record_selections records the reads of decode steps and leaves no trace."""

import pytest
import torch

from hf_sparse_attn import (
    Quest,
    SelectionRecord,
    SparseCache,
    patch_model,
    record_selections,
    sparse_attention,
    sparse_attention_stats,
    unpatch_model,
)
from hf_sparse_attn.methods.base import Selection
from hf_sparse_attn.patched import get_patch
from tests.layers import make_layer
from tests.models import METHOD_CLASSES, SPARSE, make_model, random_ids, shared_model

GREEDY = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
STEPS = GREEDY["max_new_tokens"] - 1  # the prefill yields the first token
SMALL = Quest(token_budget=48, dense_layers=1)
LAYERS, KV_HEADS = 4, 2


def padded_prompt(length=150, padding=37):
    ids = random_ids(2, length)
    mask = torch.ones_like(ids)
    ids[1, :padding], mask[1, :padding] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


def recorded(model, prompt, **options):
    with record_selections(model) as record:
        model.generate(**prompt, **{**GREEDY, **options})
    return record


@pytest.mark.parametrize("max_cache_len", [None, 256], ids=["growing", "static"])
@pytest.mark.parametrize("name", METHOD_CLASSES)
def test_as_many_tokens_are_recorded_as_the_statistics_count(name, max_cache_len):
    model = shared_model("llama")
    with sparse_attention(model, METHOD_CLASSES[name](token_budget=48, **SPARSE.get(name, {}))):
        cache = SparseCache.for_model(model, max_cache_len)
        record = recorded(model, padded_prompt(), past_key_values=cache)
        stats = sparse_attention_stats(model)
    assert record.layers == list(range(LAYERS))
    assert record.num_steps == STEPS
    for layer, layer_stats in enumerate(stats.layers):
        steps = range(record.num_steps)
        assert sum(int(record.reads(layer, step, row).sum()) for step in steps for row in (0, 1)) == (
            layer_stats.tokens_read
        )


def test_reads_are_bool_over_each_rows_tokens():
    model = shared_model("llama")
    with sparse_attention(model, SMALL):
        record = recorded(model, padded_prompt(150, 37))
    dense, sparse = record.reads(0, 2), record.reads(1, 2, row=1)
    assert dense.shape == (KV_HEADS, 153)
    assert dense.dtype == torch.bool
    assert dense.all()
    assert sparse.shape == (KV_HEADS, 153 - 37)
    assert sparse[:, :16].all()  # the sink page
    assert sparse[:, -4:].all()  # the page being filled
    assert (sparse.sum(1) <= 48).all()
    assert torch.equal(record.reads(1, -1), record.reads(1, STEPS - 1))
    assert record.selections(0) == [None] * STEPS
    assert {selection.block_size for selection in record.selections(1)} == {16}


def test_block_reads_are_the_shares_of_reads():
    model = shared_model("llama")
    with sparse_attention(model, SMALL):
        record = recorded(model, padded_prompt(63, 5))
    shares = record.block_reads(block_size=7)
    assert shares.shape == (STEPS, LAYERS, KV_HEADS, 10)  # 68 tokens at the last step
    assert shares[0, :, :, 9:].isnan().sum() == 0  # 64 tokens reach into the tenth block
    for step in range(STEPS):
        for layer in range(LAYERS):
            reads = record.reads(layer, step).float()
            for block in range(10):
                expected = reads[:, 7 * block : 7 * (block + 1)].mean(1)
                torch.testing.assert_close(shares[step, layer, :, block], expected)
    assert record.block_reads(block_size=66)[:2, ..., 1].isnan().all()  # 64 and 65 tokens fit in one block


def test_a_method_that_reads_more_is_seen_to_read_more():
    model = shared_model("llama")
    shares = []
    for budget in (48, 96):
        with sparse_attention(model, Quest(token_budget=budget, dense_layers=0)):
            shares.append(recorded(model, padded_prompt()).block_reads().nanmean())
    assert shares[0] < shares[1] < 1


def test_recording_changes_no_token_and_no_count():
    model = shared_model("llama")
    results = []
    for records in (False, True):
        with sparse_attention(model, SMALL):
            if records:
                with record_selections(model):
                    tokens = model.generate(**padded_prompt(), **GREEDY)
            else:
                tokens = model.generate(**padded_prompt(), **GREEDY)
            results.append((tokens, sparse_attention_stats(model)))
    assert torch.equal(results[0][0], results[1][0])
    assert results[0][1] == results[1][1]


def test_recording_ends_with_its_block():
    model = make_model("llama")
    patch_model(model, SMALL)
    cache = SparseCache.for_model(model)
    ids = random_ids(1, 100)
    with record_selections(model) as record:
        model.generate(ids, past_key_values=cache, **GREEDY)
    steps = record.num_steps
    model.generate(torch.cat([ids, random_ids(1, 20, seed=1)], 1), past_key_values=cache, **GREEDY)
    assert record.num_steps == steps
    assert get_patch(model).recorder is None
    assert cache.shared.recorder is None


def test_recording_goes_on_with_another_method():
    model = make_model("llama")
    patch_model(model, SMALL)
    with record_selections(model) as record:
        model.generate(**padded_prompt(), **GREEDY)
        with sparse_attention(model, Quest(token_budget=64, dense_layers=0)):
            model.generate(**padded_prompt(), **GREEDY)
        patch_model(model, "full")
        model.generate(**padded_prompt(), **GREEDY)
    assert record.num_steps == 3 * STEPS
    assert record.selections(0)[STEPS : 2 * STEPS] != [None] * STEPS
    assert [selection is None for selection in record.selections(1)] == [False] * (2 * STEPS) + [True] * STEPS


def test_unpatching_ends_recording():
    model = make_model("llama")
    patch_model(model, SMALL)
    with record_selections(model) as record:
        unpatch_model(model)
        model.generate(**padded_prompt(), **GREEDY)
    assert record.num_steps == 0


def test_a_step_that_failed_is_forgotten():
    model = make_model("llama")
    patch_model(model, SMALL)
    cache = SparseCache.for_model(model)
    model(random_ids(1, 100), past_key_values=cache)
    last, token = model.model.layers[-1].self_attn, random_ids(1, 1)
    with record_selections(model) as record:
        handle = last.register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(token, past_key_values=cache)
        handle.remove()
        assert record.num_steps == 0
        assert record.layers == []
        model(token, past_key_values=cache)
        model(token, past_key_values=cache)
    assert record.num_steps == 2
    assert [len(record.reads(layer, 0)[0]) for layer in record.layers] == [101] * LAYERS
    assert [len(record.reads(layer, 1)[0]) for layer in record.layers] == [102] * LAYERS


def test_generate_is_not_compiled_while_it_is_recorded():
    model = make_model("llama")
    patch_model(model, SMALL)
    with record_selections(model) as record:
        model.generate(**padded_prompt(), **GREEDY, cache_implementation="static")
    assert record.num_steps == STEPS


def test_a_compiled_step_is_refused(monkeypatch):
    layer = make_layer(SMALL)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with pytest.raises(RuntimeError, match="disable_compile=True"):
        SelectionRecord().add(layer, None)


def test_reading_unrecorded_steps_is_an_error():
    model = make_model("llama")
    with pytest.raises(ValueError, match="is not patched"), record_selections(model):
        pass
    patch_model(model, SMALL)
    with record_selections(model) as record, pytest.raises(ValueError, match="already being recorded"):
        record_selections(model).__enter__()
    with pytest.raises(ValueError, match="no decode step was recorded"):
        record.block_reads()
    with pytest.raises(ValueError, match=r"layer must be one of the recorded layers \[\], got 0"):
        record.reads(0, 0)
    record = recorded(model, padded_prompt())
    with pytest.raises(ValueError, match=f"step must be between -{STEPS} and {STEPS - 1}, got {STEPS}"):
        record.reads(0, STEPS)
    with pytest.raises(ValueError, match="row must be between 0 and 1, got 2"):
        record.reads(0, 0, row=2)
    with pytest.raises(ValueError, match="block_size must be at least 1, got 0"):
        record.block_reads(block_size=0)


def test_a_failure_removes_only_its_own_step():
    model = make_model("llama")
    patch_model(model, SMALL)
    cache = SparseCache.for_model(model)
    model(random_ids(1, 100), past_key_values=cache)
    token = random_ids(1, 1)
    with record_selections(model) as record:
        model(token, past_key_values=cache)
        kept = record.reads(1, 0)
        handle = model.model.layers[1].self_attn.register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(token, past_key_values=cache)
        handle.remove()
    assert record.num_steps == 1
    assert torch.equal(record.reads(1, 0), kept)


def test_layers_with_a_sliding_window_are_not_recorded():
    kinds = ["sliding_attention", "full_attention"] * 2
    model = make_model("qwen2", use_sliding_window=True, sliding_window=24, layer_types=kinds)
    with sparse_attention(model, SMALL):
        record = recorded(model, {"input_ids": random_ids(1, 100)})
    assert record.layers == [1, 3]
    assert record.num_steps == STEPS
    assert record.block_reads().shape[1] == 2


def test_a_shared_selection_counts_for_every_kv_head():
    record = SelectionRecord()
    layer = make_layer(SMALL)
    layer.update(*torch.zeros(2, 1, KV_HEADS, 20, 16))
    indices = torch.tensor([[[0, 3, 7, -1]]], dtype=torch.int32)
    record.add(layer, Selection(indices, torch.tensor([[3]], dtype=torch.int32), block_size=1))
    reads = record.reads(0, 0)
    assert reads.shape == (KV_HEADS, 20)
    assert [row.nonzero().flatten().tolist() for row in reads] == [[0, 3, 7]] * 2
