"""Queries of its prompts that a layer keeps: the last ones, and the mean of all, through every operation on rows."""

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

from hf_sparse_attn import SparseCache, sparse_attention
from hf_sparse_attn.cache.queries import PromptQueries, followed_by
from tests.methods.toy import Recent
from tests.models import DEVICE, random_ids, shared_model

SCALE = 0.25


@dataclass(frozen=True)
class Keeping(Recent):
    """A method that reads the last tokens and keeps queries."""

    name: ClassVar[str] = "toy-keeping"

    @property
    def keeps_queries(self):
        return 5


@pytest.fixture
def model():
    model = shared_model("llama", torch.float64)
    yield model
    assert model.config._attn_implementation == "sdpa"


def feed(parts, lengths, most=4, dtype=torch.float64):
    """Feed [batch, heads, tokens, d] queries of rows with so many tokens each, in parts."""
    kept, end = None, 0
    for part in parts:
        end += part.shape[2]
        padding = sum(each.shape[2] for each in parts) - torch.tensor(lengths)
        row_lengths = (end - padding).clamp_min(0).int()
        kept = followed_by(kept, part.to(dtype), row_lengths, bool(padding.any()), SCALE, most, end)
    return kept


@pytest.mark.parametrize("cuts", [[20], [1, 19], [7, 6, 7], [3, 17]])
def test_the_mean_is_that_of_each_rows_tokens_whatever_the_calls(cuts):
    query = torch.randn(3, 2, 20, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    lengths = [20, 11, 2]
    query[1, :, :9] = torch.nan  # padding
    kept = feed(query.split(cuts, dim=2), lengths)
    assert kept.number.tolist() == lengths
    assert kept.counts.tolist() == [4, 4, 2]
    for row, length in enumerate(lengths):
        torch.testing.assert_close(kept.mean[row], query[row, :, -length:].mean(1), rtol=1e-12, atol=1e-12)
    assert torch.equal(kept.states[0], query[0, :, -4:])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_queries_in_half_precision_are_added_in_float32(dtype):
    query = torch.randn(1, 2, 3000, 8, generator=torch.Generator().manual_seed(0)) + 30
    kept = feed([query], [3000], dtype=dtype)
    assert kept.total.dtype == torch.float32
    exact = query.to(dtype).double().mean(2)
    torch.testing.assert_close(kept.mean.double(), exact, rtol=1e-6, atol=0)


def test_a_row_without_tokens_has_the_mean_zero():
    kept = feed([torch.full((2, 1, 6, 4), torch.inf)], [6, 0])
    assert kept.mean[1].tolist() == [[0.0] * 4]


@pytest.mark.parametrize(("tokens", "known"), [(1, 1), (3, 3), (7, 4)])
def test_the_last_queries_do_not_reach_back_over_decode_steps(tokens, known):
    query = torch.randn(2, 1, 9 + 5 + tokens, 4, dtype=torch.float64)
    first, later = query[:, :, :9], query[:, :, 14:]
    lengths = torch.tensor([9, 2]).int()
    kept = followed_by(None, first, lengths, True, SCALE, 4, 9)
    kept = followed_by(kept, later, lengths + 5 + tokens, True, SCALE, 4, 14 + tokens)
    assert torch.equal(kept.states, later[:, :, -4:])
    assert kept.counts.tolist() == [known, known]
    assert kept.number.tolist() == [9 + tokens, 2 + tokens]  # the mean is of all prompts
    torch.testing.assert_close(kept.total[0], torch.cat((first, later), 2)[0].sum(1), rtol=1e-12, atol=1e-12)


def test_a_cut_shortens_the_last_queries_and_keeps_the_mean():
    query = torch.randn(2, 1, 10, 4, dtype=torch.float64)
    kept = feed([query], [10, 10])
    for length, left in ((9, 3), (6, 0), (3, 0)):
        cut = kept.cut(length)
        assert isinstance(cut, PromptQueries)
        assert torch.equal(cut.states, query[:, :, 6 : 6 + left])
        assert cut.counts.tolist() == [left, left]
        assert (cut.end, cut.number.tolist()) == (length, [10, 10])
        assert torch.equal(cut.mean, kept.mean)
    assert kept.cut(0) is None


def test_a_cut_into_the_padding_of_a_row_leaves_none_of_its_queries():
    query = torch.randn(2, 1, 10, 4, dtype=torch.float64)
    assert feed([query], [10, 2]).cut(7).counts.tolist() == [1, 0]


@torch.inference_mode()
def test_the_mean_follows_rows_and_is_gone_after_a_reset(model):
    ids, more = random_ids(3, 30), random_ids(3, 9, seed=1)
    mask = torch.ones(3, 39, dtype=torch.long, device=DEVICE)
    mask[1, :8] = 0
    with sparse_attention(model, Keeping(token_budget=16)):
        cache = SparseCache.for_model(model)
        model(ids, attention_mask=mask[:, :30], past_key_values=cache)
        model(more, attention_mask=mask, past_key_values=cache)
        layer = cache.layers[2]
        once = layer.prompt_queries
        assert once.number.tolist() == [39, 31, 39]
        for token in more[:, :4].split(1, dim=1):  # steps are no prompt
            mask = torch.cat([mask, mask.new_ones(3, 1)], dim=1)
            model(token, attention_mask=mask, past_key_values=cache)
        cache.reorder_cache(torch.tensor([1, 1, 0], device=DEVICE))
        cache.batch_repeat_interleave(2)
        cache.batch_select_indices(torch.tensor([4, 2], device=DEVICE))
        assert torch.equal(layer.prompt_queries.mean, once.mean[[0, 1]])
        cache.crop(-20)
        assert layer.prompt_queries.number.tolist() == [39, 31]
        fork = cache.fork(Keeping(token_budget=12))
        assert torch.equal(fork.layers[2].prompt_queries.mean, once.mean[[0, 1]])
        cache.reset()
        assert layer.prompt_queries is None
        assert fork.layers[2].prompt_queries is not None


@torch.inference_mode()
def test_a_failed_pass_adds_nothing(model):
    def fail(*args):
        raise RuntimeError("out of memory")

    with sparse_attention(model, Keeping(token_budget=16)):
        cache = SparseCache.for_model(model)
        model(random_ids(1, 20), past_key_values=cache)
        before = cache.layers[0].prompt_queries
        hook = model.get_decoder().layers[2].register_forward_pre_hook(fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            model(random_ids(1, 9), past_key_values=cache)
        hook.remove()
        cache.crop(0)
        assert cache.layers[0].prompt_queries is before
