"""The choice by provisional scores: on the device, or on the CPU with a thread for every thread of a cluster."""

import pytest
import torch
from hf_sparse_attn_kernels import _tuning as tuning
from hf_sparse_attn_kernels import append_and_select_tokens, code_scores, select_tokens_by_score
from hf_sparse_attn_kernels.codes import bit_scan, choose

from tests.ops.codes.inputs import HALF, INF
from tests.ops.codes.steps import new_tokens, prefilled, step_arguments
from tests.ops.emulation import clusters_fixture, compiled_for_cpu
from tests.ops.helpers import device, grid

CHOICE = {"cluster": 2, "threads": 256, "provisional": 1}
on_clusters = clusters_fixture(choose, "choose_by_score")


@pytest.fixture
def results(on_clusters, monkeypatch):
    """What each scan finds, in few blocks, of the kernel that multiplies bits."""
    found = []
    build = bit_scan._kernel

    def kernel_for(device, heads, result):
        found.append(result)
        if device.type == "cuda":
            return build(device, heads, result)
        return compiled_for_cpu(bit_scan.SOURCES, bit_scan.kernel_macros(heads, result), "scan_codes")

    monkeypatch.setattr(bit_scan, "blocks_of", lambda *_, **shape: 6)
    monkeypatch.setattr(bit_scan, "_kernel", kernel_for)
    if device.type == "cpu":
        monkeypatch.setattr(bit_scan, "_stream", lambda device: 0)
    return found


def _rows(lengths, query_scale=1.0, **options):
    coded = prefilled(lengths, **{"head_dim": 128, "page_size": 64, "dtype": torch.bfloat16, **options})
    query, *new = new_tokens(coded, seed=3)
    return coded, (query * query_scale, *new), [length + 1 if length else 0 for length in lengths]


def _chosen(coded, token, now, config, budget, **options):
    with tuning.forced(token_choice=config):
        return append_and_select_tokens(
            **step_arguments(coded, token, now), **budget, **options, group_reduce="softmax", impl="triton"
        )


@pytest.mark.parametrize(
    ("lengths", "options", "config", "max_tokens"),
    [
        ([703, 62, 0, 431], {"group": 4}, CHOICE | {"cluster": 3}, 120),
        ([703, 300], {"group": 2, "query_scale": 4.0}, CHOICE, 150),
        ([641], {"group": 7, "query_scale": 30.0}, CHOICE, 100),  # weights far apart
        ([641], {"group": 3, "query_scale": 1000.0}, CHOICE | {"cluster": 1}, 100),  # stand-ins say nothing
        ([512, 300], {"group": 4, "query_scale": 0.0}, CHOICE, 130),  # all scores are equal
        ([2600], {"group": 4, "query_scale": 0.0}, CHOICE | {"cluster": 1}, 200),  # and more than a warp lists
        grid([641], {"group": 8}, CHOICE | {"threads": 512}, 641),
        grid([1300], {"group": 5, "query_scale": 8.0}, CHOICE | {"cluster": 3}, 90),
    ],
)
@pytest.mark.parametrize("misled", [False, True])
def test_it_chooses_what_scores_choose(results, monkeypatch, misled, lengths, options, config, max_tokens):
    """Also where the sample leaves too few tokens, and all are estimated again."""
    if misled:
        monkeypatch.setattr(choose, "DEVIATIONS", -100)
        for cached in (choose._kernel, choose._plan):
            getattr(cached, "cache_clear", lambda: None)()
    coded, token, now = _rows(lengths, **options)
    budget = {"max_tokens": max_tokens, "sink_tokens": 3}
    indices, counts = _chosen(coded, token, now, config, budget)
    assert results == [bit_scan.Result.PROVISIONAL]
    rows = {**coded.ends(now), "page_size": 64}
    scores = code_scores(
        token[0], **coded.metadata, **coded.ends(now), **coded.options, group_reduce="softmax", impl="reference"
    )
    expected, expected_counts = select_tokens_by_score(scores, **rows, **budget, impl="reference")
    assert torch.equal(counts, expected_counts)
    of_pairs = (tensor.flatten(0, 1) for tensor in (indices, expected, scores.float()))
    for ours, right, of_pair in zip(*of_pairs, strict=True):
        assert (ours[ours >= 0].diff() > 0).all()
        assert (ours >= 0).sum() == (right >= 0).sum()
        # The reference adds in another order, which may round to the next float16.
        extra, missing = (
            of_pair[sorted(set(one.tolist()) - set(other.tolist()))] for one, other in ((ours, right), (right, ours))
        )
        assert len(extra) <= 0.03 * max_tokens
        torch.testing.assert_close(extra.sort()[0], missing.sort()[0], rtol=4 * HALF, atol=4 * HALF * 16)


def test_provisional_scores_are_off_by_the_errors_of_the_stand_ins(results, monkeypatch):
    coded, token, now = _rows([703, 431], group=4, query_scale=3.0)
    scanned = []
    choice = choose.choose

    def keep(found, *arguments, **options):
        scanned.append(found)
        return choice(found, *arguments, **options)

    monkeypatch.setattr("hf_sparse_attn_kernels.codes.select.choose_on_clusters", keep)
    _chosen(coded, token, now, CHOICE, {"max_tokens": 100, "sink_tokens": 0})
    [found] = scanned
    scores = code_scores(
        token[0], **coded.metadata, **coded.ends(now), **coded.options, group_reduce="softmax", impl="reference"
    )
    for pair, (provisional, exact) in enumerate(
        zip(found.scores.flatten(0, 1).float(), scores.flatten(0, 1).float(), strict=True)
    ):
        exists = exact != -INF
        blocks = -(-int(exists.sum()) // found.tokens_per_program)
        lse = found.program_lse[pair, :blocks].double().mul(torch.log(torch.tensor(2.0))).logsumexp(0)
        errors = found.again.stand_ins[pair].double() - lse / torch.log(torch.tensor(2.0))
        differences = (exact / torch.log(torch.tensor(2.0)) - provisional)[exists]
        assert errors.max() - errors.min() > 0.01
        assert differences.min() > errors.min() - 0.05
        assert differences.max() < errors.max() + 0.05


def test_where_the_launch_choice_does_not_say_so_scores_are_not_provisional(results):
    coded, token, now = _rows([703], group=4)
    budget = {"max_tokens": 100, "sink_tokens": 3}
    for config in (CHOICE | {"cluster": 0}, CHOICE | {"provisional": 0}):
        _chosen(coded, token, now, config, budget)
    _chosen(coded, token, now, CHOICE, budget, num_tokens=703)  # loads take 8 scores
    assert results == [bit_scan.Result.ESTIMATES] * 3
