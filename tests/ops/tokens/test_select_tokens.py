import pytest
import torch
from hf_sparse_attn_kernels import select_tokens, token_votes

from tests.ops.helpers import IMPLS, device, golden, int32, make_rows

NAN, INF = float("nan"), float("inf")
BUDGET = {"max_tokens": 20, "sink_tokens": 3, "recent_tokens": 5}


@pytest.fixture
def nan_in_new_buffers(monkeypatch):
    """Tensors that a launcher allocates hold NaN, or a large number, until a kernel has written it."""
    empty, empty_like = torch.empty, torch.empty_like

    def poison(tensor):
        return tensor.fill_(NAN if tensor.is_floating_point() else torch.iinfo(tensor.dtype).max)

    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: poison(empty(*args, **kwargs)))
    monkeypatch.setattr(torch, "empty_like", lambda *args, **kwargs: poison(empty_like(*args, **kwargs)))


def _brute_force(votes, length, max_tokens, sink_tokens, recent_tokens, pool_size=0):
    """The selection of one row, by sorting (votes, lower index first)."""
    if length <= max_tokens:
        return list(range(length))
    candidates = range(sink_tokens, length - recent_tokens)
    votes = {t: -INF if votes[t] != votes[t] else votes[t] for t in candidates}
    reach = max(0, pool_size) // 2
    pooled = {t: max(votes[n] for n in range(t - reach, t + reach + 1) if n in votes) for t in candidates}
    voted = sorted(candidates, key=lambda t: (-pooled[t], t))[: max_tokens - sink_tokens - recent_tokens]
    return [*range(sink_tokens), *sorted(voted), *range(length - recent_tokens, length)]


def _select(rows, impl, **options):
    return select_tokens(rows.query, rows.keys, rows.start, rows.end, impl=impl, **(BUDGET | options))


def _check(rows, impl, num_tokens=None, vote="soft", pool_size=0, **budget):
    """A selection against the brute force over the same implementation's votes."""
    budget = BUDGET | budget
    indices, counts = _select(rows, impl, num_tokens=num_tokens, vote=vote, pool_size=pool_size, **budget)
    votes = token_votes(
        rows.query, rows.keys, rows.start, rows.end, num_tokens=num_tokens, vote=vote, impl=impl, **budget
    )
    batch, max_tokens = len(rows.lengths), budget["max_tokens"]
    assert indices.dtype == counts.dtype == torch.int32
    assert indices.shape == (batch, 1, max_tokens)
    assert counts.shape == (batch, 1)
    for row, length in enumerate(rows.lengths):
        expected = _brute_force(votes[row].tolist(), min(length, votes.shape[1]), pool_size=pool_size, **budget)
        assert counts[row].item() == len(expected), impl
        assert indices[row, 0].tolist() == expected + [-1] * (max_tokens - len(expected)), (impl, row)


@pytest.mark.usefixtures("nan_in_new_buffers")
@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(
    ("lengths", "budget", "kv_heads", "group", "head_dim", "dtype"),
    [
        ([600, 1, 0, 20, 21], {}, 2, 1, 64, torch.float32),
        ([1030, 300], {"max_tokens": 257, "sink_tokens": 0, "recent_tokens": 0}, 1, 3, 80, torch.bfloat16),
        ([600, 519, 64], {"max_tokens": 65, "sink_tokens": 17, "recent_tokens": 47}, 2, 7, 128, torch.float16),
        ([520], {"max_tokens": 519, "sink_tokens": 1, "recent_tokens": 0}, 1, 2, 16, torch.float32),
    ],
)
def test_matches_brute_force(impl, lengths, budget, kv_heads, group, head_dim, dtype):
    rows = make_rows(lengths, kv_heads=kv_heads, group=group, head_dim=head_dim, dtype=dtype)
    _check(rows, impl, num_tokens=max(lengths), **budget)


@pytest.mark.usefixtures("nan_in_new_buffers")
@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(("vote", "pool_size"), [("soft", 1), ("soft", 7), ("logits", 0), ("logits", 3), ("head", 0)])
def test_every_vote_and_pooling(impl, vote, pool_size):
    _check(make_rows([530, 30, 19], kv_heads=1, head_dim=16, group=2), impl, vote=vote, pool_size=pool_size)


def test_tokens_with_clearly_more_votes_are_chosen():
    rows = make_rows([1500], group=3, dtype=torch.bfloat16)
    exact = token_votes(
        rows.query.double(), rows.keys.double(), rows.start, rows.end, sink_tokens=3, recent_tokens=5, impl="reference"
    )[0]
    least = exact.topk(12)[0][-1]
    for impl in IMPLS:
        indices, _ = _select(rows, impl)
        chosen = torch.zeros(rows.capacity, dtype=torch.bool, device=device)
        chosen[indices[0, 0, 3:-5].long()] = True
        assert chosen[exact > 1.001 * least].all()
        assert not chosen[exact < 0.999 * least].any()


@pytest.mark.usefixtures("nan_in_new_buffers")
@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("vote", ["soft", "logits"])
def test_ties_over_many_tiles(impl, vote):
    rows = make_rows([1700, 1100], kv_heads=1, head_dim=16)
    rows.query.fill_(1.0)
    for row in range(2):
        start = rows.start[row].item()
        rows.keys[row, :, start : start + rows.lengths[row]] = 0.0
        rows.keys[row, :, start + 500 : start + 900 : 50, 0] = 2.0
    for max_tokens in (12, 1000):
        _check(rows, impl, vote=vote, max_tokens=max_tokens)


@pytest.mark.parametrize("impl", IMPLS)
def test_votes_that_vanish_are_ties(impl):
    rows = make_rows([1100], head_dim=64)
    rows.query *= 40  # softmax weights underflow to 0 for all but a few tokens
    _check(rows, impl, max_tokens=200)


@pytest.mark.parametrize("impl", IMPLS)
def test_nan_and_infinite_votes(impl):
    rows = make_rows([600], kv_heads=1, head_dim=16)
    rows.query.fill_(1.0)
    rows.keys[0, 0, 10:300] = NAN
    rows.keys[0, 0, 400:405] = INF
    rows.keys[0, 0, 410:420] = -INF
    for max_tokens in (20, 590):
        _check(rows, impl, vote="logits", max_tokens=max_tokens)
        _check(rows, impl, vote="logits", pool_size=5, max_tokens=max_tokens)


def test_pooled_votes_of_nan_and_negative_infinity_are_ties():
    rows = make_rows([60], kv_heads=1, head_dim=16)
    rows.query.fill_(1.0)
    rows.keys[0, 0, :30] = NAN
    rows.keys[0, 0, 30:60] = -INF
    indices, _ = _select(rows, "reference", vote="logits", pool_size=3)
    assert indices[0, 0].tolist() == [*range(15), *range(55, 60)]  # the lower index wins


@pytest.mark.parametrize("impl", IMPLS)
def test_golden_selections(impl):
    vectors = golden("soft_vote0")
    keys, query, selected = vectors["keys"], vectors["query"][:, :, 0], vectors["selected"]
    budget = {"max_tokens": len(selected), "sink_tokens": 0, "recent_tokens": 0}
    indices, _ = select_tokens(query, keys, int32([0]), int32([keys.shape[2]]), impl=impl, **budget)
    assert torch.equal(indices[0, 0], selected)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"max_tokens": 8}, ValueError, r"sink_tokens=3 and recent_tokens=5; allowed: together less than max_tokens=8"),
        ({"sink_tokens": -1}, ValueError, r"sink_tokens=-1; allowed: an int of at least 0"),
        ({"pool_size": 4}, ValueError, r"pool_size=4; allowed: 0, or an odd number"),
        ({"vote": "mean"}, ValueError, r"vote='mean'; allowed: 'soft', 'logits', 'head'"),
        ({"num_tokens": 0}, ValueError, r"num_tokens=0; allowed: None, or 1 to capacity=25"),
        ({"num_tokens": True}, ValueError, r"num_tokens=True; allowed: None, or 1 to capacity=25"),
        (
            {"cached_valid": torch.zeros(1).int()},
            ValueError,
            r"cached_valid given; allowed: all of cached_query",
        ),
        ({"counter": torch.zeros(3).long()}, ValueError, r"counter has shape \[3\]; allowed: \[4\]"),
        ({"reuse_counter": torch.zeros(2)}, TypeError, r"reuse_counter has dtype torch.float32; allowed: torch.int64"),
        ({"finished": torch.zeros(1, 1).int()}, ValueError, r"finished has shape \[1, 1\]; allowed: \[batch, kv_head"),
    ],
)
def test_bad_arguments(changed, error, message):
    rows = make_rows([20])
    changed = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in changed.items()}
    with pytest.raises(error, match=message):
        _select(rows, None, **changed)
