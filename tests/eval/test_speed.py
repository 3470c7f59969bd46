"""The speed measurement on a tiny shape: the structure of its report, not its times."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import DynamicCache, PreTrainedModel, StaticCache
from typer.testing import CliRunner

from eval import speed, speed_check, speed_runs
from eval.cli import app
from eval.errors import EvalError
from eval.speed import SpeedConfig, measure, measure_model, save, speed_table
from eval.speed_runs import AHEAD, AHEAD_FUSED, DYNAMIC, FUSED, GRAPH, PREALLOCATED, STATIC, UNCOMPILED, WAYS, Work
from eval.speed_shapes import SHAPES, build_model
from hf_sparse_attn import SparseCache
from hf_sparse_attn.cli.models import load_model
from hf_sparse_attn.patch.answer import Answer
from hf_sparse_attn.patched import is_patched
from tests.graph_tape import use_tape
from tests.models import make_model
from tests.tiny import save_bloom, save_model, save_model_of

pytestmark = pytest.mark.usefixtures("quick_collections")

CONTEXT = 300
NEW_TOKENS = 4
SETTINGS: dict[str, Any] = {
    "shape": "tiny",
    "contexts": (CONTEXT,),
    "token_budget": (64,),
    "new_tokens": NEW_TOKENS,
    "repeats": 2,
    "dtype": "float32",
    "device": "cpu",
}
NO_GUARDS = torch.compiler.skip_guard_on_all_nn_modules_unsafe
SIDES = [DYNAMIC, PREALLOCATED, STATIC, "quest, 64"]


def config(**changes: Any) -> SpeedConfig:
    return SpeedConfig(**{**SETTINGS, **changes})


def tiny_model(seed: int = 0) -> PreTrainedModel:
    return build_model(SHAPES["tiny"], torch.float32, torch.device("cpu"), seed)


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    return measure(config(contexts=(CONTEXT, 2 * CONTEXT)))


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


class Feeds:
    """Record every forward pass of a model: tokens fed, tokens cached before, the cache's class, whether patched."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.seen: list[tuple[int, int, type, bool]] = []
        self.position_ids: list[list[int] | None] = []
        self.model = model
        model.register_forward_pre_hook(self._note, with_kwargs=True)

    def _note(self, module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        cache = kwargs["past_key_values"]
        fed = kwargs["input_ids"].shape[1]
        self.seen.append((fed, int(cache.get_seq_length()), type(cache), is_patched(self.model)))
        positions = kwargs.get("position_ids")
        self.position_ids.append(None if positions is None else positions.flatten().tolist())


def test_each_round_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A measurement that is ended early leaves the rounds before, in a file that is whole."""
    kept: list[dict[str, Any]] = []
    whole = measure(config(), keep=kept.append)["results"]
    assert [[entry["rounds"] for entry in each["results"]] for each in kept] == [[1], [2]]
    assert kept[-1]["results"] == whole

    generate, calls = speed.generate, iter(range(len(SIDES) * 2))  # the warm-up and one round

    def ended(*arguments: Any) -> Any:
        if next(calls, None) is None:
            raise EvalError("ended")
        return generate(*arguments)

    monkeypatch.setattr(speed, "generate", ended)
    path = tmp_path / "speed.json"
    words = ["--shape", "tiny", "--context", str(CONTEXT), "--token-budget", "64", "--new-tokens", str(NEW_TOKENS)]
    result = CliRunner().invoke(app, ["speed", *words, "--repeats", "2", "--device", "cpu", "--out", str(path)])
    assert result.exit_code == 2, result.output
    (entry,) = json.loads(path.read_text())["results"]
    assert entry["rounds"] == 1
    assert [side["name"] for side in entry["sides"]] == SIDES


def test_the_report_is_complete_and_json(report: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "new" / "speed.json"
    save(report, path)
    assert json.loads(path.read_text(encoding="utf-8")) == report
    assert {"device", "torch", "transformers", "python", "date"} <= set(report["machine"])
    assert report["settings"]["contexts"] == [CONTEXT, 2 * CONTEXT]
    assert report["settings"]["dtype"] == "float32"
    assert report["settings"]["model"] is None
    assert report["ttft_covers"] == "one token: the context is cached"
    assert [result["context"] for result in report["results"]] == [CONTEXT, 2 * CONTEXT]
    for result in report["results"]:
        assert [side["name"] for side in result["sides"]] == SIDES
        assert [side["method"] for side in result["sides"]] == ["full", "full", "full", "quest"]
        assert [side["token_budget"] for side in result["sides"]] == [None, None, None, 64]
        for side in result["sides"]:
            assert len(side["ttft_ms"]["all"]) == SETTINGS["repeats"]
            assert side["peak_memory_bytes"] > 0
            assert not side["compiled"]  # generate() does not compile on a CPU
            assert side["compile_seconds"] is side["memory_ratio"] is None


def test_reads_are_dense_attention_s_or_less(report: dict[str, Any]) -> None:
    for result in report["results"]:
        *dense, patched = result["sides"]
        for side in dense:
            assert side["kv_fraction"] == 1.0
            assert side["realised_budget"] == result["context"] + (NEW_TOKENS + 1) / 2
            assert side["ratio"] is None
        assert patched["kv_fraction"] < 1
        assert 48 <= patched["realised_budget"] <= 64  # four pages, the last one not always full
        assert patched["hyperparameters"]["page_size"] == 16


def test_quartiles_are_ordered_and_ratios_are_quotients_of_medians(report: dict[str, Any]) -> None:
    for result in report["results"]:
        sides = {side["name"]: side for side in result["sides"]}
        for side in sides.values():
            for quantity in ("ttft_ms", "tpot_ms"):
                assert 0 < side[quantity]["q1"] <= side[quantity]["median"] <= side[quantity]["q3"]
        ratio = sides["quest, 64"]["ratio"]
        for quantity in ("ttft", "tpot"):
            medians = {name: side[f"{quantity}_ms"]["median"] for name, side in sides.items()}
            assert medians[ratio[f"{quantity}_against"]] == min(medians[name] for name in SIDES[:3])
            assert ratio[quantity] == min(medians[name] for name in SIDES[:3]) / medians["quest, 64"]


def test_a_median_of_one_run_is_that_run() -> None:
    side = measure(config(repeats=1, method=()))["results"][0]["sides"][0]
    [only] = side["ttft_ms"]["all"]
    assert side["ttft_ms"] == {"median": only, "q1": only, "q3": only, "all": [only]}


def test_a_shape_decodes_from_the_cached_context_every_time() -> None:
    model = tiny_model()
    feeds = Feeds(model)
    measure_model(model, config())
    assert {fed for fed, *_ in feeds.seen} == {1}
    # warm-up and two rounds of four sides, and the check with a budget for everything
    assert len(feeds.seen) == (3 * 4 + 1) * NEW_TOKENS
    for start in range(0, len(feeds.seen), NEW_TOKENS):
        run = range(CONTEXT, CONTEXT + NEW_TOKENS)
        assert [cached for _, cached, _, _ in feeds.seen[start : start + NEW_TOKENS]] == list(run)
        positions = feeds.position_ids[start : start + NEW_TOKENS]
        assert positions == [[position] for position in run]


def test_rounds_are_interleaved_and_do_not_always_begin_with_the_same_side() -> None:
    model = tiny_model()
    feeds = Feeds(model)
    measure_model(model, config())
    kinds = {
        (DynamicCache, False): DYNAMIC,
        (SparseCache, False): PREALLOCATED,
        (StaticCache, False): STATIC,
        (SparseCache, True): "quest, 64",
    }
    runs = [kinds[kind, patched] for _, _, kind, patched in feeds.seen[::NEW_TOKENS]]
    assert runs == [*SIDES, "quest, 64", *SIDES, *SIDES[1:], SIDES[0]]


def test_a_model_prefills_the_context(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    feeds = []
    load = load_model

    def spied(*args: Any) -> Any:
        model, tokenizer = load(*args)
        feeds.append(Feeds(model))
        return model, tokenizer

    monkeypatch.setattr("hf_sparse_attn.cli.models.load_model", spied)
    report = measure(config(shape=None, model=str(tiny_folder), parameters={"dense_layers": 1}))
    assert report["ttft_covers"] == "the prefill of the context and one token"
    fed = [(fed, cached) for fed, cached, _, _ in feeds[0].seen]
    decoded = [(1, CONTEXT + step) for step in range(NEW_TOKENS - 1)]
    assert fed == [(CONTEXT, 0), *decoded] * 13
    assert [side["name"] for side in report["results"][0]["sides"]] == SIDES
    assert report["results"][0]["sides"][0]["realised_budget"] == CONTEXT + NEW_TOKENS / 2


def test_random_prompts_leave_special_tokens_out() -> None:
    ids = speed_runs.random_ids(tiny_model(), (2, 250), special_ids=range(90), seed=0)
    assert set(ids.flatten().tolist()) == set(range(90, 97))


def test_the_model_is_left_unpatched() -> None:
    model = tiny_model()
    before = model.config._attn_implementation
    measure_model(model, config())
    assert not is_patched(model)
    assert model.config._attn_implementation == before == "sdpa"


def test_all_sides_give_dense_tokens_if_the_budget_covers_everything() -> None:
    model, settings = tiny_model(), config(new_tokens=8)
    [method] = config(token_budget=(1024,)).methods()
    work = Work.start(model, settings, CONTEXT, ())
    sides = work.sides([method])
    tokens = [speed.generate(model, side, work, 8).token_ids for side in sides + sides]
    assert tokens == [tokens[0]] * 8


def test_the_fillings_of_all_caches_are_the_same() -> None:
    work = Work.start(tiny_model(), config(), CONTEXT, ())
    dynamic, growing, static = work.new_dynamic_cache(), work.new_growing_cache(), work.new_static_cache()
    assert int(static.get_seq_length()) == growing.get_seq_length() == dynamic.get_seq_length() == CONTEXT
    patched = work.new_cache("quest")
    for theirs, *ours in zip(dynamic.layers, growing.sparse_layers, static.layers, patched.sparse_layers, strict=True):
        for layer in ours:
            assert torch.equal(layer.keys[:, :, :CONTEXT], theirs.keys)
            assert torch.equal(layer.values[:, :, :CONTEXT], theirs.values)
        assert not torch.equal(theirs.keys, theirs.values)
    assert static.layers[0].keys.shape[2] == work.capacity == static.layers[0].max_cache_len
    assert not static.layers[0].keys[:, :, CONTEXT:].any()  # read, under a mask


def test_only_copies_take_memory() -> None:
    work = Work.start(tiny_model(), config(), CONTEXT, ())
    assert work.filled is not None
    buffers = {layer.keys.data_ptr() for layer in work.filled.sparse_layers}
    for side in work.sides(config().methods()):
        shares = {layer.keys.data_ptr() for layer in side.make_cache().layers} <= buffers
        assert shares is not side.copies_cache


def test_on_cuda_the_patched_side_is_static_and_runs_in_every_way(monkeypatch: pytest.MonkeyPatch) -> None:
    tapes = use_tape(monkeypatch)
    monkeypatch.setattr(speed_runs, "is_cuda", lambda model: True)
    monkeypatch.setattr(speed, "is_cuda", lambda model: True)
    monkeypatch.setattr(Answer, "fuse_steps", lambda answer: None)  # a CPU compiles no steps
    model = tiny_model()
    seen, generate = [], model.generate

    def spied(*args: Any, **kwargs: Any) -> Any:
        custom = kwargs["custom_generate"]
        way = None if custom is None else (custom.cuda_graph, custom.fuse)
        seen.append((kwargs["past_key_values"].is_compileable, kwargs["disable_compile"], way))
        return generate(*args, **kwargs)

    monkeypatch.setattr(model, "generate", spied)
    calls: list[tuple[str, int, int]] = []
    [result] = measure_model(model, config(), lambda *call: calls.append(call))["results"]
    ways = ("quest, 64" + way for way in (AHEAD, AHEAD_FUSED, GRAPH, FUSED, UNCOMPILED))
    ahead, ahead_fused, graph, fused, uncompiled = ways
    assert [side["name"] for side in result["sides"]] == [*SIDES, ahead, ahead_fused, graph, fused, uncompiled]
    assert [side["compiled"] for side in result["sides"]] == [False, False, *[True] * 4, *[False] * 3]
    compiled = {side["name"] for side in result["sides"] if side["compile_seconds"] is not None}
    assert compiled == {STATIC, "quest, 64", ahead, ahead_fused}
    assert all(side["memory_ratio"] > 0 for side in result["sides"])
    assert [side["tokens_in_common"] for side in result["sides"]] == [None] * 3 + [NEW_TOKENS] * 5 + [None]
    dynamic, growing, static, patched, run_ahead, ahead_and_fused, as_graph, as_fused, eager, check = seen[:10]
    assert static == patched == (True, False, None)
    assert run_ahead == (True, False, (False, False))
    assert ahead_and_fused == (True, False, (False, True))
    assert as_graph == (True, True, (True, False))
    assert as_fused == (True, True, (True, True))
    assert growing == (False, True, None)
    assert eager == check == (True, True, None)
    assert tapes
    assert dynamic[1]
    assert [done for _, done, _ in calls] == list(range(calls[0][2]))


def test_methods_run_in_the_ways_that_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed_runs, "is_cuda", lambda model: True)
    work = Work.start(tiny_model(), config(), CONTEXT, ())
    methods = config(method=("quest", "keycodes"), token_budget=(128, 256)).methods()
    names = [f"{method}, {budget}" for method in ("quest", "keycodes") for budget in (128, 256)]
    found = [side.name for side in work.sides(methods, ("fused", "compiled"))]
    assert found == SIDES[:3] + [name + way for name in names for way in ("", FUSED)]
    assert [side.way for side in work.sides(methods[:1])[3:]] == list(WAYS)


def test_steps_over_sliding_windows_are_neither_compiled_nor_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed_runs, "is_cuda", lambda model: True)
    model = make_model("qwen2", use_sliding_window=True, sliding_window=24, max_window_layers=1)
    work = Work.start(model, config(), CONTEXT, ())
    assert [side.way for side in work.sides(config().methods())[3:]] == ["uncompiled", "ahead"]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, None),
        ({"compile_options": {"max_autotune": True}}, {"triton.cudagraphs": True, "max_autotune": True}),
        ({"module_guards": False}, {"triton.cudagraphs": True, "guard_filter_fn": NO_GUARDS}),
    ],
)
def test_compiled_sides_are_compiled_as_asked_for(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], expected: dict[str, Any] | None
) -> None:
    use_tape(monkeypatch)
    monkeypatch.setattr(speed_runs, "is_cuda", lambda model: True)
    monkeypatch.setattr(speed, "is_cuda", lambda model: True)
    model = tiny_model()
    seen, generate = [], model.generate

    def spied(*args: Any, **kwargs: Any) -> Any:
        seen.append((kwargs["disable_compile"], kwargs.pop("compile_config", None)))
        return generate(*args, **kwargs)

    monkeypatch.setattr(model, "generate", spied)
    report = measure_model(model, config(ways=("compiled", "graph"), repeats=1, **changes), lambda *call: None)
    assert {config is not None for disabled, config in seen if disabled} == {False}
    found = [config and config.options for disabled, config in seen if not disabled]
    assert found
    assert all(options == expected for options in found)
    console = Console(width=300)
    with console.capture() as capture:
        console.print(speed_table(json.loads(json.dumps(report))))
    said = " ".join(capture.get().split())
    assert ("Compiled with max_autotune=True." in said) is ("compile_options" in changes)
    assert ("Compiled without guards on the model's modules." in said) is ("module_guards" in changes)


def test_ways_that_a_device_lacks_are_an_error_before_any_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "generate", lambda *args: pytest.fail("a run"))
    with pytest.raises(EvalError, match=r"ways=\['compiled', 'ahead'\] leaves no side of quest; possible here: uncom"):
        measure(config(ways=("compiled", "ahead")))


@pytest.mark.parametrize("step", [0, 2])
def test_other_tokens_under_a_covering_budget_are_an_error(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    generate_with_another_token(monkeypatch, step)
    with pytest.raises(EvalError, match=r"quest, \d+, context=300: with a budget for everything"):
        measure(config())


def test_another_token_that_ties_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    generate_with_another_token(monkeypatch, 2)
    model = tiny_model()
    with torch.no_grad():
        model.lm_head.weight[:] = model.lm_head.weight[:1]  # every token is as good as every other
    measure_model(model, config())


def generate_with_another_token(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    generate = speed.generate

    def wrong(model: Any, side: Any, work: Any, new_tokens: int) -> Any:
        run = generate(model, side, work, new_tokens)
        if side.method is not None and side.method.covers(CONTEXT):
            for row in run.token_ids:
                row[step] = (row[step] + 1) % SHAPES["tiny"].vocab_size
        return run

    monkeypatch.setattr(speed_check, "generate", wrong)
    monkeypatch.setattr(speed, "generate", wrong)


def test_a_patched_run_that_reads_everything_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_sparse_attn.methods.Quest.covers", lambda self, length: length != CONTEXT)
    with pytest.raises(EvalError, match="quest, 64, context=300: the patched run read as much as dense attention"):
        measure(config())


@pytest.mark.parametrize("parameters", [{}, {"k": 40, "n_init": 8, "n_local": 16}], ids=["budget", "k"])
def test_a_method_that_caches_keys_before_rope_is_measured_too(parameters: dict[str, int]) -> None:
    settings = config(method=("quest", "tokenselect"), token_budget=() if parameters else (64,), parameters=parameters)
    [result] = measure(settings)["results"]
    _, ours = result["sides"][3:]
    assert (ours["method"], ours["token_budget"], ours["realised_budget"]) == ("tokenselect", 64, 64)
    assert ours["kv_fraction"] < 1
    assert ours["ratio"]["tpot"] > 0
    rotated = "dense attention, the cached keys rotated to their positions"
    assert [(each["method"], each["against"]) for each in result["checked"]] == [
        ("quest", "dense attention"),
        ("tokenselect", rotated),
    ]
    assert {each["tokens"] for each in result["checked"]} == {NEW_TOKENS}
    assert result["checked"][1]["token_budget"] == CONTEXT + NEW_TOKENS + 1


def test_a_method_that_finds_its_own_budget_is_checked_without_its_threshold() -> None:
    parameters = {"block_size": 8, "microbatch": 2, "threshold": 0.9}
    [result] = measure(config(method=("psa",), token_budget=(), parameters=parameters))["results"]
    ours = result["sides"][-1]
    assert (ours["method"], ours["token_budget"]) == ("psa", None)
    assert 0 < ours["kv_fraction"] < 1
    [checked] = result["checked"]
    assert (checked["method"], checked["against"], checked["tokens"]) == ("psa", "dense attention", NEW_TOKENS)


def test_a_method_that_can_do_without_queries_is_measured_over_a_filled_cache() -> None:
    [result] = measure(config(method=("keycodes",), token_budget=(64,), parameters={"page_size": 16}))["results"]
    ours = result["sides"][-1]
    assert (ours["method"], ours["token_budget"], ours["realised_budget"]) == ("keycodes", 64, 64)
    assert 0 < ours["kv_fraction"] < 1
    [checked] = result["checked"]
    assert (checked["method"], checked["against"], checked["tokens"]) == ("keycodes", "dense attention", NEW_TOKENS)


def test_keys_before_rope_are_the_filled_ones_without_a_copy() -> None:
    work = Work.start(tiny_model(), config(), CONTEXT, ())
    assert work.filled is not None
    [method] = config(method=("tokenselect",)).methods()
    ours, rotated = work.new_cache(method), work.new_rotated_cache()
    for filled, layer, dense in zip(work.filled.sparse_layers, ours.sparse_layers, rotated.sparse_layers, strict=True):
        assert layer.keys.data_ptr() == filled.keys.data_ptr()
        assert layer.method == method
        first, last = (dense.keys[:, :, token] for token in (0, CONTEXT - 1))
        assert torch.equal(first, filled.keys[:, :, 0])  # position 0
        assert not torch.allclose(last, filled.keys[:, :, CONTEXT - 1])
        torch.testing.assert_close(last.norm(dim=-1), filled.keys[:, :, CONTEXT - 1].norm(dim=-1))
    assert work.filled.method.name == "full"


def test_other_tokens_than_with_rotated_keys_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    generate_with_another_token(monkeypatch, 1)
    with pytest.raises(EvalError, match=r"tokenselect, 305, context=300: with a budget for everything .* rotated to"):
        measure(config(method=("tokenselect",)))


def test_a_budget_for_everything_is_within_the_model_s_positions(tiny_folder: Path) -> None:
    model, _ = load_model(str(tiny_folder), torch.float32, torch.device("cpu"))
    limit = model.config.max_position_embeddings
    settings = config(shape=None, model=str(tiny_folder), contexts=(limit - 8,), method=("tokenselect",))
    assert speed.name_of(settings.model) == tiny_folder.name  # and nothing of the machine's folders
    assert speed.name_of("someone/a-model") == "someone/a-model"
    work = Work.start(model, settings, limit - 8, ())
    assert speed_check.covering(settings.methods()[0], work, 8).token_budget == min(work.capacity, limit)
    [result] = measure_model(model, config(shape=None, model=str(tiny_folder), method=("tokenselect",)))["results"]
    assert result["checked"][0]["against"] == "dense attention"


def test_a_run_that_ends_early_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    generate = model.generate

    def one_fewer(*args: Any, **kwargs: Any) -> Any:
        return generate(*args, **{**kwargs, "max_new_tokens": NEW_TOKENS - 1, "min_new_tokens": NEW_TOKENS - 1})

    monkeypatch.setattr(model, "generate", one_fewer)
    with pytest.raises(EvalError, match=r"dense, DynamicCache, context=300: generate\(\) returned 3 tokens in 3 parts"):
        measure_model(model, config())


def test_weights_and_prompts_are_seeded_and_leave_the_random_state_alone() -> None:
    state = torch.random.get_rng_state()
    first, second, other = tiny_model(1), tiny_model(1), tiny_model(2)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.equal(first.lm_head.weight, second.lm_head.weight)
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)
    one, two = (Work.start(first, config(seed=seed), CONTEXT, ()) for seed in (1, 2))
    assert one.input_ids.shape == (1, CONTEXT + 1)
    assert not torch.equal(one.input_ids, two.input_ids)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_built_model_is_as_asked_for_and_finite(dtype: torch.dtype) -> None:
    model = build_model(SHAPES["tiny"], dtype, torch.device("cpu"))
    assert not model.training
    assert model.dtype == dtype
    assert model.config._attn_implementation == "sdpa"
    assert model.generation_config.eos_token_id is None
    with torch.inference_mode():
        assert model(torch.arange(90)[None]).logits.isfinite().all()


# Parameters as the publishers count them.
@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("llama-2-7b", 6_738_415_616),
        ("llama-3.1-8b", 8_030_261_248),
        ("qwen2.5-7b", 7_615_616_512),
        ("mistral-7b", 7_248_023_552),
        ("smollm2-135m", 134_515_008),
    ],
)
def test_shapes_are_the_published_ones(name: str, parameters: int) -> None:
    model = build_model(SHAPES[name], torch.bfloat16, torch.device("meta"))
    assert model.num_parameters() == parameters
    assert len(SparseCache(model.config).sparse_layers) == SHAPES[name].num_hidden_layers


def test_progress_counts_every_run() -> None:
    calls: list[tuple[str, int, int]] = []
    measure(config(contexts=(CONTEXT, 350)), lambda *call: calls.append(call))
    assert [done for _, done, _ in calls] == list(range(len(calls)))
    assert {total for *_, total in calls} == {len(calls)}
    assert calls[0][0] == "300 tokens, warm-up: dense, DynamicCache"


def test_the_table_shows_every_side(report: dict[str, Any]) -> None:
    console = Console(width=200)
    with console.capture() as capture:
        console.print(speed_table(report))
    text = capture.get()
    assert text.count("quest, 64") == text.count(DYNAMIC) == 2
    assert "tiny (float32" in text
    assert "TTFT covers one token: the context is cached" in " ".join(text.split())
    side = report["results"][0]["sides"][3]
    tpot = side["tpot_ms"]
    assert f"{tpot['median']:.2f} ({tpot['q1']:.2f}-{tpot['q3']:.2f})" in text
    assert f"{side['ratio']['tpot']:.2f}x" in text
    assert "first run, s more" in " ".join(text.split())


def test_the_extra_time_of_the_first_run_is_that_over_the_median_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of compiled sides, of recorded and fused ones, and of those that prepare nothing; a faster first run is none."""
    use_tape(monkeypatch)
    monkeypatch.setattr(speed_runs, "is_cuda", lambda model: True)
    monkeypatch.setattr(Answer, "fuse_steps", lambda answer: None)  # a CPU compiles no steps
    generate, calls = speed.generate, dict[str, int]()
    first_seconds = {STATIC: 9.0, "quest, 64": 8.0, f"quest, 64{GRAPH}": 4.0, f"quest, 64{FUSED}": 7.0, DYNAMIC: 1.0}

    def timed(model: Any, side: Any, work: Any, new_tokens: int) -> Any:
        calls[side.name] = calls.get(side.name, 0) + 1
        seconds = first_seconds.get(side.name, 2.0) if calls[side.name] == 1 else (2.0, 5.0, 2.0)[calls[side.name] - 2]
        return replace(generate(model, side, work, new_tokens), seconds=seconds)

    monkeypatch.setattr(speed, "generate", timed)
    [result] = measure_model(tiny_model(), config(repeats=3))["results"]
    extra = {side["name"]: side["first_run_extra_seconds"] for side in result["sides"]}
    assert {name: seconds for name, seconds in extra.items() if seconds} == {
        STATIC: 7.0,
        "quest, 64": 6.0,
        f"quest, 64{GRAPH}": 2.0,
        f"quest, 64{FUSED}": 5.0,
    }
    for side in result["sides"]:
        assert side["compile_seconds"] == (extra[side["name"]] if side["compiled"] else None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shape": "llama-9"}, r"shape='llama-9' is unknown; known: llama-2-7b, llama-3.1-8b"),
        ({"shape": None}, "exactly one of the two"),
        ({"model": "smollm2"}, "exactly one of the two"),
        ({"contexts": ()}, "contexts is empty"),
        ({"contexts": (0,)}, "contexts=0 is not allowed: a whole number, at least 1"),
        ({"contexts": (300, 300)}, "duplicate entries"),
        ({"contexts": (True,)}, "contexts=True"),
        ({"new_tokens": 1}, "new_tokens=1 is not allowed: a whole number, at least 2"),
        ({"repeats": 0}, "repeats=0"),
        ({"warmup": 0}, "warmup=0"),
        ({"dtype": "int8"}, "dtype='int8' is unknown; known: float32"),
        (
            {"ways": ("ahead", "eager")},
            "ways='eager' is unknown; known: compiled, ahead, ahead-fused, graph, fused, uncompiled",
        ),
        ({"ways": ()}, "ways is empty; known: compiled"),
        ({"compile_options": {"tune": True}}, "compile_options: 'tune' is unknown; known are those of torch._inductor"),
        ({"compile_options": {"max_autotune": 1}}, "compile_options: max_autotune=1 is not allowed: bool, got int"),
        ({"method": ("qest",)}, "unknown method 'qest' .did you mean 'quest'"),
        ({"token_budget": (8,)}, "token_budget"),
        ({"parameters": {"pages": 1}}, "parameter 'pages'"),
        ({"method": ("h2o",)}, "'h2o' is not allowed with a shape.*attention weights"),
        ({"method": ("infllm",)}, "'infllm' is not allowed with a shape.*needs the queries of all tokens"),
        ({"method": ("ntk",)}, "'ntk' is not allowed with a shape.*rotates keys in its own way"),
        ({"method": ("streaming_llm",)}, "'streaming_llm' is not allowed with a shape.*evicts tokens"),
        ({"method": ("squeezed",)}, "'squeezed' is not allowed with a shape.*needs the prompt's queries"),
    ],
)
def test_invalid_settings_are_reported_before_any_work(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(EvalError, match=message):
        config(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"device": "tpux"}, "device='tpux' is not a device"),
        ({"shape": None, "model": "./not-here"}, "'./not-here'"),
        ({"contexts": (1 << 20,)}, r"contexts=\[1048576\] with new_tokens=4 needs 1048580 positions"),
        ({"parameters": {"dense_layers": 4}}, "method='quest': dense_layers must leave at least one layer"),
    ],
)
def test_limits_of_model_and_machine_are_errors(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(EvalError, match=message):
        measure(config(**changes))


def test_a_model_that_cannot_be_patched_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(EvalError, match=r"method='quest': BloomForCausalLM .* is not supported: .*; supported: llama"):
        measure(config(shape=None, model=str(save_bloom(tmp_path))))


def test_the_bytes_of_a_model_whose_configuration_has_no_kv_heads(tmp_path: Path) -> None:
    settings = {"num_attention_heads": 2, "num_hidden_layers": 3, "intermediate_size": 32}
    model, _ = load_model(str(save_model_of("gpt_neox", tmp_path, **settings)), torch.float32, torch.device("cpu"))
    work = Work.start(model, config(shape=None, model=str(tmp_path)), CONTEXT, ())
    weights = sum(each.numel() for each in model.parameters())
    assert work.weights_and_kv_bytes == 4 * (weights + 2 * CONTEXT * 3 * 32)


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without CUDA")
def test_missing_cuda_is_an_error() -> None:
    with pytest.raises(EvalError, match="device='cuda' asks for CUDA"):
        measure(config(device="cuda"))


def test_a_file_that_cannot_be_written_is_an_error(report: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EvalError, match="cannot be written"):
        save(report, tmp_path / "file" / "speed.json")


COMMANDS = {
    "speed": ("--shape", "tiny", "--context", "200"),
    "throughput": ("--shape", "tiny", "--context", "200"),
    "lossless": ("--shape", "tiny", "--context", "200"),
    "host-profile": ("--shape", "tiny", "--context", "200"),
    "context-speed": ("--shape", "tiny", "--context", "200"),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_file_that_could_not_be_written_is_refused_before_any_work(
    command: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("eval.speed_shapes.build_model", None)
    (tmp_path / "file").write_text("")
    for out, said in ((tmp_path, "is a directory"), (tmp_path / "file" / "new" / "a.json", "is no directory")):
        result = CliRunner().invoke(app, [command, *COMMANDS[command], "--out", str(out)])
        assert result.exit_code == 2
        (error,) = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
        assert f"out={str(out)!r}" in error
        assert said in error


@pytest.mark.parametrize(
    ("options", "said"), [(("--dtype", "int8"), "dtype='int8' is unknown"), (("--context", "50"), "context=50")]
)
def test_a_context_that_is_not_timed_is_one_line(options: tuple[str, ...], said: str) -> None:
    result = CliRunner().invoke(app, ["context-speed", *COMMANDS["context-speed"], *options])
    assert result.exit_code == 2
    assert said in result.stderr


@pytest.mark.gpu
def test_on_cuda() -> None:
    report = measure(config(shape="smollm2-135m", contexts=(2048,), dtype="bfloat16", device="cuda"))
    dense, _, static, patched, _, recorded, fused, _ = report["results"][0]["sides"]
    assert static["compiled"]
    assert patched["compiled"]
    for side in (static, patched):
        assert side["first_run_extra_seconds"] == side["compile_seconds"] > 0
    assert recorded["compile_seconds"] is fused["compile_seconds"] is None
    assert fused["first_run_extra_seconds"] > 0  # norms and RoPE are compiled
    assert patched["kv_fraction"] < dense["kv_fraction"] == 1
    assert report["memory_measures"].startswith("CUDA, allocated")
