"""The choice of tokens on clusters: on the device, or on the CPU with a thread for every thread of a cluster."""

import pytest
import torch
from hf_sparse_attn_kernels import _tuning as tuning
from hf_sparse_attn_kernels import append_and_select_tokens, select_tokens_by_score
from hf_sparse_attn_kernels.codes import choose, keep, select
from hf_sparse_attn_kernels.codes.prepared import Scanned

from tests.ops.codes.steps import new_tokens, prefilled, step_arguments
from tests.ops.codes.test_select_tokens_by_score import awkward_scores, make_scores
from tests.ops.emulation import clusters_fixture, compiled_for_cpu
from tests.ops.helpers import device, grid, int32

CHOICE = {"cluster": 2, "threads": 256, "keep": 0}

pytestmark = pytest.mark.usefixtures("on_clusters")
on_clusters = clusters_fixture(choose, "choose_by_score")
KEEPING = {"cluster": 2, "threads": 256, "keep": 256}


@pytest.fixture
def keeping(monkeypatch):
    """Launch two or three blocks for each row and KV head; on the CPU where there is no device."""
    monkeypatch.setattr(keep, "multiprocessors", lambda device: 1)
    if not torch.cuda.is_available():

        def kernel_of(device, name, *shape):
            return compiled_for_cpu(keep.SOURCES[name], keep.kernel_macros(name, *shape), name)

        monkeypatch.setattr(keep, "_kernel", kernel_of)
        monkeypatch.setattr(keep, "CHOOSING_THREADS", 256)
    else:
        keep._kernel.cache_clear()


def _choose(scanned, lengths, config=CHOICE, **options):
    starts = [5 * row for row in range(len(lengths))]
    bounds = int32(starts), int32([start + length for start, length in zip(starts, lengths, strict=True)])
    with tuning.forced(token_choice=config):
        found = choose.choose(scanned, bounds, **options)
    assert found is not None
    return found, bounds


@pytest.mark.parametrize(
    ("lengths", "width", "max_tokens", "sink_tokens", "page_size", "config"),
    [
        ([0, 1, 16, 17, 63, 111], 112, 40, 4, 16, CHOICE),
        ([700, 63], 704, 100, 0, 64, {"cluster": 3, "threads": 256, "keep": 0}),
        ([640, 641, 630], 656, 52, 4, 48, CHOICE),
        ([90], 80, 200, 30, 16, {"cluster": 2, "threads": 256, "keep": 0}),
        ([5000], 5000, 700, 9, 16, {"cluster": 3, "threads": 512, "keep": 0}),
        grid([333], 336, 17, 1, 16, CHOICE),
    ],
)
def test_matches_the_reference(lengths, width, max_tokens, sink_tokens, page_size, config):
    options = {"max_tokens": max_tokens, "sink_tokens": sink_tokens, "page_size": page_size}
    for values in (10_000, 3):  # few values: many ties
        scores = make_scores(len(lengths), width, values).half().to(device)
        found, bounds = _choose(Scanned(scores), lengths, config, **options)
        expected = select_tokens_by_score(scores, *bounds, impl="reference", **options)
        assert all(map(torch.equal, found, expected))


def test_ties_nan_and_infinite_scores():
    scores = awkward_scores(1504).half().to(device)
    options = {"max_tokens": 300, "sink_tokens": 3, "page_size": 16}
    found, bounds = _choose(Scanned(scores), [1504, 1400], **options)
    expected = select_tokens_by_score(scores, *bounds, impl="reference", **options)
    assert all(map(torch.equal, found, expected))


def _sampled_places(candidates):
    """The first tokens of the pairs that the kernel's sample has."""
    numbers, bits = torch.arange(1024), (1 << 32) - 1
    mixed = numbers * 0x9E3779B1 & bits
    mixed = (mixed ^ mixed >> 15) * 0x85EBCA77 & bits
    pairs = candidates // 2
    return 2 * ((numbers * pairs + ((mixed >> 22) * pairs >> 10)) // 1024)


def _among_the_sample(places, width, generator):
    scores = torch.rand(width, generator=generator) - 9
    scores[places[torch.randperm(len(places), generator=generator)[:200]]] += 7
    return scores


SAMPLED_SCORES = {
    "normal": lambda places, width, generator: torch.randn(width, generator=generator),
    "heavy tails": lambda places, width, generator: torch.randn(width, generator=generator) ** 5,
    "equal": lambda places, width, generator: torch.full((width,), -3.0),
    "three values": lambda places, width, generator: torch.randint(3, (width,), generator=generator),
    "the best lie together": lambda places, width, generator: torch.arange(width) / 500 - 30,
    "a sample of the best": _among_the_sample,
    "few far above the rest": lambda places, width, generator: (
        torch.where(torch.rand(width, generator=generator) < 0.05, 100.0, -9.0) + torch.rand(width, generator=generator)
    ),
    "infinite": lambda places, width, generator: torch.full((width,), -float("inf")),
    "NaN among few": lambda places, width, generator: torch.where(
        torch.rand(width, generator=generator) < 0.05, 1.0, torch.nan
    ),
}
"""Scores of a row, given the tokens of the sample, by what they are like."""


@pytest.mark.parametrize("kind", ["normal", "equal", "the best lie together", "few far above the rest"])
def test_tokens_that_lie_together(kind):
    generator, width = torch.Generator().manual_seed(0), 12_000
    rows = [SAMPLED_SCORES[kind](_sampled_places(11_712), width, generator).float() for _ in range(2)]
    scores = torch.stack(rows).half()[None].to(device)
    for max_tokens in (1400, 4000):  # a warp has 750 tokens, and room for 256 of them
        options = {"max_tokens": max_tokens, "sink_tokens": 4, "page_size": 64}
        found, bounds = _choose(Scanned(scores), [11_750], **options)
        expected = select_tokens_by_score(scores, *bounds, impl="reference", **options)
        assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("kind", SAMPLED_SCORES)
@pytest.mark.usefixtures("keeping")
def test_a_sample_leaves_few_tokens(kind):
    generator, width = torch.Generator().manual_seed(0), 12_000
    places = _sampled_places(11_712)
    rows = [SAMPLED_SCORES[kind](places, width, generator).float() for _ in range(2)]
    scores = torch.stack(rows).half()[None].to(device)
    # A sample would leave most of the tokens for the second budget, and in this row for the third.
    for max_tokens, sink_tokens in ((400, 4), (2000, 0), (1480, 0), (300, 130)):
        options = {"max_tokens": max_tokens, "sink_tokens": sink_tokens, "page_size": 64}
        found, bounds = _choose(Scanned(scores), [11_750], KEEPING, **options)
        expected = select_tokens_by_score(scores, *bounds, impl="reference", **options)
        assert all(map(torch.equal, found, expected))


@pytest.mark.usefixtures("keeping")
@pytest.mark.parametrize("kind", ["normal", "three values", "the best lie together"])
def test_full_lists(kind, monkeypatch):
    monkeypatch.setattr(keep, "MOST_KEPT", 512)
    monkeypatch.setattr(keep, "ROOM", 1024)
    test_a_sample_leaves_few_tokens(kind)


@pytest.mark.parametrize(("heads", "columns"), [(2, 4), (3, 4), (4, 4), (4, 8), (5, 8), (8, 8)])
def test_estimates_are_reduced_over_the_heads_by_softmax(heads, columns):
    _check_estimates([1300, 700, 1], 1408, heads, columns)


@pytest.mark.parametrize(("heads", "columns"), [(4, 4), (4, 8), (7, 8)])
@pytest.mark.usefixtures("keeping")
def test_a_sample_leaves_few_estimates(heads, columns):
    _check_estimates([9600, 7000, 2000], 9728, heads, columns, KEEPING)


@pytest.mark.parametrize(
    ("head_dim", "group", "config"),
    [
        (136, 3, CHOICE),
        (256, 4, KEEPING),
        grid(64, 2, CHOICE),
        grid(128, 8, CHOICE),
        grid(256, 2, CHOICE),
        grid(192, 4, KEEPING),
    ],
)
@pytest.mark.usefixtures("keeping")
def test_the_choice_of_a_step_is_the_references(head_dim, group, config, monkeypatch):
    chosen = []
    monkeypatch.setattr(
        select,
        "choose_on_clusters",
        lambda *given, **options: chosen.append(choose.choose(*given, **options)) or chosen[0],
    )
    coded = prefilled([1150], page_size=16, kv_heads=1, group=group, head_dim=head_dim)
    arguments = step_arguments(coded, new_tokens(coded, seed=1), [1151])
    arguments |= {"max_tokens": 140, "sink_tokens": 4, "group_reduce": "softmax"}
    with tuning.forced(token_choice=config):
        found = append_and_select_tokens(**arguments, impl="triton")
    assert chosen[0] is not None
    expected = append_and_select_tokens(**arguments, impl="reference")
    assert found[1].tolist() == expected[1].tolist() == [[140]]
    # Scores of 16 bits may differ by their rounding.
    assert len(set(found[0].flatten().tolist()) & set(expected[0].flatten().tolist())) >= 138


def _check_estimates(lengths, width, heads, columns, config=CHOICE):
    per_block, pages = 256, [(max(length - 1, 0)) // 64 for length in lengths]
    generator = torch.Generator().manual_seed(heads)
    estimates = (torch.randn(6, width, columns, generator=generator) * 8).half()
    estimates[..., heads:] = float("nan")
    lse = torch.full((6, width // per_block + 1, columns), float("nan"))
    scores = torch.full((3, 2, width), -float("inf"))
    for pair in range(6):
        end = 64 * pages[pair // 2]
        own = estimates[pair, :end, :heads].double() * torch.log(torch.tensor(2.0, dtype=torch.float64))
        for block in range(-(-end // per_block)):
            part = own[block * per_block : (block + 1) * per_block]
            lse[pair, block, :heads] = (part.logsumexp(0) / torch.log(torch.tensor(2.0))).float()
        if end:
            scores[pair // 2, pair % 2, :end] = (own - own.logsumexp(0)).logsumexp(1).float()
        estimates[pair, end:] = float("nan")
    empty = torch.full((3, 2, width), float("nan"), dtype=torch.float16, device=device)
    scanned = Scanned(empty, estimates.to(device), lse.to(device), per_block, heads)
    options = {"max_tokens": 200, "sink_tokens": 4, "page_size": 64}
    found, bounds = _choose(scanned, lengths, config, **options)
    scores = scores.half().to(device)
    expected = select_tokens_by_score(scores, *bounds, impl="reference", **options)
    assert torch.equal(found[1], expected[1])
    for ours, right, of_pair in zip(*(each.flatten(0, 1) for each in (found[0], expected[0], scores)), strict=True):
        assert ours[ours >= 0].diff().gt(0).all()
        extra, missing = (
            of_pair[sorted(set(one.tolist()) - set(other.tolist()))] for one, other in ((ours, right), (right, ours))
        )
        assert len(extra) == len(missing) <= 2
        torch.testing.assert_close(extra.sort()[0], missing.sort()[0], rtol=2e-3, atol=1e-6)


def test_what_it_does_not_serve_is_left_to_triton():
    options = {"max_tokens": 100, "sink_tokens": 4, "page_size": 16}
    bounds = int32([0]), int32([200])
    scores = make_scores(1, 200).half().to(device)
    unaligned = scores.new_empty(401)[1:].view(1, 2, 200).copy_(scores)
    of_nine = Scanned(scores, scores.new_zeros(2, 200, 16), scores.new_zeros(2, 1, 16).float(), 256, heads=9)
    refused = (Scanned(make_scores(1, 204).half().to(device)), of_nine, Scanned(unaligned))
    with tuning.forced(token_choice=CHOICE):
        assert choose.choose(Scanned(scores, heads=9), bounds, **options) is not None
        for scanned in refused:
            assert choose.choose(scanned, bounds, **options) is None
    assert choose.choose(Scanned(scores.cpu()), tuple(each.cpu() for each in bounds), **options) is None
