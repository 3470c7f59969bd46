"""Decode steps that generate() compiles: the same tokens as eager steps, one compilation, no state left."""

import pytest
import torch
from functorch.compile import make_boxed_func
from hf_sparse_attn_kernels import (
    append_and_attend,
    append_and_attend_progressively,
    append_and_attend_tokens,
    use_impl,
)
from hf_sparse_attn_kernels._tuning import forced
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from transformers import CONFIG_MAPPING

from hf_sparse_attn import (
    NTK,
    PSA,
    ArkVale,
    DoubleSparsity,
    DuoAttention,
    InfiniGen,
    InfLLM,
    KeyCodes,
    MInference,
    OracleTopK,
    Quest,
    RaBitQCache,
    SelfExtend,
    SparseCache,
    Squeezed,
    TokenSelect,
    patch_model,
    prepare_context,
    sparse_attention,
    sparse_attention_stats,
    unpatch_model,
)
from hf_sparse_attn.methods import make_method
from hf_sparse_attn.patch.generation import static_capacity
from hf_sparse_attn.rope import decoder_rotary
from tests import models
from tests.compared import compile_config
from tests.families import tiny_model
from tests.methods.toy import TokenTopK, UnboundedQuest
from tests.models import FAMILIES, random_ids
from tests.ops.helpers import grid

GREEDY = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
SMALL = Quest(token_budget=48)
DTYPE = torch.float64 if models.DEVICE == "cpu" else torch.float32

pytestmark = pytest.mark.usefixtures("dynamo")  # all models share the compiled code

families = pytest.mark.parametrize("family", FAMILIES)


def make_model(family, **overrides):
    """Create a model of two dense layers and a sparse one, since compile time grows with the layers.

    On a CPU it is float64: there, growing and static caches add in different orders, which must not change tokens. On
    CUDA both use the same kernels.
    """
    return models.make_model(family, dtype=DTYPE, **{"num_hidden_layers": 3, **overrides})


def compiled(backend="eager"):
    """The arguments that make generate() compile, on CPU too; a graph break is an error."""
    return {**GREEDY, "compile_config": compile_config(backend=backend)}


def graphs():
    return counters["stats"]["unique_graphs"]


def padded(lengths, seed=0):
    ids = random_ids(len(lengths), max(lengths), seed)
    mask = torch.ones_like(ids)
    for row, length in enumerate(lengths):
        ids[row, : max(lengths) - length] = 0
        mask[row, : max(lengths) - length] = 0
    return {"input_ids": ids, "attention_mask": mask}


def assert_as_eager(model, inputs, backend="eager", **options):
    eager = model.generate(**inputs, **GREEDY, disable_compile=True)
    eager_stats = sparse_attention_stats(model)
    assert torch.equal(model.generate(**inputs, **{**compiled(backend), **options}), eager)
    assert sparse_attention_stats(model) == eager_stats
    assert eager_stats.decode_steps == GREEDY["max_new_tokens"] - 1


@pytest.mark.parametrize(("family", "backend"), [*((family, "eager") for family in FAMILIES), ("llama", "aot_eager")])
def test_one_graph_serves_all_prompts_and_reads_what_eager_steps_read(family, backend):
    model = patch_model(make_model(family), SMALL)
    assert_as_eager(model, padded((150, 131, 90)), backend)
    assert graphs() == 1
    for lengths in ((150, 131, 90), (149, 20, 149), (66, 66, 66), (300, 290, 201)):
        assert_as_eager(model, padded(lengths, seed=lengths[1]), backend)  # at last in a larger cache
    within_budget = padded((30, 3, 22))
    expected = model.generate(**within_budget, **GREEDY, disable_compile=True)
    assert torch.equal(model.generate(**within_budget, **compiled(backend)), expected)
    assert graphs() == 1
    assert not counters["graph_break"]


@pytest.mark.parametrize(
    "method", [Quest(token_budget=48, dense_layers=1), KeyCodes(token_budget=48, page_size=16, dense_layers=1)]
)
@pytest.mark.skipif("granite_swa" not in CONFIG_MAPPING, reason="this version of Transformers has no such model")
def test_attention_sinks(method):
    """In a sparse layer, in a dense one, and in the prompt."""
    model = tiny_model("granite_swa", num_hidden_layers=2, layer_types=["full_attention"] * 2)
    assert_as_eager(patch_model(model.to(models.DEVICE, DTYPE), method), padded((150, 131, 90)))
    assert graphs() == 1
    assert not counters["graph_break"]


@families
def test_budget_that_covers_all_is_dense_token_for_token(family):
    model = make_model(family)
    inputs = padded((80, 41, 63))
    expected = model.generate(**inputs, **GREEDY)
    with sparse_attention(model, "quest", token_budget=1024):
        assert torch.equal(model.generate(**inputs, **compiled()), expected)
        stats = sparse_attention_stats(model)
    assert stats.kv_bytes == stats.dense_bytes > 0
    assert stats.metadata_bytes > 0  # the host cannot know that the budget covers everything
    assert graphs() == 1


@pytest.mark.parametrize(
    "method",
    [
        PSA(threshold=0.8, block_size=8, microbatch=2),
        grid(PSA(threshold=0.9, block_size=16, microbatch=1, metadata="minmax", token_budget=64, dense_layers=1)),
        ArkVale(token_budget=64, page_size=16),
        Quest(token_budget=48, bounds_dtype="model"),
        TokenSelect(token_budget=48, chunk_size=64, selection_cache_threshold=0.5),
        grid(TokenSelect(token_budget=48, selection_cache_threshold=1, vote="logits")),
        TokenTopK(token_budget=48),
        OracleTopK(token_budget=48),
        MInference(token_budget=48, block_size=16),
        InfLLM(token_budget=48, n_init=4, n_local=12, block_size=8, chunk_size=64),
        InfiniGen(token_budget=48, alpha=2.0),
        grid(InfiniGen(alpha=3.0, max_share=0.5, dense_layers=2)),
        SelfExtend(group_size=3, window=20, chunk_size=64),
        NTK(factor=2.0),
        DoubleSparsity(token_budget=48, channels=4),
        grid(DoubleSparsity(token_budget=48, channels=3, label_bits=16, dense_layers=0)),
        KeyCodes(token_budget=48, page_size=16),
        grid(KeyCodes(token_budget=48, page_size=32, bits=2, group_reduce="max", query_centre=False, dense_layers=1)),
        RaBitQCache(top_p=0.7, page_size=16, sink_tokens=16),
        grid(RaBitQCache(top_p=0.9, page_size=32, sink_tokens=0, token_budget=64, dense_layers=0)),
        Squeezed(target_sparsity=0.7, clusters=0.1, window=10),
        grid(Squeezed(target_sparsity=0.7, clusters=0.1, window=10, levels=2, token_budget=60)),
        "full",
    ],
    ids=str,
)
def test_every_kind_of_method_compiles(method):
    model = patch_model(make_model("llama"), method)
    for lengths in ((150, 90), (80, 80), (210, 3)):
        assert_as_eager(model, padded(lengths))
    assert graphs() == 1


@pytest.mark.skipif(torch.__version__ < "2.9", reason="PyTorch 2.8 cannot filter guards of Transformers' models")
def test_without_guards_on_modules_each_method_and_the_stock_model_get_their_own_step():
    """The ``compile_config`` of docs/compiled-decoding.md: the cache's guards tell the methods apart."""
    model = make_model("llama")
    inputs, options = padded((150, 90)), compiled()
    options["compile_config"].options = {"guard_filter_fn": torch.compiler.skip_guard_on_all_nn_modules_unsafe}
    stock = model.generate(**inputs, **GREEDY)
    for method in (SMALL, KeyCodes(token_budget=48, page_size=16), SMALL):
        with sparse_attention(model, method):
            assert_as_eager(model, inputs, compile_config=options["compile_config"])
    assert graphs() == 2
    assert torch.equal(model.generate(**inputs, **options, cache_implementation="static"), stock)


@pytest.mark.parametrize("is_own", [False, True], ids=["method", "model"])
def test_frequencies_that_depend_on_the_length_are_not_compiled(is_own):
    """Dynamic NTK computes them on the host, from the positions of each step."""
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10_000.0}
    options = {"max_position_embeddings": 64, **({"rope_parameters": rope} if is_own else {})}
    method = SMALL if is_own else NTK(factor=4.0, dynamic=True)
    outputs = [  # of two models, since a stock module of dynamic NTK remembers the longest sequence
        patch_model(make_model("llama", **options), method).generate(**padded((150, 90)), **arguments)
        for arguments in (compiled(), {**GREEDY, "disable_compile": True})
    ]
    assert torch.equal(*outputs)
    assert graphs() == 0


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize(
    "method",
    [SMALL, KeyCodes(token_budget=48, page_size=16), UnboundedQuest(token_budget=48)],
    ids=lambda method: method.name,
)
def test_steps_over_host_memory_compile_and_give_the_tokens_of_the_device(method, backend):
    prompts = [padded(lengths) for lengths in ((150, 90), (80, 80), (210, 3))]
    model = patch_model(make_model("llama"), method)
    expected = [model.generate(**prompt, **GREEDY, disable_compile=True) for prompt in prompts]
    patch_model(model, method, kv_storage="host")
    for prompt, tokens in zip(prompts, expected, strict=True):
        assert_as_eager(model, prompt, backend)
        assert torch.equal(model.generate(**prompt, **compiled(backend)), tokens)
    assert graphs() == 1
    assert not counters["graph_break"]


@pytest.mark.parametrize("kv_storage", ["device", "host"])
def test_no_op_reads_a_copy_of_the_keys_in_host_memory(kv_storage):
    """Inductor gives the ops that read what ``index_copy`` has written a tensor without gaps: a copy of all keys."""
    targets = []

    def record(graph, inputs):
        targets.extend(f"{node.target} {node.args[:1]}" for node in graph.graph.nodes)  # an op may be an argument
        return make_boxed_func(graph.forward)

    model = patch_model(
        make_model("llama"),
        RaBitQCache(token_budget=64, dense_layers=0, page_size=16, sink_tokens=16),
        kv_storage=kv_storage,
    )
    prompt = padded((150, 90))
    expected = model.generate(**prompt, **GREEDY, disable_compile=True)
    assert torch.equal(model.generate(**prompt, **compiled(aot_autograd(fw_compiler=record))), expected)
    writes = [target for target in targets if "index_copy" in target or "index_put" in target]
    assert bool(writes) == (kv_storage == "device")
    assert any("write_to_host" in target for target in targets) == (kv_storage == "host")


@pytest.mark.parametrize(("levels", "backend"), [(1, "eager"), (2, "eager"), (1, "aot_eager")])
def test_questions_about_a_context_compile_and_contexts_share_the_graph(levels, backend):
    model = make_model("llama")
    for tokens in (200, 310):
        options = {"target_sparsity": 0.7, "levels": levels, "clusters": 0.1, "coarse_clusters": 0.05, "window": 10}
        context = prepare_context(model, random_ids(1, tokens), progress=False, **options)
        patch_model(model, context.method)
        for rows in ((14, 6, 9), (30, 30, 2)):
            inputs = padded(rows, seed=5)
            eager = model.generate(
                **inputs, past_key_values=context.cache(max_cache_len=64), **GREEDY, disable_compile=True
            )
            stats = sparse_attention_stats(model)
            cache = context.cache(max_cache_len=64)
            assert torch.equal(model.generate(**inputs, past_key_values=cache, **compiled(backend)), eager)
            assert sparse_attention_stats(model) == stats
        assert stats.kv_fraction < 1
        unpatch_model(model)
    assert graphs() <= 2  # the number of the context's tokens is a constant of the first graph


def test_sampling_compiles_and_one_row_too():
    model = patch_model(make_model("llama"), SMALL)
    options = {"input_ids": random_ids(1, 100), **compiled(), "do_sample": True, "top_k": 5}
    torch.manual_seed(3)
    expected = model.generate(**options, disable_compile=True)
    torch.manual_seed(3)
    assert torch.equal(model.generate(**options), expected)
    assert graphs() == 1


@pytest.mark.parametrize(
    "method",
    [
        SMALL,
        TokenSelect(token_budget=48, chunk_size=64),
        KeyCodes(token_budget=48, page_size=16),
        RaBitQCache(top_p=0.7, page_size=16, sink_tokens=16),
        OracleTopK(token_budget=48),
        DoubleSparsity(token_budget=48, channels=4),
        InfLLM(token_budget=48, n_init=4, n_local=12, block_size=8, chunk_size=64),
        InfiniGen(token_budget=48, alpha=2.0),
        SelfExtend(group_size=3, window=20, chunk_size=64),
        NTK(factor=2.0),
    ],
    ids=lambda method: method.name,
)
def test_tensors_that_last_are_marked_and_rows_advance_once(method):
    """CUDA graphs copy every input at each replay, except parameters and marked tensors."""
    fed, advances = [], []

    def backend(graph, inputs):
        advances.extend(node for node in graph.graph.nodes if "advance_rows" in str(node.target))
        for node in graph.graph.find_nodes(op="placeholder"):
            marked = node.meta.get("tensor_dict", {}).get("_dynamo_static_input_type")
            value = node.meta["example_value"]
            if isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter) and not marked:
                fed.append(tuple(value.shape))
        return graph

    model = patch_model(make_model("llama"), method)
    model.generate(random_ids(2, 100), **compiled(backend))
    rotary = tuple(decoder_rotary(model).inv_freq.shape)
    assert sorted(shape for shape in fed if shape != rotary) in (
        [(2, 1), (2, 1)],
        [(1, 1), (2, 1)],
        [(2, 1)],
    )  # tokens, and positions where the model's own rotary module reads them


def test_users_own_cache_serves_several_turns():
    model = patch_model(make_model("llama"), SMALL)
    first, rest = padded((70, 41)), random_ids(2, 55, seed=7)

    def chat(cache, **options):
        turns = [model.generate(**first, past_key_values=cache, **options)]
        cache.crop(-4)
        assert cache.get_seq_length() == 77
        ids = torch.cat([turns[0], rest], dim=1)
        mask = torch.cat([first["attention_mask"], torch.ones_like(ids[:, 70:])], dim=1)
        turns.append(model.generate(ids, attention_mask=mask, past_key_values=cache, **options))
        assert cache.get_seq_length() == 148
        cache.reset()
        assert cache.get_seq_length() == 0
        turns.append(model.generate(rest, past_key_values=cache, **options))
        return turns, sparse_attention_stats(model)

    static = SparseCache.for_model(model, max_cache_len=160)
    expected, expected_stats = chat(SparseCache.for_model(model), **GREEDY)
    actual, stats = chat(static, **compiled())
    assert all(torch.equal(a, e) for a, e in zip(actual, expected, strict=True))
    assert stats == expected_stats
    assert graphs() == 1
    assert static.layers[0].capacity == 160
    # Eager steps continue where compiled ones ended.
    step = random_ids(2, 1, seed=4)
    grown = SparseCache.for_model(model)
    model.generate(rest, past_key_values=grown, **GREEDY)
    logits = [model(step, past_key_values=cache).logits for cache in (static, grown)]
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)
    assert static.get_seq_length() == grown.get_seq_length() == 67


def test_a_model_that_is_patched_again_is_not_compiled_again():
    model, inputs = make_model("llama"), padded((150, 90))
    answers = []
    for _ in range(3):
        with sparse_attention(model, SMALL):
            answers.append(model.generate(**inputs, **compiled()))
    assert torch.equal(answers[0], answers[1])
    assert torch.equal(answers[0], answers[2])
    assert graphs() == 1


@torch.no_grad()
def test_users_own_loop_may_compile_the_step():
    """Without position ids: the model asks the cache for them, and must get the length before the step."""
    model = patch_model(make_model("llama"), SMALL)
    compiled_step = torch.compile(model, backend="eager", fullgraph=True)
    caches = [SparseCache.for_model(model, max_cache_len=128), SparseCache.for_model(model)]
    for cache in caches:
        model(random_ids(2, 90), past_key_values=cache)
    for token in random_ids(2, 6, seed=2).split(1, dim=1):
        actual, expected = (
            step(token, past_key_values=cache).logits
            for step, cache in zip((compiled_step, model), caches, strict=True)
        )
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    assert graphs() == 1
    assert caches[0].get_seq_length() == 96


@pytest.mark.parametrize("method", [SMALL, TokenSelect(token_budget=48, chunk_size=64)], ids=lambda method: method.name)
@pytest.mark.parametrize("max_cache_len", [None, 128], ids=["growing", "static"])
@torch.no_grad()
def test_users_own_loop_may_compile_the_prompt_too(method, max_cache_len):
    """The buffers are allocated outside the graph; an eager step continues where compiled ones ended."""
    model = patch_model(make_model("llama"), method)
    logits = []
    for call in (torch.compile(model, backend="eager"), model):
        cache = SparseCache.for_model(model, max_cache_len)
        call(random_ids(2, 60), past_key_values=cache)
        call(random_ids(2, 1), past_key_values=cache)
        assert cache.get_seq_length() == 61
        logits.append(model(random_ids(2, 1), past_key_values=cache).logits)
        assert cache.get_seq_length() == 62
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)


def test_a_fork_of_a_compiled_cache_continues_like_the_cache():
    model = patch_model(make_model("llama"), SMALL)
    cache = SparseCache.for_model(model, max_cache_len=200)
    ids = model.generate(random_ids(1, 100), past_key_values=cache, **compiled())
    fork = cache.fork(SMALL)
    turns = [model.generate(ids, past_key_values=each, **compiled()) for each in (fork, cache)]
    assert torch.equal(*turns)
    assert fork.get_seq_length() == cache.get_seq_length() == 123


def test_prompts_that_do_not_fit_raise_before_any_work():
    model = patch_model(make_model("llama"), SMALL)
    cache = SparseCache.for_model(model, max_cache_len=64)
    with pytest.raises(ValueError, match=r"may cache 65 tokens, .* max_cache_len=64, .*disable_compile=True"):
        model.generate(random_ids(1, 54), past_key_values=cache, **compiled())
    with pytest.raises(ValueError, match=r"70 new tokens do not fit: the cache holds 0 of max_cache_len=64"):
        model.generate(random_ids(1, 70), past_key_values=cache, disable_compile=True, **GREEDY)
    assert cache.get_seq_length() == 0
    assert not any(layer.is_initialized for layer in cache.layers)
    assert graphs() == 0
    first = model.generate(random_ids(1, 40), past_key_values=cache, **compiled())
    new_tokens = random_ids(1, 10, seed=2)
    mask = torch.ones(1, 61, dtype=torch.long, device=first.device)
    with pytest.raises(ValueError, match=r"may cache 72 tokens"):  # only the new tokens are fed
        model.generate(new_tokens, attention_mask=mask, past_key_values=cache, **compiled())
    assert model.generate(random_ids(1, 54), **compiled()).shape == (1, 66)


@pytest.mark.parametrize(
    "options",
    [{"num_beams": 3}, {"prefill_chunk_size": 24}, {"prompt_lookup_num_tokens": 4}, {"disable_compile": True}],
    ids=str,
)
@pytest.mark.parametrize("own_cache", [False, True])
def test_uncompiled_generation_is_still_right(options, own_cache):
    model = make_model("llama")
    inputs = padded((90,) if "prompt_lookup_num_tokens" in options else (90, 41))
    expected = model.generate(**inputs, **GREEDY, **options)
    with sparse_attention(model, "quest", token_budget=1024):
        cache = SparseCache.for_model(model, max_cache_len=128) if own_cache else None
        assert torch.equal(model.generate(**inputs, **compiled(), past_key_values=cache, **options), expected)
        if own_cache:
            assert cache.layers[0].capacity == 128
    assert graphs() == 0
    assert not model.generation_config.disable_compile


def test_sliding_windows_keep_generate_uncompiled():
    kinds = ["full_attention", "sliding_attention"] * 2
    model = make_model("qwen2", num_hidden_layers=4, layer_types=kinds, use_sliding_window=True, sliding_window=20)
    inputs = padded((70, 41))
    expected = model.generate(**inputs, **GREEDY)
    patch_model(model, "quest", token_budget=1024)
    assert torch.equal(model.generate(**inputs, **compiled()), expected)
    cache = SparseCache.for_model(model, max_cache_len=100)
    assert not cache.is_compileable
    assert torch.equal(model.generate(**inputs, **compiled(), past_key_values=cache), expected)
    assert graphs() == 0


@pytest.mark.parametrize(
    "method",
    [
        *(make_method(name, token_budget=48) for name in ("streaming_llm", "tova", "h2o", "snapkv")),
        DuoAttention(token_budget=48, sink_tokens=4, heads=((1, 0), (0, 0), (1, 1))),
    ],
    ids=lambda method: method.name,
)
def test_methods_that_evict_keep_generate_uncompiled(method):
    model = patch_model(make_model("llama"), method)
    inputs = padded((70, 41))
    expected = model.generate(**inputs, **GREEDY, disable_compile=True)
    stats = sparse_attention_stats(model)
    assert torch.equal(model.generate(**inputs, **compiled()), expected)
    assert sparse_attention_stats(model) == stats
    cache = SparseCache.for_model(model, max_cache_len=100)
    assert not cache.is_compileable
    assert torch.equal(model.generate(**inputs, **compiled(), past_key_values=cache), expected)
    mask = torch.ones(2, cache.get_seq_length() + 60, dtype=torch.long, device=inputs["input_ids"].device)
    mask[1, :29] = 0
    with pytest.raises(ValueError, match=r"60 new tokens do not fit: the cache holds \d+ of max_cache_len=100"):
        model(random_ids(2, 60), attention_mask=mask, past_key_values=cache)
    assert graphs() == 0


def test_unpatched_model_decodes_over_a_static_cache():
    model = make_model("llama")
    inputs = padded((70, 41))
    expected = model.generate(**inputs, **GREEDY)
    cache = SparseCache(model.config, "quest", max_cache_len=100)
    assert torch.equal(model.generate(**inputs, **GREEDY, past_key_values=cache, disable_compile=True), expected)
    cache.reset()
    assert torch.equal(model.generate(**inputs, **compiled(), past_key_values=cache), expected)


def test_capacities_are_few_and_waste_little():
    sizes = [static_capacity(tokens) for tokens in range(1, 200_000)]
    assert all(tokens <= size for tokens, size in enumerate(sizes, start=1))
    assert all(size <= 1.0625 * tokens for tokens, size in enumerate(sizes, start=1) if tokens >= 1024)
    assert len(set(sizes)) < 150


@pytest.mark.parametrize(("max_cache_len", "capacity"), [(None, 128), (500, 512)])
def test_generate_takes_the_capacity_that_it_needs_or_is_told(max_cache_len, capacity):
    model = patch_model(make_model("llama"), SMALL)
    options = {**compiled(), "max_cache_len": max_cache_len, "return_dict_in_generate": True}
    cache = model.generate(random_ids(1, 100), **options).past_key_values
    assert {layer.capacity for layer in cache.layers} == {capacity}


@pytest.mark.gpu
@families
@pytest.mark.parametrize(
    "method",
    [
        SMALL,
        PSA(threshold=0.8, block_size=16, microbatch=2),
        TokenSelect(token_budget=48, chunk_size=64, selection_cache_threshold=0.5),
        KeyCodes(token_budget=48, page_size=16),
        RaBitQCache(top_p=0.7, page_size=16, sink_tokens=16),
        OracleTopK(token_budget=48),
        DoubleSparsity(token_budget=48, channels=4),
        InfLLM(token_budget=48, n_init=4, n_local=12, block_size=8, chunk_size=64),
    ],
    ids=lambda method: method.name,
)
def test_cuda_graphs_replay_the_step(method, family):
    model = patch_model(make_model(family), method)
    check_cuda_graphs(model)
    unpatch_model(model)


@pytest.mark.gpu
@pytest.mark.parametrize("method", [SMALL, KeyCodes(token_budget=48, page_size=16)], ids=lambda method: method.name)
def test_cuda_graphs_replay_the_step_over_host_memory(method):
    model = patch_model(make_model("llama"), method)
    expected = model.generate(**padded((300, 290, 201)), **GREEDY, disable_compile=True)
    patch_model(model, method, kv_storage="host")
    assert torch.equal(check_cuda_graphs(model), expected)
    unpatch_model(model)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("method", "op", "choice"),
    [
        (Quest(token_budget=64), append_and_attend, "cluster_step"),
        (KeyCodes(token_budget=128), append_and_attend_tokens, "code_step"),
        (PSA(threshold=0.8, microbatch=2), append_and_attend_progressively, "progressive_step"),
    ],
    ids=["quest", "keycodes", "psa"],
)
def test_cuda_graphs_replay_the_step_on_clusters(method, op, choice, monkeypatch):
    """Triton's kernels add in another order, so logits are compared, up to the first token that differs."""
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128, "hidden_size": 256}
    model = models.make_model("llama", dtype=torch.bfloat16, num_hidden_layers=3, initializer_range=0.05, **heads)
    ran, implementation = set(), op.dispatch.implementation

    def noted(impl, name=None):
        if name is None:
            ran.add(impl)
        return implementation(impl, name)

    monkeypatch.setattr(op.dispatch, "implementation", noted)
    options = {**padded((300, 290, 201)), **GREEDY, "return_dict_in_generate": True, "output_logits": True}
    outputs, stats = [], []
    for impl in ("cluster", "triton"):
        torch._dynamo.reset()  # a recorded step keeps its kernels
        ran.clear()
        with forced(**{choice: {"cluster": 8}}), use_impl(impl), sparse_attention(model, method):
            runs = [model.generate(**options) for _ in range(3)]  # the last one replays what the others have recorded
            stats.append(sparse_attention_stats(model))
        assert ran == {impl}
        assert not counters["graph_break"]
        assert counters["inductor"]["cudagraph_skips"] == 0
        assert torch.equal(runs[1].sequences, runs[2].sequences)
        outputs.append(runs[2])
    if op is append_and_attend_progressively:  # how much it reads follows from the weights, and these from rounding
        assert stats[0].decode_steps == stats[1].decode_steps
        assert 0 < stats[0].kv_bytes < stats[0].dense_bytes
    else:
        assert stats[0] == stats[1]
    tokens, expected = (output.sequences[:, -GREEDY["max_new_tokens"] :] for output in outputs)
    equal = int((tokens == expected).all(dim=0).cumprod(dim=0).sum())
    logits, exact = (torch.stack(output.logits[: equal + 1]).float() for output in outputs)
    assert len(logits) > 1  # prefill gives the first token
    # As far as dense attention in bfloat16 is from float32: test_contracts.py has this bound.
    assert (logits - exact).abs().max() < exact.abs().max() / 8


def check_cuda_graphs(model):
    """Assert that recorded steps give the tokens and stats of eager ones, and return the tokens."""
    inputs = padded((300, 290, 201))
    expected = model.generate(**inputs, **GREEDY, disable_compile=True)
    expected_stats = sparse_attention_stats(model)
    for _ in range(3):
        assert torch.equal(model.generate(**inputs, **GREEDY), expected)
        assert sparse_attention_stats(model) == expected_stats
    assert graphs() == 1
    assert not counters["graph_break"]
    assert counters["inductor"]["cudagraph_skips"] == 0
    return expected


def test_a_parked_cache_comes_back_without_another_compilation():
    model, ids, tokens = make_model("llama"), random_ids(1, 80), []
    for parks in (False, True):
        with sparse_attention(model, SMALL):
            cache = SparseCache.for_model(model, max_cache_len=128)
            first = model.generate(ids, past_key_values=cache, **compiled())
            compilations = graphs()
            if parks:
                cache.park()
            tokens.append(model.generate(first, past_key_values=cache, **compiled()))
            assert graphs() == compilations > 0
    assert torch.equal(tokens[0], tokens[1])
