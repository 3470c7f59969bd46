"""`select_tokens_by_mass` against the definition, with weights as exact fractions of Python's whole numbers."""

import math
from fractions import Fraction

import pytest
import torch
from hf_sparse_attn_kernels import select_tokens_by_mass
from hf_sparse_attn_kernels.codes.mass_weights import MOST_TOKENS, STEPS, step_weights
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ops.helpers import IMPLS, check_schema, device, grid, int32

NAN, INF = float("nan"), float("inf")


def _step(score, greatest):
    """How many steps of 2 ** (1 / 32) a weight is below the greatest, with both operations rounded to float32."""
    below = torch.tensor(greatest, dtype=torch.float32) - torch.tensor(score, dtype=torch.float32)
    return min(STEPS - 1, math.floor((below * torch.tensor(32 * math.log2(math.e), dtype=torch.float32)).item()))


def _definition(scores, length, top_p, sink_tokens, page_size, max_tokens):
    """The choice of one row and head: candidates are added one by one, heaviest first, until they hold the share."""
    newest_page = max(0, length - 1) // page_size * page_size
    forced = [token for token in range(length) if token < sink_tokens or token >= newest_page]
    held = {token: min(scores[token], 65504.0) for token in range(length) if scores[token] > -INF}  # NaN is not
    held = {token: score for token, score in held.items() if token not in forced}
    weights = {}
    for token, score in held.items():
        weights[token] = round(Fraction(2 ** (-_step(score, max(held.values())) / 32)) * 2**40)
    need = Fraction(max(1, round(top_p * 2**20)), 2**20) * sum(weights.values())
    taken, mass = [], 0
    for token in sorted(weights, key=lambda token: (-weights[token], token)):
        if mass >= need or len(forced) + len(taken) == max_tokens:
            break
        taken.append(token)
        mass += weights[token]
    return sorted(forced + taken)


def _check(scores, lengths, *, max_tokens=None, **options):
    starts = [5 * row for row in range(len(lengths))]
    ends = [start + length for start, length in zip(starts, lengths, strict=True)]
    scores = scores.half().to(device)
    width = scores.shape[2] if max_tokens is None else max_tokens
    sizes = []
    for impl in IMPLS:
        indices, counts = select_tokens_by_mass(
            scores, int32(starts), int32(ends), max_tokens=max_tokens, impl=impl, **options
        )
        assert indices.dtype == counts.dtype == torch.int32
        assert indices.shape == (*scores.shape[:2], width)
        for row, length in enumerate(lengths):
            length = min(length, scores.shape[2])
            for head in range(scores.shape[1]):
                expected = _definition(scores[row, head].tolist(), length, max_tokens=width, **options)
                assert indices[row, head].tolist() == expected + [-1] * (width - len(expected)), impl
                assert counts[row, head].item() == len(expected), impl
                sizes.append(len(expected))
    return sizes


def _scores(rows, width, spread=3.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 2, width, generator=generator) * spread - 7


@pytest.mark.parametrize(
    ("lengths", "width", "sink_tokens", "page_size"),
    [
        ([0, 1, 16, 17, 63, 111], 111, 4, 16),
        ([700, 63], 700, 0, 64),
        ([640, 641, 630], 650, 128, 48),
        ([90], 80, 30, 16),
        grid([333], 333, 1, 16),
    ],
)
@pytest.mark.parametrize("top_p", [0.3, 0.95, 1.0])
def test_matches_the_definition(lengths, width, sink_tokens, page_size, top_p):
    for spread in (3.0, 0.01, 60.0):  # many equal weights, and many that are not told apart
        options = {"top_p": top_p, "sink_tokens": sink_tokens, "page_size": page_size}
        _check(_scores(len(lengths), width, spread), lengths, **options)
        _check(_scores(len(lengths), width, spread), lengths, max_tokens=sink_tokens + page_size + 9, **options)


@pytest.mark.parametrize(("width", "tile"), [(1500, 64), grid(1300, 128), grid(400, 512)])
def test_rows_of_several_tiles(monkeypatch, width, tile):
    """Ties, NaN and few candidates over the borders of tiles, and more histograms than are added at once."""
    module = pytest.importorskip("hf_sparse_attn_kernels.codes.mass")
    monkeypatch.setattr(module, "LEAST_TILE", tile)
    monkeypatch.setattr(module, "MOST_TILE", tile)
    scores = _scores(2, width)
    scores[0, 0] = (scores[0, 0] / 2).round()
    scores[0, 1] = 1.0
    scores[1, 0, ::3] = NAN
    scores[1, 1, 200:] = -INF
    for lengths, max_tokens in (
        ([width, 300], None),
        ([width - 1, tile], 150),
        ([tile + 1, 1], 2000),
        ([0, width], 90),
    ):
        _check(scores, lengths, top_p=0.8, max_tokens=max_tokens, sink_tokens=3, page_size=32)


def test_special_scores():
    scores = torch.tensor(
        [
            [NAN, 1.0, NAN, -INF, 2.0, NAN, 0.0, -0.0],
            [NAN] * 8,
            [-INF] * 8,
            [INF, INF, 65504.0, INF, 1.0, INF, NAN, -65504.0],
            [-0.0, 0.0, -0.0, 0.0, 6e-8, -6e-8, 0.0, -0.0],
        ]
    )
    scores = torch.cat((scores.repeat(1, 6), torch.zeros(5, 16)), dim=1)[:, None]
    for top_p in (1e-9, 0.5, 0.999, 1):
        _check(scores, [64, 64, 63, 64, 50], top_p=top_p, sink_tokens=1, page_size=16)


@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_properties(data):
    width = data.draw(st.integers(1, 90))
    lengths = data.draw(st.lists(st.integers(0, width), min_size=1, max_size=2))
    page_size = data.draw(st.sampled_from([16, 32, 48]))
    sink_tokens = data.draw(st.integers(0, 9))
    max_tokens = data.draw(st.none() | st.integers(sink_tokens + page_size, 100))
    top_p = data.draw(st.floats(0, 1, exclude_min=True))
    # Few distinct values, so that ties are common.
    values = torch.tensor([-INF, -9.5, -0.0, 0.0, 0.01, 0.02, 0.03, 2.0, 65504.0, NAN])
    places = data.draw(st.lists(st.integers(0, len(values) - 1), min_size=width, max_size=width))
    scores = values[torch.tensor(places)].expand(len(lengths), 1, width)
    options = {"top_p": top_p, "sink_tokens": sink_tokens, "page_size": page_size}
    _check(scores, lengths, max_tokens=max_tokens, **options)


@pytest.mark.parametrize("top_p", [0.65, 0.95])
def test_the_exact_softmax_weights_of_the_choice_reach_nearly_the_share(top_p):
    """And not with many tokens more than a choice by exact weights takes."""
    scores = _scores(3, 2000, spread=2.0).half().to(device)
    rows = (int32([0] * 3), int32([2000] * 3))
    indices, counts = select_tokens_by_mass(scores, *rows, top_p=top_p, sink_tokens=0, page_size=16)
    weights = scores[..., :1984].double().softmax(dim=-1)
    reached = weights.sort(dim=-1, descending=True)[0].cumsum(dim=-1)
    for row in range(3):
        for head in range(2):
            chosen = indices[row, head][: counts[row, head] - 16].long()
            held = weights[row, head][chosen].sum().item()
            assert held >= top_p / (top_p + (1 - top_p) * 2 ** (1 / 32)) - 1e-6
            needed = (reached[row, head] < top_p).sum().item() + 1
            assert 16 < needed < len(chosen) * 1.03 < needed * 1.06


def test_a_share_of_1_chooses_every_weight_and_a_tiny_one_the_heaviest_token():
    scores = torch.linspace(-40, 0, 200, device=device).half().expand(1, 1, 200)
    rows = (int32([0]), int32([200]))
    for impl in IMPLS:
        for top_p, expected in ((1, range(200)), (1e-12, [0, 1, *range(191, 200)])):
            indices, counts = select_tokens_by_mass(scores, *rows, top_p=top_p, sink_tokens=2, page_size=16, impl=impl)
            assert indices[0, 0, : counts.item()].tolist() == list(expected)


def test_weights_do_not_depend_on_the_libraries_rounding():
    """Powers of two are far enough from the middle of two whole numbers, and the greatest sum is below 2 ** 63."""
    weights = step_weights(device).tolist()
    assert weights[0] == 2**40
    assert weights[-1] > 128
    for step, weight in enumerate(weights):
        exact = (2**10000 << 40 * 32) >> step  # (2 ** (40 - step / 32)) ** 32
        scale = 2**10000
        assert (2 * weight - 1) ** 32 * scale < exact * 2**32 < (2 * weight + 1) ** 32 * scale
    assert 2**40 * MOST_TOKENS < 2**63


def test_the_reference_takes_wider_scores():
    for dtype in (torch.float32, torch.float64):
        scores = torch.linspace(0, -12, 60, dtype=dtype, device=device).expand(1, 1, 60)
        options = {"top_p": 0.9, "sink_tokens": 1, "page_size": 16, "impl": "reference"}
        indices, counts = select_tokens_by_mass(scores, int32([0]), int32([60]), **options)
        weights = scores[0, 0, 1:48].double().exp()
        needed = ((weights.cumsum(0) - weights) < 0.9 * weights.sum()).sum().item()
        assert indices[0, 0, : counts.item()].tolist() == [*range(1 + needed), *range(48, 60)]


def test_errors():
    scores, rows = torch.zeros(1, 2, 40, device=device).half(), (int32([0]), int32([40]))
    for options, message in (
        ({"max_tokens": 19}, r"sink_tokens=4 and page_size=16; allowed: together at most max_tokens=19"),
        ({"page_size": 8}, r"page_size=8; allowed: a multiple of 16"),
        ({"sink_tokens": -1}, r"sink_tokens=-1; allowed: an int of at least 0"),
        ({"top_p": 0}, r"top_p=0; allowed: above 0 and at most 1"),
        ({"top_p": NAN}, r"top_p=nan; allowed: above 0 and at most 1"),
        ({"top_p": 1.01}, r"top_p=1.01; allowed: above 0 and at most 1"),
    ):
        with pytest.raises(ValueError, match=message):
            select_tokens_by_mass(scores, *rows, **{"top_p": 0.9, "sink_tokens": 4, "page_size": 16, **options})
    options = {"top_p": 0.9, "sink_tokens": 4, "page_size": 16}
    with pytest.raises(TypeError, match=r"top_p has type bool; allowed: a number"):
        select_tokens_by_mass(scores, *rows, **{**options, "top_p": True})
    with pytest.raises(ValueError, match=r"scores has 4194305 tokens; allowed: at most 4194304"):
        select_tokens_by_mass(scores[..., :1].expand(1, 2, MOST_TOKENS + 1), *rows, **options)
    with pytest.raises(TypeError, match=r"scores has dtype torch.float32; allowed for impl='triton': torch.float16"):
        select_tokens_by_mass(scores.float(), *rows, **options, impl="triton")


def test_the_schema_declares_what_is_written():
    scores = torch.zeros(1, 2, 40, device=device).half()
    options = {"top_p": 0.9, "sink_tokens": 4, "page_size": 16}
    check_schema(
        "select_tokens_by_mass", {"scores": scores, "seq_start": int32([0]), "seq_end": int32([40]), **options}
    )
