"""Tables of a search for the smallest budgets, for the terminal and for the documentation."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_sparse_attn.cli.terminal import literal

if TYPE_CHECKING:
    from rich.table import Table

RESULT = "budget.json"
"""Name of the results file in the folder of a search."""

TEXT_COLUMNS = ("task", "method", "smallest setting")


def head(report: dict[str, Any]) -> tuple[str, ...]:
    """Return the columns of :func:`lines`."""
    by_score = report["search"]["divergence"] is None
    measured = ("score, %", "± of the difference") if by_score else ("KL, nats per token",)
    figure = "dense score, %" if not _is_perplexity(report) else "dense perplexity"
    if by_score and _is_perplexity(report):
        measured = ("perplexity",)
    return ("task", "length", "method", "smallest setting", "KV read, %", "tokens read", *measured, figure, "samples")


def lines(report: dict[str, Any]) -> list[list[str]]:
    """Return the cells of each task, length and method under :func:`head`."""
    return [_cells(report, entry) for entry in report["results"]]


def _cells(report: dict[str, Any], entry: dict[str, Any]) -> list[str]:
    found, dense = entry["found"] or {}, entry["dense"]
    if report["search"]["divergence"] is not None:
        measured = [_number(found.get("divergence"), "{:.4g}")]
    elif _is_perplexity(report):
        measured = [_number(found.get("perplexity"), "{:.3f}")]
    else:
        measured = [_percent(found.get("score")), _percent(found.get("score_difference_error"))]
    return [
        entry["task"],
        _number(entry["length"], "{:,}"),
        entry["method"],
        setting(entry),
        _percent(found.get("kv_fraction")),
        _number(found.get("realised_budget"), "{:,.0f}"),
        *measured,
        _percent(dense["score"]) if dense["perplexity"] is None else f"{dense['perplexity']:.3f}",
        str(found.get("samples", dense["samples"])),
    ]


def setting(entry: dict[str, Any]) -> str:
    """Name the smallest setting, or say why there is none."""
    if entry["setting"] is None:
        return f"none: {entry['reason']}"
    value = entry["setting"]
    shown = f"{value:,}" if isinstance(value, int) else f"{value:g}" if value in (0, 1) else f"{value}"
    is_first = value == entry["steps"][0]
    notes = [*(["or less read"] if is_first else []), *([] if entry["is_monotone"] else ["not monotone"])]
    return f"{entry['parameter']} {shown}" + (f" ({', '.join(notes)})" if notes else "")


def criterion(report: dict[str, Any]) -> str:
    """Say what the search asked for."""
    search = report["search"]
    if search["divergence"] is not None:
        return f"mean KL from dense attention, along its own answer, at most {search['divergence']:g} nats per token"
    figure = "inverse perplexity" if _is_perplexity(report) else "score"
    return f"{figure} at least {search['target']:.4g} of dense attention's"


def title(report: dict[str, Any]) -> str:
    """Name benchmark, model, dtype and machine."""
    config = report["config"]
    model = Path(config["model"]).name if config["model"].endswith(".gguf") else config["model"]
    return f"{config['benchmark']}: {model}, {report['dtype']}, {report['device']}"


def budget_table(report: dict[str, Any]) -> Table:
    """Format the report of :func:`eval.budget.search` as a table for the terminal."""
    from rich.table import Table

    table = Table(title=literal(title(report), "table.title"), caption=literal(_caption(report), "table.caption"))
    for name in head(report):
        table.add_column(name, justify="left" if name in TEXT_COLUMNS else "right")
    for cells in lines(report):
        table.add_row(*map(literal, cells))
    return table


def budget_markdown(report: dict[str, Any], table: str) -> str:
    """Return a report as Markdown, around the table of :func:`lines`."""
    config, search = report["config"], report["search"]
    versions = ", ".join(f"{package} {version}" for package, version in report["versions"].items())
    kind = "target" if search["divergence"] is None else "divergence"
    asked = f"--{kind} {search[kind]}" + (" --pool" if search.get("pool") else "")
    protocol = f"; protocol {report['protocol_sha256'][:12]}" if report["protocol_sha256"] else ""
    return "\n".join(
        [
            f"## Dense-equivalent budgets, {title(report)}\n",
            f"`python -m eval budget {_command(report, asked)}`\n",
            f"{versions}; {report['date'][:10]}. Question: {config['question']}; seed {report['seed']}{protocol}. "
            f"{_caption(report)}\n",
            table,
        ]
    )


def _command(report: dict[str, Any], asked: str) -> str:
    """Return the arguments that measure the records, or judge those of folders."""
    if report.get("records"):
        return f"{' '.join(f'--records {folder}' for folder in report['records'])} {asked}"
    return f"{report['config']['benchmark']} {asked} {_options(report['config'])}"


def _options(config: dict[str, Any]) -> str:
    lists = {name: ",".join(map(str, config.get(name) or ())) for name in ("method", "tasks", "lengths")}
    words = [f"--{name} {values}" for name, values in lists.items() if values]
    words += [f"--parameter {name}={value}" for name, value in (config.get("parameters") or {}).items()]
    words += [f"--set {name}={value}" for name, value in (config.get("options") or {}).items()]
    return " ".join([*words, *([f"--limit {config['limit']}"] if config.get("limit") else [])])


def _caption(report: dict[str, Any]) -> str:
    text = f"The smallest probed setting with {criterion(report)}, of which all larger probed ones have it too."
    if not all(entry["is_monotone"] for entry in report["results"]):
        text += ' "Not monotone": a smaller probed setting has it as well, but one between them does not.'
    return text


def _is_perplexity(report: dict[str, Any]) -> bool:
    return any(entry["dense"]["perplexity"] is not None for entry in report["results"])


def _percent(share: float | None) -> str:
    return _number(None if share is None else 100 * share, "{:.1f}")


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)
