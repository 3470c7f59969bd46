import pytest
import torch
from hf_sparse_attn_kernels import _tuning as tuning
from hf_sparse_attn_kernels import rank_blocks
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ops.helpers import IMPLS, check_schema, device, grid, int32

NAN, INF = float("nan"), float("inf")


def _brute_force(scores, num_blocks, max_blocks, sink_blocks, recent_blocks):
    """The order of one row and head: newest blocks, first blocks, then by (score, lower index first)."""

    def rank(block):
        age = num_blocks - 1 - block
        if age < recent_blocks:
            return (0, age, 0)
        if block < sink_blocks:
            return (1, block, 0)
        return (2, INF if scores[block] != scores[block] else -scores[block], block)

    return sorted(range(num_blocks), key=rank)[:max_blocks]


def _check(scores, lengths, block_size, impls=IMPLS, **options):
    """Both implementations, on rows shifted by another amount each, against the brute force."""
    starts = [5 * row for row in range(len(lengths))]
    ends = [start + length for start, length in zip(starts, lengths, strict=True)]
    width = scores.shape[2] if options.get("max_blocks") is None else options["max_blocks"]
    for impl in impls:
        order, counts = rank_blocks(
            scores.to(device), int32(starts), int32(ends), block_size=block_size, impl=impl, **options
        )
        assert order.dtype == counts.dtype == torch.int32
        assert order.shape == (*scores.shape[:2], width)
        for row, length in enumerate(lengths):
            num_blocks = min(-(-length // block_size), scores.shape[2])
            for head in range(scores.shape[1]):
                expected = _brute_force(
                    scores[row, head].tolist(),
                    num_blocks,
                    width,
                    options.get("sink_blocks", 0),
                    options.get("recent_blocks", 1),
                )
                assert order[row, head].tolist() == expected + [-1] * (width - len(expected)), impl
                assert counts[row, head].item() == len(expected), impl


@pytest.mark.parametrize(
    ("lengths", "width", "block_size", "max_blocks", "sink_blocks", "recent_blocks"),
    [
        ([1, 15, 16, 17, 63, 0], 5, 16, 3, 1, 1),
        ([1000, 999, 40], 70, 16, None, 0, 1),
        ([1000, 777], 1000, 1, 256, 4, 64),
        ([100, 12], 4, 32, 9, 2, 3),
        ([96], 6, 16, None, 2, 3),
        ([96], 6, 16, 6, 0, 0),
        ([48], 3, 16, 1, 0, 0),
        ([150, 20], 5, 16, None, 5, 0),  # fewer scores than blocks
        ([30, 10], 4, 16, 4, 2, 2),  # more forced blocks than blocks
    ],
)
def test_matches_brute_force(lengths, width, block_size, max_blocks, sink_blocks, recent_blocks):
    scores = torch.randn(len(lengths), 2, width, generator=torch.Generator().manual_seed(0))
    options = {"max_blocks": max_blocks, "sink_blocks": sink_blocks, "recent_blocks": recent_blocks}
    _check(scores, lengths, block_size, **options)
    _check(scores.double(), lengths, block_size, impls=("reference",), **options)


def test_special_scores():
    scores = torch.tensor(
        [
            [NAN, 1.0, NAN, -INF, 2.0, NAN, 0.0, -0.0],
            [NAN] * 8,
            [-INF] * 8,
            [INF, INF, 3.4e38, INF, 1.0, INF, NAN, -3.4e38],
            [-0.0, 0.0, -0.0, 0.0, 1e-45, -1e-45, 0.0, -0.0],
        ]
    )[:, None]
    for max_blocks in (1, 3, None):
        _check(scores, [8, 8, 8, 8, 7], 1, max_blocks=max_blocks)
    _check(scores, [8, 8, 8, 8, 7], 1, sink_blocks=1, recent_blocks=2)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_properties(data):
    block_size = data.draw(st.sampled_from([1, 3, 16]))
    width = data.draw(st.integers(1, 24))
    lengths = data.draw(st.lists(st.integers(0, width * block_size), min_size=1, max_size=2))
    max_blocks = data.draw(st.none() | st.integers(1, width + 3))
    most = width if max_blocks is None else max_blocks
    sink_blocks = data.draw(st.integers(0, most))
    recent_blocks = data.draw(st.integers(0, most - sink_blocks))
    # Few distinct values, so that ties are common.
    value = st.sampled_from([-INF, -1.5, -0.0, 0.0, 1e-40, 2.0, INF, NAN]) | st.floats(width=32)
    scores = data.draw(st.lists(value, min_size=width * len(lengths), max_size=width * len(lengths)))
    scores = torch.tensor(scores).view(len(lengths), 1, width)
    options = {"max_blocks": max_blocks, "sink_blocks": sink_blocks, "recent_blocks": recent_blocks}
    _check(scores, lengths, block_size, **options)


def test_schema():
    scores = torch.randn(2, 3, 7).to(device)
    arguments = {"scores": scores, "seq_start": int32([0, 3]), "seq_end": int32([50, 90]), "block_size": 16}
    check_schema("rank_blocks", arguments)
    check_schema("rank_blocks", arguments | {"max_blocks": 4, "sink_blocks": 2})


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"scores": torch.zeros(1, 1, 4).half()}, TypeError, r"scores has dtype torch.float16; allowed: torch.float32"),
        ({"scores": torch.zeros(1, 4)}, ValueError, r"scores has shape \[1, 4\]; allowed"),
        ({"seq_end": torch.zeros(2).int()}, ValueError, r"seq_end has shape \[2\]; allowed"),
        ({"block_size": 0}, ValueError, r"block_size=0; allowed: an int of at least 1"),
        ({"max_blocks": 0}, ValueError, r"max_blocks=0; allowed: an int of at least 1"),
        (
            {"max_blocks": 2, "sink_blocks": 2},
            ValueError,
            r"sink_blocks=2 and recent_blocks=1; allowed: together at most max_blocks=2",
        ),
    ],
)
def test_errors_name_the_argument(change, error, message):
    arguments = {"scores": torch.zeros(1, 1, 4), "seq_start": int32([0]), "seq_end": int32([4]), "block_size": 1}
    arguments = {
        name: value.to(device) if isinstance(value, torch.Tensor) else value
        for name, value in (arguments | change).items()
    }
    with pytest.raises(error, match=message):
        rank_blocks(**arguments)


CANDIDATES = tuning.CANDIDATES["rank"]


@pytest.mark.parametrize("max_blocks", [None, 40])
@pytest.mark.parametrize(
    ("choice", "width"),
    [
        ({"span": 128, "warps": 8}, 300),
        grid({"span": 128, "warps": 1}, 300),
        *((choice, 1300) if choice == CANDIDATES[0] else grid(choice, 1300) for choice in CANDIDATES),
    ],
    ids=str,
)
def test_no_choice_changes_the_order(choice, width, max_blocks):
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(2, 1, width, generator=generator)
    scores[0, 0, width // 6 : width // 2] = scores[0, 0, 7]  # ties over several spans
    scores[1, 0, width // 4 :] = scores[1, 0, width // 4 :].round()
    scores[1, 0, ::97] = NAN
    with tuning.forced(rank=choice):
        _check(scores, [width - 10, width // 2], 1, max_blocks=max_blocks, sink_blocks=3, recent_blocks=5)
        _check(scores, [20, 0], 1, max_blocks=max_blocks)


def test_most_blocks_come_first_anyway():
    scores = torch.randn(2, 1, 300, generator=torch.Generator().manual_seed(0))
    with tuning.forced(rank={"span": 128}):
        _check(scores, [300, 256], 1, max_blocks=330, sink_blocks=140, recent_blocks=150)
