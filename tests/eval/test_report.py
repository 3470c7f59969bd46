import base64
import html
import io
import json
import math
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread

from eval.errors import EvalError
from eval.record_check import FIELDS
from eval.report import write_report
from eval.report.plots import draw
from eval.report.records import RUN_SETTINGS, load_runs
from eval.report.sections import make_sections
from eval.report.style import Styles
from eval.summary import summarise
from tests.eval.report_records import (
    HOSTILE,
    longbench_records,
    needle_records,
    pg19_records,
    record,
    write_records,
    write_runs,
)


class Page(HTMLParser):
    """The page's tables as text, by section, and its pictures."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tables: dict[tuple[str, str], list[list[str]]] = {}
        self.images: list[dict[str, str | None]] = []
        self.references: list[str] = []
        self.tags: set[str] = set()
        self.head: dict[str, str] = {}
        self._section, self._term = "", ""
        self._table: list[list[str]] = []
        self._cell: str | None = None
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        self.tags.add(tag)
        self.references += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag == "section":
            self._section = attributes["id"] or ""
        elif tag == "table":
            self._table = []
            self.tables[self._section, (attributes["class"] or "").split()[-1]] = self._table
        elif tag == "tr":
            self._table.append([])
        elif tag in ("td", "th", "dt", "dd"):
            self._cell = ""
        elif tag == "img":
            self.images.append(attributes)

    def handle_data(self, data: str) -> None:
        if self._cell is not None:
            self._cell += data

    def handle_endtag(self, tag: str) -> None:
        if tag in ("td", "th"):
            self._table[-1].append((self._cell or "").strip())
        elif tag == "dt":
            self._term = self._cell or ""
        elif tag == "dd":
            self.head[self._term] = self._cell or ""
        if tag in ("td", "th", "dt", "dd"):
            self._cell = None


def report_of(directory: Path, records: list[dict[str, Any]]) -> Page:
    write_records(directory / "run" / "rows.jsonl", records)
    return Page(write_report(directory))


def drawn(records: list[dict[str, Any]], kind: str) -> Figure:
    """Draw the plot of that kind from records of one section."""
    (section,) = make_sections(records)
    return next(p.figure for p in draw(section, Styles(section.columns)) if p.name.endswith(kind))


@pytest.fixture(scope="module")
def page_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(write_runs(tmp_path_factory.mktemp("runs")))


@pytest.fixture(scope="module")
def page(page_path: Path) -> Page:
    return Page(page_path)


def test_summary_leaves_errors_out_of_every_figure() -> None:
    records = [record("b", "t", sample, "quest", 64, score=score) for sample, score in enumerate((0.25, 0.75))]
    records[1] |= {"tpot_ms": 1.0, "peak_memory_bytes": 7 * 2**30, "realised_budget": 32}
    records.append(record("b", "t", 2, "quest", 64, score=None, tpot_ms=None, error="ValueError: no"))
    (entry,) = summarise(records)
    assert (entry["samples"], entry["errors"], entry["score"]) == (3, 1, 0.5)
    assert entry["tpot_ms"] == pytest.approx((records[0]["tpot_ms"] + 1.0) / 2)
    assert entry["realised_budget"] == 48
    assert entry["peak_memory_bytes"] == 7 * 2**30
    assert entry["perplexity"] is None


def test_summary_perplexity_is_the_geometric_mean() -> None:
    entries = summarise(pg19_records())
    assert [entry["perplexity"] for entry in entries] == pytest.approx([16, 32, 32, 32])
    assert all(entry["score"] is None for entry in entries)


@pytest.mark.parametrize("name", ["context_seconds", "first_token_seconds", "ttft_seconds", "tpot_ms"])
def test_summary_medians_are_not_means(name: str) -> None:
    (entry,) = summarise([record("b", "t", i, "full", None, **{name: t}) for i, t in enumerate((1.0, 2.0, 90.0))])
    assert entry[name] == 2.0


def test_summary_of_samples_with_other_scores_is_an_error() -> None:
    records = [record("b", "t", i, "full", None, scores={name: 1.0}) for i, name in enumerate(("rouge", "f1"))]
    with pytest.raises(EvalError, match=r"samples of one task have different scores: \['rouge'\] and \['f1'\]"):
        summarise(records)


def test_summary_of_only_errors_has_no_figures() -> None:
    (entry,) = summarise([record("b", "t", 0, "full", None, error="no")])
    assert {name for name, value in entry.items() if value is None} == {
        *(
            "length",
            "token_budget",
            "score",
            "perplexity",
            "divergence",
            "divergence_max",
            "top_agreement",
            "divergence_by_position",
            "kv_fraction",
            "realised_budget",
            "ttft_seconds",
        ),
        *("tpot_ms", "prompt_tokens", "peak_memory_bytes", "selection_hit_rate", "scores"),
        *("context_seconds", "first_token_seconds"),
    }


def test_summary_order_is_dense_first_then_method_and_budget_by_number() -> None:
    columns = [("window", 64), ("quest", 1024), ("quest", 256), ("full", None), ("aaa", 8)]
    records = [record("b", "t", 0, method, budget, length=n) for n in (10_000, 2000) for method, budget in columns]
    found = [(entry["length"], entry["method"], entry["token_budget"]) for entry in summarise(records)]
    one = [("full", None), ("aaa", 8), ("quest", 256), ("quest", 1024), ("window", 64)]
    assert found == [(n, *column) for n in (2000, 10_000) for column in one]


def test_score_table_has_means_in_percent_and_the_average(page: Page) -> None:
    assert page.tables["1-longbench", "scores"] == [
        ["task", "samples", "errors", "dense", "quest 256", "quest 1024", "window 256"],
        ["hotpotqa", "4", "1", "62.5", "25.0 (n=3)", "56.2", "31.2"],
        ["qasper", "4", "0", "30.0", "15.0", "27.0", "15.0"],
        ["average, over samples that all measured", "", "", "56.7", "20.0", "51.0", "28.3"],
    ]


def test_score_table_by_length_has_an_average_for_each(page: Page) -> None:
    table = page.tables["2-needle", "scores"]
    assert table[1] == ["needle", "1,024", "5", "0", "100.0", "80.0", "80.0", "80.0"]
    assert table[4:] == [
        ["average", "1,024", "", "", "100.0", "80.0", "80.0", "80.0"],
        ["average", "2,048", "", "", "100.0", "60.0", "80.0", "60.0"],
        ["average", "4,096", "", "", "100.0", "20.0", "80.0", "20.0"],
        ["average", "", "", "", "100.0", "53.3", "80.0", "53.3"],
    ]


def test_perplexity_table_is_not_in_percent(page: Page, page_path: Path) -> None:
    assert page.tables["3-pg19", "scores"][1:] == [
        ["pg19", "2", "0", "16.000", "32.000", "32.000", "32.000"],
        ["average", "", "", "16.000", "32.000", "32.000", "32.000"],
    ]
    assert "Perplexity (lower is better)" in page_path.read_text(encoding="utf-8")


def test_average_is_over_the_tasks_that_every_method_has(tmp_path: Path) -> None:
    records = [record("b", task, 0, "full", None, score=score) for task, score in (("easy", 1.0), ("hard", 0.0))]
    records.append(record("b", "easy", 0, "quest", 64, score=0.5))
    table = report_of(tmp_path, records).tables["1-b", "scores"]
    assert table[2] == ["hard", "1", "0", "0.0", "–"]  # noqa: RUF001
    assert table[3] == ["average of 1 of 2", "", "", "100.0", "50.0"]


@pytest.mark.parametrize("fate", ["failed", "missing"])
def test_averages_and_speed_ups_are_over_the_samples_that_every_method_has(tmp_path: Path, fate: str) -> None:
    samples = [(0, 1.0, 10.0, 0.5), (1, 0.0, 40.0, 0.25)]
    records = [record("b", "t", n, "full", None, score=score, tpot_ms=tpot) for n, score, tpot, _ in samples]
    records += [
        record("b", "t", n, "quest", 64, score=score, tpot_ms=tpot / 2, kv_fraction=read)
        for n, score, tpot, read in samples
    ]
    window = record("b", "t", 0, "window", 64, tpot_ms=20.0)
    hard = record("b", "t", 1, "window", 64, score=None, tpot_ms=None, error="RuntimeError: no")
    records += [window] if fate == "missing" else [window, hard]
    page = report_of(tmp_path, records)
    scores, average = page.tables["1-b", "scores"][1:]
    assert scores[-3:] == ["50.0", "50.0", "100.0 (n=1)"]
    assert average == ["average, over samples that all measured", "", "", "100.0", "100.0", "100.0"]
    header, *lines = page.tables["1-b", "costs"]
    speed_ups = {line[0]: line[header.index("TPOT speed-up")] for line in lines}
    assert speed_ups == {"dense": "1.00×", "quest 64": "2.00×", "window 64": "0.50×"}  # noqa: RUF001
    assert "quest 64: 50.0 % read, 100.00" in " ".join(image["alt"] or "" for image in page.images)


def test_cost_table(page: Page) -> None:
    header, dense, quest, *_ = page.tables["2-needle", "costs"]
    assert [cell.split(" (")[0] for cell in header] == [
        *("method", "length", "samples", "prompt tokens", "realised budget", "KV read"),
        *("TTFT", "TPOT", "TPOT speed-up", "peak memory"),
    ]
    assert dense == ["dense", "1,024", "5", "1,024", "1,024", "100.0", "0.171", "25.12", "1.00×", "1.00"]  # noqa: RUF001
    assert quest == ["quest 256", "1,024", "5", "1,024", "256", "31.2", "0.221", "21.60", "1.16×", "1.00"]  # noqa: RUF001
    assert len(page.tables["2-needle", "costs"]) == 1 + 3 * 4
    assert page.tables["1-longbench", "costs"][2][1:3] == ["own length", "7"]


def test_the_times_of_a_context_and_a_question_have_columns_where_they_were_measured(tmp_path: Path) -> None:
    times = {"context_seconds": 2.5, "first_token_seconds": 0.125}
    report = report_of(tmp_path, [record("b", "t", sample, "full", None, **times) for sample in range(2)])
    header, dense = report.tables["1-b", "costs"]
    assert dict(zip(header, dense, strict=True)).items() >= {"context (s)": "2.500", "question (s)": "0.125"}.items()


def test_kept_selections_have_a_column_where_a_method_keeps_them(tmp_path: Path) -> None:
    fields = {"length": 1024, "selection_hit_rate": 0.25}
    records = [record("b", "t", 0, "full", None, length=1024), record("b", "t", 0, "tokenselect", 64, **fields)]
    records.append(record("b", "t", 1, "tokenselect", 64, **fields | {"selection_hit_rate": 0.75}))
    header, dense, sparse = report_of(tmp_path, records).tables["1-b", "costs"]
    assert header[-1] == "selections kept (%)"
    assert (dense[-1], sparse[-1]) == ("–", "50.0")  # noqa: RUF001


def test_divergences_have_a_table_and_a_plot_where_they_were_measured(tmp_path: Path, page: Page) -> None:
    records = [record("b", "t", sample, "full", None, length=1024) for sample in range(2)]
    for sample, divergence in enumerate((0.25, 0.75)):
        followed = {"divergence": divergence, "divergence_max": 2 * divergence, "top_agreement": 1 - divergence}
        records.append(record("b", "t", sample, "quest", 64, length=1024, kv_fraction=0.125, **followed))
    found = report_of(tmp_path, records)
    assert found.tables["1-b", "divergence"][1] == ["quest 64", "1,024", "2", "0.5000", "1.500", "50.0", "12.5"]
    [line] = drawn(records, "divergence").axes[0].lines
    assert list(map(tuple, line.get_xydata())) == [(12.5, 0.5)]
    assert all(kind != "divergence" for _, kind in page.tables)


def test_agreement_counts_the_samples_that_both_answered(page: Page) -> None:
    table = page.tables["1-longbench", "agreement"]
    assert table[1] == ["quest 256", "7", "5 (71 %)", "6", "0"]
    assert table[3] == ["window 256", "8", "8 (100 %)", "6", "0"]
    assert ("3-pg19", "agreement") not in page.tables


def test_lost_samples_and_failures_show_hostile_text_as_text(page: Page) -> None:
    lost = page.tables["1-longbench", "lost"]
    assert lost[1][0] == "hotpotqa hotpotqa-0"
    assert lost[1][3].startswith("quest 256: 0.0 %")
    assert HOSTILE in lost[1][3]
    (failure,) = page.tables["failures", "failures"][1:]
    assert failure[:3] == ["longbench", "hotpotqa hotpotqa-3", "quest 256"]
    assert failure[3] == f"RuntimeError: out of memory {HOSTILE}"


def test_long_predictions_are_cut(tmp_path: Path) -> None:
    records = [record("b", "t", 0, "full", None), record("b", "t", 0, "quest", 64, score=0.0, prediction="x" * 1000)]
    assert report_of(tmp_path, records).tables["1-b", "lost"][1][3].endswith("x… (600 characters more)")


def test_page_needs_nothing_from_elsewhere(page: Page) -> None:
    assert page.references
    assert all(reference.startswith(("data:", "#")) for reference in page.references)
    assert "script" not in page.tags


def test_head_says_what_was_run(page: Page) -> None:
    assert page.head["model"] == "example/model-1b"
    assert page.head["device"] == "Example GPU, bfloat16"
    assert page.head["versions"] == "torch 2.13.0, transformers 5.16.0"
    assert "pg19: sha256 " + "ab" * 32 in page.head["protocol"]
    assert page.head["samples"] == "25, in 100 records"
    assert page.head["errors"] == "1"


def test_pictures_are_real_and_the_same_on_disk_and_in_the_page(page: Page, page_path: Path) -> None:
    files = {path.read_bytes(): path.stem for path in page_path.parent.glob("*.png")}
    kinds = {"1-longbench": {"budget", "kv-read", "latency"}, "2-needle": {"budget", "kv-read", "latency", "depth"}}
    kinds["3-pg19"] = {"budget", "kv-read", "latency", "position"}
    assert set(files.values()) == {f"{slug}-{kind}" for slug, names in kinds.items() for kind in names}
    assert len(page.images) == len(files)
    for image in page.images:
        data = base64.b64decode((image["src"] or "").removeprefix("data:image/png;base64,"))
        assert data in files
        assert len(image["alt"] or "") > 40
        pixels = imread(io.BytesIO(data))[..., :3]
        assert min(pixels.shape[:2]) > 300
        assert len(np.unique(pixels @ np.array([1.0, 256.0, 65536.0]))) > 20


def test_alt_text_has_the_numbers(page: Page) -> None:
    alts = " ".join(image["alt"] or "" for image in page.images)
    assert "dense 56.67, quest 256 20.00" in alts
    assert "quest 1024: 42.7 % read, 51.00" in alts
    # A sample's own 3,000 tokens are nearest to 4,096; a requested length is not rounded.
    assert "quest 256 at 4,096 tokens: time per output token (ms) 21.6, time to first token (s) 0.55" in alts
    assert "dense at 1,024 tokens: time per output token (ms) 25.1" in alts


def test_lines_go_through_the_averages() -> None:
    figure = drawn(needle_records(), "budget")
    assert [axis.get_title() for axis in figure.axes] == ["1,024 tokens", "2,048 tokens", "4,096 tokens"]
    dense, quest, window = figure.axes[2].lines
    assert list(np.asarray(dense.get_ydata())) == [100, 100]
    assert np.asarray(quest.get_xydata()).tolist() == [[256, 20], [1024, 80]]
    assert np.asarray(window.get_xydata()).tolist() == [[256, 20]]
    assert len({line.get_color() for line in (dense, quest, window)}) == 3


def test_heatmap_has_a_panel_per_column_with_depth_downwards() -> None:
    figure = drawn(needle_records(), "depth")
    panels = [axis for axis in figure.axes if axis.get_title()]
    assert [axis.get_title() for axis in panels] == ["dense", "quest 256", "quest 1024", "window 256"]
    found = np.asarray(panels[1].images[0].get_array())  # [depth, length]
    assert found.tolist() == [[0, 0, 0], [100, 0, 0], [100, 100, 0], [100, 100, 0], [100, 100, 100]]


def test_perplexity_by_position_is_exp_of_the_mean_over_samples() -> None:
    records = [
        record("pg19", "pg19", i, "full", None, score=None, perplexity=9.0, nll_by_position=[[10, nll], [20, 1.0]])
        for i, nll in enumerate((1.0, 3.0))
    ]
    (line,) = drawn(records, "position").axes[0].lines
    assert np.asarray(line.get_xydata()) == pytest.approx(np.array([[10, math.exp(2)], [20, math.e]]))


def test_what_is_said_of_all_positions_and_depths_is_what_the_tables_say() -> None:
    places = [(sample, 0.0) for sample in range(4)] + [(4, 1.0)]  # depths with four samples and with one
    records = [
        record("b", "t", sample, "full", None, length=1024, depth=depth, score=1 - depth) for sample, depth in places
    ]
    by_position = {"divergence": 0.05, "divergence_by_position": [[0, 0.01], [250, 1.0]]}  # the last bucket is short
    records += [each | {"method": "quest", "token_budget": 64} | by_position for each in records]
    books = [
        record("pg19", "pg19", 0, "full", None, score=None, perplexity=3.07, nll_by_position=[[100, 1.0], [164, 9.0]])
    ]
    said = {
        picture.name.partition("-")[2]: picture.alt
        for section in make_sections([*records, *books])
        for picture in draw(section, Styles(section.columns))
    }
    assert said["b-depth"].endswith("Mean over all samples: dense 80.00, quest 64 80.00.")
    assert said["b-divergence-position"].endswith("Over all positions: quest 64 0.0500.")
    assert said["pg19-position"].endswith("Over all positions: dense 3.07.")


def test_positions_without_a_figure_of_all_are_drawn_alone() -> None:
    (section,) = make_sections([record("b", "t", 0, "full", None, nll_by_position=[[100, 1.0]])])
    (alt,) = [each.alt for each in draw(section, Styles(section.columns)) if each.name.endswith("position")]
    assert alt == "Perplexity by position (lower is better)."


def test_dense_alone_draws_no_comparison(tmp_path: Path) -> None:
    records = [each for each in longbench_records() if each["method"] == "full"]
    report_of(tmp_path, records)
    assert [path.name for path in (tmp_path / "report").glob("*.png")] == ["1-longbench-latency.png"]


def test_heatmap_takes_depths_drawn_at_random(tmp_path: Path) -> None:
    depths = np.random.default_rng(0).random(40)
    records = [record("ruler", "niah_single_1", i, "full", None, length=4096, depth=d) for i, d in enumerate(depths)]
    report_of(tmp_path, records)
    assert (tmp_path / "report" / "1-ruler-depth.png").exists()


@pytest.mark.parametrize("columns", [1, 30])
def test_many_methods_lengths_and_errors_fit(tmp_path: Path, columns: int) -> None:
    methods = [("full", None), *((f"method{index // 3}", 64 << index % 3) for index in range(columns))]
    records = [
        record("b", "t", 0, method, budget, length=length, depth=0.5)
        for method, budget in methods
        for length in (512, 513, 1024, 131_072)
    ]
    records += [record("b", "broken", sample, "full", None, error="no") for sample in range(60)]
    page = report_of(tmp_path, records)
    assert len(page.tables["1-b", "scores"][0]) == 4 + len(methods)
    assert len(page.tables["failures", "failures"]) == 1 + 50
    assert "10 more are in the records." in (tmp_path / "report" / "index.html").read_text(encoding="utf-8")


def test_records_that_failed_altogether_still_make_a_page(tmp_path: Path) -> None:
    page = report_of(tmp_path, [record("b", "t", 0, "full", None, error="no")])
    assert page.tables["1-b", "scores"][1] == ["t", "1", "1", "–"]  # noqa: RUF001
    assert page.images == []


def test_the_same_dense_record_in_two_runs_counts_once(tmp_path: Path) -> None:
    dense = record("b", "t", 0, "full", None, score=1.0)
    write_records(tmp_path / "one" / "rows.jsonl", [dense | {"error": "no", "score": None}])
    write_records(tmp_path / "two" / "rows.jsonl", [dense])
    write_records(tmp_path / "two-and-a-half" / "rows.jsonl", [dense | {"error": "no", "score": None}])
    write_records(tmp_path / "zzz" / "rows.jsonl", [dense | {"seed": 1, "score": 0.5}])
    page = Page(write_report(tmp_path))
    assert page.tables["1-b", "scores"][1] == ["t", "2", "0", "75.0"]
    assert page.head["repeats left out"] == "2"


@pytest.mark.parametrize(
    ("field", "other", "title"),
    [("question", "prefill", "b, question by prefill"), ("model", "m2", "b, m2"), ("device", "cpu", "b, cpu")],
)
def test_settings_are_never_averaged_together(tmp_path: Path, field: str, other: str, title: str) -> None:
    records = [
        record("b", "t", 0, "full", None, score=1.0),
        record("b", "t", 0, "full", None, score=0.0, **{field: other}),
    ]
    page = report_of(tmp_path, records)
    figures = {page.tables[key][1][3] for key in page.tables if key[1] == "scores"}
    assert figures == {"100.0", "0.0"}
    assert f"<h2>{title}</h2>" in (tmp_path / "report" / "index.html").read_text(encoding="utf-8")


def test_parameters_that_differ_are_columns_of_their_own(tmp_path: Path) -> None:
    records = [
        record("b", "t", 0, "quest", 64, parameters={"page_size": size, "sink_tokens": 4, "token_budget": 64 + size})
        for size in (16, 32)
    ]
    header = report_of(tmp_path, records).tables["1-b", "scores"][0]
    assert header[3:] == ["quest (page_size=16) 64", "quest (page_size=32) 64"]


def test_runs_are_listed_with_their_settings(page_path: Path) -> None:
    text = page_path.read_text(encoding="utf-8")
    assert "synthetic/needle: 60 records in rows-00000.jsonl, rows-00001.jsonl" in text
    assert "&#34;limit&#34;: 4" in text


def test_out_may_be_anywhere(tmp_path: Path) -> None:
    write_records(tmp_path / "runs" / "rows.jsonl", needle_records())
    path = write_report(tmp_path / "runs", tmp_path / "some" / "where")
    assert path == tmp_path / "some" / "where" / "index.html"
    assert path.exists()
    assert not (tmp_path / "runs" / "report").exists()


@pytest.mark.parametrize("content", [None, "", "\n\n"])
def test_no_records_is_an_error(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "rows.jsonl").write_text(content)
    with pytest.raises(EvalError, match=r"has no records: .* rows\.jsonl"):
        write_report(tmp_path)
    assert not (tmp_path / "report").exists()


GOOD = record("b", "t", 0, "full", None)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"benchmark": "b", ', "Expecting"),
        ("[1, 2]", "a record must be a JSON object, got list"),
        (json.dumps({key: value for key, value in GOOD.items() if key not in ("task", "score")}), "no score, task"),
        (json.dumps(GOOD | {"score": "high"}), "score='high' is not allowed: a number"),
        (json.dumps(GOOD | {"score": True}), "score=True"),
        (json.dumps(GOOD | {"score": 1.5}), "score=1.5 is not allowed: at most 1"),
        (json.dumps(GOOD | {"tpot_ms": math.nan}), "NaN is not a number"),
        (json.dumps(GOOD | {"token_budget": "1024"}), "token_budget='1024'"),
        (json.dumps(GOOD | {"perplexity": 0}), "perplexity=0 is not allowed: above 0"),
        (json.dumps(GOOD | {"nll_by_position": [[1]]}), "nll_by_position=\\[1\\] is not allowed: a list of at least 2"),
    ],
)
def test_a_malformed_record_is_named_by_file_and_line(tmp_path: Path, line: str, said: str) -> None:
    path = tmp_path / "run" / "rows.jsonl"
    path.parent.mkdir()
    path.write_text(f"{json.dumps(GOOD)}\n{line}\n", encoding="utf-8")
    with pytest.raises(EvalError, match=rf"run/rows\.jsonl:2: .*{said}"):
        write_report(tmp_path)


def odd(**fields: Any) -> list[dict[str, Any]]:
    return [
        each | fields for each in [*longbench_records()[:12], *needle_records((1024, 2048))[:8], *pg19_records()[:4]]
    ]


ODD_RECORDS = {
    "a lone surrogate": odd(task="a \ud83d", prediction="\udcff", references=["\ud83d", None, {"b": 1.5}]),
    "dollar signs": odd(method="$a_$", task="$x^$"),
    "names that begin with an underscore": odd(method="_hidden"),
    "controls": odd(task="\x00\x1b[31m\u202e", device="\x07", sample_id="\r\n"),
    "an unknown benchmark": odd(benchmark="基准 / mine!"),
    "nothing measured": odd(
        **dict.fromkeys(("score", "prompt_tokens", "ttft_seconds", "tpot_ms", "kv_fraction", "peak_memory_bytes"))
    ),
    "nothing read": odd(kv_fraction=0.0, token_budget=0, length=0, prompt_tokens=1),
    "hopeless likelihoods": odd(perplexity=1e299, nll_by_position=[[1, 1e5], [2, 3.0]]),
    "errors alone": odd(error="ValueError: no"),
    "no optional fields": [
        {name: value for name, value in each.items() if name in {*FIELDS, "prediction"}} for each in odd()
    ],
    "odd settings": odd(versions={"torch": None, "\ud83d": [1]}, parameters={"a": {"b": [None]}}, seed=-1),
}


@pytest.mark.parametrize("kind", ODD_RECORDS)
def test_odd_records_are_reported(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "run" / "rows.jsonl"
    path.parent.mkdir()
    path.write_text("".join(json.dumps(each) + "\n" for each in ODD_RECORDS[kind]) + "\n  \n")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "rows.jsonl").write_text("")
    page = Page(write_report(tmp_path))
    assert page.images or kind in ("errors alone", "nothing measured")
    assert {"scores", "costs"} <= {name for _, name in page.tables}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ('"tpot_ms": 1e999', "tpot_ms=inf is not allowed"),
        (f'"length": {10**30}', "length=1000.* is not allowed"),
        (f'"prompt_tokens": {10**400}', "prompt_tokens=1000.* is not allowed"),
        ('"ttft_seconds": -1', "ttft_seconds=-1 is not allowed"),
        ('"nll_by_position": [[1, 1e301]]', "nll_by_position=1e.301 is not allowed"),
        ('"x": ' + "[" * 50_000, "recursion"),
    ],
)
def test_numbers_that_are_too_large_are_named(tmp_path: Path, fields: str, said: str) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps(GOOD)[:-1] + f", {fields}}}\n")
    with pytest.raises(EvalError, match=rf"rows\.jsonl:1: .*{said}"):
        write_report(tmp_path)


def test_a_configuration_that_is_not_text_is_shown_unchanged(tmp_path: Path) -> None:
    write_records(tmp_path / "rows.jsonl", [GOOD])
    (tmp_path / "config.json").write_bytes(b'{"model": "\xff"')
    assert "\\xff" in write_report(tmp_path).read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "config",
    [
        '{"options": [1]}',
        '{"options": "x"}',
        '{"data": {"t": 3}}',
        '{"data": 3, "measure": 3}',
        "[" * 100_000,
    ],
    ids=range(5),
)
def test_a_damaged_configuration_is_only_shown(tmp_path: Path, config: str) -> None:
    write_records(tmp_path / "rows.jsonl", [GOOD])
    (tmp_path / "config.json").write_text(config)
    assert html.escape(config[:300], quote=False) in html.unescape(write_report(tmp_path).read_text(encoding="utf-8"))


def test_settings_that_can_be_read_but_are_too_deep_to_be_written_are_left_out(tmp_path: Path) -> None:
    write_records(tmp_path / "rows.jsonl", [GOOD])
    for depth in range(900, 1000):  # one of them is just within the limit of Python's reader
        (tmp_path / "config.json").write_text('{"options": {"a": ' + "[" * depth + "]" * depth + "}}")
        assert load_runs(tmp_path)[0].records[0][RUN_SETTINGS] == {}


def test_a_page_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    write_records(tmp_path / "rows.jsonl", [GOOD])
    (tmp_path / "file").write_text("")
    with pytest.raises(EvalError, match="cannot be written"):
        write_report(tmp_path, tmp_path / "file" / "page")


def _two_runs(directory: Path, *configs: dict[str, Any] | None) -> str:
    """Write runs of the same sample, with the scores 1, 0.5 and so on, and return the text of their report."""
    for number, config in enumerate(configs):
        folder = directory / f"run-{number}"
        write_records(folder / "rows.jsonl", [record("passkey", "filler", 0, "quest", 64, score=1 / (1 + number))])
        if config is not None:
            (folder / "config.json").write_text(json.dumps(config))
    return write_report(directory).read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("one", "other", "titles"),
    [
        (
            {},
            {"measure": ["score", "divergence"]},
            ["passkey, measure score<", "passkey, measure score and divergence<"],
        ),
        ({"chat": "on"}, {"chat": "off"}, ["passkey, chat off", "passkey, chat on"]),
        (
            {"data": {"filler": [{"sha256": "a" * 64}]}},
            {"data": {"filler": [{"sha256": "b" * 64}]}},
            ["aaaaaaaaaaaa", "bbbbbbbbbbbb"],
        ),
        ({"options": {"depths": [0.1]}}, {"options": {"depths": [0.1, 0.5]}}, ["0.1]}", "0.1, 0.5]}"]),
    ],
    ids=["measure", "chat", "data", "options"],
)
def test_runs_of_other_settings_are_no_repeats(
    tmp_path: Path, one: dict[str, Any], other: dict[str, Any], titles: list[str]
) -> None:
    text = _two_runs(tmp_path, {"benchmark": "passkey", **one}, {"benchmark": "passkey", **other})
    assert "repeats left out" not in text
    for title in titles:
        assert title in text
    for score in ("100.0", "50.0"):
        assert score in text


@pytest.mark.parametrize(
    "config", [None, {}, {"chat": "auto", "options": {"repeats": 4}}, {"options": None, "data": {"filler": None}}]
)
def test_runs_of_the_same_settings_are_repeats(tmp_path: Path, config: dict[str, Any] | None) -> None:
    text = _two_runs(tmp_path, {"chat": "auto", "options": {}}, config)
    assert "repeats left out" in text
    assert "passkey, " not in text
