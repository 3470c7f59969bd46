"""TokenSelect against its definition, its Selection Cache, and its effect on a model."""

from dataclasses import replace

import pytest
import torch
from hf_sparse_attn_kernels import use_impl
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache

from hf_sparse_attn import (
    InfLLM,
    SparseCache,
    TokenSelect,
    patch_model,
    sparse_attention,
    sparse_attention_stats,
    unpatch_model,
)
from hf_sparse_attn.patch import hook
from hf_sparse_attn.rope import RopeTables
from tests.layers import hand_over, make_layer
from tests.methods.rotation import rotate
from tests.models import DEVICE, POSITIONS, make_model, random_ids, shared_model

HEAD_DIM, KV_HEADS, Q_HEADS = 16, 2, 6
INFLLM = InfLLM(token_budget=28, n_init=4, n_local=12, block_size=8, representatives=2, chunk_size=32)
SMALL = TokenSelect(k=24, n_init=4, n_local=8, chunk_size=32, selection_cache_threshold=1)
GREEDY = {"max_new_tokens": 10, "do_sample": False, "eos_token_id": None, "pad_token_id": 0, "disable_compile": True}


@pytest.fixture(scope="module")
def tables():
    return RopeTables(shared_model("llama").model.rotary_emb, slots=128)


def filled(tables, method, length, padding=0, max_cache_len=None, seed=0):
    """A layer of two rows with random tokens, the second padded on the left."""
    generator = torch.Generator().manual_seed(seed)
    layer = make_layer(method, max_cache_len, Q_HEADS, padding=[0, padding])
    layer.use_rope(tables)
    layer.update(*torch.randn(2, 2, KV_HEADS, length, HEAD_DIM, generator=generator).to(DEVICE))
    return layer


def chosen_by_definition(method, split, voting, keys):
    """Return the indices that one row reads, of a rotated voting query [q_heads, d] and keys [kv_heads, tokens, d]."""
    length = keys.shape[1]
    if length <= sum(split):
        return list(range(length))
    candidates = range(split.first, length - split.last)
    scores = torch.stack(
        [keys[head // (Q_HEADS // KV_HEADS), list(candidates)] @ voting[head] for head in range(Q_HEADS)]
    )
    if method.vote == "soft":
        votes = scores.softmax(dim=1).sum(0)
    elif method.vote == "logits":
        votes = scores.sum(0)
    else:
        votes = torch.zeros(len(candidates)).double()
        for row in scores:
            votes[row.topk(split.chosen).indices] += 1
        votes = votes - 1e-6 * torch.arange(len(candidates))  # equal votes: the lower index
    best = votes.topk(split.chosen).indices + split.first
    return [*range(split.first), *sorted(best.tolist()), *range(length - split.last, length)]


def attend_by_definition(queries, keys, values, chosen, chunk, scale):
    """[q_heads, tokens, d]: each query reads the chosen tokens and the chunk's up to its own, at contiguous slots."""
    out = torch.zeros_like(queries)
    for head in range(Q_HEADS):
        k, v = keys[head // (Q_HEADS // KV_HEADS)], values[head // (Q_HEADS // KV_HEADS)]
        for number in range(queries.shape[1]):
            read = [*chosen, *chunk[: number + 1]]
            packed = torch.stack([rotate(k[token], slot) for slot, token in enumerate(read)])
            query = rotate(queries[head, number], len(read) - 1)
            out[head, number] = (packed @ query * scale).softmax(0) @ v[read]
    return out


@pytest.mark.parametrize("vote", ["soft", "head", "logits"])
@pytest.mark.parametrize("max_cache_len", [None, 128], ids=["growing", "static"])
@pytest.mark.parametrize("length", [30, 90])
def test_decode_step_follows_its_definition(tables, length, max_cache_len, vote):
    method = replace(SMALL, vote=vote)
    layer = filled(tables, method, length, padding=21, max_cache_len=max_cache_len)
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(2, Q_HEADS, HEAD_DIM, generator=generator).to(DEVICE)
    key, value = torch.randn(2, 2, KV_HEADS, HEAD_DIM, generator=generator).to(DEVICE)
    hand_over(layer, key, value)
    layer.append(key.unsqueeze(2), value.unsqueeze(2))
    selection = method.select(query, layer, 0.25)
    out = method.attend(query, layer, selection, 0.25)
    for row, start in enumerate((0, 21)):
        keys, values = (buffer[row, :, start : length + 1].double().cpu() for buffer in (layer.keys, layer.values))
        q = query[row].double().cpu()
        chosen = chosen_by_definition(method, method.split, rotate(q, method.split.last), keys)
        count = int(selection.block_counts[row, 0])
        assert selection.block_indices[row, 0, :count].tolist() == chosen
        expected = attend_by_definition(q[:, None], keys, values, chosen[:-1], chosen[-1:], 0.25)
        torch.testing.assert_close(out[row].double().cpu(), expected[:, 0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("length", "queries"), [(90, 32), (90, 5), (33, 32), (32, 32)])
def test_chunk_follows_its_definition(tables, length, queries):
    layer = filled(tables, SMALL, length, padding=21)
    query = torch.randn(2, Q_HEADS, queries, HEAD_DIM, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    out = SMALL.prefill(query, layer, 0.25, None)
    for row, start in enumerate((0, 21)):
        keys, values = (buffer[row, :, start:length].double().cpu() for buffer in (layer.keys, layer.values))
        q = query[row].double().cpu()
        own = min(queries, length - start)  # the rest of the chunk is padding
        before = length - start - own
        at_local = torch.stack([rotate(q[:, i], SMALL.split.last + i) for i in range(queries)])
        chosen = chosen_by_definition(SMALL, SMALL.split, at_local.mean(0), keys[:, :before])
        chunk = list(range(before, length - start))
        expected = attend_by_definition(q[:, queries - own :], keys, values, chosen, chunk, 0.25)
        torch.testing.assert_close(out[row, :, queries - own :].double().cpu(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("parameters", "split"),
    [
        ({}, (128, 2048, 512)),
        ({"k": 256, "n_init": 0, "n_local": 16}, (0, 256, 16)),
        ({"token_budget": 2688}, (128, 2048, 512)),
        ({"token_budget": 4096}, (128, 3456, 512)),
        ({"token_budget": 1280}, (128, 640, 512)),
        ({"token_budget": 640}, (64, 320, 256)),
        ({"token_budget": 3}, (0, 2, 1)),
        ({"token_budget": 2}, (0, 1, 1)),
        ({"token_budget": 100, "n_init": 0, "n_local": 20}, (0, 80, 20)),
    ],
)
def test_budget_is_split(parameters, split):
    method = TokenSelect(**parameters)
    assert method.split == split
    assert method.token_budget == sum(split)
    assert replace(method, chunk_size=64).split == split


@pytest.mark.parametrize(
    ("parameters", "error", "message"),
    [
        ({"k": 0}, ValueError, "k must be at least 1, got 0"),
        ({"k": 2.5}, TypeError, "k must be a whole number, got 2.5"),
        ({"n_init": -1}, ValueError, "n_init must be 0 or more, got -1"),
        ({"n_local": 0}, ValueError, "n_local must be at least 1: the current token, got 0"),
        ({"chunk_size": 0}, ValueError, "chunk_size must be at least 1, got 0"),
        ({"chunk_size": -512}, ValueError, "chunk_size must be at least 1, got -512"),
        ({"selection_cache_threshold": 1.5}, ValueError, "threshold must be between -1 and 1, got 1.5"),
        ({"selection_cache_threshold": -1.01}, ValueError, "threshold must be between -1 and 1, got -1.01"),
        ({"selection_cache_threshold": float("nan")}, ValueError, "threshold must be between -1 and 1, got nan"),
        ({"selection_cache_threshold": "high"}, TypeError, "threshold must be a number, got 'high'"),
        ({"pool_size": 4}, ValueError, "pool_size must be 0, or an odd number of neighbours, got 4"),
        ({"pool_size": -3}, ValueError, "pool_size must be 0, or an odd number of neighbours, got -3"),
        ({"vote": "mean"}, ValueError, "vote must be one of soft, head, logits, got 'mean'"),
        ({"dense_layers": 2}, ValueError, "dense_layers must be 0: .* got 2"),
        ({"token_budget": 1}, ValueError, "token_budget must be at least 2: .* got 1"),
        ({"k": 100, "token_budget": 900}, ValueError, r"k=100 and token_budget=900 contradict .* = 740"),
        (
            {},
            ValueError,
            rf"k \+ n_init \+ n_local = 2048 \+ 128 \+ 512 = 2688 must be at most the model's {POSITIONS}",
        ),
        ({"token_budget": POSITIONS + 1}, ValueError, rf"= {POSITIONS + 1} must be at most .* {POSITIONS} positions"),
    ],
)
def test_bad_arguments_are_named_and_change_nothing(parameters, error, message):
    model = shared_model("llama")
    with pytest.raises(error, match=message):
        patch_model(model, "tokenselect", **parameters)
    assert model.config._attn_implementation == "sdpa"
    assert "forward" not in model.model.__dict__


def with_rope(**rope):
    return make_model("llama", rope_parameters={"rope_theta": 10000.0, **rope})


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_rope_that_follows_the_length_is_refused(rope_type):
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8} if rope_type == "longrope" else {}
    model = with_rope(rope_type=rope_type, factor=2.0, original_max_position_embeddings=POSITIONS, **factors)
    with pytest.raises(ValueError, match=rf"rope_type='{rope_type}' does not allow.*default, linear, llama3, yarn"):
        patch_model(model, SMALL)
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 2.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": POSITIONS // 4},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": POSITIONS // 4,
        },
    ],
    ids=lambda rope: rope["rope_type"],
)
@torch.inference_mode()
def test_scaled_rope_is_the_models_own(rope):
    model = with_rope(**rope)
    ids = random_ids(1, 120)
    expected = model.generate(ids, **GREEDY)
    method = TokenSelect(token_budget=POSITIONS, chunk_size=50)
    monkey = type("AlwaysSparse", (TokenSelect,), {"covers": lambda self, length: False})
    for each in (method, monkey(token_budget=POSITIONS, chunk_size=50)):
        with sparse_attention(model, each):
            assert torch.equal(model.generate(ids, **GREEDY), expected)


def test_sliding_windows_are_refused():
    model = make_model("qwen2", layer_types=["full_attention", "sliding_attention"] * 2, use_sliding_window=True)
    with pytest.raises(
        ValueError, match=r"'tokenselect' does not support sliding-window .* 2 of this Qwen2ForCausalLM's 4"
    ):
        patch_model(model, SMALL)


@torch.inference_mode()
def test_positions_that_slots_cannot_represent_are_refused():
    model = make_model("llama")
    patch_model(model, SMALL)
    ids, cache = random_ids(2, 40), SparseCache.for_model(model)
    positions = torch.arange(40, device=DEVICE).repeat(2, 1)
    positions[1, 25:] -= 25  # two texts packed into one row
    with pytest.raises(ValueError, match=r"must increase by one .* 'tokenselect' .* got \[24, 0\] in row 1"):
        model(ids, position_ids=positions, past_key_values=cache)
    assert cache.get_seq_length() == 0
    mask = torch.ones_like(ids)
    mask[1, :25] = 0
    padded = model(ids, position_ids=positions, attention_mask=mask).logits[1, 25:]
    torch.testing.assert_close(padded, model(ids, attention_mask=mask).logits[1, 25:])


@torch.inference_mode()
def test_caches_of_keys_before_and_after_rope_do_not_mix():
    model = shared_model("llama")
    prefix = SparseCache(model.config, "full")
    model(random_ids(1, 30), past_key_values=prefix)
    with pytest.raises(ValueError, match=r"'tokenselect' needs keys before RoPE, but the cache of 'full'.*after RoPE"):
        prefix.fork(SMALL)


@torch.inference_mode()
def test_unpatching_restores_the_model():
    model = make_model("llama")
    rotary, ids = model.model.rotary_emb, random_ids(1, 100)
    expected = model.generate(ids, **GREEDY)
    patch_model(model, SMALL)
    sparse = model.generate(ids, **GREEDY)
    patch_model(model, "quest", token_budget=POSITIONS)  # replaces the other
    assert torch.equal(model.generate(ids, **GREEDY), expected)
    patch_model(model, replace(SMALL, n_init=5, n_local=7))
    patch_model(model, SMALL)
    assert torch.equal(model.generate(ids, **GREEDY), sparse)
    unpatch_model(model)
    assert model.model.rotary_emb is rotary
    assert "forward" not in model.model.__dict__
    assert torch.equal(model.generate(ids, **GREEDY), expected)


@pytest.mark.parametrize(("pass_tokens", "passes"), [(70, [64, 64, 17]), (8, [32, 32, 32, 32, 17]), (500, [145])])
@torch.inference_mode()
def test_layers_attend_from_chunks_of_a_prompt(pass_tokens, passes, monkeypatch):
    """Several chunks go through the model at once, and the logits are those of passes of a chunk each."""
    monkeypatch.setattr(hook, "PASS_TOKENS", pass_tokens)
    model = make_model("llama")
    ids = random_ids(2, 145)
    mask = torch.ones_like(ids)
    mask[1, :70] = 0  # two whole chunks and more
    fed = []
    model.model.layers[0].register_forward_pre_hook(lambda layer, args: fed.append(args[0].shape[1]))
    patch_model(model, SMALL)
    whole = model(ids, attention_mask=mask, output_hidden_states=True)
    assert fed == passes
    assert [tuple(states.shape) for states in whole.hidden_states] == [(2, 145, 96)] * 5

    cache = SparseCache.for_model(model)
    parts = [
        model(ids[:, begin : begin + 32], attention_mask=mask[:, : begin + 32], past_key_values=cache).logits
        for begin in range(0, 145, 32)
    ]
    logits = torch.cat(parts, dim=1)
    torch.testing.assert_close(whole.logits[0], logits[0])
    torch.testing.assert_close(whole.logits[1, 70:], logits[1, 70:])
    states, *_ = model.model(ids, attention_mask=mask, return_dict=False)
    torch.testing.assert_close(states[0], whole.hidden_states[-1][0])


@pytest.mark.parametrize("pass_tokens", [32, 64, hook.PASS_TOKENS])
@pytest.mark.parametrize(("method", "atol"), [(SMALL, 1e-10), (INFLLM, 1e-4)])  # positions in float32 are rounded
@torch.inference_mode()
def test_chunks_do_not_depend_on_padding(pass_tokens, method, atol, monkeypatch):
    monkeypatch.setattr(hook, "PASS_TOKENS", pass_tokens)
    model = patch_model(make_model("llama", dtype=torch.float64), method)
    ids = random_ids(1, 150)
    expected = model(ids).logits
    for padding in (5, 40, 75):
        padded = torch.cat([torch.zeros(1, padding, dtype=torch.long), ids], dim=1)
        mask = (torch.arange(padding + 150) >= padding).long()[None]
        logits = model(padded, attention_mask=mask).logits[:, padding:]
        torch.testing.assert_close(logits, expected, rtol=0, atol=atol)


@torch.inference_mode()
def test_prompts_beyond_the_positions_keep_their_slots_within_them():
    model = make_model("llama")
    method = TokenSelect(token_budget=POSITIONS - 10)  # with a chunk it would be beyond
    ids = random_ids(1, 3 * POSITIONS)
    with sparse_attention(model, method):
        cache = SparseCache.for_model(model)
        assert model(ids, past_key_values=cache).logits.isfinite().all()
        assert model(ids[:, :1], past_key_values=cache).logits.isfinite().all()
        assert len(cache.layers[0].rope.cos) == POSITIONS
        stats = sparse_attention_stats(model)
    assert stats.tokens_read == 4 * 2 * method.token_budget  # layers, KV heads


def decode(model, cache, ids):
    return torch.cat([model(ids[:, i : i + 1], past_key_values=cache).logits for i in range(ids.shape[1])], dim=1)


@torch.inference_mode()
def test_selection_cache_reuses_a_selection_until_the_threshold():
    model = shared_model("llama")
    ids, steps = random_ids(2, 150), random_ids(2, 12, seed=4)
    counts, read = {}, {}
    for threshold in (-1, 0.3, 1):
        with sparse_attention(model, replace(SMALL, selection_cache_threshold=threshold)):
            cache = SparseCache.for_model(model)
            model(ids, past_key_values=cache)
            decode(model, cache, steps)
            stats = sparse_attention_stats(model)
        counts[threshold], read[threshold] = stats.method_counts, stats.metadata_bytes
        assert stats.method_counts["selections"] == 2 * 4 * 12  # rows, layers, steps
        assert stats.tokens_read == 2 * 4 * 12 * 2 * SMALL.token_budget
    kept = {threshold: each["selections_kept"] for threshold, each in counts.items()}
    assert kept[-1] == 2 * 4 * 11  # all steps but the first
    assert 0 <= kept[0.3] < kept[-1]
    assert kept[1] == 0
    assert read[-1] < read[0.3] <= read[1]


@torch.inference_mode()
def test_a_new_prompt_a_crop_and_a_reset_drop_the_selection():
    model = shared_model("llama")
    ids, steps = random_ids(2, 150), random_ids(2, 3, seed=4)
    with sparse_attention(model, replace(SMALL, selection_cache_threshold=-1)):

        def kept(prepare):
            cache = SparseCache.for_model(model)
            model(ids, past_key_values=cache)
            decode(model, cache, steps)
            before = sparse_attention_stats(model).method_counts["selections_kept"]
            prepare(cache)
            decode(model, cache, steps[:, :1])
            return sparse_attention_stats(model).method_counts["selections_kept"] - before

        assert kept(lambda cache: None) == 2 * 4
        assert kept(lambda cache: cache.reorder_cache(torch.tensor([1, 0], device=DEVICE))) == 2 * 4
        assert kept(lambda cache: model(ids[:, :5], past_key_values=cache)) == 0
        assert kept(lambda cache: cache.crop(-2)) == 0
        assert kept(lambda cache: (cache.reset(), model(ids, past_key_values=cache))) == 0


@torch.inference_mode()
def test_pooled_votes_choose_neighbours(tables):
    layer = filled(tables, replace(SMALL, pool_size=7), 120)
    query = torch.randn(2, Q_HEADS, HEAD_DIM, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    runs = []
    for pool_size in (0, 7):
        selection = replace(SMALL, pool_size=pool_size).select(query, layer, 0.25)
        middle = selection.block_indices[:, 0, 4:28]
        runs.append(int((middle.diff(dim=1) == 1).sum()))
    assert runs[1] > runs[0]


@torch.inference_mode()
def test_static_cache_within_the_budget_is_dense_token_for_token():
    model = shared_model("qwen3")
    ids = random_ids(1, 100)
    expected = model.generate(ids, past_key_values=DynamicCache(config=model.config), **GREEDY)
    with sparse_attention(model, "tokenselect", token_budget=POSITIONS):
        cache = SparseCache.for_model(model, max_cache_len=128)
        assert torch.equal(model.generate(ids, past_key_values=cache, **GREEDY), expected)


@torch.inference_mode()
def test_patching_again_keeps_the_addresses_of_a_caches_tables():
    """A cache outlives a patch, and tables at another address would need another CUDA graph."""
    model = make_model("llama")
    cache = None
    addresses = []
    for change in (1.0, 1.0, 2.0):
        model.model.rotary_emb.inv_freq /= change
        with sparse_attention(model, SMALL):
            cache = cache or SparseCache.for_model(model, max_cache_len=200)
            model(random_ids(1, 40), past_key_values=cache)
            addresses.append({layer.rope.cos.data_ptr() for layer in cache.layers})
    assert addresses[0] == addresses[1] != addresses[2]
    assert [len(each) for each in addresses] == [1, 1, 1]


@torch.inference_mode()
def test_kernels_and_references_choose_the_same_tokens(monkeypatch):
    """Except for candidates whose votes tie in float32; the ops' own tests require equality of the kernels."""
    model = make_model("qwen3", num_hidden_layers=2)
    ids, steps = random_ids(2, 90), random_ids(2, 6, seed=4)
    mask = torch.ones(2, 96, dtype=torch.long, device=DEVICE)
    mask[1, :37] = 0
    attend = TokenSelect.attend
    chosen = {"reference": [], "triton": []}
    logits, tokens_read = [], []
    for impl, selections in chosen.items():
        monkeypatch.setattr(
            TokenSelect,
            "attend",
            lambda self, query, layer, selection, scale, to=selections: (
                to.append(selection.block_indices) or attend(self, query, layer, selection, scale)
            ),
        )
        with sparse_attention(model, SMALL), use_impl(impl):
            cache = SparseCache.for_model(model)
            model(ids, attention_mask=mask[:, :90], past_key_values=cache)
            for at, step in enumerate(steps.split(1, dim=1), start=91):
                output = model(step, attention_mask=mask[:, :at], past_key_values=cache)
            logits.append(output.logits)
            tokens_read.append(sparse_attention_stats(model).tokens_read)
    same = total = 0
    for one, other in zip(*chosen.values(), strict=True):
        for row, other_row in zip(one[:, 0].tolist(), other[:, 0].tolist(), strict=True):
            same, total = same + len(set(row) & set(other_row)), total + len(set(row))
    assert len(chosen["triton"]) == 2 * 6
    assert same >= 0.99 * total
    assert tokens_read[0] == tokens_read[1]
    torch.testing.assert_close(*logits, rtol=1e-2, atol=1e-2)


class LargestTensor(TorchDispatchMode):
    """Records the largest tensor that any operation returns."""

    def __init__(self):
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        returned = func(*args, **(kwargs or {}))
        for tensor in returned if isinstance(returned, (tuple, list)) else (returned,):
            if isinstance(tensor, torch.Tensor) and tensor.device.type != "meta":
                self.numbers = max(self.numbers, tensor.untyped_storage().nbytes() // tensor.element_size())
        return returned


@pytest.mark.parametrize("max_cache_len", [None, 2100], ids=["growing", "static"])
@torch.inference_mode()
def test_a_long_prompt_needs_only_its_cache_and_hidden_states(max_cache_len):
    model = make_model("llama", num_hidden_layers=2)
    ids = random_ids(2, 2048)
    mask = torch.ones_like(ids)
    mask[1, :700] = 0
    with sparse_attention(model, replace(SMALL, chunk_size=128)):
        cache = SparseCache.for_model(model, max_cache_len)
        with LargestTensor() as largest:
            model.generate(ids, attention_mask=mask, past_key_values=cache, **{**GREEDY, "max_new_tokens": 3})
        hidden_states = 2 * 2048 * model.config.hidden_size
        kept = 2 * cache.layers[0].keys.numel()
        assert hidden_states <= largest.numbers <= max(hidden_states, kept) < 2048 * 2048
