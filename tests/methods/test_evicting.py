"""The methods that evict, against plain loops over tokens; what they keep in memory; what they refuse."""

import copy

import pytest
import torch
from hf_sparse_attn_kernels import use_impl

from hf_sparse_attn import (
    H2O,
    TOVA,
    SnapKV,
    SparseCache,
    StreamingLLM,
    sparse_attention,
    sparse_attention_stats,
)
from hf_sparse_attn.methods import evicting
from tests.methods.evicting import GROUP, KV_HEADS, Run, largest
from tests.models import DEVICE, make_model, random_ids, shared_model

BUDGET = 19
# RoPE's tables and the norms are float32, and a GPU adds up the norms in an order that depends on the shape.
TOLERANCE = {"rtol": 1e-4, "atol": 1e-4} if DEVICE == "cuda" else {}
EVICTING = {
    "streaming_llm": StreamingLLM(token_budget=BUDGET),
    "tova": TOVA(token_budget=BUDGET),
    "tova-per-head": TOVA(token_budget=BUDGET, per_head=True),
    "h2o": H2O(token_budget=BUDGET),
    "h2o-recent": H2O(token_budget=BUDGET, recent=3),
    "snapkv": SnapKV(token_budget=BUDGET, window=5, kernel=3),
}


def streaming_rule(row):
    for kept in row.kept:
        if len(kept) >= BUDGET:
            kept[:] = [*kept[:4], *kept[-(BUDGET - 1 - 4) :]]


def tova_rule(row):
    newest = [weights[-1] for weights in row.weights]
    for kept in row.kept:
        if len(kept) >= BUDGET:
            kept[:] = largest({token: sum(head[token] for head in newest) for token in kept}, BUDGET - 1)


def tova_per_head_rule(row):
    for kept, weights in zip(row.kept, row.weights, strict=True):
        if len(kept) >= BUDGET:
            kept[:] = largest(weights[-1], BUDGET - 1)


def h2o_rule(recent):
    def rule(row):
        for kept, weights in zip(row.kept, row.weights, strict=True):
            if len(kept) >= BUDGET:
                scores = {token: sum(given.get(token, 0) for given in weights) for token in kept}
                last = [token for token in kept if token >= row.fed - recent]
                others = {token: score for token, score in scores.items() if token not in last}
                kept[:] = [*largest(others, BUDGET - 1 - len(last)), *last]

    return rule


class SnapKVRule:
    """Evicts once from each row, from its first prompt."""

    def __init__(self):
        self.done = set()

    def __call__(self, row):
        if id(row) in self.done:
            return
        self.done.add(id(row))
        for kept, weights in zip(row.kept, row.weights, strict=True):
            if len(kept) > BUDGET:
                window, before = kept[-5:], kept[:-5]
                votes = [sum(given[token] for given in weights[-5:]) for token in before]
                pooled = {token: max(votes[max(0, token - 1) : token + 2]) for token in before}
                kept[:] = [*largest(pooled, BUDGET - 5), *window]


RULES = {
    "streaming_llm": lambda: streaming_rule,
    "tova": lambda: tova_rule,
    "tova-per-head": lambda: tova_per_head_rule,
    "h2o": lambda: h2o_rule(BUDGET // 2),
    "h2o-recent": lambda: h2o_rule(3),
    "snapkv": SnapKVRule,
}
"""Makes the rule of each, which changes ``kept`` of a row after its prompt and after each step."""
every_method = pytest.mark.parametrize("name", EVICTING)


@every_method
@pytest.mark.parametrize(
    ("prompts", "padding"),
    [((37, 26), 17), ((37, 26), 0), ((24, 12), 22), ((12,), 5), ((22, 2), 0)],
    ids=str,
)
def test_a_layer_keeps_and_returns_what_plain_loops_do(name, prompts, padding):
    Run(EVICTING[name], RULES[name](), prompts, padding).check()


@every_method
def test_parts_of_a_large_prompt_give_the_same_weights(name, monkeypatch):
    monkeypatch.setattr(evicting, "MAX_WEIGHTS", 5 * 2 * KV_HEADS * GROUP * 40)
    Run(EVICTING[name], RULES[name](), (90,), 31).check()


@every_method
@torch.inference_mode()
def test_memory_is_freed_after_the_prompt_and_stays_bounded(name):
    model, method = shared_model("llama"), EVICTING[name]
    kv_heads, head_dim = model.config.num_key_value_heads, model.config.head_dim
    with sparse_attention(model, method):
        cache = SparseCache.for_model(model)
        model(random_ids(2, 400), past_key_values=cache)
        before = [held_elements(layer) for layer in cache.layers]
        allocated = torch.cuda.memory_allocated() if DEVICE == "cuda" else 0
        for token in random_ids(40, 2, seed=1).unsqueeze(2):
            model(token, past_key_values=cache)
        after = [held_elements(layer) for layer in cache.layers]
    room = BUDGET + 64 if method.keeps_generated else BUDGET
    assert before == [2 * 2 * kv_heads * 400 * head_dim] * 4
    assert after == [2 * 2 * kv_heads * room * head_dim] * 4
    assert cache.get_seq_length() == 440
    storages = [layer.storage for layer in cache.layers]
    slots = BUDGET + 40 if method.keeps_generated else BUDGET
    assert [storage.kept.slots for storage in storages] == [slots] * 4
    if DEVICE == "cuda":  # most of the difference: logits and what methods keep beside it are small
        assert allocated - torch.cuda.memory_allocated() > (sum(before) - sum(after)) * 4 / 2


def held_elements(layer):
    """The numbers in the memory behind a layer's keys and values."""
    return sum(states.untyped_storage().nbytes() // states.element_size() for states in (layer.keys, layer.values))


@every_method
@torch.inference_mode()
def test_a_step_reads_the_budget_and_the_stats_say_so(name):
    model, method = shared_model("llama"), EVICTING[name]
    with sparse_attention(model, method):
        model.generate(random_ids(2, 100), max_new_tokens=9, do_sample=False, eos_token_id=None, pad_token_id=0)
        stats = sparse_attention_stats(model)
    kv_heads, batch = model.config.num_key_value_heads, 2
    grown = sum(range(1, 9)) if method.keeps_generated else 0
    assert {layer.tokens_read for layer in stats.layers} == {(8 * BUDGET + grown) * kv_heads * batch}
    assert stats.dense_bytes == sum(range(101, 109)) * kv_heads * batch * 4 * 2 * 16 * 4
    reads_keys_again = name.startswith(("tova", "h2o"))
    assert (stats.metadata_bytes >= stats.kv_bytes / 2) == reads_keys_again


@every_method
@torch.inference_mode()
def test_padding_is_not_counted(name):
    """The bytes of a batch are the sum of those of its rows alone."""
    lengths, options = (100, 4), {"max_new_tokens": 9, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    ids = random_ids(2, max(lengths))
    counts = []
    with sparse_attention(model := shared_model("llama"), EVICTING[name]):
        for length, row in zip(lengths, ids, strict=True):
            model.generate(row[None, -length:], **options)
            stats = sparse_attention_stats(model)
            counts.append((stats.metadata_bytes, stats.kv_bytes, stats.dense_bytes))
        mask = torch.stack([torch.arange(max(lengths)) >= max(lengths) - length for length in lengths]).long()
        model.generate(ids, attention_mask=mask, **options)
        stats = sparse_attention_stats(model)
    metadata_bytes, *others = map(sum, zip(*counts, strict=True))
    assert [stats.kv_bytes, stats.dense_bytes] == others
    if name.startswith("tova"):  # once a row evicts, the keys of all are read again
        assert metadata_bytes <= stats.metadata_bytes <= metadata_bytes + stats.kv_bytes / 2
    else:
        assert stats.metadata_bytes == metadata_bytes


@every_method
@torch.inference_mode()
def test_a_cut_cannot_bring_evicted_tokens_back(name):
    model, method = shared_model("llama"), EVICTING[name]
    with sparse_attention(model, method):
        cache = SparseCache.for_model(model)
        model(random_ids(1, 60), past_key_values=cache)
        cache.crop(-5)  # nothing is evicted yet
        model(random_ids(1, 5), past_key_values=cache)
        for token in random_ids(3, 1).unsqueeze(2):
            model(token, past_key_values=cache)
        least = 60 if method.keeps_generated else 63
        with pytest.raises(ValueError, match=rf"'{method.name}' cannot return to {least - 1} tokens: .*allowed: 0, or"):
            cache.crop(least - 1 - 63)
        assert cache.get_seq_length() == 63
        model(random_ids(1, 4, seed=2), past_key_values=cache)
        cache.crop(-4)
        assert cache.get_seq_length() == 63
        if method.keeps_generated:
            cache.crop(-3)
            assert cache.layers[0].storage.kept.slots == BUDGET
        cache.reset()
        model(random_ids(1, 90), past_key_values=cache)
        assert cache.get_seq_length() == 90
        assert cache.layers[0].storage.kept is None


@every_method
@torch.inference_mode()
def test_turns_after_a_crop_and_forks_go_on_as_if_nothing_had_been_fed(name):
    """A crop to the last eviction and a fork of the method itself share what was kept, and do not disturb it."""
    model, method = make_model("llama", dtype=torch.float64), EVICTING[name]
    steps = random_ids(6, 1, seed=3).unsqueeze(2)
    with sparse_attention(model, method), use_impl("reference"):
        cache = SparseCache.for_model(model)
        model(random_ids(1, 60), past_key_values=cache)
        for token in steps[:3]:
            model(token, past_key_values=cache)
        fork = cache.fork(method)
        if not method.needs_weights:  # what removed queries gave is not taken back
            model(random_ids(1, 7, seed=5), past_key_values=cache)
            cache.crop(-7)
        one, other = ([model(token, past_key_values=each).logits for token in steps] for each in (fork, cache))
        torch.testing.assert_close(one, other)


@every_method
@torch.inference_mode()
def test_forks_of_an_unfinished_prompt_do_not_overwrite_one_another(name):
    model, method = make_model("llama", dtype=torch.float64), EVICTING[name]
    steps = random_ids(8, 1, seed=3).unsqueeze(2)
    with sparse_attention(model, method), use_impl("reference"):
        cache = SparseCache.for_model(model)
        model(random_ids(1, BUDGET - 3), past_key_values=cache)
        fork = cache.fork(method)
        one, other = ([model(token, past_key_values=each).logits for token in steps] for each in (fork, cache))
        torch.testing.assert_close(one, other)


@every_method
@torch.inference_mode()
def test_rows_that_are_reordered_repeated_and_chosen_go_on_as_they_would_alone(name):
    """The third row has not filled its budget yet."""
    model, method = make_model("llama", dtype=torch.float64), EVICTING[name]
    ids, lengths = random_ids(3, 60), (60, 41, 12)
    steps, later = random_ids(4, 3, seed=3), random_ids(1, 9, seed=4).expand(4, -1)
    mask = (torch.arange(60) >= 60 - torch.tensor(lengths)[:, None]).long().to(DEVICE)
    with sparse_attention(model, method), use_impl("reference"):
        cache = SparseCache.for_model(model)
        fed(model, cache, ids, steps.T, mask)
        cache.reorder_cache(torch.tensor([2, 0, 1], device=DEVICE))
        cache.batch_repeat_interleave(2)
        cache.batch_select_indices(torch.tensor([4, 1, 2, 5], device=DEVICE))
        rows = [1, 2, 0, 1]
        mask = torch.cat((mask[rows], mask.new_ones(4, len(steps))), dim=1)
        together = fed(model, cache, later[:, :5], later[:, 5:], mask)
        for number, row in enumerate(rows):
            alone = SparseCache.for_model(model)
            fed(model, alone, ids[row : row + 1, -lengths[row] :], steps.T[row : row + 1])
            expected = fed(model, alone, later[:1, :5], later[:1, 5:])[0]
            torch.testing.assert_close(together[number], expected, **TOLERANCE)


def fed(model, cache, prompt, steps, mask=None):
    """Feed a prompt and then single tokens, and return the logits of the steps."""
    logits = []
    for tokens in (prompt, *steps.split(1, dim=1)):
        if mask is not None:
            mask = torch.cat(
                (mask, mask.new_ones(len(mask), cache.get_seq_length() + tokens.shape[1] - mask.shape[1])), 1
            )
        positions = None if mask is None else (mask.cumsum(1) - 1).clamp_min(0)[:, -tokens.shape[1] :]
        logits.append(model(tokens, attention_mask=mask, position_ids=positions, past_key_values=cache).logits[:, -1])
    return torch.stack(logits[1:], dim=1)


@every_method
@pytest.mark.parametrize("tokens", [1, 6])
@torch.inference_mode()
def test_a_pass_that_fails_after_evictions_evicts_nothing(name, tokens):
    model, method = make_model("llama", dtype=torch.float64), EVICTING[name]
    ids, steps = random_ids(2, 40), random_ids(2, 9, seed=3)
    logits = []
    with sparse_attention(model, method), use_impl("reference"):
        for fails in (False, True):
            cache = SparseCache.for_model(model)
            fed(model, cache, ids, steps[:, :3])
            if fails:
                hook = model.model.layers[2].mlp.register_forward_pre_hook(lambda *_: 1 / 0)
                with pytest.raises(ZeroDivisionError):
                    model(random_ids(2, tokens, seed=8), past_key_values=cache)
                hook.remove()
                twin = copy.deepcopy(cache)
                assert cache.get_seq_length() == 43
                torch.testing.assert_close(fed(model, twin, steps[:, 3:4], steps[:, 4:]), logits[0])
            logits.append(fed(model, cache, steps[:, 3:4], steps[:, 4:]))
    torch.testing.assert_close(*logits)


@torch.inference_mode()
def test_what_cannot_be_served_is_refused():
    model, ids = make_model("llama"), random_ids(1, 60)
    full = SparseCache(model.config, "full")
    model(ids, past_key_values=full)
    with pytest.raises(ValueError, match=r"method='h2o' needs the attention weights of the whole prompt.*'full'"):
        full.fork("h2o")
    with pytest.raises(ValueError, match=r"method='snapkv' needs the last 32 queries"):
        full.fork("snapkv")
    with sparse_attention(model, StreamingLLM(token_budget=BUDGET)):
        cache = SparseCache.for_model(model)
        model(ids, past_key_values=cache)
        assert cache.fork("quest").get_seq_length() == 60  # nothing is evicted yet
        model(ids[:, :1], past_key_values=cache)
        with pytest.raises(ValueError, match=r"method='quest' needs every token, but 'streaming_llm' has evicted"):
            cache.fork("quest")
        mask = torch.ones(1, 71, dtype=torch.long, device=DEVICE)
        mask[:, 66:] = 0
        with pytest.raises(ValueError, match="attention_mask has padding after a token"):
            model(ids[:, :10], attention_mask=mask, past_key_values=cache)
    with pytest.raises(ValueError, match=r"'streaming_llm' has evicted tokens of this cache.*patch_model"):
        model(ids[:, :1], past_key_values=cache)


@torch.inference_mode()
def test_weights_of_a_part_of_the_tokens_do_not_suffice():
    model = shared_model("llama", torch.float64)
    with sparse_attention(model, H2O(token_budget=12)):
        cache = SparseCache.for_model(model)
        model(random_ids(1, 15), past_key_values=cache)
    model(random_ids(1, 13, seed=2), past_key_values=cache)
    with sparse_attention(model, H2O(token_budget=12)):
        for _ in range(2):
            with pytest.raises(
                ValueError, match="'h2o' needs the attention weights of all tokens, but some were fed by"
            ):
                model(random_ids(1, 1), past_key_values=cache)


@torch.inference_mode()
def test_a_prompt_fed_by_an_unpatched_model():
    """Places are known; a query is known after one step; sums and windows are not."""
    model, ids = make_model("llama"), random_ids(1, 60)
    errors = {"h2o": "needs the attention weights of all tokens", "snapkv": "needs the last queries of the prompt"}
    for name in ("streaming_llm", "tova", "h2o", "snapkv"):
        cache = SparseCache(model.config, EVICTING[name])
        model(ids, past_key_values=cache)
        with sparse_attention(model, EVICTING[name]):
            for _ in range(2 if name in errors else 0):  # a second attempt is no way around
                with pytest.raises(ValueError, match=f"'{name}' {errors[name]}"):
                    model(ids[:, :1], past_key_values=cache)
            if name in errors:
                continue
            model(ids[:, :1], past_key_values=cache)
            assert cache.layers[0].storage.kept.slots == BUDGET - (name == "tova")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: StreamingLLM(token_budget=8, sink_tokens=8), "sink_tokens must be between 0 and token_budget - 1 = 7"),
        (lambda: H2O(token_budget=8, recent=8), "recent must be None, or between 0 and token_budget - 1 = 7, got 8"),
        (lambda: SnapKV(token_budget=8, window=8), "window must be between 1 and token_budget - 1 = 7, got 8"),
        (lambda: SnapKV(kernel=4), "kernel must be an odd number of neighbours, got 4"),
        (lambda: SparseCache(make_model("llama").config, "tova", kv_storage="host"), "tova"),
    ],
)
def test_errors_name_the_parameter(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_recent_is_a_whole_number():
    with pytest.raises(TypeError, match=r"recent must be a whole number or None, got 2\.5"):
        H2O(recent=2.5)
