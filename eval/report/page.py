"""The report's self-contained page, in one file without external resources."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from matplotlib import rc_context

from eval.errors import EvalError
from eval.report.budgets import budget_picture, budget_section, load_budgets
from eval.report.plots import Picture, draw
from eval.report.records import Record, Run, counted_once, load_runs
from eval.report.sections import Section, make_sections
from eval.report.style import Styles
from eval.report.tables import (
    agreement_table,
    cost_table,
    divergence_table,
    failed_samples,
    lost_samples,
    score_table,
)
from hf_sparse_attn.whole_file import write_whole

_MOST_FAILURES = 50
_SAMPLE = ("model", "benchmark", "task", "length", "sample_id", "seed")


def write_report(directory: Path, out: Path | None = None) -> Path:
    """Write the plots and one self-contained page about all runs in a folder and its subfolders.

    Parameters
    ----------
    directory : Path
        Folder with the runs, each with ``rows.jsonl`` or the unmerged parts ``rows-*.jsonl``.
    out : Path, optional
        Folder for the PNG files and ``index.html``; ``directory / "report"`` by default.

    Returns
    -------
    Path
        The page.

    Raises
    ------
    EvalError
        There is no record, one is malformed (the message names file and line), or ``out`` cannot be written.
    """
    runs = load_runs(directory)
    budgets = load_budgets(directory)
    found = [record for run in runs for record in run.records]
    records = counted_once(found)
    sections = make_sections(records)
    styles = Styles([column for section in sections for column in section.columns])
    out = directory / "report" if out is None else out
    failures = [failure for section in sections for failure in failed_samples(section)]
    try:
        return _write_page(out, found, records, sections, styles, failures, runs, budgets)
    except OSError as error:
        raise EvalError(f"out={str(out)!r} cannot be written: {error}") from error


def _write_page(
    out: Path,
    found: Sequence[Record],
    records: Sequence[Record],
    sections: Sequence[Section],
    styles: Styles,
    failures: Sequence[list[str]],
    runs: Sequence[Run],
    budgets: Sequence[dict[str, Any]],
) -> Path:
    out.mkdir(parents=True, exist_ok=True)
    page = _template().render(
        head=_head(records, repeated=len(found) - len(records)),
        budgets=[_budget(report, number, out) for number, report in enumerate(budgets, start=1)],
        sections=[_section(section, styles, out) for section in sections],
        failures=failures[:_MOST_FAILURES],
        more_failures=max(0, len(failures) - _MOST_FAILURES),
        runs=[_run(run) for run in runs],
    )
    path = out / "index.html"
    write_whole(path, page.encode("utf-8", errors="backslashreplace"))  # folder names may hold any bytes
    return path


def _template() -> Any:
    # Predictions may hold any text, so everything is escaped, regardless of the template's suffix.
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html.j2")


def _head(records: Sequence[Record], repeated: int) -> list[tuple[str, list[str]]]:
    """Return all values of each setting of the records, by name."""
    versions = sorted(
        {f"{name} {version}" for record in records for name, version in (record.get("versions") or {}).items()},
        key=str.lower,
    )
    protocols = _different(
        f"{record['protocol']}: sha256 {record.get('protocol_sha256') or 'unknown'}"
        for record in records
        if record.get("protocol")
    )
    errors = sum(record["error"] is not None for record in records)
    samples = {tuple(record[name] for name in _SAMPLE) for record in records}
    head = [
        ("model", _different(record["model"] for record in records)),
        ("device", _different(f"{record['device']}, {record['dtype']}" for record in records)),
        ("question", _different(record["question"] for record in records)),
        ("seed", _different(str(record["seed"]) for record in records)),
        ("versions", [", ".join(versions)] if versions else []),
        ("protocol", protocols),
        ("samples", [f"{len(samples):,}, in {len(records):,} records"]),
        ("errors", [f"{errors:,}"]),
        ("repeats left out", [f"{repeated:,}"] if repeated else []),
    ]
    return [(name, values) for name, values in head if values]


def _section(section: Section, styles: Styles, out: Path) -> dict[str, Any]:
    measures = _different(
        record["peak_memory_measures"] for record in section.records if record.get("peak_memory_measures")
    )
    return {
        "title": section.title,
        "slug": section.slug,
        "is_perplexity": section.is_perplexity,
        "scores": score_table(section),
        "costs": cost_table(section),
        "divergence": divergence_table(section),
        "agreement": agreement_table(section),
        "lost": lost_samples(section),
        "memory_measures": ", ".join(measures),
        "pictures": _pictures(section, styles, out),
    }


def _pictures(section: Section, styles: Styles, out: Path) -> list[dict[str, Any]]:
    with rc_context({"text.parse_math": False}):  # names may hold dollar signs
        return [_embed(picture, out) for picture in draw(section, styles)]


def _budget(report: dict[str, Any], number: int, out: Path) -> dict[str, Any]:
    title, table = budget_section(report)
    with rc_context({"text.parse_math": False}):
        picture = budget_picture(report, f"budget-{number}")
        pictures = [] if picture is None else [_embed(picture, out)]
    return {"title": title, "slug": f"budget-{number}", "table": table, "pictures": pictures}


def _embed(picture: Picture, out: Path) -> dict[str, Any]:
    png = picture.png()
    write_whole(out / f"{picture.name}.png", png)
    data = base64.b64encode(png).decode("ascii")
    return {
        "uri": f"data:image/png;base64,{data}",
        "caption": picture.caption,
        "alt": picture.alt,
        "width": picture.page_width,
    }


def _run(run: Run) -> dict[str, Any]:
    return {"name": run.name, "records": len(run.records), "files": ", ".join(run.files), "config": run.config}


def _different(values: Iterable[str]) -> list[str]:
    return sorted(set(values))
