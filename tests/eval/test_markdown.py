"""The documentation's tables are what the results files say, and nothing else."""

import json
from pathlib import Path

import pytest

from eval.errors import EvalError
from eval.markdown import results_tables
from eval.store import read_records
from eval.summary import summarise

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("path", sorted(ROOT.glob("eval/results/*/*/summary.json")), ids=lambda path: path.parent.name)
def test_kept_summaries_are_those_of_their_records(path):
    summary = json.loads(path.read_text(encoding="utf-8"))
    records = read_records(path.parent / "rows.jsonl")
    # Summaries from before there were such figures lack them.
    since = {"selection_hit_rate": None, "variant": "", "context_seconds": None, "first_token_seconds": None}
    since |= {"divergence": None, "divergence_max": None, "top_agreement": None, "divergence_by_position": None}
    since |= {"scores": None}
    assert [since | entry for entry in summary["table"]] == summarise(records)
    assert summary["finished"]
    assert summary["rows"] == len(records)
    assert (ROOT / "eval/configs" / f"{path.parent.parent.name}.yaml").exists()
    assert ", ".join(sorted({record["device"] for record in records})) == summary["device"]


ENTRY = {
    "benchmark": "passkey", "task": "filler", "length": 400, "method": "full", "token_budget": None, "samples": 3,
    "errors": 0, "score": 0.75, "perplexity": None, "kv_fraction": 1.0, "realised_budget": 401.0,
    "ttft_seconds": 1.5, "tpot_ms": 12.34, "prompt_tokens": 412.0, "peak_memory_bytes": 2**21,
}  # fmt: skip
SUMMARY = {
    "model": "m", "dtype": "float32", "device": "a CPU", "versions": {"torch": "2"}, "date": "2026-01-02T00:00:00",
    "rows": 8, "errors": 1, "harness_seconds": 1.0, "model_seconds": 40.0, "protocol_sha256": "abcdef" * 10,
    "config": {"benchmark": "passkey", "method": ["full", "quest"], "question": "decode", "seed": 3},
}  # fmt: skip


def page_of(folder, *summaries):
    for number, summary in enumerate(summaries, start=1):
        run = folder / "sweep" / f"{number:02d}-passkey"
        run.mkdir(parents=True)
        (run / "summary.json").write_text(json.dumps(SUMMARY | summary))
    return results_tables(folder)


def test_cells_hold_scores_perplexities_and_speeds(tmp_path):
    other = ENTRY | {"method": "quest", "token_budget": 1024, "score": None, "perplexity": 9.8765}
    text = page_of(tmp_path, {"table": [ENTRY, other]})
    assert "| filler | 400 | 3 | 75.0 | 9.877 |" in text
    assert "| filler | 400 | quest 1,024 | 412 | 401 | 100.0 | 1.50 | 12.3 | 2 |" in text
    assert "## quest: m, float32, a CPU\n" in text
    assert "the harness added 2.5%" in text
    assert "protocol abcdefabcdef" in text
    assert "selections kept, %" not in text


def test_a_figure_of_other_samples_than_those_of_its_line_has_their_number(tmp_path):
    fewer = [{"score": 1.0}, {"score": None, "perplexity": 9.0}, {"score": None, "errors": 3}]
    table = [
        ENTRY,
        *(ENTRY | {"method": "quest", "token_budget": 8 << n, "errors": 2} | e for n, e in enumerate(fewer)),
    ]
    assert "| filler | 400 | 3 | 75.0 | 100.0 (n=1) | 9.000 (n=1) | - |" in page_of(tmp_path, {"table": table})


def test_a_gguf_file_is_named_without_its_folder(tmp_path):
    assert "## quest: tiny.gguf, float32, a CPU\n" in page_of(tmp_path, {"table": [ENTRY], "model": "/data/tiny.gguf"})


def test_kept_selections_have_a_column_where_a_method_keeps_them(tmp_path):
    keeping = {"method": "tokenselect", "token_budget": 64, "selection_hit_rate": 0.25, "kv_fraction": 0.5}
    text = page_of(tmp_path, {"table": [ENTRY, ENTRY | keeping]})
    assert "| tokens read | KV read, % | selections kept, % | TTFT, s |" in text
    assert "| filler | 400 | tokenselect 64 | 412 | 401 | 50.0 | 25.0 | 1.50 | 12.3 | 2 |" in text
    assert "| filler | 400 | dense | 412 | 401 | 100.0 | - | 1.50 | 12.3 | 2 |" in text


def test_variants_and_the_times_of_contexts_have_columns(tmp_path):
    variants = [
        ENTRY | {"method": "quest", "token_budget": 64, "variant": f"page_size={size}", "score": score}
        for size, score in ((8, 0.5), (16, 0.25))
    ]
    text = page_of(tmp_path, {"table": [ENTRY | {"context_seconds": 1.25, "first_token_seconds": 0.25}, *variants]})
    assert "| score: dense | score: quest 64 page_size=16 | score: quest 64 page_size=8 |" in text
    assert "| filler | 400 | 3 | 75.0 | 25.0 | 50.0 |" in text
    assert "| context, s | question, s | TTFT, s |" in text
    assert "| filler | 400 | dense | 412 | 401 | 100.0 | 1.25 | 0.250 | 1.50 | 12.3 | 2 |" in text
    assert "| filler | 400 | quest 64 page_size=8 | 412 | 401 | 100.0 | - | - | 1.50 | 12.3 | 2 |" in text


def test_means_weigh_tasks_alike_and_need_every_task(tmp_path):
    tasks = [("a", 0.5, 1, 0.25, 0.4), ("b", 1.0, 99, 0.75, 0.2)]
    table = [
        ENTRY | {"task": task, "method": method, "score": score, "samples": samples, "kv_fraction": share}
        for task, dense, samples, sparse, share_read in tasks
        for method, score, share in (("full", dense, 1.0), ("quest", sparse, share_read))
    ]
    text = page_of(tmp_path / "whole", {"table": table})
    assert "| mean |  |  | 75.0 | 50.0 |\n| KV read, % |  |  | 100.0 | 30.0 |\n" in text
    text = page_of(tmp_path / "lacking", {"table": table[:-1]})
    assert "| mean |  |  | 75.0 | - |\n| KV read, % |  |  | 100.0 | - |\n" in text
    for number, fewer in enumerate(({"errors": 1}, {"samples": 98})):
        text = page_of(tmp_path / f"failed_{number}", {"table": [*table[:-1], table[-1] | fewer]})
        assert "| b | 400 | 99 | 100.0 | 75.0 (n=98) |" in text
        assert "| mean |  |  | 75.0 | - |\n| KV read, % |  |  | 100.0 | - |\n" in text
    text = page_of(tmp_path / "no_reads", {"table": [*table[:-1], table[-1] | {"kv_fraction": None}]})
    assert "| mean |  |  | 75.0 | 50.0 |\n| KV read, % |  |  | 100.0 | - |\n" in text


def test_one_task_and_perplexities_have_no_means(tmp_path):
    perplexities = [ENTRY | {"length": length, "score": None, "perplexity": 9.0} for length in (400, 800)]
    for number, table in enumerate(([ENTRY], perplexities)):
        assert "| mean |" not in page_of(tmp_path / str(number), {"table": table})


def test_a_parameter_swept_over_runs_is_one_table(tmp_path):
    runs = [
        {
            "config": SUMMARY["config"] | {"parameters": {"k": 32, "threshold": threshold}},
            "table": [
                ENTRY | {"realised_budget": 400.0 + number},
                ENTRY
                | {"method": "tokenselect", "token_budget": 64, "score": score, "kv_fraction": 0.5 + number}
                | {"realised_budget": 64.0, "selection_hit_rate": 0.5 - number / 4},
            ],
        }
        for number, (threshold, score) in enumerate([(-1, 0.0), (0.95, 0.5), (1, None)])
    ]
    lines = page_of(tmp_path, *runs).splitlines()
    begin = lines.index("### passkey: threshold")
    assert lines[begin + 2] == "Question: decode; seed 3; k 32."
    assert lines[begin + 4 :] == [
        "| task | length | method | threshold | samples | score | selections kept, % | tokens read | KV read, % |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
        "| passkey filler | 400 | dense | - | 3 | 75.0 | - | 400 | 100.0 |",
        "| passkey filler | 400 | tokenselect 64 | -1 | 3 | 0.0 | 50.0 | 64 | 50.0 |",
        "| passkey filler | 400 | tokenselect 64 | 0.95 | 3 | 50.0 | 25.0 | 64 | 150.0 |",
        "| passkey filler | 400 | tokenselect 64 | 1 | 3 | - | 0.0 | 64 | 250.0 |",
    ]


def test_runs_that_share_their_parameters_or_differ_in_more_than_one_keep_their_tables(tmp_path):
    for number, parameters in enumerate([({}, {}), ({"k": 1}, {"k": 1}), ({"k": 1, "n": 1}, {"k": 2, "n": 2})]):
        runs = [{"config": SUMMARY["config"] | {"parameters": given}, "table": [ENTRY]} for given in parameters]
        assert page_of(tmp_path / str(number), *runs).count("### passkey\n") == 2


def test_runs_over_other_lengths_are_one_table(tmp_path):
    runs = [{"table": [ENTRY | {"length": length}]} for length in (400, 800)]
    other = {"table": [ENTRY | {"length": 1600}], "config": SUMMARY["config"] | {"question": "prefill"}}
    text = page_of(tmp_path, *runs, other)
    assert text.count("### passkey\n") == 2
    assert "| filler | 400 | 3 | 75.0 |\n| filler | 800 | 3 | 75.0 |\n" in text


def test_no_results_is_an_error_that_names_the_folder(tmp_path):
    with pytest.raises(EvalError, match=str(tmp_path)):
        results_tables(tmp_path)


DAMAGED = {
    "{": "is not the summary of a run: Expecting",
    "[]": "is not the summary of a run: it holds list",
    "{}": "is not the summary of a run: KeyError: 'versions'",
    json.dumps(SUMMARY): "is not the summary of a run: KeyError: 'table'",
    json.dumps(SUMMARY | {"table": [{"task": "a"}]}): "is not the summary of a run: KeyError: 'method'",
    json.dumps(SUMMARY | {"table": [ENTRY | {"score": "good"}]}): "is not the summary of a run: ValueError",
    json.dumps(SUMMARY | {"table": [], "rows": None}): "is not the summary of a run: TypeError",
}


@pytest.mark.parametrize("content", DAMAGED, ids=range(len(DAMAGED)))
def test_a_damaged_summary_is_named(tmp_path, content):
    path = tmp_path / "sweep" / "01-passkey" / "summary.json"
    path.parent.mkdir(parents=True)
    path.write_text(content)
    with pytest.raises(EvalError, match=rf"01-passkey/summary\.json {DAMAGED[content]}"):
        results_tables(tmp_path)


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"settings": 3, "machine": {}}'])
def test_a_damaged_speed_report_is_named(tmp_path, content):
    (tmp_path / "speed").mkdir()
    (tmp_path / "speed" / "it.json").write_text(content)
    with pytest.raises(EvalError, match=r"speed/it\.json is not a report of `python -m eval speed`"):
        results_tables(tmp_path)


def test_odd_summaries_and_notes(tmp_path):
    sparse = ENTRY | {"method": "quest", "score": None}
    text = page_of(tmp_path, {"table": [sparse], "model": "m\ud83d", "model_seconds": 0.0})
    assert "| filler | 400 | quest |" in text
    assert r"m\ud83d" in text
    (tmp_path / "sweep" / "note.txt").write_bytes(b"\xff")
    with pytest.raises(EvalError, match=r"note\.txt cannot be read"):
        results_tables(tmp_path)


def test_the_note_of_a_papers_table_is_shown_with_it():
    text = results_tables(ROOT / "eval/results")
    for folder in sorted((ROOT / "eval/results/tables").iterdir()):
        report = json.loads((folder / "table.json").read_text())
        assert f"{report['notes'][-1]}\n\n{(folder / 'note.txt').read_text()}" in text
