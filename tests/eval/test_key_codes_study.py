"""The study's selector: with the shipped settings the method's own choices; what the others are, and their bytes."""

from __future__ import annotations

import pytest
import torch
from hf_sparse_attn_kernels.codes import ROTATED_UNITS, UNITS
from hf_sparse_attn_kernels.codes.rotation import rotation

from eval.studies.codes import QUERY_UNITS, Coder
from eval.studies.key_codes import CHOICES, KeyCodesStudy
from hf_sparse_attn import KeyCodes, SparseCache, record_selections, sparse_attention, sparse_attention_stats
from tests.models import random_ids, shared_model

pytestmark = pytest.mark.usefixtures("exact")

SMALL = {"token_budget": 48, "page_size": 16}
PROMPT, STEPS = 150, 24
AXES = [
    {"bits": 2},
    {"bits": 16},
    {"key_centre": "prompt"},
    {"key_centre": "none"},
    {"query_centre": "none"},
    {"query_centre": "query_head"},
    {"rotation": False},
    {"rotation": False, "bits": 2},
    {"correction": False},
    {"correction": "least_squares"},
    {"correction": "least_squares", "bits": 2},
    {"group_reduce": "max"},
    {"group_reduce": "mean"},
    {"granularity": "page"},
    {"rerank": 2},
]


class Run:
    """A batch of two rows, the second one with left padding: a prompt, then steps of given tokens."""

    def __init__(self, method, dtype=torch.float64) -> None:
        model = shared_model("llama", dtype)
        ids = random_ids(2, PROMPT + STEPS, seed=3).to(model.device)
        mask = torch.ones_like(ids)
        mask[1, :7] = 0
        cache = SparseCache(model.config, method)
        with torch.inference_mode(), sparse_attention(model, method), record_selections(model) as self.record:
            model(ids[:, :PROMPT], attention_mask=mask[:, :PROMPT], past_key_values=cache)
            for n in range(PROMPT, PROMPT + STEPS):
                model(ids[:, n : n + 1], attention_mask=mask[:, : n + 1], past_key_values=cache)
            self.stats = sparse_attention_stats(model)
        self.cache, self.lengths = cache, (PROMPT, PROMPT - 7)

    def reads(self) -> list[torch.Tensor]:
        """Return bool [kv_heads, tokens] of each layer, step and row."""
        return [
            self.record.reads(layer, step, row)
            for layer in self.record.layers
            for step in range(STEPS)
            for row in range(2)
        ]


def same(first: Run, second: Run) -> float:
    """Return the share of steps in which two runs read the same tokens."""
    pairs = list(zip(first.reads(), second.reads(), strict=True))
    return sum(torch.equal(one, two) for one, two in pairs) / len(pairs)


@pytest.mark.parametrize("bits", [1, 2])
@pytest.mark.parametrize("group_reduce", ["softmax", "max"])
@pytest.mark.parametrize(
    ("has_centre", "shipped_correction", "correction"),
    [(True, "unbiased", True), (False, "unbiased", True), (True, "least_squares", "least_squares")],
)
def test_the_shipped_settings_choose_the_shipped_method_s_tokens(
    bits, group_reduce, has_centre, shipped_correction, correction
):
    shared = {**SMALL, "bits": bits, "group_reduce": group_reduce}
    shipped = Run(KeyCodes(**shared, query_centre=has_centre, correction=shipped_correction))
    studied = Run(KeyCodesStudy(**shared, query_centre="kv_head" if has_centre else "none", correction=correction))
    assert same(shipped, studied) == 1.0
    assert studied.stats.kv_bytes == shipped.stats.kv_bytes
    assert studied.stats.metadata_bytes == shipped.stats.metadata_bytes


@pytest.mark.parametrize("bits", [1, 2])
@pytest.mark.parametrize("has_centre", [True, False])
def test_queries_are_rounded_as_in_the_op(bits, has_centre):
    """In float32; in float64, as in the other tests, nothing is rounded."""
    shared = {**SMALL, "bits": bits, "group_reduce": "max"}
    shipped = Run(KeyCodes(**shared, query_centre=has_centre, correction="unbiased"), torch.float32)
    studied, unrounded = (
        Run(
            KeyCodesStudy(**shared, query_centre="kv_head" if has_centre else "none", query_bits=query_bits),
            torch.float32,
        )
        for query_bits in (6, None)
    )
    # Estimates are added in float32 here and in float64 there, which decides between scores next to each other.
    assert same(shipped, studied) > 0.97
    assert same(shipped, unrounded) < 0.5


def test_the_defaults_are_the_shipped_ones():
    shipped, studied = KeyCodes(), KeyCodesStudy()
    for name in ("token_budget", "dense_layers", "bits", "page_size", "group_reduce", "sink_tokens"):
        assert getattr(studied, name) == getattr(shipped, name)
    assert (studied.query_centre == "kv_head") == shipped.query_centre
    assert 2 ** (studied.query_bits - 1) - 1 == ROTATED_UNITS
    assert QUERY_UNITS == UNITS


@pytest.mark.parametrize("axis", AXES, ids=lambda axis: "-".join(f"{name}-{value}" for name, value in axis.items()))
def test_every_choice_keeps_the_budget_and_chooses_otherwise(axis):
    method = KeyCodesStudy(**SMALL, **axis)
    run = Run(method)
    for reads in run.reads():
        n = reads.shape[1]
        assert bool(reads[:, : method.sink_tokens].all())
        assert bool(reads[:, (n - 1) // 16 * 16 :].all())
        read = reads.sum(1)
        assert bool((read <= method.token_budget).all())
        # A block of a page that is being filled has fewer tokens than 16.
        assert bool((read > method.token_budget - (16 if method.granularity == "page" else 1)).all())
    assert same(run, Run(KeyCodesStudy(**SMALL))) < 0.9
    assert run.stats.metadata_bytes > 0


@pytest.mark.parametrize("bits", [1, 2])
def test_factors_keep_the_product_the_norm_or_the_least_error(bits):
    """By the codes of one page of keys, decoded and compared with its rotated residuals."""
    keys = torch.randn(1, 1, 1, 16, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    residual = keys - keys.mean(3, keepdim=True)
    errors = {}
    for correction in CHOICES["correction"]:
        metadata = {
            "symbols": torch.zeros(1, 1, 16, 32, dtype=torch.int8),
            "factors": torch.zeros(1, 1, 16, 1, dtype=torch.float64),
            "offsets": torch.zeros(1, 1, 16, 1, dtype=torch.float64),
            "query_centre": torch.zeros(1, 1, 1, 32),
            "prompt_centre": keys.mean(3)[:, :, 0],
            "channel_scale": torch.ones(1, 1, 32, dtype=torch.float64),
            "coded": torch.zeros(1, 1, dtype=torch.int32),
        }
        coder = Coder(bits, "prompt", True, correction, None)
        coder.encode(keys, 0, torch.tensor([1]), metadata)
        decoded = metadata["symbols"].double() * metadata["factors"]
        rotated = residual[0, 0, 0] @ rotation(32, torch.device("cpu")).double().T
        assert torch.equal(decoded[0, 0].sign(), rotated.sign())
        product = (decoded[0, 0] * rotated).sum(1)
        if correction is True:
            torch.testing.assert_close(product, rotated.square().sum(1), rtol=1e-6, atol=0)
        elif correction is False:
            torch.testing.assert_close(decoded[0, 0].norm(dim=1), rotated.norm(dim=1), rtol=1e-6, atol=0)
        errors[correction] = (decoded[0, 0] - rotated).square().sum(1)
    assert bool((errors["least_squares"] < errors[False]).all())
    assert bool((errors[False] < errors[True]).all())


def exact_reads(keys, query, newest, budget, sinks):
    """Return which of the keys [n, d] of a KV head the best choice reads, for queries [group, d] with their scale."""
    probability = (query @ keys[:newest].T).softmax(1).sum(0)
    probability[:sinks] = 2 * len(query)
    reads = torch.zeros(len(keys), dtype=torch.bool)
    reads[newest:] = True
    reads[probability.topk(budget - int(reads.sum()))[1]] = True
    return reads


def test_sixteen_bits_are_the_keys_themselves_and_reranking_everything_is_too(monkeypatch):
    seen = []
    select = KeyCodesStudy.select

    def seeing(method, query, layer, scale):
        selection = select(method, query, layer, scale)
        if layer.layer_idx == 1:
            seen.append((query * scale, layer.keys[:, :, : layer.longest_row].clone(), layer.seq_start.clone()))
        return selection

    monkeypatch.setattr(KeyCodesStudy, "select", seeing)
    exact = Run(KeyCodesStudy(**SMALL, bits=16))
    for step, (query, keys, starts) in enumerate(seen):
        for row in range(2):
            found = exact.record.reads(1, step, row)
            for head, own in enumerate(query[row].view(keys.shape[1], -1, keys.shape[3])):
                held = keys[row, head, int(starts[row]) :]
                newest = (len(held) - 1) // 16 * 16
                assert torch.equal(found[head], exact_reads(held, own, newest, 48, 4))
    assert same(exact, Run(KeyCodesStudy(**SMALL, rerank=4))) == 1.0


def test_bytes_are_those_of_the_stored_codes():
    """A step of one row of 2 pages before the newest token's, 2 KV heads of 2 query heads, head_dim 16."""
    head_dim, group, pages = 16, 2, 2
    token, page = head_dim // 8 + 2, head_dim + 2

    def of(**axis):
        return _bytes_of_a_step(KeyCodesStudy(**SMALL, **axis), head_dim, group, pages * 16 + 5)

    for axis, expected in (
        ({}, pages * (16 * (token + 2) + page)),
        ({"bits": 2}, pages * (16 * (token + 2 + head_dim // 8) + page)),
        ({"query_centre": "none"}, pages * (16 * token + page)),
        ({"query_centre": "query_head"}, pages * (16 * (token + 2 * group) + page)),
        ({"key_centre": "prompt"}, pages * 16 * (token + 2) + 2 * head_dim),
        ({"key_centre": "none", "rotation": False}, pages * 16 * (token + 2) + 2 * head_dim),
        ({"bits": 16}, pages * 16 * 8 * head_dim),
    ):
        assert of(**axis) == 2 * expected, axis
    longer = _bytes_of_a_step(KeyCodesStudy(**SMALL, rerank=2), head_dim, group, 200)
    plain = _bytes_of_a_step(KeyCodesStudy(**SMALL), head_dim, group, 200)
    assert longer - plain == 2 * 48 * 8 * head_dim  # the keys of 48 more tokens


def _bytes_of_a_step(method, head_dim, group, length):
    class Layer:
        keys = torch.zeros(1, 2, 256, head_dim, dtype=torch.float64)
        q_heads = 2 * group

        def row_lengths(self):
            return torch.tensor([length], dtype=torch.int32)

    return int(method.metadata_bytes_read(Layer()))


@pytest.mark.parametrize("parameter", [*CHOICES, "page_size", "rerank", "sink_tokens", "token_budget"])
def test_values_that_are_not_allowed_are_named(parameter):
    numbers = {"page_size": 24, "rerank": -1, "sink_tokens": 17, "token_budget": 67, "bits": 3, "query_bits": 99}
    value = numbers.get(parameter, "other")
    error, who = (TypeError, "") if parameter == "rotation" else (ValueError, "keycodes_study: ")
    with pytest.raises(error, match=f"{who}{parameter} must be .*, got {value!r}"):
        KeyCodesStudy(**{parameter: value})
