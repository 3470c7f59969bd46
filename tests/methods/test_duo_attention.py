"""DuoAttention against plain loops over tokens, what it keeps in memory, and the files of its heads."""

import pytest
import torch
from hf_sparse_attn_kernels import use_impl

from hf_sparse_attn import (
    DuoAttention,
    SparseCache,
    patch_model,
    record_selections,
    sparse_attention,
    sparse_attention_stats,
)
from hf_sparse_attn.cache.layer import SparseLayer
from hf_sparse_attn.cache.padding import Padding
from hf_sparse_attn.cache.split import evicting_storage
from hf_sparse_attn.methods.retrieval_heads import streaming_heads
from tests.models import DEVICE, ROUNDING, make_model, random_ids, shared_model

KV_HEADS, GROUP, HEAD_DIM = 3, 2, 16
SCALE, SINKS, BUDGET = 0.3, 5, 21
MIXED = ((1.0, 0.0), (0.2, 0.9), (0.0, 0.1), (0.7, 1.0))
"""Of the tiny Llama's layers: one of each kind of head, twice; only streaming heads; only retrieval heads."""
SMALL = {"token_budget": BUDGET, "sink_tokens": SINKS}


@pytest.fixture(autouse=True)
def exact():
    with use_impl("reference"):
        yield


def visible(place, streams):
    """The tokens that a token attends to."""
    return [
        token for token in range(place + 1) if not streams or token < SINKS or place - token < BUDGET - SINKS
    ]  # fmt: skip


class Run:
    """A layer that is fed prompts and steps, and the same attention in plain loops."""

    def __init__(self, values, padding, total):
        heads = None if values is None else (values,)
        method = DuoAttention(heads=heads, **SMALL)
        self.streaming = range(KV_HEADS) if values is None else streaming_heads((values,), 0.5, None)[0]
        generator = torch.Generator().manual_seed(3)
        shape = (2, KV_HEADS, total, HEAD_DIM)
        self.keys, self.values = torch.randn(2, *shape, generator=generator, dtype=torch.float64)
        self.queries = torch.randn(2, KV_HEADS * GROUP, *shape[2:], generator=generator, dtype=torch.float64)
        self.starts, self.fed = (0, padding), 0
        self.layer = SparseLayer(method, evicting_storage(method.evicting_heads(0)), q_heads=KV_HEADS * GROUP)
        self.layer._shared.padding = Padding(torch.tensor(self.starts), 0, padding > 0)

    def feed(self, tokens):
        """Feed tokens, one as a decode step, and compare their outputs."""
        new, self.fed = slice(self.fed, self.fed + tokens), self.fed + tokens
        query, key, value = (states[:, :, new] for states in (self.queries, self.keys, self.values))
        if tokens == 1:
            self.layer.lengths.expects_step = True
            self.layer.update(key, value)
            new_key, new_value = (states[:, :, 0] for states in self.layer.take_token())
            output = self.layer.method.decode(query[:, :, 0], self.layer, new_key, new_value, SCALE)[:, :, None]
            self.layer.mark_written()
        else:
            self.layer.update(key, value)
            at = torch.arange(self.fed)
            mask = ((at <= at[new, None]) & (at >= self.layer.seq_start[:, None, None]))[:, None]
            output = self.layer.method.prefill(query, self.layer, SCALE, mask)
        for row, start in enumerate(self.starts):
            for index in range(max(0, start - new.start), tokens):
                for head in range(KV_HEADS * GROUP):
                    expected = self.attend(row, head, new.start + index, start)
                    torch.testing.assert_close(output[row, head, index], expected)

    def attend(self, row, head, at, start):
        kv = head // GROUP
        seen = [start + token for token in visible(at - start, kv in self.streaming)]
        weights = (self.keys[row, kv, seen] @ self.queries[row, head, at] * SCALE).softmax(0)
        return weights @ self.values[row, kv, seen]


@pytest.mark.parametrize("values", [(1.0, 0.0, 0.4), (0.0, 1.0, 1.0), (0.0, 0.0, 0.0), (1.0, 1.0, 1.0), None], ids=str)
@pytest.mark.parametrize("padding", [0, 13, 30])
def test_a_layer_attends_as_plain_loops_do(values, padding):
    run = Run(values, padding, total=260)
    for prompt, steps in (((37, 26), 12), ((90,), 3), ((2, 5), 30), ((40,), 0)):
        for part in prompt:
            run.feed(part)
        run.layer.method.finish_prompt([run.layer])
        for _ in range(steps):
            run.feed(1)
    storage = run.layer.storage
    if len(run.streaming):
        assert storage.kept.slots == BUDGET - 1
    assert storage.kv_heads == KV_HEADS


@pytest.mark.parametrize("heads", [MIXED, None], ids=["mixed", "all"])
@torch.inference_mode()
def test_any_way_to_feed_a_text_gives_the_logits_of_one_prefill(heads):
    """Which tokens a token sees depends on places alone, whatever is fed at once, evicted or reordered."""
    model, ids = shared_model("llama", torch.float64), random_ids(2, 190)
    mask = torch.ones_like(ids)
    mask[1, :11] = 0
    with sparse_attention(model, "duo_attention", heads=heads, **SMALL):
        expected = model(ids, attention_mask=mask).logits
        cache = SparseCache.for_model(model)
        fed = 0
        for number, tokens in enumerate((40, 37, *[1] * 25, 30, *[1] * 9, 44, 1, 1, 1, 1)):
            if number == 20:
                cache.reorder_cache(torch.tensor([1, 0], device=DEVICE))
                cache.batch_repeat_interleave(2)
                cache.batch_select_indices(torch.tensor([2, 0], device=DEVICE))
            if number == 33:
                fork = cache.fork(cache.method)
                model(ids[:, :1], attention_mask=mask[:, : fed + 1], past_key_values=fork)
            new = slice(fed, fed + tokens)
            fed += tokens
            logits = model(ids[:, new], attention_mask=mask[:, :fed], past_key_values=cache).logits
            torch.testing.assert_close(logits[0], expected[0, new], **ROUNDING)
            own = max(0, 11 - new.start)
            torch.testing.assert_close(logits[1, own:], expected[1, new][own:], **ROUNDING)
        cache.reset()
        logits = model(ids, attention_mask=mask, past_key_values=cache).logits
        torch.testing.assert_close(logits, expected, **ROUNDING)


@torch.inference_mode()
def test_streaming_heads_free_their_memory_after_the_prompt():
    model = shared_model("llama")
    head_dim, streaming, layers = model.config.head_dim, [1, 1, 2, 0], 4
    with sparse_attention(model, "duo_attention", heads=MIXED, **SMALL):
        cache = SparseCache.for_model(model)
        model(random_ids(2, 400), past_key_values=cache)
        assert [held(layer) for layer in cache.layers] == [2 * 2 * 2 * 400 * head_dim] * layers
        allocated = torch.cuda.memory_allocated() if DEVICE == "cuda" else 0
        for token in random_ids(40, 2, seed=1).unsqueeze(2):
            model(token, past_key_values=cache)
        stats = sparse_attention_stats(model)
    for layer, heads in zip(cache.layers, streaming, strict=True):
        whole = 2 - heads
        room = 464 if heads else 800  # growing buffers double
        assert held(layer) == 2 * 2 * head_dim * (heads * BUDGET + whole * room)
        own = stats.layers[layer.layer_idx]
        assert own.tokens_read == 2 * (heads * BUDGET * 40 + whole * sum(range(401, 441)))
        assert own.dense_bytes == 2 * 2 * sum(range(401, 441)) * 2 * head_dim * 4
    if DEVICE == "cuda":
        assert allocated > torch.cuda.memory_allocated()


def held(layer):
    """The numbers in the memory behind a layer's keys and values, those of the heads that keep all included."""
    storages = [layer.storage, *([] if layer.storage.whole is None else [layer.storage.whole])]
    buffers = [buffer for storage in storages for buffer in (storage.keys, storage.values)]
    return sum(buffer.untyped_storage().nbytes() // buffer.element_size() for buffer in buffers)


@torch.inference_mode()
def test_recorded_steps_show_what_each_head_reads():
    model = shared_model("llama")
    with sparse_attention(model, "duo_attention", heads=MIXED, **SMALL), record_selections(model) as record:
        model.generate(random_ids(1, 80), max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0)
    for layer, values in enumerate(MIXED):
        for step in range(5):
            reads = record.reads(layer, step)
            assert reads.shape == (2, 81 + step)
            for head, value in enumerate(values):
                assert reads[head].nonzero().flatten().tolist() == visible(80 + step, value < 0.5)


@torch.inference_mode()
def test_a_failed_prompt_after_an_eviction_is_undone():
    model, ids = make_model("llama", dtype=torch.float64), random_ids(1, 150)
    patch_model(model, "duo_attention", heads=MIXED, **SMALL)
    expected = model(ids).logits
    cache = SparseCache.for_model(model)
    model(ids[:, :60], past_key_values=cache)
    for at in range(60, 70):
        model(ids[:, at : at + 1], past_key_values=cache)
    for tokens in (1, 40):
        hook = model.model.layers[2].mlp.register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(random_ids(1, tokens, seed=9), past_key_values=cache)
        hook.remove()
    logits = model(ids[:, 70:], past_key_values=cache).logits
    torch.testing.assert_close(logits, expected[:, 70:], **ROUNDING)
    with pytest.raises(ValueError, match=r"'duo_attention' cannot return to 30 tokens: it evicted some"):
        cache.crop(30 - 150)
    cache.crop(-150)
    torch.testing.assert_close(model(ids, past_key_values=cache).logits, expected, **ROUNDING)


def test_a_published_file_and_its_numbers_give_the_same_heads(tmp_path):
    path = tmp_path / "full_attention_heads.tsv"
    path.write_text("\n".join("\t".join(f"{value:.18e}" for value in row) for row in MIXED) + "\n")
    for heads in (str(path), MIXED, torch.tensor(MIXED), [list(row) for row in MIXED]):
        method = DuoAttention(heads=heads)
        assert [method.evicting_heads(layer) for layer in range(4)] == [(1,), (0,), (0, 1), ()]
    assert DuoAttention(heads=[[-1.4e-3, 1.002]]).heads == ((0.0, 1.0),)  # training leaves some a little outside
    assert hash(DuoAttention(heads=torch.tensor(MIXED))) == hash(DuoAttention(heads=torch.tensor(MIXED)))


@pytest.mark.parametrize(
    ("threshold", "sparsity", "expected"),
    [
        (0.2, None, [(1,), (), (0, 1), ()]),
        (0.0, None, [(), (), (), ()]),
        (0.5, 0.0, [(), (), (), ()]),
        (0.5, 1.0, [(0, 1), (0, 1), (0, 1), (0, 1)]),
        (0.5, 0.1, [(1,), (), (), ()]),  # of the two smallest, which are equal, the first
        (0.5, 0.5, [(1,), (0,), (0, 1), ()]),
        (0.5, 0.6, [(1,), (0,), (0, 1), (0,)]),
    ],
)
def test_heads_stream_by_threshold_or_share(threshold, sparsity, expected):
    assert list(streaming_heads(MIXED, threshold, sparsity)) == expected


@pytest.mark.parametrize(
    ("heads", "error", "message"),
    [
        ("1\t0\n0\tx\n", ValueError, r"must have tab-separated numbers, one line per layer: .*'x'"),
        ("1\t0\n0\n", ValueError, r"must have one number per KV head, the same in every layer"),
        ("", ValueError, r"must have one number per KV head"),
        ("1\t1.5\n", ValueError, r"must be between 0 and 1, got 1.5"),
        ("nan\t1\n", ValueError, r"must be between 0 and 1, got nan"),
        ("1\t0\n" * 3, ValueError, r"must be \[layers, kv_heads\] = \[4, 2\] for this model, got \[3, 2\]"),
        (((1.0, 0.0, 0.0),) * 4, ValueError, r"heads must be \[layers, kv_heads\] = \[4, 2\].*got \[4, 3\]"),
        ((1.0, 0.0), TypeError, r"heads must be a path, or numbers \[layers, kv_heads\], got \(1.0, 0.0\)"),
        (0.5, TypeError, r"heads must be a path, or numbers"),
    ],
)
def test_heads_that_do_not_fit_are_refused_when_the_model_is_patched(heads, error, message, tmp_path):
    if isinstance(heads, str):
        path = tmp_path / "heads.tsv"
        path.write_text(heads)
        heads = str(path)
    with pytest.raises(error, match=message):
        patch_model(shared_model("llama"), "duo_attention", heads=heads)


@pytest.mark.parametrize(
    ("parameters", "error", "message"),
    [
        ({"token_budget": 64}, ValueError, r"sink_tokens must be between 0 and token_budget - 1 = 63, got 64"),
        ({"threshold": 1.2}, ValueError, r"threshold must be between 0 and 1, got 1.2"),
        ({"sparsity": -0.1}, ValueError, r"sparsity must be None, or between 0 and 1, got -0.1"),
        ({"sparsity": "half"}, TypeError, r"sparsity must be a number, got 'half'"),
    ],
)
def test_errors_name_the_parameter(parameters, error, message):
    with pytest.raises(error, match=message):
        DuoAttention(**parameters)
