"""KeyCodes against its formula, in plain torch on the layers' own keys."""

import math
from contextlib import nullcontext

import pytest
import torch

from hf_sparse_attn import KeyCodes, SparseCache, sparse_attention, sparse_attention_stats
from tests.methods.coded import check_forks_of_a_dense_prefill, decode, estimates, generate_watched
from tests.models import DEVICE, make_model, random_ids

pytestmark = pytest.mark.usefixtures("exact")

GREEDY = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": None, "pad_token_id": 0, "disable_compile": True}
ROUNDING = {"rtol": 1e-5, "atol": 1e-5}
PAGE = 16
SMALL = {"token_budget": 48, "page_size": PAGE}
PROMPT = 100


def chosen(query, keys, centre, method):
    """Return which of a row's n tokens a KV head reads: bool [n]."""
    n = len(keys)
    newest = (n - 1) // PAGE * PAGE
    scores = estimates(query, keys[:newest], centre, method.bits, PAGE, correction=method.correction)
    reduced = scores.amax(0) if method.group_reduce == "max" else scores.log_softmax(1).exp().sum(0)
    reads = torch.zeros(n, dtype=torch.bool, device=keys.device)
    reads[: method.sink_tokens] = reads[newest:] = True
    reduced[: method.sink_tokens] = -torch.inf
    room = min(method.token_budget - int(reads.sum()), newest - method.sink_tokens)
    reads[reduced.topk(room).indices] = True
    return reads


@pytest.mark.parametrize(
    ("parameters", "head_dim"),
    [
        ({}, 16),
        ({"bits": 2, "group_reduce": "max"}, 16),
        ({"query_centre": False, "sink_tokens": 0}, 16),
        ({"bits": 2, "token_budget": 40}, 40),  # a rotation without Hadamard's matrix
        ({"correction": "least_squares"}, 16),
        ({"correction": "least_squares", "bits": 2}, 16),
    ],
    ids=str,
)
@torch.inference_mode()
def test_every_step_reads_the_tokens_that_the_formula_chooses(parameters, head_dim, monkeypatch):
    method = KeyCodes(**{**SMALL, **parameters})
    starts = [0, 23]
    steps, record, stats = generate_watched(monkeypatch, method, head_dim, PROMPT, starts, GREEDY)
    layer, kv_heads = steps.layer, 2
    centre = layer.keys.new_zeros(2, kv_heads, head_dim)
    if method.query_centre:
        centre = layer.prompt_queries.mean.unflatten(1, (kv_heads, -1)).mean(2)
        centre = centre.float().double()
        assert torch.equal(layer.metadata["query_centre"].double(), centre)
    metadata_bytes = left_out = 0
    for step, query in enumerate(steps.queries):
        for row, start in enumerate(starts):
            n = PROMPT + 1 + step - start
            reads = record.reads(1, step, row)[:, -n:].to(DEVICE)
            grouped = query[row].unflatten(0, (kv_heads, -1))
            keys = layer.keys[row, :, start : start + n].double()
            for head in range(kv_heads):
                expected = chosen(grouped[head], keys[head], centre[row, head], method)
                assert torch.equal(reads[head], expected)
                assert int(expected.sum()) == min(n, method.token_budget)
            pages = (n - 1) // PAGE
            token_bytes = method.bits * head_dim // 8 + (4 if method.query_centre else 2)
            metadata_bytes += pages * (PAGE * token_bytes + head_dim + 2) * kv_heads
            left_out += n - method.token_budget
    assert len(steps.queries) == GREEDY["max_new_tokens"] - 1
    assert left_out > 0
    assert stats.layers[1].metadata_bytes == metadata_bytes
    held = PROMPT + GREEDY["max_new_tokens"] - 1
    assert layer.metadata["coded"].tolist() == [[(held - start) // PAGE] * kv_heads for start in starts]


@pytest.mark.parametrize("bits", [1, 2])
@torch.inference_mode()
def test_codes_follow_a_crop_over_a_pages_edge_and_every_change_of_rows(bits, model):
    """Without the mean query, which remembers the queries of tokens that are gone."""
    method = KeyCodes(**SMALL, bits=bits, query_centre=False)
    ids, steps = random_ids(3, PROMPT), random_ids(2, 40, seed=9)
    with sparse_attention(model, method):
        for kept in (PROMPT - 1, 96, 95, 33, 10):
            cache, fresh = SparseCache.for_model(model), SparseCache.for_model(model)
            model(ids, past_key_values=cache)
            decode(model, cache, random_ids(3, 30, seed=4))
            assert (cache.layers[0].metadata["coded"] == (PROMPT + 30) // PAGE).all()
            cache.crop(kept - PROMPT - 30)
            assert (cache.layers[0].metadata["coded"] == kept // PAGE).all()
            cache.reorder_cache(torch.tensor([2, 2, 0], device=DEVICE))
            cache.batch_repeat_interleave(2)
            cache.batch_select_indices(torch.tensor([5, 1], device=DEVICE))
            model(ids[[0, 2], :kept], past_key_values=fresh)
            torch.testing.assert_close(*(decode(model, each, steps) for each in (cache, fresh)), **ROUNDING)


@torch.inference_mode()
def test_beams_over_growing_and_static_buffers_read_the_same(model):
    ids, mask = random_ids(2, 70), torch.ones(2, 70, dtype=torch.long, device=DEVICE)
    ids[1, :20] = mask[1, :20] = 0
    options = {**GREEDY, "attention_mask": mask, "num_beams": 3}
    with sparse_attention(model, KeyCodes(**SMALL)):
        growing = model.generate(ids, **options)
        reads = sparse_attention_stats(model)
        assert torch.equal(model.generate(ids, **options, cache_implementation="static"), growing)
        assert sparse_attention_stats(model) == reads
        assert reads.kv_fraction < 1


@pytest.mark.parametrize("cuts", [[1, 99], [40, 60], [17, 16, 30, 37]])
@torch.inference_mode()
def test_a_prompt_in_parts_has_the_codes_of_the_whole(cuts, model):
    ids = random_ids(1, PROMPT)
    with sparse_attention(model, KeyCodes(**SMALL)):
        whole, parts = SparseCache.for_model(model), SparseCache.for_model(model)
        model(ids, past_key_values=whole)
        for part in ids.split(cuts, dim=1):
            model(part, past_key_values=parts)
        steps = random_ids(1, 20, seed=3)
        torch.testing.assert_close(decode(model, parts, steps), decode(model, whole, steps), **ROUNDING)
        for layer, other in zip(parts.layers, whole.layers, strict=True):
            torch.testing.assert_close(
                layer.metadata["query_centre"], other.metadata["query_centre"], rtol=1e-4, atol=1e-5
            )
            assert layer.metadata["coded"].tolist() == other.metadata["coded"].tolist() == [[7, 7]]


@torch.inference_mode()
def test_static_buffers_take_the_mean_of_the_passes_up_to_the_first_full_page(model):
    """Decode steps over them may be compiled, so every pass of a prompt ends with its codes."""
    ids = random_ids(2, PROMPT)
    mask = torch.ones_like(ids)
    mask[1, :30] = 0
    with sparse_attention(model, KeyCodes(**SMALL)):
        cache = SparseCache.for_model(model, max_cache_len=200)
        model(ids[:, :40], attention_mask=mask[:, :40], past_key_values=cache)
        layer = cache.layers[2]
        first = layer.prompt_queries.mean.unflatten(1, (2, -1)).mean(2).float()
        assert layer.metadata["coded"].tolist() == [[2, 2], [0, 0]]
        model(ids[:, 40:], attention_mask=mask, past_key_values=cache)
        whole = layer.prompt_queries.mean.unflatten(1, (2, -1)).mean(2).float()
        assert layer.metadata["coded"].tolist() == [[6, 6], [4, 4]]
        assert torch.equal(layer.metadata["query_centre"], torch.stack((first[0], whole[1])))
        assert not torch.equal(first[0], whole[0])


@torch.inference_mode()
def test_a_second_turn_keeps_the_codes_and_the_centre_of_the_first(model):
    with sparse_attention(model, KeyCodes(**SMALL)):
        cache = SparseCache.for_model(model)
        first = model.generate(random_ids(1, 60), past_key_values=cache, **GREEDY)
        metadata = {name: tensor.clone() for name, tensor in cache.layers[1].metadata.items()}
        assert metadata["coded"].tolist() == [[6, 6]]
        second = torch.cat([first, random_ids(1, 75, seed=5)], dim=1)
        model.generate(second, past_key_values=cache, attention_mask=torch.ones_like(second), **GREEDY)
        now = cache.layers[1].metadata
        assert now["coded"].tolist() == [[(60 + 40 + 75 + 39) // PAGE] * 2]
        assert torch.equal(now["query_centre"], metadata["query_centre"])
        for name, held in (("codes", 96), ("factors", 96), ("centres", 6), ("centre_scale", 6)):
            assert torch.equal(now[name][:, :, :held], metadata[name][:, :, :held])


@torch.inference_mode()
def test_forks_of_a_dense_prefill_have_the_centre_if_it_kept_the_queries(model):
    ids, steps = random_ids(1, PROMPT), random_ids(1, 20, seed=4)
    _, _, without = check_forks_of_a_dense_prefill(model, KeyCodes(**SMALL), ids, steps)
    method = KeyCodes(**SMALL, query_centre=False)
    with sparse_attention(model, method):
        plain = SparseCache.for_model(model)
        model(ids, past_key_values=plain)
        torch.testing.assert_close(decode(model, plain, steps), without, **ROUNDING)  # a centre of 0 changes nothing


@pytest.mark.parametrize("max_cache_len", [None, 200], ids=["growing", "static"])
@torch.inference_mode()
def test_what_an_unpatched_model_has_cached_is_coded_before_the_next_step(max_cache_len, model):
    ids, steps = random_ids(1, PROMPT), random_ids(1, 20, seed=4)
    method = KeyCodes(**SMALL, query_centre=False)
    cache, expected = (SparseCache(model.config, method, max_cache_len) for _ in range(2))
    for part in ids.split([60, 39, 1], dim=1):
        model(part, past_key_values=cache)
    with sparse_attention(model, method):
        model(ids, past_key_values=expected)
        torch.testing.assert_close(*(decode(model, each, steps) for each in (cache, expected)), **ROUNDING)
        assert cache.layers[0].metadata["coded"].tolist() == [[7, 7]]


@pytest.mark.parametrize("is_patched", [True, False], ids=["patched", "unpatched"])
@torch.inference_mode()
def test_a_prompt_that_follows_a_crop_is_coded_even_if_it_is_cropped_again(is_patched, model):
    """The prompt that was finished first was longer."""
    ids, others, steps = random_ids(1, 150), random_ids(1, 120, seed=6), random_ids(1, 20, seed=4)
    method = KeyCodes(**SMALL, query_centre=False)
    with sparse_attention(model, method):
        cache, fresh = SparseCache.for_model(model), SparseCache.for_model(model)
        model(ids, past_key_values=cache)
        cache.complete_prompt()
    cache.crop(-140)
    with sparse_attention(model, method) if is_patched else nullcontext():
        model(others, past_key_values=cache)
    cache.crop(-10)
    with sparse_attention(model, method):
        model(torch.cat([ids[:, :10], others[:, :110]], dim=1), past_key_values=fresh)
        torch.testing.assert_close(*(decode(model, each, steps) for each in (cache, fresh)), **ROUNDING)
        assert cache.layers[0].metadata["coded"].tolist() == [[8, 8]]


@torch.inference_mode()
def test_sequences_within_the_budget_take_the_dense_path(model):
    with sparse_attention(model, "keycodes"):
        model.generate(random_ids(1, PROMPT), **GREEDY)
        stats = sparse_attention_stats(model)
    assert (stats.metadata_bytes, stats.kv_fraction) == (0, 1.0)


def test_the_codes_take_the_stated_share_of_the_cache():
    """22 bytes of 512 for a token and KV head of 128 channels in 16 bits, and the page's centre."""
    cache = SparseCache(make_model("llama", num_hidden_layers=1, head_dim=128).config, "keycodes", max_cache_len=4096)
    states = torch.zeros(1, 2, 1, 128, dtype=torch.bfloat16)
    cache.update(states, states, 0)
    layer = cache.layers[0]
    held = sum(tensor.numel() * tensor.element_size() for tensor in layer.metadata.values())
    whole = 2 * layer.keys.numel() * layer.keys.element_size()
    assert math.isclose(held / whole, (128 / 8 + 4 + 130 / 64) / 512, rel_tol=0.01)


@pytest.mark.parametrize(
    ("parameters", "error", "message"),
    [
        ({"bits": 3}, ValueError, "keycodes: bits must be one of 1, 2, got 3"),
        ({"bits": 1.0}, TypeError, "bits must be a whole number, got 1.0"),
        ({"page_size": 8}, ValueError, "keycodes: page_size must be a multiple of 16, got 8"),
        ({"page_size": 40}, ValueError, "keycodes: page_size must be a multiple of 16, got 40"),
        ({"page_size": 0}, ValueError, "keycodes: page_size must be a multiple of 16, got 0"),
        ({"group_reduce": "mean"}, ValueError, "keycodes: group_reduce must be one of softmax, max, got 'mean'"),
        ({"correction": True}, ValueError, "keycodes: correction must be one of unbiased, least_squares, got True"),
        ({"sink_tokens": -1}, ValueError, "keycodes: sink_tokens must be 0 or more, got -1"),
        (
            {"token_budget": 67},
            ValueError,
            "keycodes: token_budget must be at least 68: the first sink_tokens=4 and a page of 64, got 67",
        ),
        ({"query_centre": 1}, TypeError, "query_centre must be True or False, got 1"),
        ({"dense_layers": -1}, ValueError, "keycodes: dense_layers must be 0 or more, got -1"),
    ],
)
def test_bad_hyperparameters(parameters, error, message):
    with pytest.raises(error, match=message):
        KeyCodes(**parameters)


@pytest.mark.parametrize(
    ("head_dim", "message"),
    [(20, "keycodes: head_dim must be a multiple of 8, got 20"), (264, "head_dim 264; at most 256 is supported")],
)
def test_models_whose_heads_do_not_fit_are_refused(head_dim, message):
    model = make_model("llama", num_hidden_layers=1, head_dim=head_dim)
    with pytest.raises(ValueError, match=message), sparse_attention(model, "keycodes"):
        pass


@torch.inference_mode()
def test_a_step_is_one_op_unless_attention_is_the_methods_own(model, monkeypatch):
    class Attending(KeyCodes):
        def attend(self, query, layer, selection, scale):
            attended.append(selection.block_size)
            return super().attend(query, layer, selection, scale)

    attended, outputs = [], []
    ids, steps = random_ids(2, PROMPT), random_ids(2, 4, seed=5)
    for method_class in (KeyCodes, Attending):
        with sparse_attention(model, method_class(**SMALL)):
            cache = SparseCache.for_model(model)
            model(ids, past_key_values=cache)
            outputs.append(decode(model, cache, steps))
            if method_class is KeyCodes:
                assert not attended
    assert attended == [1] * 4 * len(cache.layers)
    assert torch.equal(*outputs)
