"""Frontiers: which samples count, what a point averages, tables, figures, and what a checkout without results shows."""

from __future__ import annotations

import json
from typing import Any

import pytest

from eval.errors import EvalError
from eval.frontier import HEAD, frontiers, is_needle, lines
from eval.frontier_page import frontier_figures
from eval.markdown import frontier_tables, results_tables
from eval.report.frontier import frontier_picture
from tests.eval.report_records import record, write_records

SWEEP = "results-invented"
VARIANTS = [
    ("full", None, ""),
    ("quest", 256, ""),
    ("quest", 1024, ""),
    ("keycodes", 256, ""),
    ("keycodes", 256, "bits=2"),
]


def records_of(benchmark: str, task: str, samples: int, **fields: Any) -> list[dict[str, Any]]:
    """Return records of every variant; the divergence is a hundredth of the sample's number plus the variant's."""
    made = []
    for sample in range(samples):
        for place, (method, budget, variant) in enumerate(VARIANTS):
            is_dense = method == "full"
            divergence = None if is_dense else (sample + place) / 100
            own = {
                "variant": variant,
                "parameters": {},
                "divergence": divergence,
                "divergence_max": divergence,
                "top_agreement": None if is_dense else 1 - place / 10,
                "score": float(is_dense or sample % 2),
                "kv_fraction": 1.0 if is_dense else place / 20,
            }
            made.append(record(benchmark, task, sample, method, budget, **(own | fields)))
    return made


def sweep(folder, *runs, data=()):
    """Write a sweep's runs, each a benchmark's records, with their summaries and, where given, the data they read."""
    from eval.summary import summarise

    for number, records in enumerate(runs, start=1):
        first = records[0]
        run = folder / SWEEP / f"{number:02d}-{first['benchmark']}"
        write_records(run / "rows.jsonl", records)
        summary = {
            **{name: first[name] for name in ("model", "dtype", "device", "versions", "protocol_sha256")},
            "config": {
                "benchmark": first["benchmark"], "method": ["full"], "question": "decode", "seed": 1,
                "variants": [{"method": "keycodes"}, {"method": "quest"}],
            },
            "date": "2026-01-02T00:00:00", "rows": len(records), "errors": 0, "harness_seconds": 1.0,
            "model_seconds": 40.0, "table": summarise(records),
        }  # fmt: skip
        (run / "summary.json").write_text(json.dumps(summary))
        if data:
            files = [{"file": "pg19/1.txt", "bytes": 1, "sha256": data[number - 1]}]
            (run / "config.json").write_text(json.dumps({"data": {first["task"]: files}}))
    return folder


@pytest.fixture
def results(tmp_path):
    others = [each | {"score": None} for each in records_of("longbench", "lcc", 2)]
    return sweep(tmp_path, records_of("passkey", "book", 4, length=4000), others)


def test_a_point_averages_every_sample_and_needles_and_others_apart(results):
    [frontier] = frontiers(results / SWEEP)
    assert (frontier.needles, frontier.others) == (4, 2)
    assert frontier.tasks == ("passkey book at 4,000 tokens", "longbench lcc")
    assert [point.name for point in frontier.points] == [
        "dense", "keycodes 256", "keycodes 256 bits=2", "quest 256", "quest 1,024",
    ]  # fmt: skip
    quest = frontier.points[3]
    assert quest.divergence_needles.value == pytest.approx((0 + 1 + 2 + 3) / 400 + 0.01)
    assert quest.divergence_needles.error == pytest.approx((5 / 3) ** 0.5 / 100 / 2)
    assert quest.divergence_others.value == pytest.approx(0.015)
    assert quest.divergence.value == pytest.approx((4 * 0.025 + 2 * 0.015) / 6)
    assert (quest.found.value, quest.agreement, quest.kv_percent) == (0.5, pytest.approx(0.9), pytest.approx(5.0))
    assert lines(frontier)[0] == ["dense", "100.0", "-", "-", "-", "100.0 ± 0.0", "100.0"]
    assert lines(frontier)[3] == [
        "quest 256",
        "5.0",
        "0.0250 ± 0.0065",
        "0.0150 ± 0.0050",
        "90.0",
        "50.0 ± 28.9",
        "5.0",
    ]


def test_only_samples_of_every_variant_count_and_a_variant_that_always_failed_is_said(tmp_path):
    records = records_of("passkey", "book", 3, length=4000)
    records[1] |= {"error": "RuntimeError: no", "divergence": None, "score": None}  # one sample of one variant
    for each in records:
        if each["variant"] == "bits=2":
            each |= {"error": "RuntimeError: no", "divergence": None, "score": None}
    [frontier] = frontiers(sweep(tmp_path, records) / SWEEP)
    assert frontier.needles == 2
    assert frontier.left_out == ("keycodes 256 bits=2",)
    assert "Not measured, since every sample failed: keycodes 256 bits=2." in frontier_tables(tmp_path, SWEEP)


def test_a_variant_that_measured_needles_alone_takes_no_other_sample_from_the_rest(tmp_path):
    needles = records_of("passkey", "book", 3, length=4000)
    others = [each for each in records_of("longbench", "lcc", 2, score=None) if each["method"] != "quest"]
    [frontier] = frontiers(sweep(tmp_path, needles, others) / SWEEP)
    assert (frontier.needles, frontier.others) == (3, 2)
    shown = {line[0]: line[1:] for line in lines(frontier)}
    assert shown["quest 256"] == ["-", "0.0200 ± 0.0058", "-", "-", "33.3 ± 33.3", "5.0"]
    assert shown["keycodes 256"][2] == "0.0350 ± 0.0050"
    text = frontier_tables(tmp_path, SWEEP)
    assert "Measured on samples of one kind alone: quest 256, quest 1,024." in text
    divergence, found = frontier_picture(frontier, "name").figure.axes
    assert "quest" not in {line.get_label() for line in divergence.lines}
    assert "quest" in {line.get_label() for line in found.lines}


@pytest.mark.parametrize(
    ("tokens", "data", "is_other"),
    [
        ((4000, 4000), (), False),
        ((4000, 3990), (), True),
        ((4000, 4000), ("ab", "cd"), True),
        ((4000, 4000), ("ab", "ab"), False),
    ],
)
def test_a_variant_over_other_texts_is_said_and_dense_is_that_of_the_first(tmp_path, tokens, data, is_other):
    first, second = (records_of("passkey", "book", 3, length=4000, prompt_tokens=count) for count in tokens)
    first = [each for each in first if each["method"] != "quest"]
    second = [each | {"score": 0.0} for each in second if each["method"] in ("full", "quest")]
    [frontier] = frontiers(sweep(tmp_path, first, second, data=data) / SWEEP)
    assert frontier.other_texts == (("quest 256", "quest 1024") if is_other else ())
    assert frontier.points[0].found.value == 1.0
    sentence = "Measured in part with other prompts than dense attention and the rest: quest 256, quest 1024."
    assert (sentence in frontier_tables(tmp_path, SWEEP)) == is_other


@pytest.mark.parametrize("other", [{"seed": 1}, {"question": "prefill"}, {"protocol_sha256": "cd" * 32}])
def test_samples_of_the_same_name_are_others_under_another_seed_question_or_protocol(tmp_path, other):
    first, second = (records_of("passkey", "book", 3, length=4000, **fields) for fields in ({}, other))
    for each in second:
        each["score"] = 0.0
    [frontier] = frontiers(sweep(tmp_path, first, second) / SWEEP)
    assert frontier.needles == 6
    assert frontier.points[0].found.value == 0.5
    # Of another variant's samples none is shared, so nothing can be compared.
    apart = [each for each in second if each["method"] in ("full", "quest")]
    rest = [each for each in first if each["method"] != "quest"]
    assert frontiers(sweep(tmp_path / "apart", rest, apart) / SWEEP) == []


def test_a_variant_that_lacks_a_task_has_no_point_and_takes_no_sample_from_the_rest(tmp_path):
    book = records_of("passkey", "book", 3, length=4000)
    sentences = [each for each in records_of("needle", "book", 2, length=4000) if each["variant"] != "bits=2"]
    others = records_of("longbench", "lcc", 2, score=None)
    [frontier] = frontiers(sweep(tmp_path, book, sentences, others) / SWEEP)
    assert (frontier.needles, frontier.others) == (5, 2)
    assert frontier.incomplete == ("keycodes 256 bits=2",)
    assert [point.name for point in frontier.points] == ["dense", "keycodes 256", "quest 256", "quest 1,024"]
    assert "Without a point, since whole tasks are missing: keycodes 256 bits=2." in frontier_tables(tmp_path, SWEEP)


def test_models_have_frontiers_of_their_own_and_devices_are_not_mixed(tmp_path):
    large, small = (records_of("passkey", "book", 2, length=4000, model=name) for name in ("large", "small"))
    assert [frontier.model for frontier in frontiers(sweep(tmp_path, large, small) / SWEEP)] == ["large", "small"]
    other = [each | {"task": "filler", "device": "another"} for each in large]
    with pytest.raises(EvalError, match="records of large differ in their device"):
        frontiers(sweep(tmp_path, large, other) / SWEEP)


@pytest.mark.parametrize(
    ("benchmark", "task", "expected"),
    [("passkey", "book", True), ("needle", "essay", True), ("ruler", "niah_multikey_2", True), ("ruler", "vt", False)],
)
def test_needles_are_what_has_to_be_found(benchmark, task, expected):
    assert is_needle({"benchmark": benchmark, "task": task}) is expected


def test_the_figure_has_a_line_for_each_method_and_dense_attention_s_finds(results):
    [frontier] = frontiers(results / SWEEP)
    picture = frontier_picture(frontier, "name")
    divergence, found = picture.figure.axes
    assert divergence.get_yscale() == "log"
    drawn = {line.get_label(): list(map(tuple, line.get_xydata())) for line in divergence.lines}
    assert drawn["quest"] == [pytest.approx((5.0, 0.13 / 6)), pytest.approx((10.0, 0.19 / 6))]
    assert set(drawn) == {"quest", "keycodes", "keycodes bits=2"}
    levels = {line.get_label(): line.get_ydata()[0] for line in found.lines}
    assert (levels["dense"], levels["quest"]) == (100.0, 50.0)
    assert "quest 256: 5.0 % read, KL 0.0217, 50 % found" in picture.alt


def test_the_mean_of_one_sample_has_no_error(tmp_path):
    [frontier] = frontiers(sweep(tmp_path, records_of("passkey", "book", 1, length=4000)) / SWEEP)
    quest = frontier.points[3]
    assert (quest.divergence.error, quest.found.error) == (None, None)
    assert lines(frontier)[3] == ["quest 256", "5.0", "0.0100", "-", "90.0", "0.0", "5.0"]


def test_a_sweep_without_needles_has_one_panel(tmp_path):
    [frontier] = frontiers(sweep(tmp_path, records_of("longbench", "lcc", 2, score=None)) / SWEEP)
    assert len(frontier_picture(frontier, "name").figure.axes) == 1
    assert lines(frontier)[1][HEAD.index("found, %")] == "-"


def test_the_page_has_the_table_its_figure_and_each_task_below(results):
    text = results_tables(results)
    [frontier] = frontiers(results / SWEEP)
    for line in lines(frontier):
        assert f"| {' | '.join(line)} |" in text
    figures = frontier_figures(results)
    assert list(figures) == [f"frontier-{SWEEP}-1.svg"]
    assert f"(assets/frontier-{SWEEP}-1.svg)" in text
    assert figures == frontier_figures(results)  # the same bytes each time
    assert text.index("assets/") < text.index("<details")
    assert "| book | 4,000 | quest 256 | 4 | 0.0250 | 0.040 | 90.0 | 50.0 |" in text
    assert "## keycodes, quest: example/model-1b, bfloat16, Example GPU" in text


def test_without_results_a_page_says_so_and_has_no_figure(tmp_path):
    assert frontier_tables(tmp_path, "results-none") == (
        "No measurements of `eval/configs/results-none.yaml` are in this checkout.\n"
    )
    assert frontier_figures(tmp_path) == {}
    scores = [each | {"divergence": None, "top_agreement": None} for each in records_of("passkey", "book", 2)]
    assert frontiers(sweep(tmp_path, scores) / SWEEP) == []
