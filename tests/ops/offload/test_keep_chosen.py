"""`keep_chosen`: the chosen tokens lie in slots, those that were there stay, and nothing else is read or written."""

import pytest
import torch
from hf_sparse_attn_kernels import keep_chosen, sparse_decode

from tests.ops.helpers import IMPLS, check_schema, device, grid, int32, make_rows

impls = pytest.mark.parametrize("impl", IMPLS)


class Slots:
    """The oracle: the slots of one row and KV head, block by block."""

    def __init__(self, slots, block_size):
        self.blocks = [None] * slots
        self.block_size = block_size
        self.newest = (None, 0)  # the block in the last slot, and its tokens there

    def take(self, chosen, length):
        """Return the slot of each block, the blocks found, and (token, place) of each token that must be loaded."""
        size, loads, found = self.block_size, [], 0
        partial = length // size if length % size else None
        full = [block for block in chosen if block != partial]
        free = [slot for slot, block in enumerate(self.blocks) if block not in full]
        slots = []
        for block in chosen:
            if block == partial:
                slot, held = len(self.blocks), self.newest[1] if self.newest[0] == block else 0
                loads += [(block * size + offset, slot * size + offset) for offset in range(held, length % size)]
                self.newest = (block, length % size)
            elif block in self.blocks:
                slot, found = self.blocks.index(block), found + 1
            else:
                slot = free.pop(0)
                self.blocks[slot] = block
                loads += [(block * size + offset, slot * size + offset) for offset in range(size)]
            slots.append(slot)
        return slots, found, len(full), loads


class Case:
    """Rows on the device, slots of NaN, and an oracle for each row and KV head."""

    def __init__(self, lengths, slots, block_size, table=torch.int16, **shape):
        self.rows, self.slots, self.block_size = make_rows(lengths, **shape), slots, block_size
        batch, heads, capacity, head_dim = self.rows.keys.shape
        size = (batch, heads, (slots + 1) * block_size, head_dim)
        self.kept = [torch.full(size, torch.nan, dtype=self.rows.keys.dtype, device=device) for _ in "kv"]
        self.slot_blocks = torch.full((batch, heads, slots + 1), -1, dtype=torch.int32, device=device)
        blocks = -(-capacity // block_size)
        generator = torch.Generator().manual_seed(7)
        info = torch.iinfo(table)  # whatever the memory held before
        self.block_slots = torch.randint(info.min, info.max, (batch, heads, blocks), generator=generator)
        self.block_slots = self.block_slots.to(device, table)
        self.oracles = [[Slots(slots, block_size) for _ in range(heads)] for _ in range(batch)]
        self.counter, self.traffic = (torch.zeros(4, dtype=torch.int64, device=device) for _ in range(2))

    def arguments(self, indices, counts, lengths):
        return {
            "keys": self.rows.keys,
            "values": self.rows.values,
            "kept_keys": self.kept[0],
            "kept_values": self.kept[1],
            "slot_blocks": self.slot_blocks,
            "block_slots": self.block_slots,
            "block_indices": indices,
            "block_counts": counts,
            "seq_start": self.rows.start,
            "seq_end": self.rows.start + int32(lengths),
            "block_size": self.block_size,
            "counter": self.counter,
            "traffic": self.traffic,
        }

    def step(self, selections, lengths, impl):
        """Choose blocks, [batch][kv_heads or 1] lists, of rows with so many tokens, and compare everything."""
        heads, width = self.rows.keys.shape[1], self.slots
        indices = int32([[row_choice + [-1] * (width - len(row_choice)) for row_choice in row] for row in selections])
        counts = int32([[len(choice) for choice in row] for row in selections])
        expected_kept = [buffer.clone() for buffer in self.kept]
        counted, moved = self.counter.tolist(), self.traffic.tolist()
        expected = torch.full((len(lengths), heads, width), -1, dtype=torch.int32)
        for row, length in enumerate(lengths):
            for head in range(heads):
                chosen = selections[row][head % len(selections[row])]
                slots, found, full, loads = self.oracles[row][head].take(chosen, length)
                expected[row, head, : len(slots)] = torch.tensor(slots, dtype=torch.int32)
                for token, place in loads:
                    for kept, source in zip(expected_kept, (self.rows.keys, self.rows.values), strict=True):
                        kept[row, head, place] = source[row, head, int(self.rows.start[row]) + token]
                tokens = sum(min(self.block_size, length - block * self.block_size) for block in chosen)
                counted = [counted[0] + tokens, counted[1] + length, 0, counted[3]]
                moved = [moved[0] + full, moved[1] + found, moved[2] + len(loads), moved[3] + 1]
        counted[3] += 1
        slot_indices, kept_end = keep_chosen(**self.arguments(indices, counts, lengths), impl=impl)
        assert torch.equal(slot_indices.cpu(), expected)
        assert kept_end.tolist() == [self.slots * self.block_size + length % self.block_size for length in lengths]
        for kept, other in zip(self.kept, expected_kept, strict=True):
            assert torch.equal(kept.nan_to_num(-77.0), other.nan_to_num(-77.0))
        assert self.counter.tolist() == counted
        assert self.traffic.tolist() == moved
        return indices, counts, slot_indices, kept_end


def choose(generator, length, block_size, most, newest=True, ascending=True):
    """Return random blocks of a row, with its newest or without."""
    blocks = -(-length // block_size)
    chosen = torch.randperm(blocks, generator=generator)[: min(most, blocks)].tolist()
    if newest and blocks and blocks - 1 not in chosen:
        chosen[-1] = blocks - 1
    return sorted(chosen) if ascending else chosen


@impls
@pytest.mark.parametrize(
    ("block_size", "slots", "head_dim", "dtype"),
    [
        (1, 20, 16, torch.float32),
        (4, 6, 80, torch.bfloat16),
        grid(1, 33, 80, torch.float16),
        grid(3, 7, 128, torch.float32),
        grid(16, 3, 256, torch.bfloat16),
    ],
    ids=str,
)
@pytest.mark.parametrize("shared", [False, True], ids=["each-head", "shared"])
def test_steps_of_growing_rows(block_size, slots, head_dim, dtype, shared, impl):
    """Rows of several lengths grow token by token, at last by many at once; one is empty."""
    case = Case([63, 40, 0, 9], slots, block_size, head_dim=head_dim, dtype=dtype)
    generator = torch.Generator().manual_seed(block_size)
    for grown in (20, 19, 18, 17, 16, 15, 4, 0):
        lengths = [max(0, length - grown) for length in case.rows.lengths]
        most = int(torch.randint(1, slots + 1, (), generator=generator))
        selections = [
            [
                choose(generator, length, block_size, most, grown % 3 > 0, grown % 2 > 0)
                for _ in range(1 if shared else 2)
            ]
            for length in lengths
        ]
        case.step(selections, lengths, impl)


@impls
def test_a_selection_that_returns_is_loaded_once(impl):
    case = Case([40, 40], 8, 4)
    selections = [[[0, 3, 9], [1, 2, 9]], [[5, 6, 7], [0, 4, 9]]]
    case.step(selections, [38, 38], impl)
    loaded = int(case.traffic[2])
    case.step(selections, [38, 38], impl)
    assert int(case.traffic[2]) == loaded
    case.step([[choice[::-1] for choice in row] for row in selections], [38, 38], impl)
    assert int(case.traffic[2]) == loaded
    case.slot_blocks.fill_(-1)
    case.oracles = [[Slots(8, 4) for _ in range(2)] for _ in range(2)]
    case.step(selections, [38, 38], impl)
    assert int(case.traffic[2]) == 2 * loaded


@impls
@pytest.mark.parametrize("table", [torch.int16, torch.int32])
def test_more_slots_than_a_program_holds_at_once(table, impl):
    case = Case([1500], 1100, 1, table, head_dim=8)
    generator = torch.Generator().manual_seed(0)
    for _ in range(2):
        case.step([[choose(generator, 1500, 1, 1100) for _ in range(2)]], [1500], impl)
    assert 0 < int(case.traffic[1]) < int(case.traffic[0])


@impls
def test_attention_over_the_slots_is_that_over_the_rows(impl):
    case = Case([63, 50], 6, 4, group=3, head_dim=80)
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        selections = [[choose(generator, length, 4, 6) for _ in range(2)] for length in (63, 50)]
        indices, counts, slot_indices, kept_end = case.step(selections, [63, 50], impl)
        bounds = (case.rows.start, case.rows.end)
        expected = sparse_decode(
            case.rows.query, case.rows.keys, case.rows.values, indices, counts, *bounds, block_size=4
        )
        kept_start = torch.zeros_like(kept_end)
        found = sparse_decode(case.rows.query, *case.kept, slot_indices, counts, kept_start, kept_end, block_size=4)
        for actual, wanted in zip(found, expected, strict=True):
            torch.testing.assert_close(actual, wanted)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            {"kept_keys": torch.zeros(1, 2, 11, 16)},
            ValueError,
            r"kept_keys has shape \[1, 2, 11, 16\]; allowed: .* 12, 16",
        ),
        ({"kept_values": torch.zeros(1, 2, 12, 16).half()}, TypeError, r"kept_values has dtype torch.float16"),
        ({"slot_blocks": torch.zeros(1, 2, 2).int()}, ValueError, r"slot_blocks has 1 slots .* at least n=2"),
        (
            {"block_slots": torch.zeros(1, 2, 9).long()},
            TypeError,
            r"block_slots has dtype torch.int64; allowed: .*int16",
        ),
        (
            {"block_slots": torch.zeros(1, 2, 3).int()},
            ValueError,
            r"block_slots has shape \[1, 2, 3\]; allowed: .*blocks",
        ),
        ({"block_size": 0}, ValueError, r"block_size=0; allowed: an int of at least 1"),
        ({"traffic": torch.zeros(3).long()}, ValueError, r"traffic has shape \[3\]; allowed: \[4\]"),
        ({"values": torch.zeros(1, 2, 9, 16)}, ValueError, r"values has shape"),
    ],
    ids=str,
)
def test_arguments_are_checked(changes, error, message):
    case = Case([30], 2, 4, head_dim=16)
    arguments = case.arguments(int32([[[0, 1], [2, 3]]]), int32([[2, 2]]), [30])
    changes = {name: each.to(device) if isinstance(each, torch.Tensor) else each for name, each in changes.items()}
    with pytest.raises(error, match=message):
        keep_chosen(**arguments | changes)


def test_schema():
    case = Case([30], 2, 4, head_dim=16)
    check_schema("keep_chosen", case.arguments(int32([[[0, 1], [2, 3]]]), int32([[2, 2]]), [30]))
