"""RaBitQCache against its formula, in plain torch on the layers' own keys."""

import pytest
import torch

from hf_sparse_attn import RaBitQCache, SparseCache, sparse_attention, sparse_attention_stats
from tests.methods.coded import check_forks_of_a_dense_prefill, decode, estimates, generate_watched, stored
from tests.models import DEVICE, ROUNDING, make_model, random_ids

pytestmark = pytest.mark.usefixtures("exact")

GREEDY = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": None, "pad_token_id": 0, "disable_compile": True}
PAGE, SINKS = 16, 16
SMALL = {"page_size": PAGE, "sink_tokens": SINKS, "top_p": 0.6, "dense_layers": 1}
PROMPT = 100


def estimated_weights(query, keys, query_centre, key_centre, method):
    """The softmax weights of the coded tokens after the first ones, summed over the group's queries."""
    newest = (len(keys) - 1) // PAGE * PAGE
    scores = estimates(query, keys[:newest], query_centre, 1, PAGE, key_centre)
    return scores[:, method.sink_tokens :].softmax(1).sum(0)


def chosen(weights, n, method):
    """Which of a row's n tokens a KV head reads, bool [n]: tokens are added one by one until they hold the share."""
    newest = (n - 1) // PAGE * PAGE
    reads = torch.zeros(n, dtype=torch.bool)
    reads[: method.sink_tokens] = reads[newest:] = True
    # In steps of 2 ** (1 / 32), of which equal ones are taken in order.
    steps = ((weights.max() / weights).log2() * 32).floor().clamp_max(1023).tolist()
    rounded = [2 ** (-step / 32) for step in steps]
    held, left = 0.0, method.top_p * sum(rounded)
    for index in sorted(range(len(steps)), key=lambda index: (steps[index], index)):
        if held >= left or int(reads.sum()) == method.token_budget:
            break
        reads[method.sink_tokens + index] = True
        held += rounded[index]
    return reads


@pytest.mark.parametrize(
    ("parameters", "head_dim"),
    [
        ({}, 16),
        ({"top_p": 0.95, "token_budget": 48}, 16),
        ({"query_centre": False}, 16),
        ({"top_p": 0.8, "sink_tokens": 0}, 40),  # a rotation without Hadamard's matrix
    ],
    ids=str,
)
@torch.inference_mode()
def test_every_step_reads_the_tokens_that_the_formula_chooses(parameters, head_dim, monkeypatch):
    method = RaBitQCache(**{**SMALL, **parameters})
    starts = [0, 23]
    steps, record, stats = generate_watched(monkeypatch, method, head_dim, PROMPT, starts, GREEDY)
    layer, kv_heads = steps.layer, 2
    query_centre = layer.keys.new_zeros(2, kv_heads, head_dim)
    if method.query_centre:
        query_centre = layer.prompt_queries.mean.unflatten(1, (kv_heads, -1)).mean(2).float().double()
        assert torch.equal(layer.metadata["query_centre"].double(), query_centre)
    stored_centre = layer.metadata["centres"].double() * layer.metadata["centre_scale"].double().unsqueeze(-1)
    metadata_bytes, token_bytes, sizes = 0, head_dim // 8 + (4 if method.query_centre else 2), set()
    for row, start in enumerate(starts):
        for head in range(kv_heads):
            key_centre = stored(layer.keys[row, head, start:PROMPT].double().mean(0))
            torch.testing.assert_close(stored_centre[row, head, 0], key_centre, rtol=0, atol=0)
            for step, query in enumerate(steps.queries):
                n = PROMPT + 1 + step - start
                reads = record.reads(1, step, row)[head, -n:].cpu()
                keys = layer.keys[row, head, start : start + n].double()
                queries = query[row].unflatten(0, (kv_heads, -1))[head]
                weights = estimated_weights(queries, keys, query_centre[row, head], key_centre, method)
                assert torch.equal(reads, chosen(weights, n, method))
                sizes.add(int(reads.sum()))
                candidates = (n - 1) // PAGE - method.sink_tokens // PAGE
                metadata_bytes += candidates * PAGE * token_bytes + head_dim + 2
                # A second way: as many of the exact weights as hold the share, and the share that is held.
                if method.token_budget is None:
                    exact = weights.sort(descending=True)[0]
                    needed = int((exact.cumsum(0) < method.top_p * exact.sum()).sum()) + 1
                    read = reads[method.sink_tokens : method.sink_tokens + len(weights)]
                    assert abs(int(read.sum()) - needed) <= 2
                    least = method.top_p / (method.top_p + (1 - method.top_p) * 2 ** (1 / 32))
                    assert weights[read.to(weights.device)].sum() >= (least - 1e-9) * weights.sum()
    assert len(steps.queries) == GREEDY["max_new_tokens"] - 1
    assert len(sizes) > 5 if method.token_budget is None else max(sizes) == method.token_budget > min(sizes)
    assert stats.layers[1].metadata_bytes == metadata_bytes
    held = PROMPT + GREEDY["max_new_tokens"] - 1
    assert layer.metadata["coded"].tolist() == [[(held - start) // PAGE] * kv_heads for start in starts]


def held(layer):
    """The metadata of a layer whose rows have equally many coded pages, without what is not coded yet."""
    pages = int(layer.metadata["coded"].max())
    assert (layer.metadata["coded"] == pages).all()
    ends = {"codes": pages * PAGE, "factors": pages * PAGE}
    return {name: tensor[:, :, : ends.get(name)].clone() for name, tensor in layer.metadata.items() if name != "coded"}


@torch.inference_mode()
def test_a_crop_and_changes_of_rows_keep_the_centres_and_code_again_what_comes_again(model):
    """The centres are those of the first prompt, whatever is removed after it."""
    ids, steps = random_ids(3, PROMPT), random_ids(3, 40, seed=4)
    with sparse_attention(model, RaBitQCache(**SMALL)):
        cache = SparseCache.for_model(model)
        model(ids, past_key_values=cache)
        expected = decode(model, cache, steps)
        before = held(cache.layers[2])
        for kept in (PROMPT + 30, 112, 111, PROMPT):
            cache.crop(kept - PROMPT - 40)
            assert (cache.layers[2].metadata["coded"] == kept // PAGE).all()
            again = decode(model, cache, steps[:, kept - PROMPT :])
            torch.testing.assert_close(again, expected[:, kept - PROMPT :], **ROUNDING)
            assert all(torch.equal(tensor, before[name]) for name, tensor in held(cache.layers[2]).items())
        cache.crop(-40)
        cache.reorder_cache(torch.tensor([2, 2, 0], device=DEVICE))
        cache.batch_repeat_interleave(2)
        cache.batch_select_indices(torch.tensor([5, 1], device=DEVICE))
        torch.testing.assert_close(decode(model, cache, steps[[0, 2]]), expected[[0, 2]], **ROUNDING)


@torch.inference_mode()
def test_beams_over_growing_and_static_buffers_read_the_same(model):
    ids, mask = random_ids(2, 70), torch.ones(2, 70, dtype=torch.long, device=DEVICE)
    ids[1, :20] = mask[1, :20] = 0
    options = {**GREEDY, "attention_mask": mask, "num_beams": 3}
    with sparse_attention(model, RaBitQCache(**SMALL)):
        growing = model.generate(ids, **options)
        reads = sparse_attention_stats(model)
        assert torch.equal(model.generate(ids, **options, cache_implementation="static"), growing)
        assert sparse_attention_stats(model) == reads
        assert reads.kv_fraction < 1


@pytest.mark.parametrize("cuts", [[1, 99], [40, 60], [17, 16, 30, 37]])
@torch.inference_mode()
def test_a_prompt_in_parts_has_the_codes_of_the_whole(cuts, model):
    ids, steps = random_ids(1, PROMPT), random_ids(1, 20, seed=3)
    with sparse_attention(model, RaBitQCache(**SMALL)):
        whole, parts = SparseCache.for_model(model), SparseCache.for_model(model)
        model(ids, past_key_values=whole)
        for part in ids.split(cuts, dim=1):
            model(part, past_key_values=parts)
        torch.testing.assert_close(decode(model, parts, steps), decode(model, whole, steps), **ROUNDING)
        for layer, other in zip(parts.layers[1:], whole.layers[1:], strict=True):
            assert layer.metadata["coded"].tolist() == other.metadata["coded"].tolist() == [[7, 7]]
            scales = (each.metadata["centre_scale"] for each in (layer, other))
            torch.testing.assert_close(*scales, rtol=1e-3, atol=0)


@torch.inference_mode()
def test_static_buffers_take_the_mean_of_the_passes_up_to_the_first_full_page(model):
    """Decode steps over them may be compiled, so every pass of a prompt ends with its codes."""
    ids = random_ids(2, PROMPT)
    mask = torch.ones_like(ids)
    mask[1, :30] = 0

    def mean_key(layer, row, end):
        return torch.stack([stored(head.double().mean(0)) for head in layer.keys[row, :, 30 * row : end]])

    with sparse_attention(model, RaBitQCache(**SMALL)):
        cache = SparseCache.for_model(model, max_cache_len=200)
        model(ids[:, :40], attention_mask=mask[:, :40], past_key_values=cache)
        layer = cache.layers[2]
        assert layer.metadata["coded"].tolist() == [[2, 2], [0, 0]]
        model(ids[:, 40:], attention_mask=mask, past_key_values=cache)
        assert layer.metadata["coded"].tolist() == [[6, 6], [4, 4]]
    centres = layer.metadata["centres"].double() * layer.metadata["centre_scale"].double().unsqueeze(3)
    expected = torch.stack((mean_key(layer, 0, 40), mean_key(layer, 1, PROMPT)))
    torch.testing.assert_close(centres.squeeze(2), expected, rtol=0, atol=0)


@torch.inference_mode()
def test_a_second_turn_keeps_the_codes_and_the_centres_of_the_first(model):
    with sparse_attention(model, RaBitQCache(**SMALL)):
        cache = SparseCache.for_model(model)
        first = model.generate(random_ids(1, 60), past_key_values=cache, **GREEDY)
        before = held(cache.layers[1])
        second = torch.cat([first, random_ids(1, 75, seed=5)], dim=1)
        model.generate(second, past_key_values=cache, attention_mask=torch.ones_like(second), **GREEDY)
        now = cache.layers[1].metadata
        assert now["coded"].tolist() == [[(60 + 40 + 75 + 39) // PAGE] * 2]
        for name, tensor in before.items():
            end = tensor.shape[2] if name in ("codes", "factors") else None
            assert torch.equal(now[name][:, :, :end], tensor), name


@torch.inference_mode()
def test_forks_of_a_dense_prefill_choose_as_a_prefill_of_their_own(model):
    ids, steps = random_ids(1, PROMPT), random_ids(1, 20, seed=4)
    own, fork, _ = check_forks_of_a_dense_prefill(model, RaBitQCache(**SMALL), ids, steps)
    for name in ("centres", "centre_scale"):
        assert torch.equal(fork.layers[1].metadata[name], own.layers[1].metadata[name])


@pytest.mark.parametrize("max_cache_len", [None, 200], ids=["growing", "static"])
@torch.inference_mode()
def test_a_share_of_1_reads_everything(max_cache_len, model, monkeypatch):
    """By the dense path; and by a choice of all tokens, if there were none."""
    ids, steps = random_ids(1, PROMPT), random_ids(1, 20, seed=4)
    whole = model(torch.cat((ids, steps), dim=1)).logits[:, PROMPT:]
    for is_chosen in (False, True):
        if is_chosen:
            monkeypatch.setattr(RaBitQCache, "covers", lambda method, length: False)
        with sparse_attention(model, RaBitQCache(**{**SMALL, "top_p": 1})):
            cache = SparseCache.for_model(model, max_cache_len=max_cache_len)
            model(ids, past_key_values=cache)
            found = decode(model, cache, steps)
            stats = sparse_attention_stats(model)
        assert (stats.metadata_bytes > 0) == is_chosen
        assert stats.kv_bytes == stats.dense_bytes
        torch.testing.assert_close(found, whole, **ROUNDING)


@pytest.mark.parametrize(
    ("parameters", "length", "covers"),
    [
        ({}, 256, True),
        ({}, 257, False),
        ({"top_p": 1.0}, 10**6, True),
        ({"top_p": 1.0, "token_budget": 300}, 300, True),
        ({"top_p": 1.0, "token_budget": 300}, 301, False),
        ({"token_budget": 300}, 300, False),
        ({"sink_tokens": 0, "page_size": 16}, 16, True),
        ({"sink_tokens": 0, "page_size": 16}, 17, False),
    ],
    ids=str,
)
def test_dense_attention_serves_rows_of_which_everything_is_read(parameters, length, covers):
    assert RaBitQCache(**parameters).covers(length) is covers


@pytest.mark.parametrize(
    ("parameters", "error", "message"),
    [
        ({"top_p": 0}, ValueError, "rabitqcache: top_p must be above 0 and at most 1, got 0"),
        ({"top_p": 1.5}, ValueError, "rabitqcache: top_p must be above 0 and at most 1, got 1.5"),
        ({"top_p": "0.9"}, TypeError, "top_p must be a number, got '0.9'"),
        ({"page_size": 40}, ValueError, "rabitqcache: page_size must be a multiple of 16, got 40"),
        ({"sink_tokens": 64}, ValueError, "rabitqcache: sink_tokens must be 0 or a multiple of page_size=128, got 64"),
        ({"sink_tokens": -128}, ValueError, "rabitqcache: sink_tokens must be 0 or a multiple of page_size=128"),
        (
            {"token_budget": 255},
            ValueError,
            "rabitqcache: token_budget must be None, or at least 256: the first sink_tokens=128 and a page of 128",
        ),
        ({"token_budget": 300.0}, TypeError, "token_budget must be a whole number or None, got 300.0"),
        ({"query_centre": 1}, TypeError, "query_centre must be True or False, got 1"),
        ({"dense_layers": -1}, ValueError, "rabitqcache: dense_layers must be 0 or more, got -1"),
    ],
)
def test_bad_hyperparameters(parameters, error, message):
    with pytest.raises(error, match=message):
        RaBitQCache(**parameters)


def test_models_whose_heads_do_not_fit_are_refused():
    model = make_model("llama", num_hidden_layers=1, head_dim=20)
    message = "rabitqcache: head_dim must be a multiple of 8, got 20"
    with pytest.raises(ValueError, match=message), sparse_attention(model, "rabitqcache"):
        pass
