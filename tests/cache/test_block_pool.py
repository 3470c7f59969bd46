"""The bookkeeping of the block pool, compared with a simulation in plain Python."""

from collections import OrderedDict

import numpy as np
import pytest

from hf_sparse_attn.cache.offload.pool import BlockPool

policies = pytest.mark.parametrize("policy", ["lru", "fifo"])


class Simulation:
    """A cache of named blocks: reads move a block to the end (LRU) or not (FIFO); the first one that may go, goes."""

    def __init__(self, slots, policy):
        self.slots, self.policy = slots, policy
        self.blocks = OrderedDict()

    def take(self, names):
        """Return whether each block was there."""
        was_there = [name in self.blocks for name in names]
        for name, hit in zip(names, was_there, strict=True):
            if hit and self.policy == "lru":
                self.blocks.move_to_end(name)
        for name, hit in zip(names, was_there, strict=True):
            if not hit:
                if len(self.blocks) == self.slots:
                    del self.blocks[next(block for block in self.blocks if block not in names)]
                self.blocks[name] = None
        return was_there

    def forget(self, table, first_gone):
        for name in list(self.blocks):
            if name[0] == table and name[2] >= first_gone[name[1]]:
                del self.blocks[name]


def make_pool(slots, policy, tables=2, pairs=3, blocks=20):
    pool = BlockPool(slots, policy)
    assert [pool.add_table() for _ in range(tables)] == list(range(tables))
    pool.lay_out(pairs, blocks)
    return pool


def random_choice(generator, pairs=3, blocks=20, most=12):
    flat = generator.permutation(pairs * blocks)[: generator.integers(1, most)]
    return np.stack(np.unravel_index(flat, (pairs, blocks)))


@policies
@pytest.mark.parametrize("slots", [12, 17, 40, 200])
def test_hits_and_slots_are_those_of_a_plain_simulation(slots, policy):
    generator = np.random.default_rng(slots)
    pool, simulation = make_pool(slots, policy), Simulation(slots, policy)
    contents = {}  # what the loads have written to each slot
    hits = 0
    for step in range(400):
        table = step % 2
        pairs, blocks = random_choice(generator)
        names = [(table, pair, block) for pair, block in zip(pairs.tolist(), blocks.tolist(), strict=True)]
        found = pool.take(table, pairs, blocks)
        assert (~found.is_missing).tolist() == simulation.take(names)
        assert len(set(found.slots.tolist())) == len(names)
        for name, slot, is_missing in zip(names, found.slots.tolist(), found.is_missing.tolist(), strict=True):
            if is_missing:
                contents[slot] = name
            assert contents[slot] == name
        hits += int((~found.is_missing).sum())
        if step % 50 == 49:  # a crop: each pair keeps its first blocks
            first_gone = generator.integers(0, 20, 3)
            pool.forget(table, first_gone)
            simulation.forget(table, first_gone)
    assert hits > 0


@policies
def test_a_step_never_loses_a_block_that_it_reads(policy):
    """Under FIFO a block that is read again may be the oldest."""
    pool = make_pool(4, policy)
    pairs, blocks = np.zeros(4, np.int64), np.arange(4)
    first = pool.take(0, pairs, blocks)
    then = pool.take(0, pairs, np.array([0, 1, 8, 9]))
    assert then.is_missing.tolist() == [False, False, True, True]
    assert then.slots[:2].tolist() == first.slots[:2].tolist()
    assert set(then.slots[2:].tolist()) == set(first.slots[2:].tolist())


def test_more_blocks_than_slots_are_refused():
    pool = make_pool(3, "lru")
    with pytest.raises(ValueError, match="one step reads 4 blocks of one layer, but the pool has 3 slots"):
        pool.take(0, np.zeros(4, np.int64), np.arange(4))


@policies
def test_larger_and_more_tables_keep_their_blocks(policy):
    pool = make_pool(30, policy)
    pairs, blocks = np.array([0, 1, 2]), np.array([5, 19, 0])
    slots = pool.take(1, pairs, blocks).slots
    pool.reserve(64)
    assert pool.add_table() == 2
    found = pool.take(1, np.append(pairs, 2), np.append(blocks, 60))
    assert found.is_missing.tolist() == [False, False, False, True]
    assert found.slots[:3].tolist() == slots.tolist()
    pool.take(2, np.repeat(np.arange(3), 9), np.tile(np.arange(9), 3))  # 27 more: one has to go
    assert pool.take(1, pairs, blocks).is_missing.sum() == 1


def test_a_dropped_table_makes_room_for_the_next_one():
    pool = make_pool(30, "lru")
    pool.take(0, np.array([0]), np.array([3]))
    pool.drop_table(0)
    assert pool.add_table() == 0
    assert pool.take(0, np.array([0]), np.array([3])).is_missing.all()


def test_reordered_rows_keep_the_slots_of_their_first_copies():
    pool = make_pool(30, "lru")
    pairs, blocks = np.array([0, 1, 2, 2]), np.array([1, 2, 3, 4])
    slots = pool.take(0, pairs, blocks).slots
    pool.reorder(0, np.array([2, 2, 1]))
    found = pool.take(0, np.array([0, 0, 1, 1, 2]), np.array([3, 4, 3, 4, 2]))
    assert found.is_missing.tolist() == [False, False, True, True, False]
    assert found.slots[[0, 1, 4]].tolist() == slots[[2, 3, 1]].tolist()
    pool.take(0, np.repeat(np.arange(3), 10), np.tile(np.arange(10, 20), 3))  # evicts all, so every owner is right
    assert pool.take(0, np.array([0, 0, 2]), np.array([3, 4, 2])).is_missing.all()


@policies
def test_slots_to_keep_are_not_reused(policy):
    """Blocks 0 and 1 are the first to go, whether or not they were read lately."""
    pool = make_pool(4, policy, pairs=1)
    pair = np.zeros(2, np.int64)
    kept = pool.take(0, pair, np.array([0, 1])).slots
    others = pool.take(0, pair, np.array([2, 3])).slots
    assert set(pool.take(0, pair, np.array([4, 5]), keep=kept).slots) == set(others)
    found = pool.take(0, pair, np.array([0, 1]))
    assert found.slots.tolist() == kept.tolist()
    assert not found.is_missing.any()
    with pytest.raises(ValueError, match="one step reads 5 blocks of one layer, but the pool has 4 slots"):
        pool.take(0, np.zeros(3, np.int64), np.array([6, 7, 8]), keep=kept)
