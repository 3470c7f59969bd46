"""Tables of the divergence by position: on the results' page and by themselves."""

import json

from eval.markdown import position_tables, results_tables
from eval.summary import summarise
from tests.eval.report_records import record, write_records

SWEEP = "results-invented"
HEAD = "| task | length | method | all | 0 | 250 |"


def write_run(folder, benchmark, task, by_position):
    """Write a run of two samples, in which Quest diverges as given and dense attention has no divergence."""
    records = []
    for sample, pairs in enumerate(by_position):
        nothing = dict.fromkeys(("divergence", "divergence_max", "top_agreement", "divergence_by_position"))
        records.append(record(benchmark, task, sample, "full", None, score=None, **nothing))
        mean = sum(value for _, value in pairs) / len(pairs)
        own = {"divergence": mean, "divergence_max": 1.0, "top_agreement": 0.5, "divergence_by_position": pairs}
        records.append(record(benchmark, task, sample, "quest", 256, score=None, **own))
    run = folder / SWEEP / f"01-{benchmark}"
    write_records(run / "rows.jsonl", records)
    first = records[0]
    summary = {
        **{name: first[name] for name in ("model", "dtype", "device", "versions", "protocol_sha256")},
        "config": {"benchmark": benchmark, "method": ["full", "quest"], "question": "decode", "seed": 0},
        "date": "2026-01-02T00:00:00", "rows": len(records), "errors": 0, "harness_seconds": 1.0,
        "model_seconds": 40.0, "table": summarise(records),
    }  # fmt: skip
    (run / "summary.json").write_text(json.dumps(summary))


def test_positions_have_the_means_of_the_samples_that_reach_them(tmp_path):
    write_run(tmp_path, "longanswer", "retelling", [[[0, 0.1], [250, 0.3]], [[0, 0.2]]])
    text = position_tables(tmp_path, SWEEP)
    assert text.startswith("longanswer, model-1b, bfloat16, Example GPU, 2 samples: mean KL from dense attention")
    assert HEAD in text
    (line,) = [line for line in text.splitlines() if "quest" in line]
    assert line.endswith("| quest 256 | 0.2000 | 0.1500 | 0.3000 |")
    assert "dense |" not in text
    page = results_tables(tmp_path)
    assert text in page
    assert page.count(HEAD) == 1


def test_the_mean_of_a_method_that_failed_on_a_sample_has_its_number_of_samples(tmp_path):
    write_run(tmp_path, "longanswer", "retelling", [[[0, 0.1], [250, 0.3]], [[0, 0.2]]])
    path = tmp_path / SWEEP / "01-longanswer" / "summary.json"
    summary = json.loads(path.read_text())
    summary["table"][1]["errors"] = 1
    path.write_text(json.dumps(summary))
    assert "| quest 256 | 0.2000 (n=1) | 0.1500 | 0.3000 |" in position_tables(tmp_path, SWEEP)


def test_short_answers_have_no_such_table(tmp_path):
    write_run(tmp_path, "passkey", "filler", [[[0, 0.1]], [[0, 0.2]]])
    assert HEAD not in results_tables(tmp_path)
    nothing = f"No measurements of `eval/configs/{SWEEP}.yaml` are in this checkout.\n"
    assert position_tables(tmp_path, SWEEP) == position_tables(tmp_path / "missing", SWEEP) == nothing
