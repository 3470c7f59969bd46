"""Squeezed Attention against its definition, in plain torch on the layers' own clusters."""

import pytest
import torch

from hf_sparse_attn import (
    SparseCache,
    Squeezed,
    record_selections,
    sparse_attention,
    sparse_attention_stats,
)
from tests.models import DEVICE, ROUNDING, make_model, random_ids

pytestmark = pytest.mark.usefixtures("exact")

GREEDY = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0, "disable_compile": True}
SMALL = {"clusters": 0.1, "coarse_clusters": 0.03, "window": 12}
PROMPT = 160


class Queries:
    """Keeps the queries of one layer's decode steps."""

    def __init__(self, method, monkeypatch):
        self.seen = []
        decode = Squeezed.decode

        def seeing(inner, query, layer, *args):
            if layer.layer_idx == 1:
                self.seen.append((query.clone(), layer))
            return decode(inner, query, layer, *args)

        monkeypatch.setattr(Squeezed, "decode", seeing)


def weights_of(query, centroids, sizes, among):
    """S of one KV head: [group, head_dim] queries, [clusters, head_dim] centroids, a mask of clusters."""
    scores = query @ centroids.T * query.shape[1] ** -0.5
    powers = torch.exp(scores - scores[:, among].amax(1, keepdim=True)) * among
    return (powers / (powers * sizes).sum(1, keepdim=True)).mean(0)


@pytest.mark.parametrize("levels", [1, 2])
@torch.inference_mode()
def test_a_step_reads_the_clusters_above_the_threshold(levels, model, monkeypatch):
    method = Squeezed(target_sparsity=0.6, levels=levels, **SMALL)
    queries = Queries(method, monkeypatch)
    with sparse_attention(model, method), record_selections(model) as record:
        model.generate(random_ids(1, PROMPT), **GREEDY)
    dropped = 0
    for step, (query, layer) in enumerate(queries.seen):
        index = {name: tensor[0] for name, tensor in layer.metadata.items()}
        tokens = int(index["context_lengths"])
        assert tokens == PROMPT - 12
        reads = record.reads(1, step)
        grouped = query[0].view(2, -1, query.shape[2])
        for head in range(2):
            sizes = index["cluster_sizes"][head]
            among = sizes > 0
            if levels == 2:
                coarse_sizes = index["coarse_sizes"][head]
                coarse = weights_of(grouped[head], index["coarse_centroids"][head], coarse_sizes, coarse_sizes > 0)
                among &= (coarse > index["coarse_threshold"])[index["parents"][head].long()]
            weights = weights_of(grouped[head], index["centroids"][head], sizes, among)
            chosen = (weights > index["threshold"]) & among
            ends = sizes.cumsum(0)
            expected = torch.zeros(reads.shape[1], dtype=torch.bool)
            expected[:4] = expected[tokens:] = True
            for cluster in chosen.nonzero().flatten().tolist():
                slots = range(int(ends[cluster] - sizes[cluster]), int(ends[cluster]))
                expected[index["token_order"][head][list(slots)].long().cpu()] = True
            assert torch.equal(reads[head], expected)
            dropped += int((~expected).sum())
    assert dropped > 0


@torch.inference_mode()
def test_clusters_partition_the_prompt_and_centroids_are_their_means(model):
    with sparse_attention(model, "squeezed", levels=2, **SMALL):
        cache = SparseCache.for_model(model)
        ids, mask = random_ids(2, PROMPT), torch.ones(2, PROMPT, dtype=torch.long, device=DEVICE)
        ids[1, :31] = mask[1, :31] = 0
        model(ids, attention_mask=mask, past_key_values=cache)
        cache.complete_prompt()
    for layer in cache.layers:
        for row, (start, length) in enumerate(((0, PROMPT), (31, PROMPT - 31))):
            index = {name: tensor[row] for name, tensor in layer.metadata.items()}
            tokens = length - 12
            assert int(index["context_lengths"]) == tokens
            for head in range(2):
                sizes, order = index["cluster_sizes"][head], index["token_order"][head][:tokens].long()
                assert torch.equal(order.sort().values, torch.arange(tokens, device=DEVICE))
                assert int(sizes.sum()) == tokens - 4
                assert torch.equal(order[-4:], torch.arange(4, device=DEVICE))
                keys = layer.keys[row, head, start : start + tokens][order[:-4]]
                parts = keys.split(sizes[sizes > 0].tolist())
                means = torch.stack([part.mean(0) for part in parts])
                torch.testing.assert_close(index["centroids"][head][sizes > 0], means, rtol=1e-6, atol=1e-6)
                parents = index["parents"][head][sizes > 0].long()
                assert (parents.diff() >= 0).all()  # children of a coarse cluster lie together
                coarse = index["coarse_sizes"][head]
                assert torch.equal(torch.zeros_like(coarse).scatter_add_(0, parents, sizes[sizes > 0]), coarse)


@torch.inference_mode()
def test_a_questions_tokens_share_one_choice_per_head(model):
    """A second pass attends under the mask that the mean weights of its tokens give."""
    ids, question = random_ids(1, PROMPT), random_ids(1, 9, seed=5)
    with sparse_attention(model, "squeezed", target_sparsity=0.6, **SMALL):
        cache = SparseCache.for_model(model)
        model(ids, past_key_values=cache)
        cache.complete_prompt()
        together = model(question, past_key_values=cache).logits
        assert cache.get_seq_length() == PROMPT + 9
    with sparse_attention(model, "squeezed", target_sparsity=0, **SMALL):
        cache = SparseCache.for_model(model)
        model(ids, past_key_values=cache)
        cache.complete_prompt()
        everything = model(question, past_key_values=cache).logits
    dense = model(torch.cat([ids, question], dim=1)).logits[:, -9:]
    torch.testing.assert_close(everything, dense, **ROUNDING)
    assert (together - dense).abs().max() > 1e-3


@torch.inference_mode()
def test_clusters_follow_rows_and_are_dropped_by_a_crop_into_them(model):
    ids = random_ids(3, PROMPT)
    step = random_ids(2, 1, seed=9)
    with sparse_attention(model, "squeezed", target_sparsity=0.6, **SMALL):
        cache = SparseCache.for_model(model)
        model(ids, past_key_values=cache)
        cache.complete_prompt()
        cache.reorder_cache(torch.tensor([2, 2, 0], device=DEVICE))
        cache.batch_repeat_interleave(2)
        cache.batch_select_indices(torch.tensor([5, 1], device=DEVICE))
        worked_on = model(step, past_key_values=cache).logits
        fresh = SparseCache.for_model(model)
        model(ids[[0, 2]], past_key_values=fresh)
        expected = model(step, past_key_values=fresh).logits
        torch.testing.assert_close(worked_on, expected, **ROUNDING)
        for position in range(12):  # growth keeps the clusters
            torch.testing.assert_close(
                *(model(step, past_key_values=each).logits for each in (cache, fresh)), **ROUNDING, msg=f"{position}"
            )
        cache.crop(-20)
        assert (cache.layers[0].metadata["context_lengths"] > 0).all()
        cache.crop(-40)
        assert (cache.layers[0].metadata["context_lengths"] == 0).all()
        assert (cache.layers[0].metadata["run_starts"] == 0).all()
        exact = model(step, past_key_values=cache).logits
    kept = PROMPT + 13 - 60
    dense = model(torch.cat([ids[[0, 2], :kept], step], dim=1)).logits[:, -1:]
    torch.testing.assert_close(exact, dense, **ROUNDING)


@torch.inference_mode()
def test_a_growing_conversation_is_clustered_anew_when_it_has_doubled(model):
    with sparse_attention(model, "squeezed", target_sparsity=0.6, **SMALL):
        cache = SparseCache.for_model(model)
        lengths = []
        for tokens in (60, 30, 90):
            model(random_ids(1, tokens), past_key_values=cache)
            cache.complete_prompt()
            lengths.append(int(cache.layers[0].metadata["context_lengths"]))
    assert lengths == [48, 48, 168]


@torch.inference_mode()
def test_an_unknown_end_of_the_prompt_is_read_exactly_with_a_warning(model):
    ids = random_ids(1, PROMPT)
    with sparse_attention(model, "squeezed", target_sparsity=0.6, **SMALL):
        cache = SparseCache.for_model(model)
        model(ids, past_key_values=cache)
        cache.crop(-30)
        with pytest.warns(UserWarning, match="half of the text's last 12 queries are not known"):
            cache.complete_prompt()
        model(ids[:, :1], past_key_values=cache)
        assert sparse_attention_stats(model).kv_fraction >= 1


@torch.inference_mode()
def test_a_short_turn_after_many_steps_cannot_calibrate(model):
    """The queries before the steps come before most of what would be clustered."""
    with sparse_attention(model, "squeezed", target_sparsity=0.6, **SMALL):
        cache = SparseCache.for_model(model)
        model(random_ids(1, 60), past_key_values=cache)
        for token in random_ids(1, 100, seed=1).split(1, dim=1):
            model(token, past_key_values=cache)
        model(random_ids(1, 5), past_key_values=cache)
        with pytest.warns(UserWarning, match=r"half of .* 12 queries are not known, since decode steps generated"):
            cache.complete_prompt()
        assert cache.layers[0].metadata["context_lengths"].item() == 60 - 12
        model(random_ids(1, 7), past_key_values=cache)  # the turn goes on
        cache.complete_prompt()
        assert cache.layers[0].metadata["context_lengths"].item() == 60 + 100 + 12 - 12
        assert cache.layers[0].prompt_queries.counts.item() == 12


@torch.inference_mode()
def test_a_fork_needs_the_queries_of_the_prompt(model):
    cache = SparseCache(model.config, "full")
    with pytest.raises(ValueError, match=r"needs the last 100 queries of the prompt, but the cache keeps 0"):
        cache.fork("squeezed")


@torch.inference_mode()
def test_short_prompts_take_the_dense_path(model):
    ids = random_ids(1, 40)
    expected = model.generate(ids, **GREEDY)
    with sparse_attention(model, "squeezed"):
        assert torch.equal(model.generate(ids, **GREEDY), expected)
        stats = sparse_attention_stats(model)
    assert (stats.metadata_bytes, stats.kv_fraction) == (0, 1.0)


@pytest.mark.parametrize(
    ("parameters", "error", "message"),
    [
        ({"target_sparsity": 1}, ValueError, "target_sparsity must be at least 0 and below 1, got 1"),
        ({"target_sparsity": "0.9"}, TypeError, "target_sparsity must be a number"),
        ({"clusters": 0.0}, ValueError, "clusters must be above 0 and at most 1: no more clusters than keys, got 0.0"),
        ({"coarse_clusters": 0.06}, ValueError, "coarse_clusters must be above 0 and at most clusters=0.05, got 0.06"),
        ({"levels": 3}, ValueError, "levels must be 1 or 2, got 3"),
        ({"window": 0}, ValueError, "window must be at least 1, got 0"),
        ({"window": 2.0}, TypeError, "window must be a whole number"),
        ({"sink_tokens": -1}, ValueError, "sink_tokens must be 0 or more, got -1"),
        ({"token_budget": 0}, ValueError, "token_budget must be at least 1, or None, got 0"),
        ({"dense_layers": 1}, ValueError, "dense_layers must be 0"),
        ({"seed": -1}, ValueError, "seed must be 0 or more, got -1"),
        ({"iterations": 0}, ValueError, "iterations must be at least 1, got 0"),
        ({"batch_tokens": 0}, ValueError, "batch_tokens must be at least 1, or None, got 0"),
    ],
)
def test_bad_hyperparameters(parameters, error, message):
    with pytest.raises(error, match=message):
        Squeezed(**parameters)


def test_rows_too_short_for_two_clusters_are_read_exactly():
    """The one cluster's weight equals the threshold but for rounding, which differs with the batch."""
    model = make_model("llama", dtype=torch.float64, num_hidden_layers=2)
    ids, more = random_ids(2, 20), random_ids(2, 1, seed=1)
    expected = model(torch.cat((ids, more), dim=1), use_cache=False).logits[:, -1:]
    method = Squeezed(target_sparsity=0.8, clusters=0.1, window=8)
    with torch.no_grad(), sparse_attention(model, method):
        for length, reads_all in ((20, True), (13, True), (60, False)):
            text = random_ids(2, 60)[:, :length]
            cache = SparseCache.for_model(model)
            model(text, past_key_values=cache)
            model(more, past_key_values=cache)  # finishes the prompt
            assert (cache.sparse_layers[-1].metadata["context_lengths"] == 0).all() == reads_all
        cache = SparseCache.for_model(model)
        model(ids, past_key_values=cache)
        torch.testing.assert_close(model(more, past_key_values=cache).logits, expected, rtol=0, atol=1e-9)


def test_a_model_with_sliding_windows_is_refused():
    model = make_model("qwen2", layer_types=["full_attention", "sliding_attention"] * 2, use_sliding_window=True)
    with (
        pytest.raises(ValueError, match="method 'squeezed' does not support sliding-window layers"),
        sparse_attention(model, "squeezed"),
    ):
        pass
