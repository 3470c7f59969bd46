"""The page: everything in one file, nothing fetched from anywhere."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from matplotlib import rc_context

from eval.errors import EvalError
from eval.report.plots import Picture, draw
from eval.report.rows import Row, Run, counted_once, load_runs
from eval.report.sections import Section, make_sections
from eval.report.style import Styles
from eval.report.tables import agreement_table, cost_table, failed_samples, lost_samples, score_table

_MOST_FAILURES = 50
_SAMPLE = ("model", "benchmark", "task", "length", "sample_id", "seed")


def write_report(directory: Path, out: Path | None = None) -> Path:
    """Write the plots and one self-contained page about every run in a folder and the folders below it.

    Parameters
    ----------
    directory : Path
        Has the runs, each with ``rows.jsonl`` (or the parts ``rows-*.jsonl`` that are not merged yet).
    out : Path, optional
        Where the PNG files and ``index.html`` go; ``directory / "report"`` by default.

    Returns
    -------
    Path
        The page.

    Raises
    ------
    EvalError
        There is no row, or one is malformed (the message has file and line), or ``out`` cannot be written.
    """
    runs = load_runs(directory)
    found = [row for run in runs for row in run.rows]
    rows = counted_once(found)
    sections = make_sections(rows)
    styles = Styles([column for section in sections for column in section.columns])
    out = directory / "report" if out is None else out
    failures = [failure for section in sections for failure in failed_samples(section)]
    try:
        return _write_page(out, found, rows, sections, styles, failures, runs)
    except OSError as error:
        raise EvalError(f"out={str(out)!r} cannot be written: {error}") from error


def _write_page(
    out: Path,
    found: Sequence[Row],
    rows: Sequence[Row],
    sections: Sequence[Section],
    styles: Styles,
    failures: Sequence[list[str]],
    runs: Sequence[Run],
) -> Path:
    out.mkdir(parents=True, exist_ok=True)
    page = _template().render(
        head=_head(rows, repeated=len(found) - len(rows)),
        sections=[_section(section, styles, out) for section in sections],
        failures=failures[:_MOST_FAILURES],
        more_failures=max(0, len(failures) - _MOST_FAILURES),
        runs=[_run(run) for run in runs],
    )
    path = out / "index.html"
    path.write_text(page, encoding="utf-8", errors="backslashreplace")  # names of folders may be of any bytes
    return path


def _template() -> Any:
    # Predictions are whatever a model wrote: everything is escaped, whatever the template's name ends in.
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html.j2")


def _head(rows: Sequence[Row], repeated: int) -> list[tuple[str, list[str]]]:
    """Return the settings of the rows by name, each with all its values."""
    versions = sorted(
        {f"{name} {version}" for row in rows for name, version in (row.get("versions") or {}).items()}, key=str.lower
    )
    protocols = _different(
        f"{row['protocol']}: sha256 {row.get('protocol_sha256') or 'unknown'}" for row in rows if row.get("protocol")
    )
    errors = sum(row["error"] is not None for row in rows)
    samples = {tuple(row[name] for name in _SAMPLE) for row in rows}
    head = [
        ("model", _different(row["model"] for row in rows)),
        ("device", _different(f"{row['device']}, {row['dtype']}" for row in rows)),
        ("question", _different(row["question"] for row in rows)),
        ("seed", _different(str(row["seed"]) for row in rows)),
        ("versions", [", ".join(versions)] if versions else []),
        ("protocol", protocols),
        ("samples", [f"{len(samples):,}, in {len(rows):,} rows"]),
        ("errors", [f"{errors:,}"]),
        ("repeats left out", [f"{repeated:,}"] if repeated else []),
    ]
    return [(name, values) for name, values in head if values]


def _section(section: Section, styles: Styles, out: Path) -> dict[str, Any]:
    measures = _different(row["peak_memory_measures"] for row in section.rows if row.get("peak_memory_measures"))
    return {
        "title": section.title,
        "slug": section.slug,
        "is_perplexity": section.is_perplexity,
        "scores": score_table(section),
        "costs": cost_table(section),
        "agreement": agreement_table(section),
        "lost": lost_samples(section),
        "memory_measures": ", ".join(measures),
        "pictures": _pictures(section, styles, out),
    }


def _pictures(section: Section, styles: Styles, out: Path) -> list[dict[str, Any]]:
    with rc_context({"text.parse_math": False}):  # names are text, also where they hold dollar signs
        return [_embed(picture, out) for picture in draw(section, styles)]


def _embed(picture: Picture, out: Path) -> dict[str, Any]:
    png = picture.png()
    (out / f"{picture.name}.png").write_bytes(png)
    data = base64.b64encode(png).decode("ascii")
    return {
        "uri": f"data:image/png;base64,{data}",
        "caption": picture.caption,
        "alt": picture.alt,
        "width": picture.page_width,
    }


def _run(run: Run) -> dict[str, Any]:
    return {"name": run.name, "rows": len(run.rows), "files": ", ".join(run.files), "config": run.config}


def _different(values: Iterable[str]) -> list[str]:
    return sorted(set(values))
