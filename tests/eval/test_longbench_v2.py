"""LongBench v2 and LongBench-E: prompts and scores of the official code, categories, and rows that are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import eval.benchmarks.longbench_v2 as longbench_v2
from eval import metrics
from eval.benchmarks import BENCHMARKS
from eval.benchmarks.base import Item, Setup
from eval.benchmarks.longbench import ENGLISH_TASKS
from eval.benchmarks.longbench_e import LongBenchE
from eval.benchmarks.longbench_v2 import LongBenchV2
from eval.errors import EvalError
from eval.protocols import load_protocol
from tests.eval.hub_stand_in import hub_stand_in
from tests.eval.tokenizers import tiny_tokenizer

GOLDEN = Path(__file__).parent / "golden"
OFFICIAL: dict[str, Any] = json.loads((GOLDEN / "dataset_prompts.json").read_text(encoding="utf-8"))["longbench_v2"]
EXAMPLE: dict[str, Any] = OFFICIAL["examples"][0]


def v2_items(folder: Path, protocols: Path, *examples: dict[str, Any], **values: Any) -> list[Item]:
    (folder / "data.json").write_text(json.dumps(examples), encoding="utf-8")
    values = {"tokenizer": tiny_tokenizer(), "max_positions": 10_000, **values}
    return LongBenchV2().items(Setup(tasks=("choice",), data_dir=folder, protocol_dir=protocols, **values))


def text_of(*ids: Any) -> str:
    return str(tiny_tokenizer().decode([token for part in ids for token in part])).removeprefix("<s>")


def test_prompts_are_the_official_ones(tmp_path: Path, protocols: Path) -> None:
    items = v2_items(tmp_path, protocols, *OFFICIAL["examples"], options={"cut": OFFICIAL["cut"]})
    samples = [item.build() for item in items]
    assert [text_of(each.material_ids, each.question_ids) for each in samples] == OFFICIAL["prompts"]
    assert {each.max_new_tokens for each in samples} == {OFFICIAL["max_new_tokens"]}
    assert [each.truncated for each in samples] == [False, True]
    assert [each.references for each in samples] == ["B", "B"]
    for each in samples:
        assert text_of(each.question_ids).startswith("\n\nNow say: Which harbour?")


def test_scores_are_the_official_ones() -> None:
    for case in OFFICIAL["scores"]:
        assert metrics.score("longbench_v2", "choice", case["prediction"], "B") == case["score"], case
    assert {case["score"] for case in OFFICIAL["scores"]} == {0, 1}


def test_items_have_their_categories_and_long_ones_can_be_left_out(tmp_path: Path, protocols: Path) -> None:
    rows = [{**EXAMPLE, "_id": length, "length": length} for length in ("long", "short", "medium")]
    items = v2_items(tmp_path, protocols, *rows)
    assert items[0].categories == {"difficulty": "hard", "length": "long", "domain": "Long In-context Learning"}
    medium = v2_items(tmp_path, protocols, *rows, options={"longest": "medium"}, lengths=(300, 400), limit=1)
    assert [(item.sample_id, item.length) for item in medium] == [("short", 300), ("short", 400)]
    with pytest.raises(EvalError, match="longest='huge' is not allowed: short, medium, long or None"):
        v2_items(tmp_path, protocols, *rows, options={"longest": "huge"})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"answer": "E"}, r"data\.json: answer='E' of example 0 is not A, B, C or D"),
        ({"choice_C": 3}, r"data\.json: choice_C of example 0 is not a text but 3"),
    ],
)
def test_malformed_rows_are_named(changes: dict[str, Any], said: str, tmp_path: Path, protocols: Path) -> None:
    with pytest.raises(EvalError, match=said):
        v2_items(tmp_path, protocols, {**EXAMPLE, **changes})


def test_a_length_without_room_and_a_wrong_cut_are_refused(tmp_path: Path, protocols: Path) -> None:
    with pytest.raises(EvalError, match="length=129 leaves no room beside 128 new tokens"):
        v2_items(tmp_path, protocols, EXAMPLE, lengths=(129,))
    with pytest.raises(EvalError, match="cut=1 is not allowed"):
        v2_items(tmp_path, protocols, EXAMPLE, options={"cut": 1})


def test_rows_come_from_the_hub_at_their_revision(
    tmp_path: Path, protocols: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub.constants as constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    requests: list[str] = []
    with hub_stand_in({"THUDM/LongBench-v2/data.json": json.dumps([EXAMPLE]).encode()}, requests) as address:
        monkeypatch.setattr(constants, "ENDPOINT", address)
        template = address + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        setup = Setup(tiny_tokenizer(), 10_000, ("choice",), protocol_dir=protocols)
        (item,) = LongBenchV2().items(setup)
    assert item.build().references == "B"
    asked = [each for each in requests if "/datasets/" in each]
    assert asked
    assert {each.split(" ")[1] for each in asked} == {
        f"/datasets/THUDM/LongBench-v2/resolve/{longbench_v2.REVISION}/data.json"
    }


# LongBench-E


def test_longbench_e_has_the_words_ranges_of_the_official_scorer(tmp_path: Path, protocols: Path) -> None:
    rows = [
        {"context": "A lamp. " * 9, "input": "What?", "answers": ["a lamp"], "all_classes": None, "length": length}
        for length in (0, 3999, 4000, 7999, 8000, 60_000)
    ]
    (tmp_path / "qasper_e.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    setup = Setup(tiny_tokenizer(), 4000, ("qasper",), data_dir=tmp_path, protocol_dir=protocols)
    items = BENCHMARKS["longbench_e"].items(setup)
    assert [item.categories["words"] for item in items] == ["0-4k", "0-4k", "4-8k", "4-8k", "8k+", "8k+"]
    sample = items[0].build()
    template = load_protocol("longbench", protocols).values["dataset2prompt"]["qasper"]
    assert text_of(sample.material_ids, sample.question_ids) == template.format(**rows[0])


def test_longbench_e_has_the_scores_of_its_tasks() -> None:
    assert set(LongBenchE.tasks) < set(ENGLISH_TASKS)
    assert metrics.tasks("longbench_e") == tuple(task for task in ENGLISH_TASKS if task in LongBenchE.tasks)
    assert metrics.score("longbench_e", "qasper", "a lamp", ["the lamp"]) == 1
    assert metrics.named_scores("longbench_e", "lcc", "x = 1", ["x = 1"]) == {"levenshtein": 1, "difflib": 1}


def test_longbench_e_needs_the_length(tmp_path: Path, protocols: Path) -> None:
    row = {"context": "c", "input": "", "answers": ["a"], "all_classes": None}
    (tmp_path / "qasper_e.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    with pytest.raises(EvalError, match=r"qasper_e\.jsonl:1 lacks length"):
        LongBenchE().items(Setup(tiny_tokenizer(), 4000, ("qasper",), data_dir=tmp_path, protocol_dir=protocols))
