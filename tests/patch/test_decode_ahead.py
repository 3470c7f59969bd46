"""Decoding one step ahead of the device gives the tokens, scores and caches of ``generate()``."""

import sys

import pytest
import torch
from hf_sparse_attn_kernels import use_impl
from torch._dynamo.utils import counters

from hf_sparse_attn import METHODS, DecodeAhead, SparseCache, patch_model, sparse_attention_stats
from hf_sparse_attn.patch import decode_ahead
from hf_sparse_attn.patch.answer import Answer
from tests.compared import compile_config
from tests.models import DEVICE, SPARSE, VOCABULARY, make_model, random_ids

pytestmark = pytest.mark.usefixtures("exact")

KEEPING = [name for name, method in METHODS.items() if not method.evicts]
ANSWER = {"do_sample": False, "disable_compile": True, "cache_implementation": "static"}
GREEDY = {"max_new_tokens": 12, **ANSWER}


def patched(method="quest", **overrides):
    model = make_model("llama", dtype=torch.float64, **{"num_hidden_layers": 2, **overrides})
    settings = {"token_budget": 48, "dense_layers": int(method == "infinigen"), **SPARSE.get(method, {})}
    return patch_model(model, method, **settings)


def padded_batch():
    ids, mask = random_ids(3, 110, seed=3), torch.ones(3, 110, dtype=torch.long, device=DEVICE)
    ids[1, :40] = mask[1, :40] = 0
    ids[2, :7] = mask[2, :7] = 0
    return {"input_ids": ids, "attention_mask": mask}


def compiled():
    return {"disable_compile": False, "compile_config": compile_config()}


class Streamer:
    def __init__(self, fails_at=None):
        self.received, self.has_ended, self.fails_at = [], False, fails_at

    def put(self, tokens):
        if len(self.received) == self.fails_at:
            raise RuntimeError("the reader is gone")
        self.received.append(tokens)

    def end(self):
        self.has_ended = True


@pytest.mark.parametrize("method", KEEPING)
def test_tokens_are_those_of_generate(method):
    model, inputs = patched(method), padded_batch()
    expected = model.generate(**inputs, **GREEDY)
    steps = sparse_attention_stats(model).decode_steps
    assert torch.equal(model.generate(**inputs, **GREEDY, custom_generate=DecodeAhead()), expected)
    assert sparse_attention_stats(model).decode_steps == steps  # the maximum length is no surprise


def test_sampled_tokens_are_those_of_generate():
    model, inputs = patched(), padded_batch()
    arguments = {**inputs, **GREEDY, "do_sample": True, "top_k": 20, "temperature": 1.4}
    answers = []
    for custom in (None, DecodeAhead()):
        torch.manual_seed(5)
        answers.append(model.generate(**arguments, custom_generate=custom))
    assert torch.equal(*answers)
    torch.manual_seed(6)
    assert not torch.equal(model.generate(**arguments, custom_generate=DecodeAhead()), answers[0])


@pytest.mark.parametrize("last", [0, 1, 2, 7, 11])
def test_an_end_leaves_no_trace_of_the_surplus_step(last):
    model, inputs = patched(), padded_batch()
    tokens = model.generate(**inputs, **GREEDY)[:, 110:]
    arguments = {**inputs, **GREEDY, "eos_token_id": tokens[:, : last + 1].unique().tolist(), "output_scores": True}
    arguments |= {"return_dict_in_generate": True, "output_logits": True}
    expected = model.generate(**arguments)
    steps = sparse_attention_stats(model).decode_steps
    actual = model.generate(**arguments, custom_generate=DecodeAhead())
    assert torch.equal(actual.sequences, expected.sequences)
    assert expected.sequences.shape[1] <= 110 + last + 1
    ends_early = expected.sequences.shape[1] < 122
    assert sparse_attention_stats(model).decode_steps == steps + ends_early
    for name in ("scores", "logits"):
        assert len(getattr(actual, name)) == len(getattr(expected, name))
        torch.testing.assert_close(getattr(actual, name), getattr(expected, name), rtol=0, atol=0)
    ours, stock = actual.past_key_values, expected.past_key_values
    assert ours.get_seq_length() == stock.get_seq_length() == expected.sequences.shape[1] - 1
    for each, other in zip(ours.layers, stock.layers, strict=True):
        held = slice(ours.get_seq_length())
        assert torch.equal(each.keys[:, :, held], other.keys[:, :, held])


def assert_same_turns(model, custom):
    """Compare with ``generate()`` three turns over one cache, whose texts end early, so that it is cut each time."""
    first = random_ids(2, 90)
    ends = model.generate(first, **GREEDY)[:, 96].tolist()
    turns = []
    for custom_generate in (None, custom):
        cache, ids, texts = SparseCache.for_model(model, max_cache_len=256), first, []
        arguments = {**GREEDY, "cache_implementation": None, "eos_token_id": ends, "past_key_values": cache}
        arguments["custom_generate"] = custom_generate
        for turn in range(3):
            ids = model.generate(ids, attention_mask=torch.ones_like(ids), **arguments)
            texts.append(ids)
            ids = torch.cat((ids, random_ids(2, 20, seed=turn)), dim=1)
        turns.append((texts, cache.get_seq_length()))
    assert turns[0][1] == turns[1][1]
    assert all(torch.equal(*pair) for pair in zip(turns[0][0], turns[1][0], strict=True))
    assert turns[0][0][0].shape[1] < 102


@pytest.mark.parametrize("method", ["keycodes", "rabitqcache", "squeezed", "quest"])
def test_an_answer_of_one_token_leaves_the_prompt_open(method):
    """The next turn belongs to it, for the methods that make something of a whole prompt."""
    model, first, second = patched(method), random_ids(1, 60), random_ids(1, 30, seed=7)
    end = int(model.generate(first, **{**GREEDY, "max_new_tokens": 1})[0, -1])
    turns = []
    for custom_generate in (None, DecodeAhead()):
        cache = SparseCache.for_model(model)
        arguments = {**GREEDY, "cache_implementation": None, "past_key_values": cache}
        ids = model.generate(first, **{**arguments, "eos_token_id": end}, custom_generate=custom_generate)
        assert ids.shape[1] == 61
        ids = torch.cat((ids, second), dim=1)
        turns.append(model.generate(ids, attention_mask=torch.ones_like(ids), **arguments))
    assert torch.equal(*turns)


@pytest.mark.parametrize("method", ["quest", "keycodes", "psa", "tokenselect"])
def test_several_turns_over_one_cache(method):
    assert_same_turns(patched(method), DecodeAhead())


@pytest.mark.parametrize("max_new_tokens", [1, 2, 5])
def test_a_cache_that_the_answer_fills(max_new_tokens):
    model, ids = patched(), random_ids(2, 80)
    arguments = {**GREEDY, "cache_implementation": None, "max_new_tokens": max_new_tokens}
    expected = model.generate(ids, **arguments)
    cache = SparseCache.for_model(model, max_cache_len=80 + max_new_tokens - 1)
    actual = model.generate(ids, **arguments, past_key_values=cache, custom_generate=DecodeAhead())
    assert torch.equal(actual, expected)
    assert cache.get_seq_length() == 80 + max_new_tokens - 1


@pytest.mark.parametrize("last", [3, 5])
def test_a_text_that_ends_where_the_cache_is_full(last):
    """There is no room for a surplus step."""
    model, ids = patched(), random_ids(1, 80)
    tokens = model.generate(ids, **GREEDY)[0, 80:].tolist()
    arguments = {**GREEDY, "cache_implementation": None, "eos_token_id": tokens[last]}
    assert tokens[last] not in tokens[:last]
    expected = model.generate(ids, **arguments)
    cache = SparseCache.for_model(model, max_cache_len=80 + last)
    streamer = Streamer()
    actual = model.generate(ids, **arguments, past_key_values=cache, custom_generate=DecodeAhead(streamer=streamer))
    assert torch.equal(actual, expected)
    assert actual.shape[1] == 80 + last + 1
    assert torch.cat([each.flatten() for each in streamer.received[1:]]).tolist() == tokens[: last + 1]


def test_compiled_steps():
    model, inputs = patched(), padded_batch()
    expected = model.generate(**inputs, **GREEDY)
    torch._dynamo.reset()
    counters.clear()
    ends = {"eos_token_id": expected[:, 116].tolist()}
    for arguments in ({}, ends, ends):
        answers = [
            model.generate(**inputs, **{**GREEDY, **compiled(), **arguments}, custom_generate=custom)
            for custom in (None, DecodeAhead())
        ]
        assert torch.equal(*answers)
    assert counters["stats"]["unique_graphs"] == 1  # generate()'s own
    torch._dynamo.reset()


def test_a_step_is_launched_before_the_host_waits_for_the_last_one(monkeypatch):
    events = []

    def noted(owner, name, event):
        stock = getattr(owner, name)

        def call(self, *args):
            events.append(event)
            return stock(self, *args)

        monkeypatch.setattr(owner, name, call)

    noted(Answer, "step", "launch")
    noted(decode_ahead.Arrival, "send", "send")
    noted(decode_ahead.Arrival, "wait", "wait")
    model, ids = patched(), random_ids(1, 60)
    model.generate(ids, **{**GREEDY, "max_new_tokens": 4}, custom_generate=DecodeAhead())
    # Whatever the host waits for was sent before the last launch, so the device has a step to work on meanwhile.
    assert events == ["send", "launch", "send", "wait", "launch", "send", "wait", "launch", "send", "wait"]


def test_compiled_steps_wait_for_nothing_else(monkeypatch):
    """The only tensors of which the host asks the value are those that tell whether the text has ended."""
    model, inputs = patched(), padded_batch()
    arguments = {**inputs, **GREEDY, **compiled(), "custom_generate": DecodeAhead()}
    torch._dynamo.reset()
    model.generate(**arguments)
    asked, is_decoding = [], []

    def noted(name):
        stock = getattr(torch.Tensor, name)

        def call(self, *args, **kwargs):
            frame, modules = sys._getframe(1), []
            while frame is not None:
                modules.append(frame.f_globals.get("__name__", ""))
                frame = frame.f_back
            # The reference of an op asks for lengths; its kernels do not.
            if is_decoding and not any(module.startswith("hf_sparse_attn_kernels") for module in modules):
                asked.append((name, modules[0]))
            return stock(self, *args, **kwargs)

        monkeypatch.setattr(torch.Tensor, name, call)

    for name in ("item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__index__", "__float__"):
        noted(name)
    choose = Answer.choose
    monkeypatch.setattr(Answer, "choose", lambda self, raw: is_decoding.append(True) or choose(self, raw))
    model.generate(**arguments)
    assert asked == [("__bool__", "hf_sparse_attn.patch.decode_ahead")] * (GREEDY["max_new_tokens"] - 1)
    torch._dynamo.reset()


@pytest.mark.parametrize("ends", [False, True])
def test_a_streamer_receives_every_token_of_the_answer(ends):
    model, ids, streamer = patched(), random_ids(1, 80), Streamer()
    expected = model.generate(ids, **GREEDY)
    arguments = {**GREEDY, "eos_token_id": expected[0, 85].tolist()} if ends else GREEDY
    output = model.generate(ids, **arguments, custom_generate=DecodeAhead(streamer=streamer))
    assert output.shape[1] == (expected[0, 80:].tolist().index(expected[0, 85]) + 81 if ends else 92)
    assert torch.equal(streamer.received[0], ids.cpu())
    assert torch.cat(streamer.received[1:]).tolist() == output[0, 80:].tolist()
    assert streamer.has_ended


def test_a_streamer_that_fails_leaves_a_cache_that_can_be_used():
    model, ids = patched(), random_ids(1, 80)
    expected = model.generate(ids, **GREEDY)
    cache = SparseCache.for_model(model, max_cache_len=128)
    arguments = {**GREEDY, "cache_implementation": None, "past_key_values": cache}
    with pytest.raises(RuntimeError, match="the reader is gone"):
        model.generate(ids, **arguments, custom_generate=DecodeAhead(Streamer(fails_at=4)))
    held = cache.get_seq_length()
    assert 80 < held < 92
    arguments["max_new_tokens"] = 92 - held - 1
    assert torch.equal(model.generate(expected[:, : held + 1], **arguments, custom_generate=DecodeAhead()), expected)


def test_logits_processors_and_other_families():
    for family in ("qwen2", "mistral", "qwen3"):
        model = patch_model(make_model(family, dtype=torch.float64), "quest", token_budget=48)
        arguments = {**GREEDY, "repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "min_new_tokens": 4}
        arguments["eos_token_id"] = list(range(0, VOCABULARY, 3))
        ids = random_ids(2, 90)
        expected = model.generate(ids, **arguments)
        assert torch.equal(model.generate(ids, **arguments, custom_generate=DecodeAhead()), expected)


def with_windows():
    kinds = ["sliding_attention", "full_attention"]
    windows = {"layer_types": kinds, "use_sliding_window": True, "sliding_window": 20}
    model = make_model("qwen2", dtype=torch.float64, num_hidden_layers=2, **windows)
    return patch_model(model, "quest", token_budget=48, dense_layers=0)


@pytest.mark.parametrize("passes", [1, 4], ids=["prompt", "step"])
def test_a_pass_that_fails_over_sliding_windows(passes):
    model, ids, growing = with_windows(), random_ids(1, 70), {**GREEDY, "cache_implementation": None}
    expected = model.generate(ids, **growing)
    cache, count = SparseCache.for_model(model), []

    def fail(*args):
        count.append(None)
        if len(count) == passes:
            raise RuntimeError("out of memory")

    hook = model.model.layers[1].mlp.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        model.generate(ids, **growing, past_key_values=cache, custom_generate=DecodeAhead())
    hook.remove()
    held = cache.get_seq_length()
    assert held == (0 if passes == 1 else 70 + passes - 2)
    growing["max_new_tokens"] = 12 - (held - 69 if held else 0)
    text = expected[:, : held + 1] if held else ids
    assert torch.equal(model.generate(text, **growing, past_key_values=cache, custom_generate=DecodeAhead()), expected)


@pytest.mark.parametrize("ends", [False, True])
def test_sliding_windows(ends):
    model = with_windows()
    ids, growing = random_ids(2, 70), {**GREEDY, "cache_implementation": None}
    answers = []
    for custom in (None, DecodeAhead()):
        cache, text = SparseCache.for_model(model), ids
        for _ in range(2):  # the second call goes on from the windows of the first
            arguments = {**growing, "past_key_values": cache, "attention_mask": torch.ones_like(text)}
            if ends:
                arguments["eos_token_id"] = model.generate(text, **growing)[:, -6].tolist()
            text = model.generate(text, **arguments, custom_generate=custom)
        answers.append(text)
        assert cache.get_seq_length() == text.shape[1] - 1
        assert cache.layers[0].keys.shape[2] == 20  # the window
    assert torch.equal(*answers)


@pytest.mark.parametrize("kind", ["windows", "offloaded"])
def test_an_end_that_fills_a_cache_whose_steps_are_not_compiled(kind):
    if kind == "windows":
        model = with_windows()
    else:
        model = make_model("llama", dtype=torch.float64, num_hidden_layers=2)
        settings = {**SPARSE["arkvale"], "offload": True, "gpu_cache_tokens": 64}
        patch_model(model, "arkvale", token_budget=48, dense_layers=0, **settings)
    ids, growing = random_ids(1, 70, seed=5), {**GREEDY, "cache_implementation": None}
    tokens = model.generate(ids, **growing)[0, 70:].tolist()
    growing |= {"eos_token_id": tokens[5], "pad_token_id": 0, "max_new_tokens": 40}
    length = 70 + tokens.index(tokens[5]) + 1
    for custom in (None, DecodeAhead()):
        cache = SparseCache.for_model(model, max_cache_len=length - 1)
        text = model.generate(ids, **growing, past_key_values=cache, custom_generate=custom)
        assert text[0, 70:].tolist() == tokens[: length - 70]
        assert cache.get_seq_length() == length - 1


@pytest.mark.parametrize("method", ["quest", "psa"])
def test_growing_and_offloaded_caches(method):
    model, ids = make_model("llama", dtype=torch.float64), random_ids(2, 90)
    for settings in ({}, {"offload": True, "gpu_cache_tokens": 4096}):
        patch_model(model, method, token_budget=48, **SPARSE.get(method, {}), **settings)
        growing = {**GREEDY, "cache_implementation": None}
        growing["eos_token_id"] = model.generate(ids, **growing)[:, 97].tolist()
        expected = model.generate(ids, **growing)
        assert torch.equal(model.generate(ids, **growing, custom_generate=DecodeAhead()), expected)


def test_keys_and_values_in_host_memory():
    model = make_model("llama", dtype=torch.float64)
    patch_model(model, "keycodes", token_budget=48, page_size=16, kv_storage="host")
    ids = random_ids(2, 90)
    expected = model.generate(ids, **GREEDY)
    assert torch.equal(model.generate(ids, **GREEDY, custom_generate=DecodeAhead()), expected)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_beams": 2}, "DecodeAhead supports greedy decoding and sampling, got beam search"),
        ({"assistant_model": make_model("llama", seed=1)}, "greedy decoding and sampling, got assisted generation"),
        ({"use_cache": False}, "use_cache must be True for DecodeAhead, got False"),
        ({"output_hidden_states": True, "return_dict_in_generate": True}, "output_hidden_states must be False for"),
    ],
)
def test_calls_that_are_refused(arguments, message):
    model, ids = patched(), random_ids(1, 40)
    with pytest.raises(ValueError, match=message):
        model.generate(ids, **{**GREEDY, **arguments}, custom_generate=DecodeAhead())


@pytest.mark.parametrize("method", [name for name in METHODS if name not in KEEPING])
def test_methods_that_evict_are_refused(method):
    with pytest.raises(ValueError, match=f"method '{method}' does not support DecodeAhead: it evicts tokens"):
        patched(method).generate(random_ids(1, 70), **GREEDY, custom_generate=DecodeAhead())


def test_unpatched_models_are_refused():
    with pytest.raises(ValueError, match="not patched"):
        make_model("llama").generate(random_ids(1, 5), custom_generate=DecodeAhead(), max_new_tokens=1)


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["quest", "keycodes", "psa", "tokenselect"])
def test_in_cuda_graphs(method):
    model = make_model("llama", num_hidden_layers=2)
    settings = {"token_budget": 48, "dense_layers": 0, **SPARSE.get(method, {})}
    patch_model(model, method, **settings)
    inputs, arguments = padded_batch(), {"max_new_tokens": 40, "do_sample": False}
    with use_impl("triton"):
        expected = model.generate(**inputs, **arguments)
        for ends in ({}, {"eos_token_id": expected[:, 120].tolist()}):
            stock = model.generate(**inputs, **arguments, **ends)
            for _ in range(2):  # the second one replays what the first one has recorded
                actual = model.generate(**inputs, **arguments, **ends, custom_generate=DecodeAhead())
                assert torch.equal(actual, stock)


@torch.inference_mode()
def test_windows_drop_old_tokens_again_after_an_answer():
    kinds = ["sliding_attention", "full_attention"]
    windows = {"layer_types": kinds, "use_sliding_window": True, "sliding_window": 20}
    model = patch_model(make_model("qwen2", num_hidden_layers=2, **windows), "quest", token_budget=512, dense_layers=0)
    cache = SparseCache.for_model(model)
    answer = {"past_key_values": cache, "do_sample": False, "max_new_tokens": 4, "pad_token_id": 0}
    text = model.generate(random_ids(1, 50), custom_generate=DecodeAhead(), **answer, eos_token_id=None)
    model.generate(torch.cat((text, random_ids(1, 40, seed=1)), dim=1), **answer, eos_token_id=None)
    assert cache.layers[0].keys.shape[2] == 20
