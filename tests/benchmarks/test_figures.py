"""Figures agree with the results: their data, their lines, and the README's stored picture."""

import json
import shutil
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from op_bench import overview, performance, plot
from op_bench.registry import CHUNK_STEP, TOKEN_STEPS
from op_bench.results import ResultsError
from op_bench.shapes import Shape

from tests.benchmarks.records import LONG, SHORT, entry, report

ROOT = Path(__file__).resolve().parents[2]
DESCRIPTION = "{http://purl.org/dc/elements/1.1/}description"


def drawn(axes):
    """Return the points of a panel's lines by name."""
    return {line.get_label(): [list(point) for point in line.get_xydata()] for line in axes.get_lines()}


@pytest.fixture
def root(tmp_path):
    """Copy the picture's results into a new tree."""
    shutil.copytree(ROOT / "eval/results" / overview.SWEEP, tmp_path / "eval/results" / overview.SWEEP)
    (tmp_path / overview.TIMES).parent.mkdir(parents=True)
    shutil.copy(ROOT / overview.TIMES, tmp_path / overview.TIMES)
    (tmp_path / overview.FOLDER).mkdir(parents=True)
    return tmp_path


def rewrite(path, change):
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def test_a_panel_has_one_dense_line_and_one_per_step():
    panels = plot.series(
        report(
            entry(SHORT, 10.0, 20.0),
            entry(LONG, 20.0, 80.0),
            entry(LONG, 9.0, 80.0, variant="bf16"),
            entry(LONG, 70.0, 80.0, op="dense_decode", variant=""),
            entry(LONG, 30.0, 79.0, *TOKEN_STEPS[0]),
            entry(Shape(32, 8, 128, 8, 8192), 30.0, 85.0),
            entry(Shape(28, 4, 128, 1, 1 << 20, queries=512), 500.0, 13750.0, *CHUNK_STEP),
        )
    )
    assert panels == {
        "q32-kv8-d128-b1": {
            plot.DENSE: [(8192, 20.0), (32768, 79.0)],
            "Quest": [(8192, 10.0), (32768, 20.0)],
            "TokenSelect, chosen anew": [(32768, 30.0)],
        },
        "q32-kv8-d128-b8": {plot.DENSE: [(8192, 85.0)], "Quest": [(8192, 30.0)]},
    }


def test_times_are_drawn_on_logarithmic_axes_with_the_lengths_as_ticks():
    _, (axes,) = plot.new_figure(4, 3, 1, 1)
    lines = {plot.DENSE: [(8192, 20.0), (32768, 80.0)], "Quest": [(8192, 10.0), (32768, 20.0)]}
    plot.draw_times(axes, lines, plot.THEMES["light"])
    assert drawn(axes) == {name: [list(point) for point in points] for name, points in lines.items()}
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["8K", "32K"]


def test_the_page_shows_a_figure_for_each_theme_and_report(tmp_path):
    folder = tmp_path / "kernels/benchmarks/results"
    folder.mkdir(parents=True)
    (folder / "a.json").write_text(json.dumps(report(entry(SHORT, 10.0, 20.0))))
    (folder / "b.json").write_text(json.dumps(report()))
    text, files = performance.tables(tmp_path), performance.figures(tmp_path)
    assert set(files) == {"times-a-light.svg", "times-a-dark.svg"}
    assert all(f"](assets/{name}#only-" in text for name in files)
    assert "times-b" not in text
    for name, theme in plot.THEMES.items():
        assert theme.quest.encode() in files[f"times-a-{name}.svg"]


def test_the_data_are_means_of_the_results(root):
    sweep = root / "eval/results" / overview.SWEEP
    accuracy = overview.overview_data(root)["accuracy"]
    assert accuracy["points"]["dense attention"] == [[100.0, 100.0, ""]]
    assert [budget for _, _, budget in accuracy["points"]["Quest"]] == ["256", "512", "1,024", "2,048"]
    rows = sum(len((path / "rows.jsonl").read_text().splitlines()) for path in sweep.iterdir() if path.is_dir())
    assert accuracy["samples"] == rows / sum(map(len, accuracy["points"].values()))

    def change(summary):
        for row in summary["table"]:
            if row["method"] == "quest" and row["token_budget"] == 256:
                row["score"], row["kv_fraction"] = 1.0, 0.5

    before = {budget: point for *point, budget in accuracy["points"]["Quest"]}["256"]
    path = sweep / "03-passkey/summary.json"
    (row,) = [
        row for row in json.loads(path.read_text())["table"] if (row["method"], row["token_budget"]) == ("quest", 256)
    ]
    rewrite(path, change)
    after = {budget: point for *point, budget in overview.overview_data(root)["accuracy"]["points"]["Quest"]}["256"]
    assert after[0] - before[0] == pytest.approx(100 * (0.5 - row["kv_fraction"]) / 6)
    assert after[1] - before[1] == pytest.approx(100 * (1.0 - row["score"]) / 6)


def test_the_picture_shows_its_data():
    data = overview.overview_data(ROOT)
    figure = overview.overview_figure(data, plot.THEMES["dark"])
    accuracy, time = (drawn(axes) for axes in figure.axes)
    assert time == data["time"]["lines"]
    assert accuracy == {
        method: [[read, score] for read, score, _ in points] for method, points in data["accuracy"]["points"].items()
    }
    assert data["accuracy"]["device"] in figure.axes[0].get_title(loc="left")
    assert data["time"]["device"] in figure.axes[1].get_title(loc="left")


@pytest.mark.parametrize("file", overview.FILES.values())
def test_the_stored_picture_has_the_results_data(file):
    description = ElementTree.parse(ROOT / overview.FOLDER / file).getroot().find(f".//{DESCRIPTION}")
    message = "run: python kernels/benchmarks/run.py --overview"
    assert json.loads(description.text) == overview.overview_data(ROOT), message


def test_the_picture_is_written_with_its_data_and_the_same_each_time(root):
    written = overview.write_overview(root)
    assert [path.name for path in written] == list(overview.FILES.values())
    first = [path.read_bytes() for path in written]
    data = ElementTree.fromstring(first[0]).find(f".//{DESCRIPTION}").text
    assert json.loads(data) == overview.overview_data(root)
    assert [path.read_bytes() for path in overview.write_overview(root)] == first
    assert first[0] != first[1]


def other_device(summary):
    summary["device"] = "another"


def fewer_samples(summary):
    for row in summary["table"]:
        row["samples"] -= 1


def no_quest(summary):
    summary["table"] = [row for row in summary["table"] if row["method"] != "quest"]


@pytest.mark.parametrize("change", [other_device, fewer_samples, no_quest])
def test_inconsistent_runs_are_refused(root, change):
    rewrite(root / "eval/results" / overview.SWEEP / "01-passkey/summary.json", change)
    with pytest.raises(ResultsError, match="must hold every task and length"):
        overview.overview_data(root)


def test_missing_and_damaged_results_are_named(root):
    summary = root / "eval/results" / overview.SWEEP / "01-passkey/summary.json"
    summary.write_text("{}")
    with pytest.raises(ResultsError, match=r"01-passkey/summary\.json is not the summary of a run"):
        overview.overview_data(root)
    rewrite(root / overview.TIMES, lambda times: times["entries"].clear())
    with pytest.raises(ResultsError, match="has no decode steps of q32-kv8-d128-b1"):
        overview.overview_data(root)


@pytest.mark.parametrize(
    ("make", "head"),
    [
        (overview.accuracy_table, "| token_budget | KV read, % | score, % |"),
        (overview.times_table, "| tokens in the cache | best dense kernel, µs | Quest, µs |"),
    ],
)
def test_each_method_has_its_tables(make, head):
    assert make(ROOT, "Quest").startswith(head)
    assert "TokenSelect" not in make(ROOT, "Quest")
    with pytest.raises(KeyError, match="Nothing"):
        make(ROOT, "Nothing")
