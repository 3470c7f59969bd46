"""The table of the papers' claims is made from the result files, and says which of them hold."""

from __future__ import annotations

import json
import re
from pathlib import Path
from statistics import fmean, median

import pytest

from eval.claim_checks import Check
from eval.claims import CLAIMS, Claim, claims_rows

ROOT = Path(__file__).resolve().parents[2]


def test_every_claim_is_measured_in_this_checkout() -> None:
    rows = claims_rows(ROOT)
    assert len(rows) == len(CLAIMS)
    assert {verdict for *_, verdict in rows} <= {"yes", "in part", "no"}
    assert {paper.split()[0] for paper, *_ in rows} == {"Quest", "Squeezed", "TokenSelect", "PSA"}


def test_figures_are_those_of_the_files() -> None:
    """Computed from the rows, not from the summaries that the table reads."""
    folder = ROOT / "eval/results/results-squeezed/01-longbench"
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    tasks = {row["task"] for row in rows}

    def mean(**wanted: object) -> float:
        cells = [
            [row["score"] for row in rows if row["task"] == task and wanted.items() <= row.items()] for task in tasks
        ]
        return sum(100 * sum(cell) / len(cell) for cell in cells) / len(cells)

    dense, quest = mean(method="full"), mean(method="quest", token_budget=1024)
    assert len(tasks) == 16
    shown = next(here for paper, claim, here, _ in claims_rows(ROOT) if claim == "a negligible loss on long tasks")
    assert shown.startswith(f"{dense - quest:.1f} of {dense:.1f} points lost with 1,024 tokens; ")


def cells(run: str, **wanted: object) -> list[list[float]]:
    """Return the scores of each task of a table's run, computed from its records, in percent."""
    path = ROOT / f"eval/results/tables/{run}/rows.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    found = [record for record in records if wanted.items() <= record.items() and record["error"] is None]
    return [
        [100 * each["score"] for each in found if each["task"] == task] for task in {each["task"] for each in found}
    ]


def mean(run: str, **wanted: object) -> float:
    return fmean(fmean(cell) for cell in cells(run, **wanted))


def claimed(part: str) -> tuple[str, str]:
    """Return our figures and the verdict of the claim whose text has a part."""
    ((here, verdict),) = [(here, verdict) for _, claim, here, verdict in claims_rows(ROOT) if part in claim]
    return here, verdict


def test_quest_is_compared_with_the_best_method_that_evicts_at_each_budget() -> None:
    here, verdict = claimed("(figure 7)")
    run = "quest-fig7-qwen2.5-coder-1.5b/01-longbench"
    assert len(cells(run, method="full")) == 6
    leads = []
    for budget in (256, 512, 1024, 2048, 4096):
        quest, *others = (
            mean(run, method=method, token_budget=budget) for method in ("quest", "h2o", "tova", "streaming_llm")
        )
        leads.append(quest - max(others))
        assert f"{leads[-1]:+.1f} with {budget:,}" in here
    dense = mean(run, method="full")
    loss = dense - mean(run, method="quest", token_budget=1024)
    assert f"{loss:.1f} of dense attention's {dense:.1f} points lost" in here
    assert verdict == verdict_of([*(lead >= 0 for lead in leads), loss <= 1])


def test_perplexities_are_compared_with_dense_attentions() -> None:
    here, verdict = claimed("(figure 6")
    shown, held = [], []
    for run in ("smollm2-cpu", "qwen2.5-coder-1.5b"):
        path = ROOT / f"eval/results/tables/quest-fig6-{run}/01-pg19/rows.jsonl"
        found = {each["method"]: each["perplexity"] for each in map(json.loads, path.read_text().splitlines())}
        above = {method: 100 * (perplexity / found["full"] - 1) for method, perplexity in found.items()}
        shown += [f"{above[method]:.1f}" for method in ("quest", "h2o", "tova")]
        held += [above["quest"] <= 0.16, above["h2o"] >= above["quest"], above["tova"] >= above["quest"]]
    assert re.findall(r"(?:Quest|H2O|TOVA) ([\d.]+) %", here) == shown
    assert verdict == verdict_of(held)


def test_tokenselect_is_compared_with_infllm_at_the_papers_lengths() -> None:
    here, verdict = claimed("(table 2)")
    run = "tokenselect-2-qwen2.5-coder-1.5b/01-ruler"
    budgets = ((2688, 2816), (8320, 8448))
    pairs = [
        (
            mean(run, length=length, method="tokenselect", token_budget=ours),
            mean(run, length=length, method="infllm", token_budget=theirs),
        )
        for length in (8192, 16384)
        for ours, theirs in budgets
    ]
    assert re.findall(r"([\d.]+) to ([\d.]+) %", here) == [(f"{ours:.1f}", f"{theirs:.1f}") for ours, theirs in pairs]
    leads = (81.81 - 36.09, 90.22 - 52.10, 68.68 - 29.36, 82.06 - 40.53)
    assert verdict == verdict_of([ours - theirs >= lead for (ours, theirs), lead in zip(pairs, leads, strict=True)])


def test_tokenselects_votes_and_numbers_of_tokens_are_those_of_its_tables() -> None:
    votes, tokens = (f"tokenselect-{table}-qwen2.5-coder-1.5b/01-infinitebench" for table in (4, 5))
    values = {"task": "kv_retrieval", "method": "tokenselect"}
    soft, logits, heads = (mean(votes, **values, variant=name) for name in ("", "vote=logits", "vote=head"))
    dense = mean(votes, task="kv_retrieval", method="full")
    here = (
        f"Qwen2.5-Coder-1.5B, 32K: soft {soft:.0f} %, logits {logits:.0f} %, heads {heads:.0f} %, dense {dense:.0f} %"
    )
    assert claimed("(table 4)") == (here, "no")
    numbers = mean(tokens, task="number_string", method="tokenselect", variant="k=128")
    few, many = mean(tokens, **values, variant="k=128"), mean(tokens, **values, token_budget=2688)
    here = f"Qwen2.5-Coder-1.5B, 32K: numbers {numbers:.0f} %; values {few:.0f} and {many:.0f} %"
    assert claimed("(table 5)") == (here, "in part")


def test_tokenselects_prefill_is_that_of_its_table() -> None:
    path = ROOT / "eval/results/tables/tokenselect-8-qwen2.5-coder-1.5b/01-passkey/rows.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]

    def seconds(method: str, length: int) -> float:
        wanted = {"method": method, "length": length}
        return median(each["ttft_seconds"] for each in records if wanted.items() <= each.items())

    parts = [
        part
        for length in (10_000, 32_000)
        for part in (
            f"{length:,}: {seconds('tokenselect', length):.2f} s, dense {seconds('full', length):.2f} s",
            f"MInference {seconds('minference', length):.2f} s",
        )
    ]
    assert claimed("(table 8") == ("Qwen2.5-Coder-1.5B, " + "; ".join(parts), "no")


@pytest.mark.parametrize(
    ("part", "table", "benchmark"),
    [
        ("tasks of table 2", "squeezed-2", "longbench"),
        ("table 3", "squeezed-3", "ruler"),
        ("as in table 4", "squeezed-4", "prefixqa"),
    ],
)
def test_squeezed_attentions_losses_are_those_of_its_tables(part: str, table: str, benchmark: str) -> None:
    here, verdict = claimed(part)
    losses = []
    for variant in ("sink_tokens=0, target_sparsity=0.7", "sink_tokens=0"):
        for run in ("01", "02"):
            folder = f"{table}-qwen2.5-coder-1.5b/{run}-{benchmark}"
            losses.append(mean(folder, method="full") - mean(folder, variant=variant))
    assert re.findall(r"(-?[\d.]+) (?:points lost|in a conversation)", here) == [f"{loss:.1f}" for loss in losses]
    held = [loss <= most for loss, most in zip(losses, (1, 1, 0.5, 0.5), strict=True)]
    assert verdict == verdict_of(held)


def test_psa_is_compared_with_dense_attention_by_bytes_and_points() -> None:
    here, verdict = claimed("8.8x")
    run = "psa-fig5-qwen2.5-coder-1.5b/01-longbench"
    dense = mean(run, method="full")
    losses = [dense - mean(run, variant=f"threshold={threshold}") for threshold in (0.95, 0.98)]
    assert re.findall(r"([\d.]+) of [\d.]+ points", here) == [f"{loss:.1f}" for loss in losses]
    saved = [float(each) for each in re.findall(r"([\d.]+)x with threshold", here)]
    assert verdict == verdict_of([*(each >= 8.8 for each in saved), *(loss <= 1 for loss in losses)])


def verdict_of(held: list[bool]) -> str:
    return "yes" if all(held) else "in part" if any(held) else "no"


@pytest.mark.parametrize(("ours", "verdict"), [((3, 3), "yes"), ((3, 1), "in part"), ((1, 1), "no")])
def test_a_claim_holds_if_all_of_its_figures_are_as_good(ours: tuple[int, int], verdict: str, tmp_path: Path) -> None:
    claim = Claim("A paper", "a claim", lambda root: [Check(f"{each}x", each, 2) for each in ours])
    assert claim.row(tmp_path) == ("A paper", "a claim", f"{ours[0]}x; {ours[1]}x", verdict)
    losses = Claim("A paper", "a claim", lambda root: [Check("", -each, -2, least=False) for each in ours])
    assert losses.row(tmp_path)[3] == verdict


def test_without_results_nothing_is_said_to_hold(tmp_path: Path) -> None:
    assert {row[2:] for row in claims_rows(tmp_path)} == {("not measured in this checkout", "-")}
