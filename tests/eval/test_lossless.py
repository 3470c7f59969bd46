"""The measurement of lossless decoding on tiny models: its comparisons, figures and tables, not its times."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel
from typer.testing import CliRunner

from eval import lossless, lossless_runs, speed_runs
from eval.cli import app
from eval.errors import EvalError
from eval.lossless import measure_lossless, measure_lossless_model
from eval.lossless_config import LosslessConfig
from eval.lossless_runs import LATE
from eval.lossless_table import HEAD, computed_lines, equal_tokens, lines, lossless_table
from eval.markdown import lossless_tables
from eval.speed_runs import DYNAMIC, FUSED, GRAPH, PREALLOCATED, STATIC, UNCOMPILED, Work
from eval.speed_shapes import SHAPES, build_model
from hf_sparse_attn import SelfSpeculation, sparse_attention
from hf_sparse_attn.cli.models import load_model
from hf_sparse_attn.patched import is_patched
from tests.compared import compile_config
from tests.graph_tape import use_tape

pytestmark = pytest.mark.usefixtures("quick_collections")

CONFIG = LosslessConfig(
    shape="tiny",
    contexts=(150,),
    method=("quest", "keycodes"),
    token_budget=(48,),
    draft_tokens=(3,),
    parameters={"page_size": 16},
    new_tokens=6,
    repeats=1,
    device="cpu",
)
SHORT = replace(CONFIG, method=("quest",), new_tokens=5)
NOTHING = "nothing to compare with: dense attention does not fit in memory"


def tiny_model(dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    return build_model(SHAPES["tiny"], dtype, torch.device("cpu"))


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    said: list[tuple[str, int, int]] = []
    kept: list[tuple[int, int, str]] = []
    config = replace(CONFIG, contexts=(150, 90), prompts=2)
    model = tiny_model()
    measured = measure_lossless_model(
        model,
        config,
        lambda *what: said.append(what),
        lambda so_far, context, side: kept.append((len(so_far["results"]), context, side["name"])),
    )
    # After each side, with what is known so far; the second prompt adds to the same entries.
    drafting = ["quest, 48, draft 3", "keycodes, 48, draft 3"]
    sides = [DYNAMIC, PREALLOCATED, STATIC, *drafting]
    assert kept == [(number, context, name) for number, context in ((1, 150), (2, 90)) for name in 2 * sides]
    assert not is_patched(model)
    assert [done for _, done, _ in said] == list(range(5 * 2 * 2 * 2))
    assert {total for _, _, total in said} == {len(said)}
    return dict(json.loads(json.dumps(measured)))


def test_a_report_has_every_side_with_dense_attention_s_tokens(report: dict[str, Any]) -> None:
    assert [entry["context"] for entry in report["results"]] == [150, 90]
    assert report["machine"]["versions"]["torch"] == torch.__version__
    for entry in report["results"]:
        drafting = ["quest, 48, draft 3", "keycodes, 48, draft 3"]
        assert [side["name"] for side in entry["sides"]] == [DYNAMIC, PREALLOCATED, STATIC, *drafting]
        for side in entry["sides"]:
            assert side["error"] is None
            assert [(each["prompt"], each["compared"], each["in_common"]) for each in side["tokens"]] == [
                (0, 6, 6),
                (1, 6, 6),
            ]
            assert {each["gap"] for each in side["tokens"]} == {None}
            assert side["graphs"] == {"first": 0, "timed": 0}


def test_random_weights_give_costs_and_no_acceptance(report: dict[str, Any]) -> None:
    for entry in report["results"]:
        dense = {
            side["name"]: side["ms_per_token"]["median"] for side in entry["sides"] if side["draft_tokens"] is None
        }
        assert entry["fastest_dense"] == min(dense, key=dense.__getitem__)
        for side in entry["sides"]:
            if side["draft_tokens"] is None:
                assert side["speed_up"] == min(dense.values()) / side["ms_per_token"]["median"]
                continue
            for name in ("ms_per_token", "speed_up", "acceptance_rate", "tokens_per_pass"):
                assert side[name] is None
            assert 0 < side["kv_fraction"] < 1
            parts = 3 * side["draft_step_ms"]["q1"] + side["verification_ms"]["q1"]
            assert parts <= side["round_ms"]["q3"] + 1e-6
            assert side["break_even_tokens"] == side["round_ms"]["median"] / min(dense.values())


@pytest.fixture(scope="module")
def real(model_dir: str, data_dir: Path) -> dict[str, Any]:
    """A report on given weights."""
    model, tokenizer = load_model(model_dir, torch.float64, "cpu")
    config = replace(SHORT, shape=None, model=model_dir, data_dir=data_dir)
    return measure_lossless_model(model, config, tokenizer=tokenizer)


def test_given_weights_are_timed_end_to_end(real: dict[str, Any]) -> None:
    (entry,) = real["results"]
    dense = [side["ms_per_token"]["median"] for side in entry["sides"] if side["draft_tokens"] is None]
    (side,) = (side for side in entry["sides"] if side["draft_tokens"] is not None)
    assert side["speed_up"] == min(dense) / side["ms_per_token"]["median"]
    assert 0 <= side["acceptance_rate"] <= 1
    assert 1 <= side["tokens_per_pass"] <= 4


def test_costs_and_acceptance_are_combined(report: dict[str, Any], real: dict[str, Any]) -> None:
    found = computed_lines({"random": report, "real": real})
    tokens = next(side["tokens_per_pass"] for side in real["results"][0]["sides"] if side["draft_tokens"] == 3)
    assert [line[:6] for line in found] == [
        ["random", context, "quest, 48, draft 3", "real", "150", f"{tokens:.2f}"] for context in ("150", "90")
    ]
    first = report["results"][0]
    side = next(side for side in first["sides"] if side["name"] == "quest, 48, draft 3")
    ms = side["round_ms"]["median"] / tokens
    assert found[0][6] == f"{ms:.2f}"
    dense = next(side for side in first["sides"] if side["name"] == first["fastest_dense"])
    assert found[0][7] == f"{dense['ms_per_token']['median'] / ms:.2f}"
    other = json.loads(json.dumps(real))
    for each in other["results"][0]["sides"]:
        each["hyperparameters"]["token_budget"] = 64
    assert computed_lines({"random": report, "real": other}) == []


def test_a_limit_leaves_out_the_last_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    generate, calls = lossless_runs.generate, []

    def noted(model: Any, side: Any, work: Any, new_tokens: int) -> Any:
        calls.append(side.name)
        return generate(model, side, work, new_tokens)

    monkeypatch.setattr(lossless_runs, "generate", noted)
    monkeypatch.setattr(lossless_runs.Clock, "is_late", property(lambda clock: len(calls) >= clock.limit_seconds))
    config = replace(SHORT, repeats=3, limit_seconds=14, contexts=(150, 90), draft_tokens=(3, 2))
    first, second = measure_lossless_model(tiny_model(), config)["results"]
    # The dense sides run four times each. The next one reaches the limit after its first timed run.
    assert calls == 4 * [DYNAMIC] + 4 * [PREALLOCATED] + 4 * [STATIC] + 2 * ["quest, 48, draft 3"]
    assert [side["error"] for side in first["sides"]] == [None, None, None, None, LATE]
    assert {side["error"] for side in second["sides"]} == {LATE}
    assert first["sides"][3]["break_even_tokens"] > 0


def test_acceptance_is_counted_over_all_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    generate, found = lossless_runs.generate, []

    def noted(*arguments: Any) -> Any:
        run = generate(*arguments)
        found.append(run)
        return run

    monkeypatch.setattr(lossless_runs, "generate", noted)
    config = replace(SHORT, shape=None, model="tiny", prompts=2, new_tokens=8)
    (entry,) = measure_lossless_model(tiny_model(), config)["results"]
    runs = [run for run in found if run.speculation is not None]
    assert len(runs) == 4
    timed = [runs[1], runs[3]]  # after the comparison of each prompt
    drafts = [run.speculation for run in timed]
    side = entry["sides"][3]
    assert side["acceptance_rate"] == sum(sum(each.accepted) for each in drafts) / sum(
        sum(each.drafted) for each in drafts
    )
    assert side["tokens_per_pass"] == 14 / sum(each.verifications for each in drafts)
    times = [sum(run.token_ms) for run in timed]
    assert side["ms_per_token"]["median"] == pytest.approx(median(time / 7 for time in times))
    rounds = [
        1e3 * (draft + verification)
        for each in drafts
        for drafted, draft, verification in zip(
            each.drafted, each.draft_seconds, each.verification_seconds, strict=True
        )
        if drafted == 3
    ]
    assert side["round_ms"]["median"] == pytest.approx(median(rounds))


def test_books_are_prefilled_once_for_all_sides(model_dir: str, data_dir: Path) -> None:
    model, tokenizer = load_model(model_dir, torch.float64, "cpu")
    config = replace(SHORT, shape=None, model=model_dir, data_dir=data_dir)
    found = measure_lossless_model(model, config, tokenizer=tokenizer)
    assert found["prompts"] == "beginnings of books: book"
    assert found["settings"]["data_dir"] == data_dir.name
    side = found["results"][0]["sides"][3]
    assert side["tokens"][0]["in_common"] == 5

    _, prompts = lossless_runs.make_prompts(model, config, tokenizer)
    assert prompts is not None
    ids = prompts[0]
    assert ids.tolist() == [tokenizer((data_dir / "book.txt").read_text())["input_ids"][:151]]
    greedy = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}
    expected = model.generate(ids, **greedy)[:, 151:].tolist()
    work = Work.prefill(model, ids, 5)
    (method,) = config.methods()
    speculation = SelfSpeculation(3)
    with sparse_attention(model, method):
        assert model.generate(ids, **greedy, custom_generate=speculation)[:, 151:].tolist() == expected
    for side_of_work in lossless_runs.make_sides(work, config, [method]):
        run = lossless_runs.generate(model, side_of_work, work, 5)
        assert run.token_ids == expected
        # The same drafts as after a prompt of its own: the first pass gives the first token.
        assert run.speculation in (None, speculation.stats)
        assert (run.speculation is None) == (side_of_work.method is None)


def test_compiled_sides_compile_in_their_first_run_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (lossless, lossless_runs, speed_runs):
        monkeypatch.setattr(module, "is_cuda", lambda model: True)
    tapes = use_tape(monkeypatch)
    model = build_model(replace(SHAPES["tiny"], num_hidden_layers=3), torch.float64, torch.device("cpu"))
    model.generation_config.compile_config = compile_config()
    config = replace(SHORT, draft_tokens=(2,), contexts=(150, 90))
    name = "quest, 48, draft 2"
    # A draft's step and a dense pass are compiled once for all contexts.
    first = ({STATIC: 1, name: 2}, {STATIC: 1, name: 0})
    said: list[tuple[str, int, int]] = []
    found = measure_lossless_model(model, config, lambda *what: said.append(what))["results"]
    assert {total for _, _, total in said} == {len(said)} == {2 * 7 * (1 + config.repeats)}
    for entry, graphs in zip(found, first, strict=True):
        ways = [name + FUSED, name + GRAPH, name]
        assert [side["name"] for side in entry["sides"]] == [DYNAMIC, PREALLOCATED, STATIC, *ways, name + UNCOMPILED]
        compiled = {side["name"]: side["graphs"] for side in entry["sides"] if side["compiled"]}
        assert compiled == {each: {"first": number, "timed": 0} for each, number in graphs.items()}
        assert {side["error"] for side in entry["sides"]} == {None}
        assert {each["in_common"] for side in entry["sides"] for each in side["tokens"]} == {5}
    assert not hasattr(model, "_compiled_call")
    assert tapes


def changed_at(place: int) -> Any:
    """Return a ``generate`` whose lossless sides have another token."""
    generate = lossless_runs.generate

    def wrong(model: Any, side: Any, work: Any, new_tokens: int) -> Any:
        run = generate(model, side, work, new_tokens)
        if side.method is not None:
            run.token_ids[0][place] = (run.token_ids[0][place] + 1) % SHAPES["tiny"].vocab_size
        return run

    return wrong


def test_other_tokens_are_an_error_in_float32(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(lossless_runs, "generate", changed_at(2))
    path = tmp_path / "it.json"
    words = ["--shape", "tiny", "--context", "150", "--method", "quest", "--token-budget", "48", "--draft-tokens", "3"]
    result = CliRunner().invoke(
        app, ["lossless", *words, "--new-tokens", "5", "--repeats", "1", "--device", "cpu", "--out", str(path)]
    )
    assert result.exit_code == 1, result.output
    sides = json.loads(path.read_text())["results"][0]["sides"]
    assert "150 tokens, quest, 48, draft 3: token 3 of prompt 1 is not dense attention's" in result.output
    assert [side["is_wrong"] for side in sides] == [False, False, False, True]
    assert sides[3]["error"].startswith("token 3 of prompt 1 is not dense attention's, whose logits of both are ")
    assert "ms_per_token" not in sides[3]
    (tokens,) = sides[3]["tokens"]
    assert (tokens["in_common"], tokens["is_tie"]) == (2, False)
    assert tokens["gap"] > 0


def test_other_tokens_are_reported_in_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lossless_runs, "generate", changed_at(1))
    (entry,) = measure_lossless_model(tiny_model(torch.bfloat16), SHORT)["results"]
    side = entry["sides"][3]
    assert side["error"] is None
    assert side["round_ms"]["median"] > 0
    (tokens,) = side["tokens"]
    assert tokens["in_common"] == 1
    assert tokens["is_tie"] == (tokens["roundings"] <= 4)


@pytest.mark.parametrize("failing", [DYNAMIC, "quest, 48, draft 3"])
@pytest.mark.parametrize("at_call", [1, 2])
def test_a_side_that_does_not_fit_in_memory_has_an_error_alone(
    monkeypatch: pytest.MonkeyPatch, failing: str, at_call: int
) -> None:
    generate, calls = lossless_runs.generate, []

    def scarce(model: Any, side: Any, work: Any, new_tokens: int) -> Any:
        calls.append(side.name)
        if side.name == failing and calls.count(failing) == at_call:
            raise torch.OutOfMemoryError("no")
        return generate(model, side, work, new_tokens)

    monkeypatch.setattr(lossless_runs, "generate", scarce)
    found = measure_lossless_model(tiny_model(), SHORT)
    (entry,) = found["results"]
    assert {side["name"]: side["error"] for side in entry["sides"] if side["error"]} == {failing: "out of memory"}
    assert entry["fastest_dense"] != failing
    assert calls.count(failing) == at_call
    assert [row[2] for row in lines(found)].count("out of memory") == 1
    assert {len(row) for row in lines(found)} == {len(HEAD)}


def test_contexts_and_dense_attention_that_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    generate, begin = lossless_runs.generate, Work.start

    def scarce(model: Any, side: Any, work: Any, new_tokens: int) -> Any:
        if side.method is None:
            raise torch.OutOfMemoryError("no")
        return generate(model, side, work, new_tokens)

    def scarcer(model: Any, config: Any, context: int, special_ids: Any) -> Any:
        if context == 150:
            raise torch.OutOfMemoryError("no")
        return begin(model, config, context, special_ids)

    monkeypatch.setattr(lossless_runs, "generate", scarce)
    monkeypatch.setattr(Work, "start", scarcer)
    found = measure_lossless_model(tiny_model(), replace(SHORT, contexts=(150, 90)))
    first, second = found["results"]
    assert (first["error"], first["sides"]) == ("out of memory", [])
    assert second["error"] is None
    assert second["sides"][-1]["error"] == NOTHING  # every dense side was tried before it
    assert second["fastest_dense"] is None
    assert [row[:3] for row in lines(found)][:2] == [["150", "out of memory", "-"], ["90", DYNAMIC, "out of memory"]]


def test_tables_show_every_side(report: dict[str, Any], real: dict[str, Any], tmp_path: Path) -> None:
    assert lossless_tables(tmp_path) == "No measurements of `python -m eval lossless` are in this checkout.\n"
    assert lossless_table(report).row_count == 10
    (tmp_path / "lossless").mkdir()
    path = tmp_path / "lossless/tiny-cpu.json"
    path.write_text(json.dumps(report))
    text = lossless_tables(tmp_path)
    assert text.startswith("### tiny-cpu, float64, ")
    assert (
        "`python -m eval lossless --shape tiny --context 150,90 --method quest,keycodes --token-budget 48 "
        "--draft-tokens 3 --parameter page_size=16 --new-tokens 6 --prompts 2 --repeats 1`"
    ) in text
    assert "2 x 1 runs (prompts x repeats) of 6 tokens" in text
    assert text.count("| 12 of 12 |") == 10
    side = report["results"][0]["sides"][3]
    assert f"| 150 | quest, 48, draft 3 | - | - | - | - | {side['draft_step_ms']['median']:.2f} | " in text
    assert "Weights are random: times are measured, acceptance is not." in text
    assert "Computed" not in text
    (tmp_path / "lossless/real.json").write_text(json.dumps(real))
    assert "### Computed: measured costs of random weights, measured tokens per pass of real ones" in lossless_tables(
        tmp_path
    )
    (tmp_path / "lossless/real.json").unlink()
    settings = report["settings"] | {"shape": None, "model": "a/folder/it.gguf", "data_dir": "books"}
    path.write_text(json.dumps(report | {"settings": settings}))
    assert "lossless --model it.gguf " in lossless_tables(tmp_path)
    assert " --data-dir D`" in lossless_tables(tmp_path)
    path.write_text("{}")
    with pytest.raises(EvalError, match=r"tiny-cpu\.json is not a report of `python -m eval lossless`"):
        lossless_tables(tmp_path)


def test_differences_are_counted_as_ties_or_others() -> None:
    def tokens(in_common: int, is_tie: bool | None) -> dict[str, Any]:
        return {"compared": 8, "in_common": in_common, "is_tie": is_tie}

    assert equal_tokens([tokens(8, None)]) == "8 of 8"
    assert equal_tokens([tokens(8, None), tokens(3, True)]) == "11 of 16 (1 tie)"
    assert equal_tokens([tokens(2, True), tokens(3, True), tokens(0, False)]) == "5 of 24 (2 ties, 1 other)"
    assert equal_tokens([tokens(2, False)]) == "2 of 8 (1 other)"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"draft_tokens": ()}, "draft_tokens is empty"),
        ({"draft_tokens": (4, 4)}, r"draft_tokens=\[4, 4\] has duplicate entries"),
        ({"draft_tokens": (0,)}, "draft_tokens=0 is not allowed: a whole number, at least 1"),
        ({"new_tokens": 2}, "new_tokens=2 is not allowed: a whole number, at least 3"),
        ({"prompts": 0}, "prompts=0 is not allowed"),
        ({"limit_seconds": 0.0}, "limit_seconds=0.0 is not allowed: a finite number above 0"),
        ({"limit_seconds": math.nan}, "limit_seconds=nan is not allowed: a finite number above 0"),
        ({"contexts": ()}, "contexts is empty"),
        ({"data_dir": Path("books")}, "data_dir='books' is not allowed with a shape, which has no tokenizer"),
        ({"method": ("full",), "parameters": {}}, "method='full' has no method that drafts"),
        ({"method": ("tokenselect",), "parameters": {}}, "'tokenselect' does not support self-speculation: its passes"),
        ({"shape": "none"}, "shape='none' is unknown"),
    ],
)
def test_bad_settings(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(EvalError, match=message):
        replace(CONFIG, **changes)


def test_settings_that_do_not_suit_the_model(model_dir: str, data_dir: Path) -> None:
    config = replace(SHORT, shape=None, model=model_dir, data_dir=data_dir)
    with pytest.raises(EvalError, match=r"prompts=2 with contexts=.150. needs as many books of 151 tokens; .* has 1"):
        measure_lossless(replace(config, prompts=2))
    with pytest.raises(EvalError, match="data_dir='books' is not a folder"):
        measure_lossless(replace(config, model="a model that is not there", data_dir=Path("books")))
    with pytest.raises(EvalError, match="needs 1029 positions; the model has 1024"):
        measure_lossless(replace(config, contexts=(1024,)))
