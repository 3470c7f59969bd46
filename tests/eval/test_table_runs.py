"""The runs of a paper's table: on other models, at other lengths and budgets, and without what cannot run."""

from __future__ import annotations

from typing import Any

import pytest

from eval.config import RunConfig, read_sweep
from eval.errors import EvalError
from eval.table_runs import TableRun, row_of, stand_ins, table_runs
from eval.tables import read_table

MODEL = "example/model-1b"


def runs_of(name: str, **given: Any) -> list[TableRun]:
    return table_runs(read_sweep(read_table(name).path, {}), given)


def one_run(given: dict[str, Any] | None = None, **settings: Any) -> TableRun:
    (run,) = table_runs([RunConfig(**{"benchmark": "passkey", "model": MODEL, **settings})], given or {})
    return run


@pytest.mark.parametrize(
    ("printed", "own", "expected"),
    [
        ([1, 2, 3], [1, 2, 3], {1: 1, 2: 2, 3: 3}),
        ([1, 2, 3], [2], {2: 2}),
        ([1, 2, 3], [7], {1: 7}),
        ([1, 2, 3], [2, 7], {2: 2}),
        ([1, 2], [7, 8, 9], {1: 7, 2: 8}),
        ([], [7], {}),
    ],
)
def test_equal_values_pair_and_without_any_all_in_order(printed: list[int], own: list[int], expected: Any) -> None:
    assert stand_ins(printed, own) == expected


def test_as_printed_every_row_stands_for_itself() -> None:
    for run in runs_of("tokenselect-2"):
        assert run.config == run.printed
        assert {row: own for row, own in run.rows.items() if row[1] is not None} == {
            row: row for row in map(row_of, run.variants[1:])
        }
        assert run.lengths == {length: length for length in run.config.lengths}
        assert run.refusals == ()


def test_another_model_takes_the_place_of_all_and_leaves_their_chat_templates() -> None:
    base, lwm, longchat = runs_of("squeezed-2", model="smollm2")
    assert {run.config.model for run in (base, lwm, longchat)} == {"smollm2"}
    assert {run.config.chat_template for run in (base, lwm, longchat)} == {None}
    assert lwm.printed.chat_template == "ruler:lwm-chat"
    assert [run.config.chat for run in (base, lwm, longchat)] == ["off", "on", "on"]
    assert lwm.config == longchat.config
    given = runs_of("squeezed-2", model="smollm2", chat_template="mine.jinja")
    assert {run.config.chat_template for run in given} == {"mine.jinja"}


def test_a_model_of_the_table_runs_alone_with_its_own_settings() -> None:
    (run,) = runs_of("squeezed-2", model="lmsys/longchat-7b-v1.5-32k")
    assert run.config == run.printed
    assert run.config.chat_template == "ruler:vicuna-chat"


def test_other_lengths_stand_for_the_shortest_if_none_is_the_papers() -> None:
    run = runs_of("tokenselect-2", model="smollm2", lengths=(2000, 3000))[0]
    assert run.config.lengths == (2000, 3000)
    assert run.lengths == {4096: 2000, 8192: 3000}
    assert runs_of("tokenselect-2", model="smollm2", lengths=(2000, 8192))[0].lengths == {8192: 8192}


def test_other_budgets_stand_for_the_papers_if_none_is_the_papers() -> None:
    def tova(*budgets: int) -> dict[int | None, int | None]:
        run = runs_of("quest-1", model="smollm2", token_budget=budgets)[0]
        assert {variant.token_budget for variant in run.variants} == {None, *budgets}
        return {row[1]: own[1] for row, own in run.rows.items() if row[0] == "tova" and row[1] is not None}

    assert tova(48, 96) == {32: 48, 64: 96}
    assert tova(64, 96) == {64: 64}


def test_other_budgets_take_the_place_of_k_too_and_keep_the_names_of_the_rest() -> None:
    run = runs_of("tokenselect-2", model="smollm2", token_budget=(256,))[0]
    assert run.rows["tokenselect", 8320, "k=4096, n_local=4096"] == ("tokenselect", 256, "n_local=4096")
    assert run.rows["tokenselect", 2688, ""] == ("tokenselect", 256, "")
    assert run.rows["infllm", 2816, "n_local=512"] == ("infllm", 256, "n_local=512")
    assert len({row_of(variant) for variant in run.variants}) == len(run.variants)


def test_methods_without_a_budget_have_rows_without_one() -> None:
    run = one_run(method=("full", "quest"), parameters={"page_size": 32})
    assert run.rows["quest", None, ""] == run.rows["quest", 1024, ""] == ("quest", 1024, "")
    assert run.rows["full", None, ""] == ("full", None, "")
    several = one_run(method=("quest",), token_budget=(256, 512))
    assert ("quest", None, "") not in several.rows


def test_what_cannot_be_made_says_why_and_the_rest_runs() -> None:
    run = one_run(
        method=("full", "quest", "streaming_llm", "retrieval_attention"),
        token_budget=(64, 512),
        parameters={"streaming_llm.sink_tokens": 128, "retrieval_attention.k": 3, "page_size": 16},
        variants=({"method": "quest", "page_size": 0}, {"method": "quest", "page_size": 64, "token_budget": 256}),
    )
    assert [row_of(variant) for variant in run.variants] == [
        ("full", None, ""),
        ("quest", 64, ""),
        ("quest", 512, ""),
        ("streaming_llm", 512, ""),
        ("quest", 256, "page_size=64"),
    ]
    assert [(refusal.method, refusal.token_budget) for refusal in run.refusals] == [
        ("streaming_llm", 64),
        ("retrieval_attention", None),
        ("quest", None),
    ]
    for refusal, word in zip(run.refusals, ("sink_tokens", "not here yet", "page_size"), strict=True):
        assert word in refusal.reason
    assert run.config.method == ("full", "quest", "streaming_llm")


def test_tasks_are_some_of_the_tables_in_its_order() -> None:
    (run,) = runs_of("tokenselect-4", tasks=("passkey", "longbook_qa_eng"))
    assert run.config.tasks == ("longbook_qa_eng", "passkey")
    for tasks in (("vt",), ("passkey", "vt")):
        with pytest.raises(EvalError, match=r"tasks=\['vt'\] is not allowed: one or more of longbook_qa_eng, "):
            runs_of("tokenselect-4", tasks=tasks)
