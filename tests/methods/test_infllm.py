"""InfLLM against its definition in plain loops, its budget, and its effect on a model."""

from dataclasses import replace

import pytest
import torch

from hf_sparse_attn import InfLLM, SparseCache, patch_model, sparse_attention, sparse_attention_stats
from hf_sparse_attn.cache.lengths import Lengths
from hf_sparse_attn.methods import infllm, memory_blocks
from hf_sparse_attn.rope import RopeTables
from tests.layers import make_layer, step
from tests.methods.coded import decode
from tests.methods.rotation import rotate
from tests.models import DEVICE, POSITIONS, ROUNDING, make_model, random_ids, shared_model

pytestmark = pytest.mark.usefixtures("exact")

HEAD_DIM, KV_HEADS, Q_HEADS = 16, 2, 6
GROUP, SCALE = Q_HEADS // KV_HEADS, 0.25
SMALL = InfLLM(token_budget=40, n_init=3, n_local=9, block_size=4, representatives=2, chunk_size=64)
GREEDY = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0, "disable_compile": True}


class Definition:
    """One row of one layer: every query, token and head in turn."""

    def __init__(self, split, representatives):
        self.split, self.representatives = split, representatives
        self.keys, self.values = [], []  # [kv_heads, d] each
        self.sought = [{} for _ in range(KV_HEADS)]  # token: the products of the queries that met it
        self.most_blocks = 0

    def block_key(self, block, kv_head):
        first = self.split.first + block * self.split.size
        means = {token: sum(met) / len(met) for token, met in self.sought[kv_head].items()}
        tokens = sorted(range(first, first + self.split.size), key=lambda token: -means[token])
        return sum(self.keys[token][kv_head] for token in tokens[: self.representatives]) / self.representatives

    def choose(self, queries, position):
        """The blocks for queries [n, q_heads, d], the first of them at a position."""
        number = max(0, position + 1 - self.split.first - self.split.last) // self.split.size
        self.most_blocks = max(self.most_blocks, number)
        mean = sum(rotate(query, self.split.last) for query in queries) / len(queries)
        scores = [
            sum(float(mean[head] @ self.block_key(block, head // GROUP)) for head in range(Q_HEADS))
            for block in range(number)
        ]
        return sorted(range(number), key=lambda block: -scores[block])[: self.split.blocks], number

    def attend(self, queries, keys, values, is_step=False):
        """Append keys and values [n, kv_heads, d]; return the outputs of queries [n, q_heads, d], and what was read."""
        first, size, last = self.split.first, self.split.size, self.split.last
        position = len(self.keys)
        chosen, number = self.choose(queries, position)
        self.keys += keys
        self.values += values
        blocks = [token for block in chosen for token in range(first + block * size, first + (block + 1) * size)]
        outputs, read = [], []
        for at, query in enumerate(queries, start=position):
            begin = max(0, at - last + 1)
            after = range(first + number * size, begin)
            remote = sorted({token for token in (*range(first), *blocks, *after) if token < begin})
            rows = []
            for head in range(Q_HEADS):
                near, far = rotate(query[head], at), rotate(query[head], last)
                local = [near @ rotate(self.keys[token][head // GROUP], token) for token in range(begin, at + 1)]
                scores = [far @ self.keys[token][head // GROUP] for token in remote] + local
                weights = (torch.stack(scores) * SCALE).softmax(0)
                held = torch.stack([self.values[token][head // GROUP] for token in (*remote, *range(begin, at + 1))])
                rows.append(weights @ held)
            outputs.append(torch.stack(rows))
            read.append([*remote, *range(begin, at + 1)])
        for at, query in enumerate(queries, start=position):
            for kv_head in range(KV_HEADS) if not is_step or at >= last else ():
                near = [rotate(query[head], at) for head in range(kv_head * GROUP, (kv_head + 1) * GROUP)]
                for token in range(max(0, at - last + 1), at):
                    key = rotate(self.keys[token][kv_head], token)
                    self.sought[kv_head].setdefault(token, []).append(float(sum(each @ key for each in near)))
        return torch.stack(outputs), read


def random_states(heads, tokens, generator):
    return torch.randn(2, heads, tokens, HEAD_DIM, dtype=torch.float64, generator=generator).to(DEVICE)


def listed(states, row, first=0):
    """[heads, tokens, d] of a row, token by token."""
    return list(states[row, :, first:].transpose(0, 1).cpu())


@pytest.mark.parametrize("max_cache_len", [None, 100], ids=["growing", "static"])
@pytest.mark.parametrize(
    ("parameters", "parts"),
    [
        ({}, [20, 7, 36]),
        ({"n_init": 0, "block_size": 5, "representatives": 5, "token_budget": 31}, [63]),
        ({"block_size": 1, "representatives": 1, "token_budget": 24}, [8, 24, 24]),
        ({}, [6]),  # within the local window at first
    ],
    ids=str,
)
@torch.inference_mode()
def test_prompt_and_steps_follow_the_definition(parameters, parts, max_cache_len):
    """Two rows, the second with left padding that fills the first chunk."""
    method = replace(SMALL, **parameters)
    padding, generator = (0, min(21, sum(parts) - 3)), torch.Generator().manual_seed(1)
    layer = make_layer(method, max_cache_len, Q_HEADS, padding=list(padding))
    layer.use_rope(RopeTables(shared_model("llama").model.rotary_emb, slots=method.rope_slots(POSITIONS)))
    rows = [Definition(method.split, method.representatives) for _ in padding]
    fed = 0
    for tokens in parts:
        query, key, value = (random_states(heads, tokens, generator) for heads in (Q_HEADS, KV_HEADS, KV_HEADS))
        skipped = max(0, padding[1] - fed)
        for states in (query, key, value):
            states[1, :, :skipped] = 1000
        layer.update(key, value)
        out = method.prefill(query, layer, SCALE, None)
        for row, first in ((0, 0), (1, skipped)):
            if first < tokens:
                expected, _ = rows[row].attend(*(listed(states, row, first) for states in (query, key, value)))
                torch.testing.assert_close(out[row, :, first:].transpose(0, 1).cpu(), expected, **ROUNDING)
        fed += tokens
    method.finish_prompt([layer])
    for buffer in (layer.keys, layer.values):
        buffer[1, :, : padding[1]] = buffer[:, :, fed + 30 :] = torch.nan
    most_read = 0
    for _ in range(30):
        query, key, value = (random_states(heads, 1, generator) for heads in (Q_HEADS, KV_HEADS, KV_HEADS))
        before = layer.counter.read()
        out = step(layer, query[:, :, 0], key[:, :, 0], value[:, :, 0], SCALE)
        tokens_read = 0
        for row in range(2):
            expected, read = rows[row].attend(*(listed(states, row) for states in (query, key, value)), is_step=True)
            torch.testing.assert_close(out[row].cpu(), expected[0], **ROUNDING)
            tokens_read += len(read[0]) * KV_HEADS
            most_read = max(most_read, len(read[0]))
        after = layer.counter.read()
        assert after.tokens_read - before.tokens_read == tokens_read
        assert after.decode_steps - before.decode_steps == 1
        assert after.dense_bytes - before.dense_bytes == 2 * KV_HEADS * HEAD_DIM * 8 * sum(
            len(row.keys) for row in rows
        )
    assert most_read <= method.token_budget
    assert rows[0].most_blocks > method.split.blocks or sum(parts) < 10  # blocks were left out


@torch.inference_mode()
def test_a_step_represents_a_block_when_it_becomes_whole(monkeypatch):
    """In any row; a step that may not depend on the host's values does so every time, to the same end."""
    represented = []

    def represent(layer, split, representatives, block, number=1):
        represented.append(block.tolist())
        memory_blocks.represent(layer, split, representatives, block, number)

    def memory(is_known):
        generator = torch.Generator().manual_seed(2)
        layer = make_layer(SMALL, 100, Q_HEADS, padding=[0, 6])
        layer.use_rope(RopeTables(shared_model("llama").model.rotary_emb, slots=SMALL.rope_slots(POSITIONS)))
        query, key, value = (random_states(heads, 30, generator) for heads in (Q_HEADS, KV_HEADS, KV_HEADS))
        layer.update(key, value)
        SMALL.prefill(query, layer, SCALE, None)
        SMALL.finish_prompt([layer])
        represented.clear()
        with monkeypatch.context() as patch:
            if not is_known:
                patch.setattr(Lengths, "known_length", None)
            for _ in range(8):
                states = (random_states(heads, 1, generator)[:, :, 0] for heads in (Q_HEADS, KV_HEADS, KV_HEADS))
                step(layer, *states, SCALE)
        return layer.metadata["block_keys"].clone(), layer.metadata["represented"].tolist()

    monkeypatch.setattr(infllm, "represent", represent)
    keys, numbers = memory(is_known=True)
    # Blocks of 4 after the first 3 tokens and before the last 9; the rows are 6 tokens apart.
    assert represented == [[4, 2], [4, 3], [5, 3], [5, 4]]
    again, numbers_again = memory(is_known=False)
    assert len(represented) == 8
    assert numbers == numbers_again == [6, 5]
    torch.testing.assert_close(keys, again, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("parameters", "split"),
    [
        ({}, (128, 16, 128, 4096)),
        ({"token_budget": 40, "n_init": 3, "n_local": 9, "block_size": 4}, (3, 6, 4, 9)),
        ({"token_budget": 1024}, (20, 3, 85, 662)),
        ({"token_budget": 256}, (5, 3, 21, 165)),
        ({"token_budget": 2}, (0, 1, 1, 1)),
        ({"token_budget": 100, "n_init": 0, "n_local": 20, "block_size": 7, "representatives": 1}, (0, 10, 7, 20)),
    ],
)
def test_budget_is_split(parameters, split):
    method = InfLLM(**parameters)
    assert method.split == split
    first, blocks, size, last = split
    assert first + blocks * size + size - 1 + last <= method.token_budget
    assert method.covers(last)
    assert not method.covers(last + 1)


@torch.inference_mode()
def test_texts_longer_than_the_trained_positions_are_read_sparsely():
    model = make_model("llama", dtype=torch.float64)
    ids = random_ids(2, POSITIONS + 90)
    mask = torch.ones_like(ids)
    mask[1, :130] = 0
    with sparse_attention(model, SMALL):
        growing = model.generate(ids, attention_mask=mask, **GREEDY)
        stats = sparse_attention_stats(model)
        static = model.generate(ids, attention_mask=mask, **GREEDY, cache_implementation="static")
        assert torch.equal(growing, static)
        assert sparse_attention_stats(model) == stats
        layers, steps = model.config.num_hidden_layers, GREEDY["max_new_tokens"] - 1
        assert 0 < stats.tokens_read <= SMALL.token_budget * 2 * KV_HEADS * layers * steps
        beams = [model.generate(ids, attention_mask=mask, **GREEDY, num_beams=2, **kind) for kind in ({}, STATIC)]
        assert torch.equal(*beams)


STATIC = {"cache_implementation": "static"}


@torch.inference_mode()
def test_crops_changes_of_rows_and_forks_keep_the_memory():
    model, ids, steps = shared_model("llama", torch.float64), random_ids(3, 90), random_ids(3, 24, seed=4)
    with sparse_attention(model, SMALL):
        cache = SparseCache.for_model(model)
        model(ids, past_key_values=cache)
        expected = decode(model, cache, steps)
        memory = cache.layers[2].metadata
        assert (memory["represented"] == (114 - 3 - 9) // 4).all()
        for kept in (110, 95, 91):
            cache.crop(kept - 114)
            assert (memory["queries"][:, :, kept:] == 0).all()
            assert (memory["queries"][:, :, :kept] != 0).any(3).all()
            assert (memory["represented"] == (kept + 1 - 3 - 9) // 4).all()
            decode(model, cache, random_ids(3, 5, seed=kept))  # other tokens, which are removed again
            cache.crop(-5)
            torch.testing.assert_close(
                decode(model, cache, steps[:, kept - 90 :]), expected[:, kept - 90 :], **ROUNDING
            )
        cache.crop(-24)
        cache.reorder_cache(torch.tensor([2, 2, 0], device=DEVICE))
        cache.batch_repeat_interleave(2)
        cache.batch_select_indices(torch.tensor([5, 1], device=DEVICE))
        torch.testing.assert_close(decode(model, cache, steps[[0, 2]]), expected[[0, 2]], **ROUNDING)


@torch.inference_mode()
def test_a_fork_to_other_blocks_has_the_queries_of_the_prompt():
    model, ids, steps = shared_model("llama", torch.float64), random_ids(2, 60), random_ids(2, 12, seed=4)
    other = replace(SMALL, block_size=5, representatives=1)
    logits = []
    for first in (SMALL, other):  # a prompt of one chunk, which does not depend on the size of blocks
        with sparse_attention(model, first):
            cache = SparseCache.for_model(model)
            model(ids, past_key_values=cache)
        with sparse_attention(model, other):
            logits.append(decode(model, cache.fork(other), steps))
    torch.testing.assert_close(*logits, **ROUNDING)
    with sparse_attention(model, "tokenselect", token_budget=48):
        cache = model(ids).past_key_values
        with pytest.raises(
            ValueError, match="method='infllm' needs the queries of all tokens, which a cache of 'token"
        ):
            cache.fork(SMALL)


@pytest.mark.parametrize(
    ("parameters", "error", "message"),
    [
        ({"token_budget": 1}, ValueError, "token_budget must be at least 2: the current token and a block, got 1"),
        ({"n_init": -1}, ValueError, "infllm: n_init must be 0 or more, got -1"),
        ({"n_local": 0}, ValueError, "n_local must be at least 1: the current token, got 0"),
        ({"block_size": 0}, ValueError, "block_size must be at least 1, got 0"),
        ({"block_size": 2.5}, TypeError, "block_size must be a whole number, got 2.5"),
        ({"representatives": 0}, ValueError, "representatives must be between 1 and block_size=128, got 0"),
        ({"block_size": 2}, ValueError, "representatives must be between 1 and block_size=2, got 4"),
        ({"chunk_size": 0}, ValueError, "chunk_size must be at least 1, got 0"),
        ({"dense_layers": 2}, ValueError, "dense_layers must be 0: .* got 2"),
        ({}, ValueError, rf"n_local must be below the model's {POSITIONS} positions, .* got 4096"),
    ],
)
def test_bad_arguments_are_named_and_change_nothing(parameters, error, message):
    model = shared_model("llama")
    with pytest.raises(error, match=message):
        patch_model(model, "infllm", **parameters)
    assert model.config._attn_implementation == "sdpa"


def test_rope_that_follows_the_length_is_refused():
    model = make_model(
        "llama",
        rope_parameters={
            "rope_theta": 10000.0,
            "rope_type": "dynamic",
            "factor": 2.0,
            "original_max_position_embeddings": POSITIONS,
        },
    )
    with pytest.raises(ValueError, match="infllm rotates keys by slot, which rope_type='dynamic' does not allow"):
        patch_model(model, SMALL)
