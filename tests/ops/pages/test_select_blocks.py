import pytest
import torch
from hf_sparse_attn_kernels import select_blocks
from hf_sparse_attn_kernels import select_blocks as public_select_blocks
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ops.helpers import IMPLS, device, int32

NAN, INF = float("nan"), float("inf")


def _brute_force(scores, num_blocks, max_blocks, sink_blocks, recent_blocks):
    """The selection of one row and head, by sorting (forced, score, lower index first)."""
    count = min(num_blocks, max_blocks)

    def rank(block):
        forced = block < sink_blocks or block >= num_blocks - recent_blocks
        score = -INF if scores[block] != scores[block] else scores[block]
        return (not forced, -score, block)

    return sorted(sorted(range(num_blocks), key=rank)[:count])


def _check(scores, lengths, block_size, **options):
    """Both implementations, on rows shifted by another amount each, against the brute force."""
    starts = [5 * row for row in range(len(lengths))]
    ends = [start + length for start, length in zip(starts, lengths, strict=True)]
    for impl in IMPLS:
        indices, counts = select_blocks(
            scores.to(device), int32(starts), int32(ends), block_size=block_size, impl=impl, **options
        )
        assert indices.dtype == counts.dtype == torch.int32
        assert indices.shape == (*scores.shape[:2], options["max_blocks"])
        for row, length in enumerate(lengths):
            num_blocks = min(-(-length // block_size), scores.shape[2])
            for head in range(scores.shape[1]):
                expected = _brute_force(
                    scores[row, head].tolist(),
                    num_blocks,
                    options["max_blocks"],
                    options.get("sink_blocks", 0),
                    options.get("recent_blocks", 0),
                )
                padding = [-1] * (options["max_blocks"] - len(expected))
                assert indices[row, head].tolist() == expected + padding, impl
                assert counts[row, head].item() == len(expected), impl


@pytest.mark.parametrize(
    ("lengths", "width", "block_size", "max_blocks", "sink_blocks", "recent_blocks"),
    [
        ([1, 15, 16, 17, 63, 0], 5, 16, 3, 1, 1),
        ([1000, 999, 40], 70, 16, 8, 0, 1),
        ([1000, 777], 1000, 1, 256, 4, 64),
        ([100, 12], 4, 32, 9, 2, 3),
        ([96], 6, 16, 4, 2, 2),
        ([96], 6, 16, 6, 0, 0),
        ([48], 3, 16, 1, 0, 0),
    ],
)
def test_matches_brute_force(lengths, width, block_size, max_blocks, sink_blocks, recent_blocks):
    scores = torch.randn(len(lengths), 2, width, generator=torch.Generator().manual_seed(0))
    _check(
        scores,
        lengths,
        block_size,
        max_blocks=max_blocks,
        sink_blocks=sink_blocks,
        recent_blocks=recent_blocks,
    )


def test_scores_wider_than_one_tile():
    scores = torch.randn(1, 1, 20000, generator=torch.Generator().manual_seed(0))
    scores[0, 0, 5000:15000] = scores[0, 0, 7]  # ties over several tiles
    for max_blocks in (50, 9000):
        _check(scores, [19990], 1, max_blocks=max_blocks, sink_blocks=3, recent_blocks=5)


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
    for max_blocks in (1, 3, 5, 8):
        _check(scores, [8, 8, 8, 8, 7], 1, max_blocks=max_blocks)
    _check(scores, [8, 8, 8, 8, 7], 1, max_blocks=3, sink_blocks=1, recent_blocks=2)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_properties(data):
    block_size = data.draw(st.sampled_from([1, 3, 16]))
    width = data.draw(st.integers(1, 24))
    lengths = data.draw(st.lists(st.integers(0, width * block_size), min_size=1, max_size=2))
    max_blocks = data.draw(st.integers(1, width + 3))
    sink_blocks = data.draw(st.integers(0, max_blocks))
    recent_blocks = data.draw(st.integers(0, max_blocks - sink_blocks))
    # Few distinct values, so that ties are common.
    value = st.sampled_from([-INF, -1.5, -0.0, 0.0, 1e-40, 2.0, INF, NAN]) | st.floats(width=32)
    scores = data.draw(st.lists(value, min_size=width * len(lengths), max_size=width * len(lengths)))
    scores = torch.tensor(scores).view(len(lengths), 1, width)
    options = {"max_blocks": max_blocks, "sink_blocks": sink_blocks, "recent_blocks": recent_blocks}
    _check(scores, lengths, block_size, **options)

    indices, counts = select_blocks(
        scores.to(device), int32([0] * len(lengths)), int32(lengths), block_size=block_size, impl="triton", **options
    )
    for row, length in enumerate(lengths):
        num_blocks = -(-length // block_size)
        count = counts[row, 0].item()
        chosen = indices[row, 0, :count].tolist()
        assert count == min(max_blocks, num_blocks)
        assert chosen == sorted(set(chosen))
        assert all(0 <= block < num_blocks for block in chosen)
        assert (indices[row, 0, count:] == -1).all()
        assert set(range(min(sink_blocks, num_blocks))) <= set(chosen)
        assert set(range(max(0, num_blocks - recent_blocks), num_blocks)) <= set(chosen)


def test_forced_blocks_must_fit():
    with pytest.raises(ValueError, match=r"sink_blocks=2 and recent_blocks=2; allowed: together at most max_blocks=3"):
        select_blocks(
            torch.zeros(1, 1, 4, device=device),
            int32([0]),
            int32([4]),
            block_size=1,
            max_blocks=3,
            sink_blocks=2,
            recent_blocks=2,
        )


def test_the_public_name_is_still_the_op_after_a_kernel_has_run():
    import hf_sparse_attn_kernels

    _check(torch.zeros(1, 1, 4), [4], 1, max_blocks=2)
    assert hf_sparse_attn_kernels.select_blocks is public_select_blocks
