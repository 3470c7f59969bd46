"""Where offloaded progressive reading stops, against the rule in plain Python; and the merge of parts."""

import math

import numpy as np
import pytest
import torch

from hf_sparse_attn.methods.merge import merge_attention
from hf_sparse_attn.methods.microbatches import StopRule

BLOCK_SIZE, MICROBATCH, GROUP = 4, 3, 2
LENGTHS = [63, 64, 10, 1, 0]  # 16, 16, 3, 1 and 0 blocks
FORCED = 2


def has_enough(weights, complete, blocks_left, threshold, rest):
    """Decide for one query head; weights and completeness of the blocks read so far, in their order."""
    if rest == "least":
        known = [weight for weight, is_complete in zip(weights, complete, strict=True) if is_complete]
    else:
        known = []
        for first in range(0, len(weights), MICROBATCH):
            places = range(max(first, FORCED), min(first + MICROBATCH, len(weights)))
            counted = [weights[place] for place in places if complete[place]]
            known += [sum(counted) / len(counted)] if counted else []
    return bool(known) and sum(weights) > threshold * (sum(weights) + min(known) * blocks_left)


@pytest.mark.parametrize("rest", ["least", "last"])
@pytest.mark.parametrize("threshold", [0.5, 0.9, 1.0])
def test_pairs_stop_where_the_rule_says(threshold, rest):
    generator = np.random.default_rng(0)
    rule = StopRule(np.array(LENGTHS), GROUP, BLOCK_SIZE, threshold, rest, FORCED)
    num_blocks = [math.ceil(length / BLOCK_SIZE) for length in LENGTHS]
    order = np.full((len(LENGTHS), 18), -1)
    for pair, blocks in enumerate(num_blocks):
        order[pair, :blocks] = generator.permutation(blocks)
    sums = np.where(order[..., None] < 0, -np.inf, generator.normal(size=(*order.shape, GROUP)) * 3)
    seen = set()
    for first in range(0, 18, MICROBATCH):
        part = slice(first, first + MICROBATCH)
        _, goes_on = rule.add(order[:, part], sums[:, part].astype(np.float32))
        for pair, blocks in enumerate(num_blocks):
            read = min(first + MICROBATCH, blocks)
            assert rule.read_counts[pair] == read
            if read == blocks:
                continue  # nothing is left, whatever the rule says
            complete = [(block + 1) * BLOCK_SIZE <= LENGTHS[pair] for block in order[pair, :read]]
            expected = all(
                has_enough(np.exp(sums[pair, :read, head]).tolist(), complete, blocks - read, threshold, rest)
                for head in range(GROUP)
            )
            assert goes_on[pair] != expected
            seen.add(expected)
    assert seen == ({False} if threshold == 1 else {True, False})


@pytest.mark.parametrize("rest", ["least", "last"])
def test_a_round_is_read_one_microbatch_after_the_other(rest):
    """Pairs have rounds of different sizes; what lies behind the microbatch where a pair stops changes nothing."""
    generator = np.random.default_rng(1)
    sizes = [min(math.ceil(length / BLOCK_SIZE), 18 - MICROBATCH * (pair % 2)) for pair, length in enumerate(LENGTHS)]
    order = np.full((len(LENGTHS), 18), -1)
    for pair, size in enumerate(sizes):
        order[pair, :size] = generator.permutation(math.ceil(LENGTHS[pair] / BLOCK_SIZE))[:size]
    sums = np.where(order[..., None] < 0, -np.inf, generator.normal(size=(*order.shape, GROUP)) * 3)
    at_once, one_by_one = (StopRule(np.array(LENGTHS), GROUP, BLOCK_SIZE, 0.5, rest, FORCED) for _ in "ab")
    read, goes_on = at_once.add(order, sums, MICROBATCH)
    reads_on = np.ones(len(order), bool)
    for first in range(0, 18, MICROBATCH):
        part = slice(first, first + MICROBATCH)
        blocks = np.where(reads_on[:, None], order[:, part], -1)
        reads_on &= one_by_one.add(blocks, np.where(blocks[..., None] < 0, -np.inf, sums[:, part]))[1]
    assert read.tolist() == one_by_one.read_counts.tolist()
    assert goes_on.tolist() == reads_on.tolist()
    assert (read < sizes).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_merged_parts_are_attention_to_all_tokens(dtype):
    """Two lists of one and three sets of tokens; some sets are empty, and one row has no token at all."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(3, 4, 5, 7, generator=generator, dtype=torch.float64) * 20  # [batch, sets, heads, tokens]
    values = torch.randn(3, 4, 5, 7, 6, generator=generator, dtype=torch.float64)
    scores[0, 1] = scores[1, :3] = scores[2] = -math.inf
    lse = scores.logsumexp(dim=3)
    outputs = (scores.softmax(dim=3).nan_to_num(0)[..., None] * values).sum(dim=3)
    expected_lse = scores.transpose(1, 2).flatten(2).logsumexp(dim=2)
    expected = (scores.transpose(1, 2).flatten(2).softmax(dim=2)[..., None] * values.transpose(1, 2).flatten(2, 3)).sum(
        2
    )
    expected[2] = 0
    parts = [(outputs[:, part].to(dtype), lse[:, part].to(dtype)) for part in (slice(1), slice(1, 4))]
    output, total = merge_attention(parts)
    assert output.dtype == total.dtype == dtype
    torch.testing.assert_close(output, expected.to(dtype))
    torch.testing.assert_close(total, expected_lse.to(dtype))
