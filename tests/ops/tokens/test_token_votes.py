import pytest
import torch
from hf_sparse_attn_kernels import token_votes

from tests.ops.helpers import IMPLS, check_schema, device, golden, int32, make_rows

NAN, INF = float("nan"), float("inf")


@pytest.fixture(autouse=True)
def nan_in_new_buffers(monkeypatch):
    """Tensors that a launcher allocates hold NaN, or a large number, until a kernel has written it."""
    empty = torch.empty

    def poisoned(*args, **kwargs):
        tensor = empty(*args, **kwargs)
        return tensor.fill_(NAN if tensor.is_floating_point() else torch.iinfo(tensor.dtype).max)

    monkeypatch.setattr(torch, "empty", poisoned)


def exact_scores(rows, row, sink_tokens, recent_tokens, num_tokens):
    """float64 q.k [q_heads, n] of a row's candidates, head by head."""
    start, length = rows.start[row].item(), min(rows.lengths[row], num_tokens)
    first, last = start + sink_tokens, start + length - recent_tokens
    kv_heads, q_heads = rows.keys.shape[1], rows.query.shape[1]
    scores = []
    for head in range(q_heads):
        keys = rows.keys[row, head // (q_heads // kv_heads), first : max(first, last)].double()
        scores.append(keys @ rows.query[row, head].double())
    return torch.stack(scores)


def exact_votes(rows, vote, sink_tokens, recent_tokens, num_voted, num_tokens):
    """float64 votes [batch, num_tokens]."""
    votes = torch.full((len(rows.lengths), num_tokens), -INF, dtype=torch.float64, device=device)
    for row in range(len(rows.lengths)):
        scores = exact_scores(rows, row, sink_tokens, recent_tokens, num_tokens)
        count = scores.shape[1]
        if vote == "soft":
            voted = scores.softmax(dim=1).sum(dim=0)
        elif vote == "logits":
            voted = scores.sum(dim=0)
        else:
            voted = torch.zeros(count, dtype=torch.float64, device=device)
            for of_head in scores.tolist():
                for token in sorted(range(count), key=lambda t, s=of_head: (-s[t], t))[:num_voted]:
                    voted[token] += 1
        votes[row, sink_tokens : sink_tokens + count] = voted
    return votes


@pytest.mark.parametrize("vote", ["soft", "logits"])
@pytest.mark.parametrize(
    ("lengths", "sink_tokens", "recent_tokens", "kv_heads", "group", "head_dim", "dtype"),
    [
        ([700, 1, 0, 63, 130], 5, 9, 2, 1, 64, torch.float32),
        ([1025, 300], 0, 0, 1, 3, 80, torch.bfloat16),
        ([130, 129, 600], 128, 1, 2, 7, 128, torch.float16),
        ([513], 1, 511, 2, 9, 16, torch.bfloat16),
        ([150, 90], 3, 0, 1, 1, 256, torch.float32),
        ([200, 77], 0, 30, 12, 3, 32, torch.float16),  # more heads than a program holds at once
    ],
)
def test_error_is_bounded_by_that_of_the_reference(
    vote, lengths, sink_tokens, recent_tokens, kv_heads, group, head_dim, dtype
):
    rows = make_rows(lengths, kv_heads=kv_heads, group=group, head_dim=head_dim, dtype=dtype)
    rows.query *= 4 * head_dim**-0.5
    for num_tokens in (None, rows.capacity - 2):
        exact = exact_votes(rows, vote, sink_tokens, recent_tokens, 0, num_tokens or rows.capacity)
        is_candidate = exact > -INF
        errors = {}
        for impl in IMPLS:
            votes = token_votes(
                rows.query,
                rows.keys,
                rows.start,
                rows.end,
                sink_tokens=sink_tokens,
                recent_tokens=recent_tokens,
                vote=vote,
                num_tokens=num_tokens,
                impl=impl,
            )
            assert votes.dtype == torch.float32
            assert votes.shape == exact.shape
            assert torch.equal(votes > -INF, is_candidate)
            assert (votes[~is_candidate] == -INF).all()
            errors[impl] = (votes.double() - exact)[is_candidate].abs().max().item()
        largest = exact[is_candidate].abs().max().item()
        assert errors["reference"] <= 1e-5 * largest
        assert errors["triton"] <= 4 * errors["reference"] + 1e-6 * largest


@pytest.mark.parametrize(("lengths", "group", "max_tokens"), [([600, 40, 0, 13], 1, 60), ([90, 520], 3, 15)])
def test_head_vote_counts_the_heads(lengths, group, max_tokens):
    rows = make_rows(lengths, group=group, head_dim=16)
    exact = exact_votes(rows, "head", 4, 6, max_tokens - 10, rows.capacity)
    for impl in IMPLS:
        votes = token_votes(
            rows.query,
            rows.keys,
            rows.start,
            rows.end,
            sink_tokens=4,
            recent_tokens=6,
            vote="head",
            max_tokens=max_tokens,
            impl=impl,
        )
        assert torch.equal(votes.double(), exact), impl


def test_equal_scores_are_voted_for_in_their_order():
    keys = torch.zeros(1, 1, 1100, 16, device=device)
    keys[0, 0, 700:, 0] = 1.0
    query = torch.ones(1, 2, 16, device=device)
    query[0, 1, 0] = -1.0
    for impl in IMPLS:
        votes = token_votes(query, keys, int32([0]), int32([1100]), vote="head", max_tokens=30, impl=impl)
        expected = torch.zeros(1, 1100, device=device)
        expected[0, :30] = 1.0
        expected[0, 700:730] = 1.0
        assert torch.equal(votes, expected), impl


def test_float64_only_in_the_reference():
    rows = make_rows([40], group=2)
    rows.keys, rows.query = rows.keys.double(), rows.query.double()
    votes = token_votes(rows.query, rows.keys, rows.start, rows.end, impl="reference")
    exact = exact_votes(rows, "soft", 0, 0, 0, rows.capacity)
    torch.testing.assert_close(votes, exact, rtol=1e-12, atol=0)
    with pytest.raises(TypeError, match=r"query has dtype torch.float64; allowed for impl='triton'"):
        token_votes(rows.query, rows.keys, rows.start, rows.end, impl="triton")


@pytest.mark.parametrize("impl", IMPLS)
def test_golden_votes(impl):
    vectors = golden("soft_vote0")
    keys, query = vectors["keys"], vectors["query"][:, :, 0]
    votes = token_votes(query, keys, int32([0]), int32([keys.shape[2]]), impl=impl)
    torch.testing.assert_close(votes[0], vectors["votes"], rtol=2e-5, atol=1e-7)


@torch.no_grad()
def test_one_opaque_node():
    rows = make_rows([90, 70], group=3)
    arguments = (rows.query, rows.keys, rows.start, rows.end)
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda *tensors: token_votes(*tensors, sink_tokens=2, num_tokens=80), fullgraph=True, backend="aot_eager"
    )
    torch.testing.assert_close(compiled(*arguments), token_votes(*arguments, sink_tokens=2, num_tokens=80))
    for options in ({}, {"vote": "head", "max_tokens": 20, "num_tokens": 50}):
        names = ("query", "keys", "seq_start", "seq_end")
        check_schema("token_votes", dict(zip(names, arguments, strict=True)) | options)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"vote": "hard"}, ValueError, r"vote='hard'; allowed: 'soft', 'logits', 'head'"),
        ({"vote": "head"}, ValueError, r"max_tokens=None; allowed with vote='head': an int"),
        ({"vote": "head", "max_tokens": 3}, ValueError, r"sink_tokens=2 and recent_tokens=1; allowed: together less"),
        ({"num_tokens": 26}, ValueError, r"num_tokens=26; allowed: None, or 1 to capacity=25"),
        ({"num_tokens": True}, ValueError, r"num_tokens=True; allowed: None, or 1 to capacity=25"),
        ({"recent_tokens": -1}, ValueError, r"recent_tokens=-1; allowed: an int of at least 0"),
        ({"query": torch.zeros(1, 3, 64)}, ValueError, r"q_heads=3 of query; allowed: a multiple of kv_heads=2"),
        ({"query": torch.zeros(1, 2, 32)}, ValueError, r"keys has shape \[1, 2, 25, 64\]; allowed"),
        ({"query": torch.zeros(1, 2, 64).half()}, TypeError, r"keys has dtype torch.float32; allowed: torch.float16"),
        ({"seq_end": torch.zeros(1)}, TypeError, r"seq_end has dtype torch.float32; allowed: torch.int32"),
    ],
)
def test_bad_arguments(changed, error, message):
    rows = make_rows([20])
    arguments = {"query": rows.query, "keys": rows.keys, "seq_start": rows.start, "seq_end": rows.end}
    arguments |= {"sink_tokens": 2, "recent_tokens": 1}
    changed = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in changed.items()}
    with pytest.raises(error, match=message):
        token_votes(**(arguments | changed))
