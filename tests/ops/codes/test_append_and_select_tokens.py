"""A decode step's op against its parts, in both implementations."""

import pytest
import torch
from hf_sparse_attn_kernels import _reference, append_and_select_tokens, code_scores, select_tokens_by_score
from hf_sparse_attn_kernels import _tuning as tuning
from hf_sparse_attn_kernels.codes import reference, reference_encode

from tests.ops.codes.inputs import divide
from tests.ops.codes.steps import new_tokens, prefilled, step_arguments
from tests.ops.helpers import IMPLS, check_schema, device, grid

SMALL = {"block_t": 64, "per_multiprocessor": 1}


def _by_parts(coded, token, lengths, budget, impl, **options):
    """The tokens that the separate ops choose after the token was written by indexing."""
    query, *new = token
    for row, length in enumerate(lengths):
        for buffer, states in zip((coded.rows.keys, coded.rows.values), new, strict=True):
            if length > 0:
                buffer[row, :, coded.rows.start[row] + length - 1] = states[row]
    coded.encode(lengths, max_pages=1, impl=impl)
    rows = coded.ends(lengths)
    scores = code_scores(query, **coded.metadata, **rows, **coded.options, **options, impl=impl)
    return select_tokens_by_score(scores, **rows, page_size=coded.page_size, **budget, impl=impl)


CASES = [
    ([62, 31, 0, 47], {"group": 3}, "max"),
    ([62, 45], {"group": 4, "head_dim": 80, "page_size": 48, "bits": 2, "dtype": torch.float16}, "softmax"),
    ([62, 46], {"group": 2, "head_dim": 40, "bits": 2, "correction": "least_squares"}, "max"),
    ([94], {"group": 7, "head_dim": 128, "centred": False, "dtype": torch.bfloat16, "kv_heads": 1}, "softmax"),
    grid([79, 15], {"group": 1, "head_dim": 256, "bits": 2}, "max"),
    grid([30, 127], {"group": 2, "head_dim": 8, "page_size": 64}, "softmax"),
]


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(("lengths", "options", "group_reduce"), CASES)
def test_steps_do_what_the_parts_do(impl, lengths, options, group_reduce):
    """Over the end of a page, with an empty row, from the same state: all buffers are equal to the bit."""
    fused, parts = (prefilled(lengths, **options) for _ in range(2))
    budget = {"max_tokens": 16 + fused.page_size, "sink_tokens": 3}
    counters = [torch.zeros(4, dtype=torch.int64, device=device) for _ in range(2)]
    with tuning.forced(code_scan=SMALL, softmax_scan=SMALL):
        for step in range(1, 4):
            now = [length + step if length else 0 for length in lengths]
            token = new_tokens(fused, seed=step)
            reduction = {"group_reduce": group_reduce, "scale": 0.2}
            found = append_and_select_tokens(
                **step_arguments(fused, token, now), **budget, **reduction, counter=counters[0], impl=impl
            )
            expected = _by_parts(parts, token, now, budget, impl, counter=counters[1], **reduction)
            state = [[coded.rows.keys, coded.rows.values, *coded.tensors()] for coded in (fused, parts)]
            for first, second in zip((*found, *state[0]), (*expected, *state[1]), strict=True):
                torch.testing.assert_close(first, second, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(*counters)


LONG_CASES = [
    ([700, 63, 0, 431], {"group": 3}, {}),
    ([641, 513], {"group": 7, "head_dim": 80, "kv_heads": 1, "page_size": 48}, {}),
    grid([1201], {"group": 2, "head_dim": 8, "centred": False, "dtype": torch.bfloat16}, {}),
    grid([577, 600], {"group": 16, "head_dim": 128, "kv_heads": 1, "dtype": torch.float16}, {}),
]
AWKWARD_CASES = [
    ([600, 431], {"group": 4}, {"deviations": -100.0}),  # the sample misleads: all scores are read again
    ([600], {"group": 3}, {"scale": 0.0}),  # all scores are equal
    grid([555, 600], {"group": 4}, {"scale": 1e-3}),  # many are
]


@pytest.mark.parametrize(("lengths", "options", "special"), LONG_CASES + AWKWARD_CASES)
def test_rows_of_several_programs(monkeypatch, lengths, options, special):
    """One launch reduces estimates and keeps candidates: the choice is that from the scores of `code_scores`."""
    special = {"deviations": 3.0, "scale": 0.2} | special
    fused, parts = (prefilled(lengths, **options) for _ in range(2))
    budget = {"max_tokens": 40 + fused.page_size, "sink_tokens": 3}
    now = [length + 1 if length else 0 for length in lengths]
    token = new_tokens(fused, seed=1)
    reduction = {"group_reduce": "softmax", "scale": special["scale"]}
    with tuning.forced(code_scan=SMALL, softmax_scan=SMALL):
        expected = _by_parts(parts, token, now, budget, "triton", **reduction)
        divide(monkeypatch, span=256, at_once=256, sampled=32, deviations=special["deviations"])
        found = append_and_select_tokens(**step_arguments(fused, token, now), **budget, **reduction, impl="triton")
    for first, second in zip(found, expected, strict=True):
        torch.testing.assert_close(first, second, rtol=0, atol=0)


@pytest.mark.parametrize("impl", IMPLS)
def test_a_page_that_is_counted_already_stays(impl):
    coded = prefilled([64], group=2)
    before = [tensor.clone() for tensor in coded.tensors()]
    options = {"max_tokens": 32, "sink_tokens": 0, "impl": impl}
    append_and_select_tokens(**step_arguments(coded, new_tokens(coded, 1), [64]), **options)
    for tensor, old in zip(coded.tensors(), before, strict=True):
        torch.testing.assert_close(tensor, old, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("impl", IMPLS)
def test_tokens_beyond_num_tokens_are_appended_and_coded(impl):
    coded = prefilled([47, 20], group=2)
    token = new_tokens(coded, 1)
    indices, counts = append_and_select_tokens(
        **step_arguments(coded, token, [48, 21]), max_tokens=30, sink_tokens=0, num_tokens=20, impl=impl
    )
    assert (coded.coded == torch.tensor([[3], [1]], device=device)).all()
    assert (counts == 20).all()
    assert (indices[..., :20] == torch.arange(20, device=device)).all()
    assert torch.equal(coded.rows.keys[0, :, coded.rows.start[0] + 47], token[1][0])


def test_strided_tokens_and_query():
    """Views into a projection's output give the same results as copies."""
    options = {"max_tokens": 32, "sink_tokens": 0, "impl": "triton"}
    results = []
    for contiguous in (True, False):
        coded = prefilled([63, 40], group=2)
        query, key, value = new_tokens(coded, 1)
        if not contiguous:
            joined = torch.cat((query, key, value), dim=1)
            query, key, value = joined.split((query.shape[1], key.shape[1], value.shape[1]), dim=1)
        else:
            query, key, value = (tensor.contiguous() for tensor in (query, key, value))
        found = append_and_select_tokens(**step_arguments(coded, (query, key, value), [64, 41]), **options)
        results.append((*found, coded.rows.keys.clone(), *coded.tensors()))
    for first, second in zip(*results, strict=True):
        torch.testing.assert_close(first, second, rtol=0, atol=0, equal_nan=True)


def test_without_lengths_on_the_host(monkeypatch):
    """As on a device, where the reference must not wait for them."""
    results = []
    for on_host in (True, False):
        if not on_host:
            for module in (_reference, reference, reference_encode):
                monkeypatch.setattr(module, "host_lengths", lambda start, end: None)
        coded = prefilled([62, 0, 30], group=2)
        for step in (1, 2):
            lengths = [62 + step, 0, 30 + step]
            found = append_and_select_tokens(
                **step_arguments(coded, new_tokens(coded, step), lengths),
                max_tokens=32,
                sink_tokens=1,
                impl="reference",
            )
        results.append((*found, coded.rows.keys, coded.rows.values, *coded.tensors()))
    for first, second in zip(*results, strict=True):
        torch.testing.assert_close(first, second, rtol=0, atol=0, equal_nan=True)


def test_errors():
    coded = prefilled([40])
    arguments = step_arguments(coded, new_tokens(coded, 1), [41]) | {"max_tokens": 30, "sink_tokens": 4}
    short = {name: coded.metadata[name][:, :, :16].contiguous() for name in ("codes", "factors")}
    short |= {name: coded.metadata[name][:, :, :1].contiguous() for name in ("centres", "centre_scale")}
    for options, message in (
        ({"new_key": arguments["new_key"][:, :1]}, r"new_key has shape \[1, 1, 64\]; allowed: \[batch, kv_heads"),
        ({"new_value": arguments["new_value"].half()}, r"new_value has dtype torch.float16; allowed: torch.float32"),
        ({"coded": coded.coded.long()}, r"coded has dtype torch.int64; allowed: torch.int32"),
        ({"sink_tokens": 15}, r"sink_tokens=15 and page_size=16; allowed: together at most max_tokens=30"),
        ({"group_reduce": "mean"}, r"group_reduce='mean'; allowed: 'softmax', 'max'"),
        (short, r"codes has 16 tokens; allowed: at least capacity=85 of keys"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            append_and_select_tokens(**{**arguments, **options})


def test_the_schema_declares_what_is_written():
    coded = prefilled([47, 20], group=2)
    counter = torch.zeros(4, dtype=torch.int64, device=device)
    check_schema(
        "append_and_select_tokens",
        step_arguments(coded, new_tokens(coded, 1), [48, 21])
        | {"max_tokens": 30, "sink_tokens": 4, "counter": counter},
    )
