import math
from dataclasses import replace

import pytest
import torch
from hf_sparse_attn_kernels import _tuning as tuning
from hf_sparse_attn_kernels import code_scores
from hf_sparse_attn_kernels.codes import reference, reference_encode

from tests.ops.codes.inputs import HALF, INF, Coded, estimates_of, make_coded
from tests.ops.helpers import IMPLS, check_schema, device, grid

SMALL = {"block_t": 64, "per_multiprocessor": 1}


def _score(coded: Coded, lengths=None, **options):
    with tuning.forced(code_scan=SMALL, softmax_scan=SMALL):
        return code_scores(coded.rows.query, **coded.metadata, **coded.ends(lengths), **coded.options, **options)


def _poison(coded: Coded) -> None:
    """NaN in all floats that `encode` has not written, and anything in the rest."""
    for row, (count, *_) in enumerate(coded.coded.tolist()):
        coded.metadata["factors"][row, :, count * coded.page_size :] = float("nan")
        if not coded.has_shared_centre:
            coded.metadata["centre_scale"][row, :, count:] = float("nan")


def _check(found, coded: Coded, lengths, *, softmax, scale, num_tokens, first_page=0) -> None:
    """Scores against the estimates of the definition, within the rounding of the query and of the result."""
    size, kv_heads = coded.page_size, coded.coded.shape[1]
    for row, length in enumerate(lengths):
        tokens = max(0, min(length, num_tokens) - 1) // size * size
        first = min(first_page * size, tokens)
        assert (found[row, :, :first] == -INF).all()
        assert (found[row, :, tokens:] == -INF).all()
        for head in range(kv_heads if first < tokens else 0):
            estimates, rounding = (each[:, first:] for each in estimates_of(coded, row, head, tokens, scale))
            if softmax and len(estimates) > 1:
                wanted = estimates.log_softmax(dim=1).logsumexp(dim=0)
                # Estimates are kept in float16.
                rounding = rounding + 1.01 * HALF * estimates.abs()
                allowed = rounding.amax(dim=0) + rounding.amax()
            else:
                wanted, allowed = estimates.amax(dim=0), rounding.amax(dim=0)
            allowed = allowed + 1.01 * HALF * wanted.abs() + 1e-5
            assert ((found[row, head, first:tokens].double() - wanted).abs() <= allowed).all()


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("group_reduce", ["max", "softmax"])
@pytest.mark.parametrize(
    ("lengths", "options"),
    [
        ([0, 1, 16, 17, 111], {"group": 3}),
        ([100, 49], {"group": 4, "head_dim": 80, "page_size": 48, "bits": 2, "dtype": torch.bfloat16}),
        ([81], {"group": 7, "head_dim": 128, "centred": False, "dtype": torch.float16}),
        ([40], {"group": 1, "head_dim": 256, "bits": 2, "kv_heads": 1}),
        ([0, 16, 111], {"group": 3, "head_dim": 80, "shared": True}),
        grid([100, 49], {"group": 4, "page_size": 48, "bits": 2, "shared": True, "dtype": torch.bfloat16}),
        grid([40], {"group": 16, "head_dim": 32, "bits": 2, "kv_heads": 1}),
        grid([40], {"group": 33, "head_dim": 64, "kv_heads": 1}),
        grid([140], {"group": 2, "head_dim": 8, "page_size": 64}),
    ],
)
def test_scores_are_those_of_the_definition(impl, group_reduce, lengths, options):
    coded = make_coded(lengths, **options)
    coded.encode(impl="reference")
    _poison(coded)
    found = _score(coded, group_reduce=group_reduce, impl=impl)
    assert found.dtype == torch.float16
    assert found.shape == coded.metadata["codes"].shape[:3]
    width, scale = found.shape[2], coded.rows.query.shape[2] ** -0.5
    _check(found, coded, lengths, softmax=group_reduce == "softmax", scale=scale, num_tokens=width)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("group_reduce", ["max", "softmax"])
def test_scale_and_num_tokens(impl, group_reduce):
    coded = make_coded([111, 63], group=3)
    coded.encode(impl="reference")
    for num_tokens in (1, 17, 70):
        found = _score(coded, group_reduce=group_reduce, num_tokens=num_tokens, scale=0.3, impl=impl)
        assert found.shape == (2, 2, num_tokens)
        _check(found, coded, [111, 63], softmax=group_reduce == "softmax", scale=0.3, num_tokens=num_tokens)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(("group_reduce", "group"), [("max", 3), ("softmax", 3), ("softmax", 1)])
@pytest.mark.parametrize("shared", [False, True])
def test_tokens_before_the_first_page_are_no_candidates(impl, group_reduce, group, shared):
    """They have no score, and no part in the sums of the softmax."""
    lengths = [200, 63, 33, 17]
    coded = make_coded(lengths, group=group, shared=shared)
    coded.encode(impl="reference")
    _poison(coded)
    for first_page in (1, 2, 20):
        found = _score(coded, group_reduce=group_reduce, first_page=first_page, impl=impl)
        sizes = {"scale": 64**-0.5, "num_tokens": found.shape[2], "first_page": first_page}
        _check(found, coded, lengths, softmax=group_reduce == "softmax", **sizes)


def _rounding(coded: Coded, scores: torch.Tensor, group_reduce: str) -> torch.Tensor:
    """Bound the difference of scores whose float32 numbers round to neighbours in float16."""
    numbers = scores.abs()
    if group_reduce == "softmax":
        tokens = coded.rows.lengths[0] // 16 * 16
        heads = range(coded.coded.shape[1])
        scale = coded.rows.query.shape[2] ** -0.5
        numbers = numbers + max(estimates_of(coded, 0, head, tokens, scale)[0].abs().max() for head in heads)
    return 2 * HALF * numbers + 1e-5


@pytest.mark.parametrize("options", [{}, {"head_dim": 80, "bits": 2}, {"head_dim": 128, "centred": False}])
def test_both_implementations_round_alike(options):
    """The products are exact in both, so that few scores differ, and these by one rounding to float16."""
    coded = make_coded([200], group=3, **options)
    coded.encode(impl="reference")
    for group_reduce in ("max", "softmax"):
        ours, theirs = (_score(coded, group_reduce=group_reduce, impl=impl)[..., :192].float() for impl in IMPLS)
        assert (ours == theirs).float().mean() > 0.98
        assert ((ours - theirs).abs() <= _rounding(coded, theirs, group_reduce)).all()


def test_the_reference_in_float64():
    coded = make_coded([63, 40], group=3, head_dim=80, bits=2, dtype=torch.float64)
    coded.encode(impl="reference")
    found = _score(coded, impl="reference")
    assert found.dtype == torch.float64
    for row, tokens in enumerate((48, 32)):
        wanted = estimates_of(coded, row, 1, tokens, 80**-0.5)[0].amax(dim=0)
        torch.testing.assert_close(found[row, 1, :tokens], wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("group_reduce", ["max", "softmax"])
def test_scores_stay_finite(impl, group_reduce):
    coded = make_coded([40], group=2)
    coded.rows.keys *= 300
    coded.rows.query *= 300
    coded.encode(impl="reference")
    for query in (coded.rows.query, torch.zeros_like(coded.rows.query)):
        coded.rows.query = query
        found = _score(coded, scale=1.0, group_reduce=group_reduce, impl=impl)
        assert found[..., :32].isfinite().all()
        assert (found[..., 32:] == -INF).all()


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(("bits", "centred", "shared"), [(1, True, False), (2, False, False), (1, True, True)])
def test_counter(impl, bits, centred, shared):
    coded = make_coded([111, 0, 33], group=2, bits=bits, centred=centred, shared=shared)
    coded.encode(impl="reference")
    counter = torch.zeros(4, dtype=torch.int64, device=device)
    for group_reduce, num_tokens, first_page, pages in (("max", None, 0, [6, 2]), ("softmax", 100, 2, [4])):
        counter.zero_()
        options = {"num_tokens": num_tokens, "first_page": first_page, "counter": counter}
        _score(coded, group_reduce=group_reduce, impl=impl, **options)
        page_bytes = 16 * (8 * bits + (4 if centred else 2))
        centres = len(pages) if shared else sum(pages)
        assert counter.tolist() == [0, 0, 2 * (sum(pages) * page_bytes + centres * 66), 0]


@pytest.mark.parametrize("candidate", [*tuning.CANDIDATES["code_scan"][:1], {"block_t": 128, "warps": 4, "stages": 1}])
def test_no_choice_changes_a_result(candidate):
    coded = make_coded([300], group=3, kv_heads=1)
    coded.encode(impl="reference")
    for group_reduce in ("max", "softmax"):
        expected = _score(coded, group_reduce=group_reduce, impl="triton")
        with tuning.forced(code_scan=candidate, softmax_scan=candidate):
            found = code_scores(
                coded.rows.query,
                **coded.metadata,
                **coded.ends(),
                **coded.options,
                group_reduce=group_reduce,
                impl="triton",
            )
        allowed = _rounding(coded, expected.float(), group_reduce)
        assert ((found == expected) | ((found - expected).abs() <= allowed)).all()


@pytest.mark.parametrize(("bits", "deviation"), [(1, math.sqrt(math.pi / 2 - 1)), (2, 0.37)])
def test_the_error_is_that_of_the_code(bits, deviation):
    """On Gaussian keys the error has mean 0; its deviation is RaBitQ's |r| |q - m| times this over sqrt(head_dim)."""
    coded = make_coded([4097], head_dim=128, page_size=64, bits=bits, kv_heads=1, dtype=torch.float64)
    coded.encode(impl="reference")
    found = _score(coded, scale=1.0, impl="reference")[0, 0, :4096]
    keys, query = coded.rows.keys[0, 0, :4096], coded.rows.query[0, 0]
    centres = coded.metadata["centres"].double() * coded.metadata["centre_scale"].double()[..., None]
    lengths = (keys - centres[0, 0, :64].repeat_interleave(64, dim=0)).norm(dim=1)
    centred = (query - coded.options["query_centre"][0, 0]).norm()
    error = (found - keys @ query) / (lengths * centred / math.sqrt(128))
    assert abs(error.mean()) < 4 * deviation / math.sqrt(4096)
    assert abs(error.std() - deviation) < 0.06 * deviation


@pytest.mark.parametrize("bits", [1, 2])
@pytest.mark.parametrize("head_dim", [32, 80, 128])
def test_rounding_the_query_hardly_adds_to_the_error_of_the_code(bits, head_dim):
    coded = make_coded([2049], head_dim=head_dim, page_size=64, bits=bits, kv_heads=2, group=4)
    coded.encode(impl="reference")
    query, keys = coded.rows.query[0].double(), coded.rows.keys[0].double().repeat_interleave(4, dim=0)
    exact = torch.einsum("hd,htd->ht", query, keys[:, :2048])
    errors = []
    for dtype in (torch.float32, torch.float64):
        scores = []
        for head in range(8):
            rows = replace(coded.rows, query=query[head].expand(1, 2, -1).to(dtype))
            found = _score(replace(coded, rows=rows), scale=1.0, impl="reference")
            scores.append(found[0, head // 4, :2048].double())
        errors.append((torch.stack(scores) - exact).square().mean().sqrt())
    assert errors[0] < 1.01 * errors[1]


def test_without_lengths_on_the_host(monkeypatch):
    coded = make_coded([0, 15, 70], group=3, head_dim=80, bits=2)
    coded.encode(impl="reference")
    counters = [torch.zeros(4, dtype=torch.int64, device=device) for _ in range(2)]
    expected = [_score(coded, group_reduce=name, counter=counters[0], impl="reference") for name in ("max", "softmax")]
    for module in (reference, reference_encode):
        monkeypatch.setattr(module, "host_lengths", lambda start, end: None)
    found = [_score(coded, group_reduce=name, counter=counters[1], impl="reference") for name in ("max", "softmax")]
    assert torch.equal(*counters)
    for first, second in zip(found, expected, strict=True):
        assert torch.equal(first, second)


def test_errors():
    coded = make_coded([40])
    for options, message in (
        ({"group_reduce": "mean"}, r"group_reduce='mean'; allowed: 'softmax', 'max'"),
        ({"num_tokens": 16.0}, r"num_tokens=16.0; allowed: None, or 1 to 48"),
        ({"num_tokens": 49}, r"num_tokens=49; allowed: None, or 1 to 48, the tokens of codes"),
        ({"counter": torch.zeros(4, device=device)}, r"counter has dtype torch.float32; allowed: torch.int64"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            _score(coded, **options)
    coded.rows.query = coded.rows.query[:, :, :32]
    with pytest.raises(ValueError, match=r"codes has shape .* allowed: .* = \[1, 2, 48, 1, 4\]"):
        _score(coded)


def test_the_schema_declares_what_is_written():
    coded = make_coded([40, 20], group=2)
    coded.encode()
    counter = torch.zeros(4, dtype=torch.int64, device=device)
    arguments = {"query": coded.rows.query, **coded.metadata, **coded.ends(), **coded.options, "counter": counter}
    check_schema("code_scores", arguments | {"num_tokens": 40})
