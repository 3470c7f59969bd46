import math

import pytest
import torch
from hf_sparse_attn_kernels import select_tokens_by_score
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ops.codes.inputs import divide
from tests.ops.helpers import IMPLS, check_schema, device, grid, int32

NAN, INF = float("nan"), float("inf")


def _brute_force(scores, length, max_tokens, sink_tokens, page_size):
    """The choice of one row and head, by sorting (forced, score, lower index first)."""
    newest_page = max(0, length - 1) // page_size * page_size

    def rank(token):
        forced = token < sink_tokens or token >= newest_page
        score = -INF if scores[token] != scores[token] else scores[token]
        return (not forced, -score, token)

    return sorted(sorted(range(length), key=rank)[:max_tokens])


def _check(scores, lengths, *, max_tokens, **options):
    starts = [5 * row for row in range(len(lengths))]
    ends = [start + length for start, length in zip(starts, lengths, strict=True)]
    scores = scores.half().to(device)
    for impl in IMPLS:
        indices, counts = select_tokens_by_score(
            scores, int32(starts), int32(ends), max_tokens=max_tokens, impl=impl, **options
        )
        assert indices.dtype == counts.dtype == torch.int32
        assert indices.shape == (*scores.shape[:2], max_tokens)
        for row, length in enumerate(lengths):
            length = min(length, scores.shape[2])
            for head in range(scores.shape[1]):
                expected = _brute_force(scores[row, head].tolist(), length, max_tokens, **options)
                assert indices[row, head].tolist() == expected + [-1] * (max_tokens - len(expected)), impl
                assert counts[row, head].item() == len(expected), impl


def make_scores(rows, width, values=10_000, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, 2, width, generator=generator) * values).round() / values


@pytest.mark.parametrize(
    ("lengths", "width", "max_tokens", "sink_tokens", "page_size"),
    [
        ([0, 1, 16, 17, 63, 111], 111, 40, 4, 16),
        ([700, 63], 700, 100, 0, 64),
        ([640, 641, 630], 650, 52, 4, 48),
        ([90], 80, 200, 30, 16),
        grid([333], 333, 17, 1, 16),
    ],
)
def test_matches_brute_force(lengths, width, max_tokens, sink_tokens, page_size):
    for values in (10_000, 3):  # few values: many ties
        scores = make_scores(len(lengths), width, values)
        _check(scores, lengths, max_tokens=max_tokens, sink_tokens=sink_tokens, page_size=page_size)


def awkward_scores(width):
    """Ties, NaN and few candidates over the borders of programs."""
    scores = make_scores(2, width)
    scores[0, 0] = (2 * scores[0, 0]).round()
    scores[0, 1] = 1.0
    scores[1, 0, ::3] = NAN
    scores[1, 1, 200:] = -INF
    scores[1, 1, 201::3] = NAN
    return scores


@pytest.mark.parametrize(
    ("width", "max_tokens", "span", "sampled", "deviations"),
    [
        (1504, 60, 256, 32, 3.0),
        (1300, 400, 512, 64, 0.0),
        grid(1024, 1024, 1024, 32, 1.0),
        grid(2500, 70, 256, 256, 3.0),
    ],
)
def test_rows_of_several_programs(monkeypatch, width, max_tokens, span, sampled, deviations):
    divide(monkeypatch, span=span, at_once=256, sampled=sampled, deviations=deviations)
    scores = awkward_scores(width)
    for lengths in ([width, 300], [span + 1, width - 1], [0, span]):
        _check(scores, lengths, max_tokens=max_tokens, sink_tokens=3, page_size=32)


@pytest.mark.parametrize(("width", "at_once"), [(1500, 256), (1040, 1024)])
def test_a_sample_that_leaves_too_few_candidates(monkeypatch, width, at_once):
    """All tokens are searched then, in several parts or one."""
    divide(monkeypatch, span=512, at_once=at_once, sampled=32, deviations=-100.0)
    _check(awkward_scores(width), [width, 900], max_tokens=100, sink_tokens=3, page_size=16)


def test_every_candidate_reaches_the_bound(monkeypatch):
    """The bound is 1 where three tokens of score 0 are wanted: more are kept, but not for their scores."""
    divide(monkeypatch, span=256, at_once=256, sampled=32, deviations=-1.0)
    scores = (torch.arange(800) % 8 == 7).float().expand(1, 2, -1)
    for more in (0, 3):
        _check(scores, [800], max_tokens=1 + 98 + 16 + more, sink_tokens=1, page_size=16)


def test_more_candidates_than_a_program_holds(monkeypatch):
    """The scores rise and fall slowly, so that most programs have no candidate and one has most."""
    divide(monkeypatch, span=256, at_once=256, sampled=32)
    scores = torch.linspace(0, 12, 1600).sin().expand(1, 2, -1) * torch.tensor([1, -1])[:, None]
    for max_tokens in (90, 700):
        _check(scores, [1590], max_tokens=max_tokens, sink_tokens=0, page_size=64)


@pytest.mark.parametrize("sink_tokens", [0, 4, 8])
@pytest.mark.parametrize("scratch", [-1_082_130_432, 0x7FFFFFFF], ids=["negative", "positive"])
def test_an_empty_row_reads_no_bound_and_writes_no_token(monkeypatch, sink_tokens, scratch):
    """Whatever the scratch memory holds, and even where the row is the last one of the outputs."""
    divide(monkeypatch, span=256, at_once=256, sampled=32)
    empty, allocated = torch.empty, []

    def filled(size, **options):
        if options["dtype"] != torch.int32:
            return empty(size, **options)
        allocated.append(torch.full((math.prod(size) + 4096,), scratch, **options))
        return allocated[-1][: math.prod(size)].view(size)

    scores, page = make_scores(2, 1500), {"sink_tokens": sink_tokens, "page_size": 32}
    monkeypatch.setattr(torch, "empty", filled)
    _check(scores, [1500, 0], max_tokens=sink_tokens + 64, **page)
    assert allocated
    for tensor in allocated:
        assert (tensor[-4096:] == scratch).all()


def test_most_tokens_are_always_chosen(monkeypatch):
    """No group of neighbours can be sampled."""
    divide(monkeypatch, span=256, at_once=256, sampled=32)
    _check(make_scores(1, 600), [600], max_tokens=650, sink_tokens=570, page_size=16)
    _check(make_scores(1, 600), [596], max_tokens=590, sink_tokens=5, page_size=576)


def test_every_score_of_float16():
    """Each has its place in the order: negative ones, NaN, and those below the normal range."""
    numbers = 1 << 16
    scores = torch.arange(-numbers // 2, numbers // 2).to(torch.int16).view(torch.float16)
    scores = scores[torch.randperm(numbers, generator=torch.Generator().manual_seed(0))].to(device)
    values = scores.float().nan_to_num(nan=-INF, neginf=-INF, posinf=INF)
    for max_tokens in (100, 31000, 32000, 60000):
        options = {"max_tokens": max_tokens, "sink_tokens": 0, "page_size": 16}
        by_impl = [
            select_tokens_by_score(scores[None, None], int32([0]), int32([numbers]), **options, impl=impl)[0].flatten()
            for impl in IMPLS
        ]
        assert all(torch.equal(indices, by_impl[0]) for indices in by_impl)
        is_taken = torch.zeros(numbers, dtype=torch.bool, device=device)
        is_taken[by_impl[0].long()] = True
        assert is_taken.sum() == max_tokens
        assert is_taken[-16:].all()
        assert values[:-16][is_taken[:-16]].min() >= values[~is_taken].max()


def test_long_rows_whose_neighbours_score_alike():
    lengths, width = int32([40000, 23457]), 40000
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(2, 2, width // 20, generator=generator).repeat_interleave(20, dim=2)
    scores = (scores + 0.2 * torch.randn(scores.shape, generator=generator)).half().to(device)
    options = {"max_tokens": 1024, "sink_tokens": 4, "page_size": 64}
    by_impl = [select_tokens_by_score(scores, 0 * lengths, lengths, **options, impl=impl) for impl in IMPLS]
    for indices, counts in by_impl:
        torch.testing.assert_close(indices, by_impl[0][0], rtol=0, atol=0)
        assert (counts == 1024).all()


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
    for max_tokens in (17, 20, 30, 64):
        _check(scores, [64, 64, 63, 64, 50], max_tokens=max_tokens, sink_tokens=1, page_size=16)


@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_properties(data):
    width = data.draw(st.integers(1, 90))
    lengths = data.draw(st.lists(st.integers(0, width), min_size=1, max_size=2))
    page_size = data.draw(st.sampled_from([16, 32, 48]))
    sink_tokens = data.draw(st.integers(0, 9))
    max_tokens = data.draw(st.integers(sink_tokens + page_size, 100))
    # Few distinct values, so that ties are common.
    values = torch.tensor([-INF, -1.5, -0.0, 0.0, 6e-8, 2.0, 2.002, INF, NAN])
    places = data.draw(st.lists(st.integers(0, len(values) - 1), min_size=width, max_size=width))
    scores = values[torch.tensor(places)].expand(len(lengths), 1, width)
    _check(scores, lengths, max_tokens=max_tokens, sink_tokens=sink_tokens, page_size=page_size)


def test_the_reference_takes_wider_scores():
    for dtype in (torch.float32, torch.float64):
        scores = torch.linspace(1, 1.00001, 40, dtype=dtype, device=device).expand(1, 1, 40)
        options = {"max_tokens": 20, "sink_tokens": 1, "page_size": 16, "impl": "reference"}
        indices, _ = select_tokens_by_score(scores, int32([0]), int32([40]), **options)
        assert indices.tolist() == [[[0, *range(21, 40)]]]


def test_errors():
    scores, rows = torch.zeros(1, 2, 40, device=device).half(), (int32([0]), int32([40]))
    for options, message in (
        ({"max_tokens": 19}, r"sink_tokens=4 and page_size=16; allowed: together at most max_tokens=19"),
        ({"page_size": 8}, r"page_size=8; allowed: a multiple of 16"),
        ({"sink_tokens": -1}, r"sink_tokens=-1; allowed: an int of at least 0"),
    ):
        with pytest.raises(ValueError, match=message):
            select_tokens_by_score(scores, *rows, **{"max_tokens": 30, "sink_tokens": 4, "page_size": 16, **options})
    with pytest.raises(TypeError, match=r"scores has dtype torch.float32; allowed for impl='triton': torch.float16"):
        select_tokens_by_score(scores.float(), *rows, max_tokens=30, sink_tokens=4, page_size=16, impl="triton")


def test_the_schema_declares_what_is_written():
    scores = torch.zeros(1, 2, 40, device=device).half()
    options = {"max_tokens": 30, "sink_tokens": 4, "page_size": 16}
    check_schema(
        "select_tokens_by_score", {"scores": scores, "seq_start": int32([0]), "seq_end": int32([40]), **options}
    )
