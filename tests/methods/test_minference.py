"""MInference against its definition in plain loops over queries and keys, its files, and its frame."""

import json
import math

import pytest
import torch
from hf_sparse_attn_kernels import use_impl

from hf_sparse_attn import MInference, SparseCache, patch_model, sparse_attention, sparse_attention_stats
from hf_sparse_attn.cache.layer import SparseLayer
from hf_sparse_attn.cache.padding import Padding
from hf_sparse_attn.cache.storage import GrowingStorage
from hf_sparse_attn.methods import prefill_patterns
from hf_sparse_attn.methods.minference import listed
from tests.models import DEVICE, ROUNDING, make_model, random_ids, shared_model

KV_HEADS, GROUP, HEAD_DIM, SIZE = 2, 3, 16, 16
SCALE = 0.4


@pytest.fixture(autouse=True)
def exact():
    with use_impl("reference"):
        yield


def softmax(scores):
    top = max(scores)
    weights = [math.exp(score - top) for score in scores]
    return [weight / sum(weights) for weight in weights]


def first_of(scores, number):
    """Keys of the largest values, of equal ones the first."""
    return set(sorted(scores, key=lambda key: (-scores[key], key))[: max(0, number)])


class PlainHead:
    """One query head of one row: which keys each of its queries attends to, from the paper's definitions."""

    def __init__(self, queries, keys):
        self.q, self.k = queries, keys  # [n, d] of the last tokens, [length, d]
        self.length, self.new = len(keys), len(queries)
        self.places = range(self.length - self.new, self.length)
        scores = (queries @ keys.T * SCALE).tolist()
        self.weights = {  # of the last queries
            place: softmax(scores[place - self.places[0]][: place + 1]) for place in self.places[-64:]
        }

    def verticals(self, number):
        sums = {j: sum(row[j] for row in self.weights.values() if j < len(row)) for j in range(self.length)}
        return first_of(sums | dict.fromkeys(range(min(30, self.length)), math.inf), number)

    def slash_sums(self, local):
        sums = {o: sum(row[place - o] for place, row in self.weights.items() if place >= o) for o in range(self.length)}
        return sums | dict.fromkeys(range(min(local, self.length)), math.inf)

    def touching(self, offset):
        """Diagonals of blocks with a pair of tokens at this distance."""
        return {i // SIZE - (i - offset) // SIZE for i in range(offset, offset + SIZE)}

    def along(self, diagonals):
        return lambda b: {c for c in range(b + 1) if b - c in diagonals}

    def a_shape(self, sinks, diagonals):
        return set(range(sinks)), self.along(set(range(diagonals)))

    def vertical_slash(self, verticals, slashes):
        chosen = first_of(self.slash_sums(100), slashes)
        return self.verticals(verticals), self.along(set().union(*(self.touching(o) for o in chosen)))

    def budgeted_slash(self, verticals, number):
        best = {}
        for offset, total in self.slash_sums(SIZE).items():
            for diagonal in self.touching(offset):
                best[diagonal] = max(best.get(diagonal, 0), total)
        blocks = -(-self.length // SIZE)
        return self.verticals(verticals), self.along(first_of({d: t for d, t in best.items() if d < blocks}, number))

    def block_sparse(self, number):
        def chosen(b):
            own = [p - self.places[0] for p in self.places if p // SIZE == b]
            mean = self.q[own].mean(0)
            scores = {c: float(mean @ self.k[c * SIZE : (c + 1) * SIZE].mean(0)) * SCALE for c in range(b)}
            return first_of(scores | {b: math.inf}, number)

        return set(), chosen

    def seen(self, pattern, place):
        columns, blocks = pattern
        chosen = blocks(place // SIZE)
        return [j for j in range(place + 1) if j in columns or j // SIZE in chosen]

    def coverage(self, pattern):
        return sum(sum(row[j] for j in self.seen(pattern, place)) for place, row in self.weights.items())

    def best(self, budget):
        sinks = min(SIZE, budget // 8, budget - SIZE)
        candidates = [self.a_shape(sinks, (budget - sinks) // SIZE)]
        for eighths in (1, 4, 7):
            verticals = min(budget * eighths // 8, budget - SIZE)
            candidates.append(self.budgeted_slash(verticals, (budget - verticals) // SIZE))
        candidates.append(self.block_sparse(budget // SIZE))
        shares = [self.coverage(candidate) for candidate in candidates]
        return candidates[shares.index(max(shares))], shares.index(max(shares))

    def outputs(self, pattern, values):
        rows = []
        for index, place in enumerate(self.places):
            seen = self.seen(pattern, place)
            rows.append((self.q[index] @ self.k[seen].T * SCALE).softmax(0) @ values[seen])
        return torch.stack(rows)


class Prompt:
    """A layer that is fed a prompt in parts, the second row padded."""

    def __init__(self, method, parts, padding, seed=0, sharpness=1.0):
        generator = torch.Generator().manual_seed(seed)
        shape = (2, KV_HEADS, sum(parts), HEAD_DIM)
        self.keys, self.values = torch.randn(2, *shape, generator=generator, dtype=torch.float64)
        self.queries = sharpness * torch.randn(2, KV_HEADS * GROUP, *shape[2:], generator=generator).double()
        self.queries[:, ::GROUP] = self.keys.roll(37, 2)  # a slash
        self.queries[:, 1::GROUP] += 2 * self.keys[:, :, 40:41]  # a vertical line
        self.padding = padding
        self.layer = SparseLayer(method, GrowingStorage(), q_heads=KV_HEADS * GROUP, layer_idx=1)
        self.layer._shared.padding = Padding(torch.tensor([0, padding]), 0, padding > 0)
        self.parts = parts

    def passes(self):
        """Feed the parts; yield each pass's output, and the plain heads with their values."""
        fed = 0
        for part in self.parts:
            new, fed = slice(fed, fed + part), fed + part
            self.layer.update(self.keys[:, :, new].clone(), self.values[:, :, new].clone())
            self.layer.keys[1, :, : self.padding] = self.layer.values[1, :, : self.padding] = torch.nan
            output = self.layer.method.prefill(self.queries[:, :, new], self.layer, SCALE, None)
            for row, start in enumerate((0, self.padding)):
                own = min(part, fed - start)
                for head in range(KV_HEADS * GROUP if own > 0 else 0):
                    kv = head // GROUP
                    plain = PlainHead(self.queries[row, head, fed - own : fed], self.keys[row, kv, start:fed])
                    yield row, head, plain, output[row, head, part - own :], self.values[row, kv, start:fed]


@pytest.mark.parametrize(
    ("parts", "padding", "sharpness"), [((111,), 0, 1.0), ((90,), 27, 0.3), ((63, 40), 50, 2.0)], ids=str
)
def test_a_pass_follows_the_pattern_that_holds_the_most_weight(parts, padding, sharpness):
    budget, chosen = 40, set()
    for _row, _head, plain, output, values in Prompt(
        MInference(token_budget=budget, block_size=SIZE), parts, padding, sharpness=sharpness
    ).passes():
        if plain.length <= budget:
            pattern, number = plain.a_shape(0, 1 + budget // SIZE), None  # everything
        else:
            pattern, number = plain.best(budget)
            for place in plain.places:  # the budget holds, but for rounding down to a whole block
                assert len(plain.seen(pattern, place)) <= budget
        chosen.add(number)
        torch.testing.assert_close(output, plain.outputs(pattern, values))
    assert len(chosen - {None}) > 1  # heads differ


@pytest.fixture
def published(tmp_path):
    """A file of patterns in the published format, for two layers of six heads."""
    kinds = [
        ["vertical_and_slash", 35, 60, 0.9],
        ["stream_llm", 20, 40, 0.8],
        ["block_sparse", 2, 1, 0.7],
        ["vertical_and_slash", 2, 101, 336],
        ["stream_llm", 1, 17, 1],
        ["block_sparse", 3, 1, 1],
    ]
    path = tmp_path / "patterns.json"
    path.write_text(json.dumps([{str(h): kinds[(h + layer) % 6] for h in range(6)} for layer in range(2)]))
    return path, [kinds[(head + 1) % 6] for head in range(6)]


@pytest.mark.parametrize(("parts", "padding"), [((130,), 0), ((70, 63), 31)], ids=str)
def test_a_file_gives_every_head_its_pattern(published, parts, padding):
    path, kinds = published
    method = MInference(token_budget=SIZE, patterns=str(path), block_size=SIZE)
    for _row, head, plain, output, values in Prompt(method, parts, padding).passes():
        kind, first, second, _ = kinds[head]
        if kind == "stream_llm":
            reach = set().union(*(plain.touching(offset) for offset in range(second)))
            pattern = set(range(first)), plain.along(reach)
        elif kind == "vertical_and_slash":
            pattern = plain.vertical_slash(max(first, 30), max(second, 50))
        else:
            pattern = plain.block_sparse(first)
        torch.testing.assert_close(output, plain.outputs(pattern, values))
        seen = plain.seen(pattern, plain.length - 1)
        if kind == "stream_llm":
            assert set(seen) >= {*range(first), *range(max(0, plain.length - second), plain.length)}


def test_slashes_are_rounded_up_to_every_block_that_they_touch():
    head = PlainHead(torch.zeros(1, 2), torch.zeros(1, 2))
    assert [head.touching(offset) for offset in (0, 1, 16, 31, 32)] == [{0}, {0, 1}, {1}, {1, 2}, {2}]


def stream_llm(heads):
    """Return the pattern of a layer, in the published format."""
    return {str(head): ["stream_llm", 1, 1, 0] for head in range(heads)}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("nothing", r"must be a JSON file"),
        ("{}", r"must be a JSON list of one object per layer"),
        ('[{"1": ["stream_llm", 1, 1, 0]}]', r"layer 0 must have heads 0 to 0, got \['1'\]"),
        ('[{"0": ["dense", 1, 1, 0]}]', r"head 0 of layer 0 must be .*stream_llm, vertical_and_slash, block_sparse"),
        ('[{"0": ["stream_llm", 0, 1, 0]}]', r"sizes of at least 1, got \['stream_llm', 0, 1, 0\]"),
        ('[{"0": ["stream_llm", 1, 1, 0]}]', r"has 1 layers of 1 heads; the model has 4 layers of 6 heads"),
        (
            json.dumps([stream_llm(heads) for heads in (6, 6, 5, 6)]),
            r"of \[6, 6, 5, 6\] heads; the model has 4",
        ),
    ],
)
def test_a_file_that_does_not_fit_is_refused_when_the_model_is_patched(content, message, tmp_path):
    path = tmp_path / "patterns.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        patch_model(shared_model("llama"), "minference", patterns=str(path))
    with pytest.raises(FileNotFoundError, match=r"patterns='.*none\.json' cannot be read: No such file"):
        patch_model(shared_model("llama"), "minference", patterns=str(tmp_path / "none.json"))
    with pytest.raises(IsADirectoryError, match=r"patterns='.*' cannot be read: Is a directory"):
        patch_model(shared_model("llama"), "minference", patterns=str(tmp_path))


@pytest.mark.parametrize(
    ("parameters", "error", "message"),
    [
        ({"token_budget": 63}, ValueError, r"token_budget must be at least a block of 64, got 63"),
        ({"block_size": 8}, ValueError, r"block_size must be a power of two of at least 16, got 8"),
        ({"block_size": 48}, ValueError, r"block_size must be a power of two of at least 16, got 48"),
        ({"patterns": 3}, TypeError, "patterns must be the path of a file or None, got 3"),
    ],
)
def test_errors_name_the_parameter(parameters, error, message):
    with pytest.raises(error, match=message):
        MInference(**parameters)


@torch.inference_mode()
def test_a_long_prompt_is_sparse_and_decode_steps_are_dense():
    model, ids = shared_model("llama", torch.float64), random_ids(2, 300)
    dense = model(ids).logits
    with sparse_attention(model, "minference", token_budget=64, block_size=16):
        cache = SparseCache.for_model(model)
        logits = model(ids, past_key_values=cache).logits
        assert (logits - dense).abs().max() > 1e-3
        model(ids[:, :1], past_key_values=cache)
        stats = sparse_attention_stats(model)
        assert stats.kv_bytes == stats.dense_bytes > 0
        torch.testing.assert_close(model(ids[:, :64]).logits, dense[:, :64], **ROUNDING)  # within the budget


@torch.inference_mode()
def test_the_first_layers_can_be_dense():
    model, ids = make_model("llama", dtype=torch.float64, num_hidden_layers=2), random_ids(2, 150)
    mask = torch.ones_like(ids)
    mask[1, :40] = 0
    with sparse_attention(model, "minference", token_budget=32, block_size=16, dense_layers=1):
        positions = (mask.cumsum(-1) - 1).clamp_min(0)
        together = model(ids, attention_mask=mask, position_ids=positions).logits
        alone = model(ids[1:, 40:]).logits
    torch.testing.assert_close(together[1:, 40:], alone, **ROUNDING)


@torch.inference_mode()
def test_lists_hold_what_is_chosen():
    chosen = torch.rand(2, 3, 5, 21, generator=torch.Generator().manual_seed(0)).to(DEVICE) < 0.3
    chosen[0, 0] = False
    indices, counts = listed(chosen)
    for place in torch.cartesian_prod(*(torch.arange(size) for size in (2, 3, 5))).tolist():
        own, number = indices[tuple(place)].tolist(), int(counts[tuple(place)])
        assert own[:number] == chosen[tuple(place)].nonzero().flatten().tolist()
        assert set(own[number:]) <= {-1}
    assert prefill_patterns.largest(torch.tensor([1.0, -torch.inf, 1.0, 3.0]), 3).tolist() == [True, False, True, True]
