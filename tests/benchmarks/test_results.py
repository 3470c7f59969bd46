"""Records of a run: compared, and written as tables; no time is measured here."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from op_bench import break_even as even
from op_bench import performance, registry, results
from op_bench.registry import TOKEN_STEPS
from op_bench.shapes import Shape
from op_bench.timing import quartiles

from tests.benchmarks.records import LONG, SHORT, entry, report, times

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "kernels" / "benchmarks" / "run.py"


def test_floors_and_what_is_over_them():
    floors = results.floors_us(4_270_000, 2e12)
    assert floors["nominal"] == pytest.approx(1.0)
    assert floors["copy"] == pytest.approx(2.135)
    over = results.over_floor(times(3.0), floors)
    assert over["layers"]["nominal"] == pytest.approx(3.0)
    assert over["replay"]["nominal"] == pytest.approx(8.0)


def test_the_best_of_others_counts_and_ours_beside_it():
    dense = [
        {"backend": "slow", "times": times(30.0)},
        {"backend": "fast", "times": times(20.0)},
        {"backend": "broken", "times": None},
    ]
    found = results.against_dense(times(10.0), dense, times(15.0))["layers"]
    assert (found["best"], found["best_us"], found["ratio"]) == ("fast", 20.0, 2.0)
    assert (found["best_with_ours"], found["ratio_with_ours"]) == (results.OURS, 1.5)
    found = results.against_dense(times(10.0), dense, times(25.0))["layers"]
    assert (found["best_with_ours"], found["ratio_with_ours"]) == ("fast", 2.0)
    assert results.against_dense(times(10.0), dense[2:], times(15.0)) is None


def test_quartiles():
    assert quartiles([4.0, 1.0, 3.0, 2.0, 5.0]) == {"min": 1.0, "q1": 2.0, "median": 3.0, "q3": 4.0, "samples": 5}
    assert quartiles([2.0])["median"] == 2.0


def test_a_report_is_written_and_read(tmp_path):
    path = tmp_path / "new" / "device.json"
    made = report(entry(SHORT, 10.0, 20.0))
    results.write(made, path)
    assert results.read(path) == made
    assert results.shape_of(made["entries"][0]) == SHORT
    for text in ("no json", "[]", '{"machine": {}}'):
        path.write_text(text)
        with pytest.raises(results.ResultsError, match=r"device\.json is not a results file"):
            results.read(path)
    assert results.file_stem("NVIDIA H100 80GB HBM3") == "nvidia-h100-80gb-hbm3"


def test_the_machine_is_recorded(tmp_path):
    machine = results.machine_record("NVIDIA H200", {"copy_bytes_per_second": 4.2e12}, "python run.py", tmp_path)
    assert machine["device"] == "NVIDIA H200"
    assert machine["commit"] is None  # no repository there
    assert {"torch", "triton", "transformers", "driver", "date", "command", "copy_bytes_per_second"} <= set(machine)
    json.dumps(machine)


def test_compare_finds_what_is_slower():
    old = report(entry(SHORT, 10.0, 20.0), entry(LONG, 10.0, 20.0), entry(LONG, 1.0, 2.0, op="page_scores"))
    new = report(entry(SHORT, 10.4, 20.0), entry(LONG, 10.6, 20.0))
    lines, slower = results.compare(old, new)
    assert slower == 1  # in a graph of layers; alone 15.6 is within 5 % of 15
    assert len(lines) == 5
    assert [line.endswith("SLOWER") for line in lines] == [False, False, False, False, True]
    assert results.compare(old, new, margin=0.1)[1] == 0
    new["entries"][1]["times"] = None
    assert results.compare(old, new)[1] == 0


def test_a_part_of_a_run_is_put_into_an_older_report():
    old = report(entry(SHORT, 10.0, 20.0), entry(LONG, 10.0, 20.0))
    new = report(entry(LONG, 5.0, 20.0), entry(LONG, 7.0, 20.0, *STEP))
    new["machine"] |= {"date": "2026-02-03T04:05:06", "driver": "1.2"}
    new["settings"] |= TOKEN_SETTINGS
    made = results.merged(old, new)
    assert [each["times"]["layers"]["median"] for each in made["entries"]] == [10.0, 5.0, 7.0]
    assert [each["op"] for each in made["entries"]] == ["quest_step", "quest_step", STEP[0]]
    assert "machine" not in made["entries"][0]
    assert made["entries"][1]["machine"] == {"date": "2026-02-03T04:05:06", "driver": "1.2"}
    assert results.machine_of(made, made["entries"][2]) == new["machine"]
    assert made["machine"] == old["machine"]
    assert made["settings"] == new["settings"]
    assert [each["shape"]["name"] for each in made["dense"]] == [SHORT.name, LONG.name]
    new["settings"]["page_size"] = 32
    with pytest.raises(results.ResultsError, match="other settings: page_size"):
        results.merged(old, new)


def test_devices_must_agree():
    old = report(device="NVIDIA H100")
    with pytest.raises(results.ResultsError, match="'NVIDIA H100', these from 'NVIDIA H200'; --force"):
        results.check_device(old, "NVIDIA H200", force=False)
    results.check_device(old, "NVIDIA H200", force=True)
    results.check_device(old, "NVIDIA H100", force=False)


@pytest.mark.parametrize(
    ("points", "measured", "crossing"),
    [
        ([(8, 2.0), (32, 3.0)], 8, None),
        ([(8, 0.5), (32, 0.9)], None, None),
        ([(32, 2.0), (8, 0.5)], 32, 16.0),
        ([(8, 0.25), (32, 1.0), (128, 4.0)], 128, 32.0),
        ([(8, 1.5), (32, 0.9), (128, 2.0)], 128, pytest.approx(38.4, abs=0.1)),
        ([(8, 1.5), (32, 0.9)], None, None),
    ],
)
def test_break_even(points, measured, crossing):
    assert even.break_even(points) == even.BreakEven(min(points)[0], measured, crossing)


def test_step_ratios_are_of_eight_bit_bounds():
    made = report(entry(SHORT, 10.0, 5.0), entry(LONG, 10.0, 20.0), entry(LONG, 1.0, 20.0, variant="bf16"))
    assert even.step_ratios(made, "layers") == {"q32-kv8-d128-b1": [(8192, 0.5), (32768, 2.0)]}


STEP, KEPT, CHUNK_STEP = *TOKEN_STEPS, registry.CHUNK_STEP
TOKEN_SETTINGS = {"sink_tokens": 128, "voted_tokens": 2048, "recent_tokens": 512}


SPEED = {
    "machine": {"device": "NVIDIA H200", "date": "2026-01-02T03:04:05"},
    "settings": {"model": None, "shape": "llama-3.1-8b", "dtype": "bfloat16"},
    "results": [
        {
            "context": context,
            "sides": [
                {"name": "dense, StaticCache", "tpot_ms": {"median": 10.0}, "ratio": None},
                {
                    "name": "quest, 2048",
                    "tpot_ms": {"median": 10.0 / ratio},
                    "ratio": {"tpot": ratio, "tpot_against": "dense, StaticCache"},
                },
            ],
        }
        for context, ratio in ((32768, 0.5), (131072, 2.0))
    ],
}  # fmt: skip


def results_tree(root, reports=(), speeds=()):
    for folder, files in (("kernels/benchmarks/results", reports), ("eval/results/speed", speeds)):
        (root / folder).mkdir(parents=True)
        for number, content in enumerate(files):
            (root / folder / f"{number}.json").write_text(json.dumps(content))
    return root


def test_the_page_says_where_there_are_no_results(tmp_path):
    page = performance.tables(results_tree(tmp_path))
    assert "have not been timed yet: run `make bench`" in page
    assert "`generate()` has not been timed yet" in page


def test_the_page_shows_steps_generate_and_where_both_break_even(tmp_path):
    made = report(entry(SHORT, 10.0, 5.0), entry(LONG, 10.0, 20.0))
    speeds = [{**SPEED, "results": [result]} for result in SPEED["results"]]  # a run for each context is one table
    page = performance.tables(results_tree(tmp_path, [made], speeds))
    assert "| 32/8 | 128 | 1 | 32K | 10.0 | 20.0 | SDPA cuDNN | 2.00 | 10.00 | 15.0 | 25.0 | 1.67 |" in page
    assert "| 32/8 | 128 | 1 | 32,768 (crossing near 16,000) | 32,768 (crossing near 15,000) |" in page
    on = "llama-3.1-8b | bfloat16, NVIDIA H200"
    assert f"| {on} | 131,072 | quest, 2048 | 5.00 | 10.00 | dense, StaticCache | 2.00 |" in page
    assert f"| {on} | quest, 2048 | 131,072 (crossing near 66,000) |" in page
    assert "2026-01-02" in page


def test_the_page_shows_tokenselect_where_it_was_measured(tmp_path):
    quest = report(entry(LONG, 10.0, 20.0))
    assert "TokenSelect" not in performance.tables(results_tree(tmp_path / "without", [quest]))
    short, long = (Shape(28, 4, 128, 1, length << 20, queries=512) for length in (1, 2))
    other = Shape(28, 4, 128, 1, 1 << 17)
    steps = [
        entry(short, 550.0, 13750.0, *CHUNK_STEP),
        entry(long, 1100.0, 27500.0, *CHUNK_STEP),
        entry(other, 40.0, 60.0, *STEP),
        entry(other, 20.0, 60.0, *KEPT),
    ]
    new = report(*steps)
    new["settings"] |= TOKEN_SETTINGS
    new["machine"]["date"] = "2026-02-03"
    page = performance.tables(results_tree(tmp_path / "with", [results.merged(quest, new)]))
    assert "## TokenSelect, NVIDIA H200" in page
    assert "| 28/4 | 128 | 512 | 1M | 0.550 | 13.75 | SDPA cuDNN | 25.00 | 550.00 |" in page
    assert "| 28/4 | 128 | 1 | 128K | chosen anew | 40.0 | 60.0 | SDPA cuDNN | 1.50 | 40.00 | 45.0 | 65.0" in page
    assert "| 28/4 | 128 | 1 | 128K | choice kept | 20.0 | 60.0 | SDPA cuDNN | 3.00 |" in page
    assert "| chunk of the prefill | 28/4 | 128 | 1 | 1,048,576 (the shortest measured) |" in page
    assert "| decode step, choice kept | 28/4 | 128 | 1 | 131,072 (the shortest measured) |" in page
    assert page.index("page bounds") < page.index("## TokenSelect") < page.index("`generate()`")
    assert "2026-02-03" in page


def test_the_page_shows_squeezed_attention_where_it_was_measured(tmp_path):
    quest = report(entry(LONG, 10.0, 20.0))
    assert "Squeezed" not in performance.tables(results_tree(tmp_path / "without", [quest]))
    prefill = Shape(32, 32, 128, 1, 1 << 19, queries=1024)
    alone, shared = (Shape(32, 8, 128, batch, 1 << 17, shared=batch > 1) for batch in (1, 8))
    steps = [
        entry(prefill, 3400.0, 15000.0, *registry.SQUEEZED_PREFILL_STEP),
        entry(shared, 150.0, 450.0, *registry.SQUEEZED_STEP),
        entry(alone, 40.0, 120.0, *registry.SQUEEZED_STEP),
        entry(alone, 10.0, 120.0, "lookup_runs", ""),
    ]
    new = report(*steps)
    new["settings"] |= {"sparsity": 0.9, "clusters": 0.05, "window": 100, "tail_tokens": 256}
    page = performance.tables(results_tree(tmp_path / "with", [results.merged(quest, new)]))
    assert "## Squeezed Attention, NVIDIA H200" in page
    assert "5% as many clusters as keys. 90% of the clustered tokens" in page
    assert "| 32/32 | 128 | 1024 | 512K | 3.400 | 15.00 | SDPA cuDNN | 4.41 | 3400.00 |" in page
    first = page.index("| 32/8 | 128 | 1 | 128K | 40.0 | 120.0 | SDPA cuDNN | 3.00 | 40.00 | 45.0 | 125.0 | 2.78 |")
    assert first < page.index("| 32/8 | 128 | 8, shared | 128K | 150.0 | 450.0 | SDPA cuDNN | 3.00 |")
    assert page.index("page bounds") < page.index("## Squeezed Attention") < page.index("`generate()`")
    assert " 10.0 |" not in page[page.index("## Squeezed Attention") : page.index("`generate()`")]


def test_the_page_shows_progressive_attention_beside_quest(tmp_path):
    quest = report(entry(LONG, 10.0, 20.0))
    assert "Progressive" not in performance.tables(results_tree(tmp_path / "without", [quest]))
    other = Shape(32, 8, 64, 1, 1 << 17)
    new = report(entry(LONG, 12.5, 20.0, *registry.PSA_STEP), entry(other, 40.0, 20.0, *registry.PSA_STEP))
    new["settings"] |= {"block_size": 32, "microbatch": 8, "threshold": 0.95}
    page = performance.tables(results_tree(tmp_path / "with", [results.merged(quest, new)]))
    part = page[page.index("## Progressive Sparse Attention, NVIDIA H200") : page.index("`generate()`")]
    assert "until P exceeds 0.95: blocks of 32 tokens, tested every 8 blocks" in part
    rows = [line for line in part.splitlines() if line.startswith(("| 32/8 ", "| 28/4 "))]
    assert any("| 12.5 | 20.0 | SDPA cuDNN | 1.60 |" in row and row.endswith("| 10.0 | 1.25 |") for row in rows)
    assert any("| 40.0 | 20.0 | SDPA cuDNN | 0.50 |" in row and row.endswith("| - | - |") for row in rows)


def test_the_page_names_the_versions_and_dates_of_the_entries_shown(tmp_path):
    old = report(entry(SHORT, 10.0, 20.0), entry(LONG, 10.0, 20.0))
    new = report(entry(LONG, 5.0, 20.0))
    new["machine"] |= {"date": "2026-02-03T04:05:06", "triton": "3.7"}
    assert "torch 2.11, triton 3.6; 2026-01-02.\n" in performance.tables(results_tree(tmp_path / "old", [old]))
    page = performance.tables(results_tree(tmp_path / "merged", [results.merged(old, new)]))
    assert "torch 2.11, triton 3.6 and 3.7; 2026-01-02, 2026-02-03.\n" in page


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["--margin", "much"], 2, "invalid float value"),
        pytest.param(["--help"], 0, "--compare OLD", marks=pytest.mark.grid),
    ],
)
def test_the_script_runs_by_itself(arguments, status, message, tmp_path):
    command = [sys.executable, str(SCRIPT), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == status
    assert message in done.stdout + done.stderr
