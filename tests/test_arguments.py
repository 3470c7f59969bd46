"""Arguments of the wrong type or size: the error names them, and nothing has changed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from hf_sparse_attn import (
    TOVA,
    DecodeAhead,
    DoubleSparsity,
    DuoAttention,
    FixedContext,
    MInference,
    SelfSpeculation,
    SparseCache,
    calibrate_channels,
    patch_model,
    prepare_context,
    record_selections,
    sparse_attention,
    sparse_attention_stats,
    unpatch_model,
)
from tests.models import METHOD_CLASSES, VOCABULARY, make_model, random_ids

IDS = random_ids(1, 60)


@pytest.fixture
def model():
    return make_model("llama")


def refuses(error, message):
    return pytest.raises(error, match=re.escape(message))


@pytest.fixture
def cache(model):
    patch_model(model, "quest", token_budget=64)
    cache = SparseCache.for_model(model)
    with torch.inference_mode():
        model(IDS, past_key_values=cache)
    yield cache
    assert (cache.length, len(cache.layers[0].keys)) == (60, 1)


@pytest.mark.parametrize("name", METHOD_CLASSES)
@pytest.mark.parametrize("value", ["8", 1.5, True], ids=repr)
def test_numbers_of_methods(name, value):
    with refuses(TypeError, "token_budget must be a whole number"):
        METHOD_CLASSES[name](token_budget=value)


@pytest.mark.parametrize("value", ["no", None, 1], ids=repr)
def test_bools_of_methods(value):
    with refuses(TypeError, f"per_head must be True or False, got {value!r}"):
        TOVA(per_head=value)


@pytest.mark.parametrize(
    ("method", "parameter"), [(DoubleSparsity, "calibration"), (MInference, "patterns"), (DuoAttention, "heads")]
)
def test_files_of_methods(method, parameter):
    assert method(**{parameter: Path("folder/file")}) == method(**{parameter: "folder/file"})
    with pytest.raises(TypeError, match=rf"{parameter} must be .*path.* got 5"):
        method(**{parameter: 5})


@pytest.mark.parametrize(("heads", "rows"), [([], "[]"), ([[1], [1, 0]], "[1, 2]")])
def test_heads_of_duo_attention(heads, rows):
    with refuses(ValueError, f"heads must have one number per KV head, the same in every layer, got rows of {rows}"):
        DuoAttention(heads=heads)


@pytest.mark.parametrize("call", [unpatch_model, sparse_attention_stats])
@pytest.mark.parametrize("value", [None, "quest", torch.nn.Linear(2, 2)], ids=["None", "str", "Linear"])
def test_what_is_no_model(call, value):
    with refuses(TypeError, f"model must be a Transformers model, got {type(value).__name__}"):
        call(value)


@pytest.mark.parametrize(
    ("input_ids", "error", "message"),
    [
        (None, TypeError, "input_ids must be whole numbers, got NoneType"),
        (IDS.float(), TypeError, "input_ids must be whole numbers, got torch.float32"),
        (IDS + 0j, TypeError, "input_ids must be whole numbers, got torch.complex64"),
        (IDS + VOCABULARY, ValueError, f"below the model's vocabulary of {VOCABULARY} tokens, got"),
        (IDS - VOCABULARY, ValueError, "input_ids must be at least 0"),
    ],
)
def test_token_ids(model, tmp_path, input_ids, error, message):
    with refuses(error, message):
        calibrate_channels(model, input_ids, tmp_path / "file.json")
    with refuses(error, message):
        prepare_context(model, input_ids, window=8, progress=False)
    assert not list(tmp_path.iterdir())


def test_token_ids_of_any_whole_type(model):
    expected = prepare_context(model, IDS, window=8, progress=False)
    for ids in (IDS.to(torch.uint8), IDS.int(), IDS[0].tolist()):
        assert prepare_context(model, ids, window=8, progress=False).token_ids_hash == expected.token_ids_hash


def test_the_folder_of_a_calibration(model, tmp_path):
    hook = model.get_decoder().register_forward_pre_hook(lambda *arguments: pytest.fail("computed for nothing"))
    with refuses(FileNotFoundError, "is in a folder that does not exist"):
        calibrate_channels(model, IDS, tmp_path / "missing" / "file.json")
    hook.remove()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"chunk_size": "8"}, TypeError, "chunk_size must be a whole number, got '8'"),
        ({"chunk_size": 0}, ValueError, "chunk_size must be at least 1, got 0"),
        ({"progress": "yes"}, TypeError, "progress must be True, False or a function, got 'yes'"),
    ],
)
def test_options_of_prepare_context(model, options, error, message):
    with refuses(error, message):
        prepare_context(model, IDS, window=8, **options)


def test_prepared_contexts(model, tmp_path):
    context = prepare_context(model, IDS, window=8, progress=False)
    for value, error in ((1.5, TypeError), (True, TypeError), (0, ValueError)):
        with pytest.raises(error, match=r"batch_size must be .* or None, got"):
            context.cache(batch_size=value)
    path = tmp_path / "context.safetensors"
    context.save(path)
    with refuses(TypeError, "model must be a Transformers model, got int"):
        FixedContext.load(path, 5)
    with refuses(ValueError, "input_ids must be [tokens] or [1, tokens], got shape (2, 30)"):
        FixedContext.load(path, model, IDS.view(2, 30))


@pytest.mark.parametrize("value", ["-5", -1.5, float("nan"), None, torch.tensor(-1.0), torch.tensor([-1, -1])], ids=str)
def test_tokens_to_remove(cache, value):
    with refuses(TypeError, f"tokens_to_remove must be a whole number, got {value!r}"):
        cache.crop(value)


def test_rows_of_a_cache(cache):
    with refuses(ValueError, "repeats must be at least 1, got 0"):
        cache.batch_repeat_interleave(0)
    with refuses(TypeError, "repeats must be a whole number, got 1.5"):
        cache.batch_repeat_interleave(1.5)
    for nothing in ([], torch.tensor([False])):
        with refuses(ValueError, "indices must keep at least one row, got none"):
            cache.batch_select_indices(nothing)
    with refuses(TypeError, "indices must be whole numbers, got str"):
        cache.batch_select_indices("0")
    with refuses(TypeError, "beam_idx must be whole numbers, got NoneType"):
        cache.reorder_cache(None)
    for kept in ([0], torch.tensor([True])):
        cache.batch_select_indices(kept)


def test_models_of_saved_caches(cache, model, tmp_path):
    path = tmp_path / "cache.safetensors"
    other = make_model("llama", num_hidden_layers=2)
    with refuses(ValueError, "with layers 4, KV heads 2, head_dim 16; it has layers 2, KV heads 2, head_dim 16"):
        cache.save(path, other)
    with refuses(TypeError, "model must be a Transformers model, got NoneType"):
        cache.save(path, None)
    with refuses(TypeError, "input_ids must be whole numbers, got torch.float32"):
        cache.save(path, model, IDS.float())
    assert not path.exists()
    cache.save(path, model, IDS)
    for value in (1.5, "x"):
        with refuses(TypeError, f"max_cache_len must be a whole number or None, got {value!r}"):
            SparseCache.load(path, model, max_cache_len=value)
    assert SparseCache.load(path, model, IDS[0].view(1, 60).int()).length == 60


@pytest.mark.parametrize("loop", [DecodeAhead, SelfSpeculation])
def test_loops(loop):
    with refuses(TypeError, "streamer must have the methods put and end, or be None, got 8"):
        loop(streamer=8)
    for name in ("cuda_graph", "fuse"):
        with refuses(TypeError, f"{name} must be True or False, got 'no'"):
            loop(**{name: "no"})


def test_a_recording_cannot_outlive_its_patch(model):
    patch_model(model, "quest")
    with refuses(RuntimeError, "was unpatched while it was recorded"), record_selections(model):
        unpatch_model(model)
        patch_model(model, "quest")
        with record_selections(model) as other:
            assert other.num_steps == 0
    with record_selections(model) as record, sparse_attention(model, "full"):
        model.generate(IDS, max_new_tokens=3, pad_token_id=0, eos_token_id=None)
    assert record.num_steps == 2
    for arguments in ((0, 0.5), (0, 0, "1")):
        with pytest.raises(TypeError, match="must be a whole number"):
            record.reads(*arguments)
    with refuses(TypeError, "block_size must be a whole number, got 1.5"):
        record.block_reads(1.5)
