"""The table of the papers' claims is made from the result files, and says which of them hold."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eval.claims import CLAIMS, Check, Claim, claims_rows

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


@pytest.mark.parametrize(("ours", "verdict"), [((3, 3), "yes"), ((3, 1), "in part"), ((1, 1), "no")])
def test_a_claim_holds_if_all_of_its_figures_are_as_good(ours: tuple[int, int], verdict: str, tmp_path: Path) -> None:
    claim = Claim("A paper", "a claim", lambda root: [Check(f"{each}x", each, 2) for each in ours])
    assert claim.row(tmp_path) == ("A paper", "a claim", f"{ours[0]}x; {ours[1]}x", verdict)
    losses = Claim("A paper", "a claim", lambda root: [Check("", -each, -2, least=False) for each in ours])
    assert losses.row(tmp_path)[3] == verdict


def test_without_results_nothing_is_said_to_hold(tmp_path: Path) -> None:
    assert {row[2:] for row in claims_rows(tmp_path)} == {("not measured in this checkout", "-")}
