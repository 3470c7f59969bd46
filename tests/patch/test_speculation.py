"""Self-speculation gives the tokens of dense attention, or their distribution, by sparse drafts."""

import pytest
import torch
from hf_sparse_attn_kernels import use_impl
from torch._dynamo.utils import counters
from transformers import GPT2Config, GPT2LMHeadModel, StoppingCriteria, StoppingCriteriaList

from hf_sparse_attn import (
    METHODS,
    SelfSpeculation,
    SparseCache,
    SpeculationStats,
    patch_model,
    sparse_attention,
    sparse_attention_stats,
)
from hf_sparse_attn.patch.draft_and_verify import speculative_sample
from tests.compared import compile_config
from tests.models import COVERING, DEVICE, SPARSE, VOCABULARY, make_model, random_ids

pytestmark = pytest.mark.usefixtures("exact")

DRAFTING = [
    "quest",
    "arkvale",
    "psa",
    "keycodes",
    "rabitqcache",
    "oracle_topk",
    "double_sparsity",
    "infinigen",
]
# The reference implementation, which float64 needs, cannot be recorded as a CUDA graph.
ANSWER = {"do_sample": False, "disable_compile": True}
GREEDY = {"max_new_tokens": 20, **ANSWER}


def dense_model(family="llama", **overrides):
    return make_model(family, dtype=torch.float64, **{"num_hidden_layers": 2, **overrides})


def patched(model, method="quest", **hyperparameters):
    return patch_model(
        model,
        method,
        **{"token_budget": 48, "dense_layers": int(method == "infinigen"), **SPARSE.get(method, {}), **hyperparameters},
    )


def padded_batch():
    ids, mask = random_ids(3, 110, seed=3), torch.ones(3, 110, dtype=torch.long, device=DEVICE)
    ids[1, :40] = mask[1, :40] = 0
    ids[2, :7] = mask[2, :7] = 0
    return {"input_ids": ids, "attention_mask": mask}


def keys_of(cache):
    return [layer.keys[:, :, : cache.get_seq_length()] for layer in cache.layers]


class Interrupt:
    """Raises at a call of a module, counted from now."""

    def __init__(self, module, error, at_call):
        self.error, self.calls_left = error, at_call
        self.hook = module.register_forward_pre_hook(self)

    def __call__(self, *args):
        self.calls_left -= 1
        if self.calls_left == 0:
            self.hook.remove()
            raise self.error


@pytest.mark.parametrize("method", [name for name in METHODS if name not in DRAFTING])
def test_methods_that_cannot_draft_are_refused(method):
    settings = {"dense_layers": 0} if METHODS[method].dense_layers else {}
    model = patch_model(dense_model(), method, token_budget=48, **{**SPARSE.get(method, {}), **settings})
    with pytest.raises(ValueError, match=f"method '{method}' does not support self-speculation: it"):
        model.generate(random_ids(1, 5), max_new_tokens=2, custom_generate=SelfSpeculation())


@pytest.mark.parametrize("method", DRAFTING)
def test_greedy_tokens_are_those_of_the_unpatched_model(method):
    model, inputs = dense_model(), padded_batch()
    expected = model.generate(**inputs, **GREEDY)
    speculation = SelfSpeculation(draft_tokens=3)
    budget = {"token_budget": 8} if method == "oracle_topk" else {}  # else all of its drafts are accepted
    actual = patched(model, method, **budget).generate(**inputs, **GREEDY, custom_generate=speculation)
    assert torch.equal(actual, expected)
    stats = speculation.stats
    assert stats.acceptance_rate < 1
    assert stats.generated == 20
    assert sparse_attention_stats(model).decode_steps == sum(stats.drafted)
    assert sparse_attention_stats(model).kv_fraction < 1


@pytest.mark.parametrize("method", DRAFTING)
def test_a_draft_that_reads_everything_is_always_accepted(method, monkeypatch):
    model, ids = dense_model(), random_ids(1, 60)
    expected = model.generate(ids, **GREEDY)
    monkeypatch.setattr(METHODS[method], "covers", lambda self, length: False)
    speculation = SelfSpeculation(draft_tokens=5)
    settings = {"token_budget": 1024, "dense_layers": int(method == "infinigen"), **COVERING.get(method, {})}
    actual = patch_model(model, method, **settings).generate(ids, **GREEDY, custom_generate=speculation)
    assert torch.equal(actual, expected)
    # 1 by the prompt, then 6 by each verification: 5 drafted and one more.
    assert speculation.stats == SpeculationStats(drafted=(5, 5, 5, 0), accepted=(5, 5, 5, 0), generated=20)
    assert speculation.stats.acceptance_rate == 1
    assert speculation.stats.tokens_per_verification == 19 / 4


@pytest.mark.parametrize("family", ["qwen2", "mistral", "qwen3"])
def test_other_families(family):
    model, ids = dense_model(family), random_ids(2, 100)
    expected = model.generate(ids, **GREEDY)
    actual = patched(model).generate(ids, **GREEDY, custom_generate=SelfSpeculation(4))
    assert torch.equal(actual, expected)


def test_sliding_windows():
    kinds = ["sliding_attention", "full_attention"]
    model = dense_model("qwen2", layer_types=kinds, use_sliding_window=True, sliding_window=20)
    ids = random_ids(2, 70)
    expected = model.generate(ids, **GREEDY)
    patched(model)
    cache = SparseCache.for_model(model)
    model(ids[:, :69], past_key_values=cache)
    arguments = {**GREEDY, "past_key_values": cache, "custom_generate": SelfSpeculation(4)}
    Interrupt(model.model.layers[1].mlp, RuntimeError("out of memory"), at_call=8)
    with pytest.raises(RuntimeError, match="out of memory"):
        model.generate(ids, **arguments)
    kept = expected[:, : cache.get_seq_length() + 1]
    assert kept.shape[1] > 70
    actual = model.generate(kept, **{**arguments, "max_new_tokens": 90 - kept.shape[1]})
    assert torch.equal(actual, expected)
    assert cache.layers[0].keys.shape[2] == 20  # the window


@pytest.mark.parametrize("max_new_tokens", [1, 2, 3, 8])
def test_every_number_of_new_tokens(max_new_tokens):
    model, ids = dense_model(), random_ids(2, 80)
    arguments = {"max_new_tokens": max_new_tokens, **ANSWER}
    expected = model.generate(ids, **arguments)
    patched(model)
    cache = SparseCache.for_model(model, max_cache_len=80 + max_new_tokens - 1)  # as full as generate() fills it
    for past_key_values in (None, cache):
        speculation = SelfSpeculation(4)
        actual = model.generate(ids, past_key_values=past_key_values, **arguments, custom_generate=speculation)
        assert torch.equal(actual, expected)
        assert speculation.stats.generated == max_new_tokens
    assert cache.get_seq_length() == 80 + max_new_tokens - 1


def test_an_end_inside_a_draft():
    model, inputs = dense_model(), padded_batch()
    tokens = model.generate(**inputs, **GREEDY)[:, 110:].tolist()
    for ends in ([tokens[0][5], tokens[1][9]], [tokens[0][2]], [row[11] for row in tokens]):
        expected = model.generate(**inputs, **GREEDY, eos_token_id=ends)
        with sparse_attention(
            model, "oracle_topk", token_budget=48, dense_layers=0
        ):  # drafts well, so that ends are drafted
            cache = SparseCache.for_model(model)
            speculation = SelfSpeculation(6)
            arguments = {**inputs, **GREEDY, "eos_token_id": ends, "past_key_values": cache}
            actual = model.generate(**arguments, custom_generate=speculation)
        assert torch.equal(actual, expected)
        assert cache.get_seq_length() == expected.shape[1] - 1
        assert max(speculation.stats.accepted) > 1


def test_the_cache_holds_what_dense_attention_would_leave_over_several_turns():
    model, first = dense_model(), random_ids(2, 90)
    turns = []
    for method, custom in (("full", None), ("quest", SelfSpeculation(4)), ("keycodes", SelfSpeculation(2))):
        patched(model, method)
        cache, texts = SparseCache.for_model(model), [first]
        for fed in (0, 30, 1):  # new tokens; a single one would be a decode step
            ids = torch.cat((texts[-1], random_ids(2, 30, seed=7)[:, :fed]), dim=1)
            ids = ids[:, :-1] if fed == 1 else ids
            arguments = {**GREEDY, "past_key_values": cache, "attention_mask": torch.ones_like(ids)}
            texts.append(model.generate(ids, **arguments, custom_generate=custom))
            assert cache.get_seq_length() == texts[-1].shape[1] - 1
        turns.append((texts, keys_of(cache)))
    for texts, keys in turns[1:]:
        assert all(torch.equal(*pair) for pair in zip(texts, turns[0][0], strict=True))
        torch.testing.assert_close(keys, turns[0][1], rtol=1e-5, atol=1e-5)


def test_scores_logits_processors_and_the_output_object():
    model, ids = dense_model(), random_ids(2, 90)
    arguments = {**GREEDY, "repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "min_new_tokens": 4}
    arguments |= {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    expected = model.generate(ids, **arguments)
    actual = patched(model).generate(ids, **arguments, custom_generate=SelfSpeculation(3))
    assert torch.equal(actual.sequences, expected.sequences)
    for name in ("scores", "logits"):
        torch.testing.assert_close(getattr(actual, name), getattr(expected, name), rtol=1e-4, atol=1e-4)
    assert isinstance(actual.past_key_values, SparseCache)


def test_chunked_prompts_and_embeddings():
    model, ids = dense_model(), random_ids(2, 90)
    inputs = {"inputs_embeds": model.get_input_embeddings()(ids)}
    expected = model.generate(**inputs, **GREEDY), model.generate(ids, **GREEDY)
    patched(model)
    speculation = SelfSpeculation(3)
    assert torch.equal(model.generate(**inputs, **GREEDY, custom_generate=speculation), expected[0])
    for chunk in (1, 32, 89):  # 89 leaves a single token for the last chunk
        chunked = model.generate(ids, **GREEDY, prefill_chunk_size=chunk, custom_generate=speculation)
        assert torch.equal(chunked, expected[1])


class Streamer:
    def __init__(self):
        self.received, self.has_ended = [], False

    def put(self, tokens):
        self.received.append(tokens)

    def end(self):
        self.has_ended = True


class StopAfter(StoppingCriteria):
    """Stop each row at another length, without an end token."""

    def __init__(self, *lengths):
        self.lengths = torch.tensor(lengths, device=DEVICE)

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids.shape[1] >= self.lengths


def test_a_streamer_receives_the_tokens_that_are_kept():
    model, ids = patched(dense_model()), random_ids(1, 80)
    streamer = Streamer()
    output = model.generate(ids, **GREEDY, custom_generate=SelfSpeculation(4, streamer=streamer))
    assert torch.equal(streamer.received[0], ids.cpu())
    assert torch.cat(streamer.received[1:]).tolist() == output[0, 80:].tolist()
    assert streamer.has_ended


def test_stopping_criteria_of_the_user():
    model, ids = dense_model(), random_ids(2, 80)
    arguments = {**GREEDY, "stopping_criteria": StoppingCriteriaList([StopAfter(87, 93)]), "eos_token_id": [VOCABULARY]}
    expected = model.generate(ids, **arguments)
    assert expected.shape[1] == 93
    assert expected[0, 87:].tolist() == [0] * 6
    actual = patched(model).generate(ids, **arguments, custom_generate=SelfSpeculation(4))
    assert torch.equal(actual, expected)


@pytest.mark.parametrize(
    "method",
    [
        "quest",
        "keycodes",
        "double_sparsity",
        *(
            pytest.param(name, marks=pytest.mark.grid)
            for name in DRAFTING
            if name not in ("quest", "keycodes", "double_sparsity")
        ),
    ],
)
def test_a_static_cache_whose_drafts_and_verifications_are_compiled(method):
    config = compile_config()
    model, inputs = dense_model(num_hidden_layers=2), padded_batch()
    expected = model.generate(**inputs, **GREEDY)
    patched(model, method)
    torch._dynamo.reset()
    counters.clear()
    compiled = {"disable_compile": False, "compile_config": config}
    arguments = {**inputs, **GREEDY, **compiled, "return_dict_in_generate": True}
    uncompiled, speculation = SelfSpeculation(4), SelfSpeculation(4)
    static = {**inputs, **GREEDY, "cache_implementation": "static"}
    assert torch.equal(model.generate(**static, custom_generate=uncompiled), expected)
    output = model.generate(**arguments, custom_generate=speculation)
    assert speculation.stats == uncompiled.stats  # the same drafts: both keep the metadata up
    assert speculation.stats.verifications > 1
    # A draft's step and the verification; these methods finish a prompt after every dense pass, on the host.
    graphs = 1 if method in ("double_sparsity", "infinigen") else 2
    assert counters["stats"]["unique_graphs"] == graphs
    # Neither further rounds nor another cache compiles anything; another length of draft compiles its verification.
    for draft_tokens, added in ((4, 0), (2, graphs - 1), (2, 0)):
        again = SelfSpeculation(draft_tokens)
        assert torch.equal(model.generate(**arguments, custom_generate=again).sequences, expected)
        graphs += added
        assert counters["stats"]["unique_graphs"] == graphs
        assert draft_tokens != 4 or again.stats == speculation.stats
    torch._dynamo.reset()
    assert torch.equal(output.sequences, expected)
    assert output.past_key_values.is_compileable
    assert output.past_key_values.get_seq_length() == expected.shape[1] - 1


@pytest.mark.parametrize("method", ["quest", "keycodes"])
def test_a_verification_that_dynamo_leaves_uncompiled(method):
    config = compile_config(fullgraph=False)
    model, inputs = dense_model(num_hidden_layers=3), padded_batch()
    expected = model.generate(**inputs, **GREEDY)
    patched(model, method)
    torch._dynamo.reset()
    with torch._dynamo.config.patch(disable=True):
        arguments = {**inputs, **GREEDY, "disable_compile": False, "compile_config": config}
        assert torch.equal(model.generate(**arguments, custom_generate=SelfSpeculation(4)), expected)
    torch._dynamo.reset()


@pytest.mark.gpu
@pytest.mark.parametrize("method", DRAFTING)
def test_drafts_in_cuda_graphs(method):
    model, inputs = make_model("llama", num_hidden_layers=2), padded_batch()
    expected = model.generate(**inputs, **GREEDY)
    patched(model, method)
    speculation = SelfSpeculation(4)
    arguments = {**inputs, **GREEDY, "disable_compile": False, "custom_generate": speculation}
    with use_impl("triton"):
        for _ in range(2):  # the second one replays what the first one has recorded
            assert torch.equal(model.generate(**arguments), expected)
    assert speculation.stats.verifications > 1


@pytest.mark.parametrize("method", ["quest", "keycodes"])
def test_keys_and_values_in_host_memory(method):
    model, ids = dense_model(), random_ids(2, 90)
    expected = model.generate(ids, **GREEDY)
    patched(model, method, kv_storage="host")
    assert torch.equal(model.generate(ids, **GREEDY, custom_generate=SelfSpeculation(4)), expected)


@pytest.mark.parametrize("at_call", [2, 4, 6, 9], ids=["draft", "later draft", "verification", "next round"])
@pytest.mark.parametrize("error", [RuntimeError("out of memory"), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_a_failure_leaves_the_tokens_that_were_kept(at_call, error):
    model, ids = dense_model(), random_ids(1, 90)
    expected = model.generate(ids, **GREEDY)
    patched(model)
    cache, streamer = SparseCache.for_model(model), Streamer()
    Interrupt(model.model.layers[1].mlp, error, at_call)
    speculation = SelfSpeculation(4, streamer=streamer)
    with pytest.raises(type(error)):
        model.generate(ids, past_key_values=cache, **GREEDY, custom_generate=speculation)
    kept = sum(len(tokens) for tokens in streamer.received[1:])
    assert cache.get_seq_length() == 90 + kept - 1
    more = {"max_new_tokens": 20 - kept, **ANSWER, "past_key_values": cache}
    assert torch.equal(model.generate(expected[:, : 90 + kept], **more, custom_generate=SelfSpeculation(4)), expected)


def test_speculative_sampling_follows_the_wanted_distribution():
    """The probability of each token, from the rule's two branches, by a chi-square test."""
    generator = torch.Generator().manual_seed(5)
    drafts, wanted = (torch.rand(2, 6, generator=generator).softmax(-1) ** 3 for _ in range(2))
    drafts, wanted = drafts / drafts.sum(1, keepdim=True), wanted / wanted.sum(1, keepdim=True)
    wanted[1, 2] = 0
    wanted[1] /= wanted[1].sum()
    repeats = 20_000
    torch.manual_seed(11)
    for p, q in zip(drafts, wanted, strict=True):
        p, q = p.expand(repeats, -1), q.expand(repeats, -1)
        drawn = speculative_sample(torch.multinomial(p, 1)[:, 0], p, q)
        observed = torch.bincount(drawn, minlength=6)
        assert (observed[q[0] == 0] == 0).all()
        expected = q[0] * repeats
        chi_square = ((observed - expected).square() / expected)[expected > 0].sum()
        assert chi_square < 20.5  # the 99.9th percentile for 5 degrees of freedom


def test_speculative_sampling_keeps_a_token_where_both_distributions_agree():
    p = torch.tensor([[0.25, 0.75], [0.5, 0.5]])
    for drafted in ([0, 1], [1, 0]):
        assert speculative_sample(torch.tensor(drafted), p, p).tolist() == drafted


def test_sampled_answers_follow_the_dense_distribution():
    """The drafted token's distribution over many rows, by a chi-square test; that of the draft itself fails it."""
    model, rows, ids = dense_model(initializer_range=0.1), 500, random_ids(1, 30)
    text = torch.cat((ids, ids[:, :1]), dim=1)  # the answer's first token is given
    with torch.no_grad():
        best = (model(text).logits[0, -1].float() / 1.5).topk(5)
    expected = best.values.softmax(0) * rows
    patched(model, "oracle_topk", token_budget=1)
    arguments = {"max_new_tokens": 3, **ANSWER, "do_sample": True, "top_k": 5, "temperature": 1.5}
    arguments["prefix_allowed_tokens_fn"] = lambda row, tokens: (
        text[0, 30:].tolist() if len(tokens) == 30 else range(97)
    )
    distances = []
    for custom in (SelfSpeculation(1), None):
        torch.manual_seed(3)
        output = model.generate(ids.expand(rows, -1), **arguments, custom_generate=custom)
        observed = (output[:, 31, None] == best.indices).sum(0)
        distances.append(float(((observed - expected).square() / expected).sum()) + rows - int(observed.sum()))
    assert distances[0] < 18.5 < distances[1]  # the 99.9th percentile for 4 degrees of freedom


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_beams": 2}, "greedy decoding and sampling, got beam search"),
        ({"assistant_model": make_model("llama", seed=1)}, "greedy decoding and sampling, got assisted generation"),
        ({"use_cache": False}, "use_cache must be True"),
        ({"output_hidden_states": True, "return_dict_in_generate": True}, "output_hidden_states must be False"),
        ({"guidance_scale": 1.5}, "does not support UnbatchedClassifierFreeGuidanceLogitsProcessor"),
        ({"max_new_tokens": 500}, r"the model's 512 positions.*up to 540 tokens"),
    ],
)
def test_calls_that_are_refused(arguments, message):
    model = patched(dense_model())
    with pytest.raises(ValueError, match=message):
        model.generate(random_ids(1, 40), **{**GREEDY, **arguments}, custom_generate=SelfSpeculation())


ROPE_BY_LENGTH = {
    "dynamic": {"max_position_embeddings": 80, "rope_parameters": {"factor": 4.0}},
    "longrope": {
        "max_position_embeddings": 320,
        "rope_parameters": {
            "factor": 4.0,
            "long_factor": [4.0] * 8,
            "short_factor": [1.0] * 8,
            "original_max_position_embeddings": 80,
        },
    },
}
"""RoPE whose frequencies change beyond 80 positions."""


def model_by_length(rope_type):
    settings = ROPE_BY_LENGTH[rope_type]
    rope = {"rope_type": rope_type, "rope_theta": 10000.0, **settings["rope_parameters"]}
    return dense_model(**{**settings, "rope_parameters": rope})


def left_padded(length, padding):
    ids, mask = random_ids(2, length, seed=1), torch.ones(2, length, dtype=torch.long, device=DEVICE)
    ids[:, :padding] = mask[:, :padding] = 0
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize(
    ("rope_type", "length", "padding", "text"),
    [
        ("dynamic", 70, 0, "a prompt of 70 and a text of up to 90 positions"),
        ("dynamic", 85, 0, "a prompt of 85 and a text of up to 105 positions"),
        ("longrope", 70, 0, "a prompt of 70 and a text of up to 90 positions"),
        ("longrope", 85, 10, "a prompt of 75 and a text of up to 105 positions"),
    ],
)
def test_answers_within_which_the_rope_changes_are_refused(rope_type, length, padding, text):
    model, streamer = patched(model_by_length(rope_type)), Streamer()
    arguments = {**left_padded(length, padding), **GREEDY, "custom_generate": SelfSpeculation(8, streamer)}
    with pytest.raises(ValueError, match=f"within 80 positions.*rope_type='{rope_type}' change there.*{text}"):
        model.generate(**arguments)
    assert not streamer.received


def test_the_positions_of_the_user_count_where_the_rope_changes():
    model, ids = patched(model_by_length("longrope")), random_ids(1, 50)
    positions = torch.arange(25, 75, device=DEVICE)[None]
    with pytest.raises(ValueError, match="a prompt of 50 and a text of up to 95 positions"):
        model.generate(ids, position_ids=positions, **GREEDY, custom_generate=SelfSpeculation())


@pytest.mark.parametrize(("rope_type", "length"), [("dynamic", 60), ("longrope", 60), ("longrope", 85)])
@pytest.mark.parametrize("is_compiled", [False, True])
def test_answers_before_or_after_the_rope_changes(rope_type, length, is_compiled):
    model, ids = model_by_length(rope_type), random_ids(1, length, seed=1)
    expected = model.generate(ids, **GREEDY)
    patched(model, "oracle_topk", token_budget=4096)
    arguments = {**GREEDY, "cache_implementation": "static"}
    if is_compiled:  # a draft that is filled up would end beyond the change
        torch._dynamo.reset()
        arguments |= {"disable_compile": False, "compile_config": compile_config()}
    for draft_tokens in (8, 1):
        actual = model.generate(ids, **arguments, custom_generate=SelfSpeculation(draft_tokens))
        assert torch.equal(actual, expected)
    torch._dynamo.reset()


def test_compiled_verifications_stay_within_absolute_positions():
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "n_positions": 96, "n_embd": 64, "n_layer": 2, "n_head": 4}
    config = GPT2Config(**sizes, bos_token_id=1, eos_token_id=None, pad_token_id=0, initializer_range=0.3)
    model, ids = GPT2LMHeadModel(config).to(DEVICE, torch.float64).eval(), random_ids(1, 70)
    arguments = {"max_new_tokens": 26, **ANSWER}
    expected = model.generate(ids, **arguments)
    patched(model)
    torch._dynamo.reset()
    arguments |= {"disable_compile": False, "compile_config": compile_config(), "cache_implementation": "static"}
    assert torch.equal(model.generate(ids, **arguments, custom_generate=SelfSpeculation(8)), expected)
    torch._dynamo.reset()


def test_a_single_token_that_fills_the_cache():
    """It is verified after the token before, which must be given, or twice, for which there must be room."""
    model, ids = dense_model(), random_ids(1, 70)
    arguments = {"max_new_tokens": 1, **ANSWER}
    expected = model.generate(ids, **arguments)
    patched(model)
    arguments |= {"attention_mask": torch.ones_like(ids), "custom_generate": SelfSpeculation(4)}
    for room, given in ((70, ids), (71, ids[:, 69:])):
        cache = SparseCache.for_model(model, max_cache_len=room)
        model(ids[:, :69], past_key_values=cache)
        assert model.generate(given, past_key_values=cache, **arguments)[:, -1] == expected[:, -1]
        assert cache.get_seq_length() == 70
    cache = SparseCache.for_model(model, max_cache_len=70)
    model(ids[:, :69], past_key_values=cache)
    with pytest.raises(ValueError, match=r"whole text of 70 tokens, or .* max_cache_len of at least 71"):
        model.generate(ids[:, 69:], past_key_values=cache, **arguments)
    assert cache.get_seq_length() == 69


def test_unpatched_models_are_refused():
    with pytest.raises(ValueError, match="not patched"):
        make_model("llama").generate(random_ids(1, 5), custom_generate=SelfSpeculation())


@pytest.mark.parametrize(
    ("draft_tokens", "error"), [(0, ValueError), (-1, ValueError), (2.0, TypeError), (True, TypeError)]
)
def test_draft_tokens_are_checked(draft_tokens, error):
    with pytest.raises(error, match=f"draft_tokens must be .*got {draft_tokens}"):
        SelfSpeculation(draft_tokens)
