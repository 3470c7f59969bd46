"""Generates the documentation's tables of results from the results folders."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any

from eval import budget_table, host_table, lossless_table, throughput_table
from eval.comparison_table import report_markdown
from eval.config import DENSE
from eval.context_table import HEAD, context_markdown, side_lines
from eval.errors import EvalError
from eval.frontier_page import details, diverges, frontier_markdown
from eval.position_table import by_position, run_summaries
from eval.store import read_json
from eval.summary import column_order
from eval.table_command import REPORT
from eval.terminal import number, of_samples

_NOTHING = "-"


def results_tables(results: Path) -> str:
    """Return the tables of every sweep and every speed report, as Markdown.

    Parameters
    ----------
    results : Path
        Holds a folder for each sweep, named after its file in ``eval/configs``, ``speed`` with reports of
        ``python -m eval speed``, ``contexts`` with reports of ``python -m eval context-speed``, ``throughput`` with
        reports of ``python -m eval throughput``, ``budgets`` with folders of ``python -m eval budget``, and ``tables``
        with those of ``python -m eval table``. The ``note.txt`` of a sweep or of a table is included.

    Raises
    ------
    EvalError
        There are no results, or a file cannot be read or has the wrong content.
    """
    sweeps: dict[str, list[dict[str, Any]]] = {}
    for path in sorted(results.glob("*/*/summary.json")):
        summary = read_json(path, "the summary of a run")
        with _named(path, "the summary of a run"):
            _sweep(path.parent.parent.name, [summary], results)  # each alone first, so that an error names its file
        sweeps.setdefault(path.parent.parent.name, []).append(summary)
    parts = []
    for name, summaries in sweeps.items():
        with _named(results / name, "a sweep whose runs go together"):
            frontier = frontier_markdown(results / name, _table) if any(map(diverges, summaries)) else ""
            parts.append(_sweep(name, summaries, results, frontier))
    for folder, pattern, command, form in _REPORTS:
        for path in sorted((results / folder).glob(pattern)):
            what = f"a report of `python -m eval {command}`"
            report = read_json(path, what)
            with _named(path, what):
                parts.append(form(path.stem, report))
            if path.parent != results / folder and (note := path.with_name("note.txt")).exists():
                parts.append(_note(note))
    if not parts:
        looked = ", ".join(f"{folder}/{pattern}" for folder, pattern, *_ in _REPORTS)
        raise EvalError(f"results={str(results)!r} holds no results: no */*/summary.json, {looked}")
    # What cannot be written as UTF-8, such as a lone surrogate in a name, is shown by its escape.
    return "\n".join(parts).encode("utf-8", "backslashreplace").decode("utf-8")


def frontier_tables(results: Path, sweep: str) -> str:
    """Return the table and the figure of each model of one sweep; a sentence if it was not measured.

    Raises
    ------
    EvalError
        A file of records cannot be read.
    """
    return frontier_markdown(results / sweep, _table)


def _context(name: str, report: dict[str, Any]) -> str:
    return context_markdown(name, report, _table(HEAD, side_lines(report), left=1))


def _throughput(name: str, report: dict[str, Any]) -> str:
    table = _table(throughput_table.head(report), throughput_table.lines(report), left=1)
    return throughput_table.throughput_markdown(name, report, table)


def _budget(name: str, report: dict[str, Any]) -> str:
    table = _table(budget_table.head(report), budget_table.lines(report), left=1)
    return budget_table.budget_markdown(report, table)


def _paper(name: str, report: dict[str, Any]) -> str:
    return report_markdown(report, _table)


def position_tables(results: Path, sweep: str) -> str:
    """Return the tables of a sweep's divergences by position, as Markdown; a sentence if there are none.

    Raises
    ------
    EvalError
        A summary cannot be read.
    """
    found = [part for each in run_summaries(results / sweep) for part in by_position(each, _cells(each), _table)]
    return "\n".join(found) or f"No measurements of `eval/configs/{sweep}.yaml` are in this checkout.\n"


def storage_table(results: Path) -> str:
    """Return a table of the throughput with keys and values in host memory; a sentence if it was not measured.

    Raises
    ------
    EvalError
        A report cannot be read or has the wrong content.
    """
    found, devices, what = [], set(), "a report of `python -m eval throughput`"
    for path in sorted((results / "throughput").glob("*.json")):
        report = read_json(path, what)
        with _named(path, what):
            if lines := throughput_table.storage_lines(report):
                found += lines
                devices.add(report["machine"]["device"])
    if not found:
        return "No measurements with keys and values in host memory are in this checkout.\n"
    listed = ", ".join(sorted(devices))
    return f"{listed}; weights, keys and values are random.\n\n{_table(throughput_table.STORAGE_HEAD, found, left=3)}"


def lossless_tables(results: Path) -> str:
    """Return the tables of the measurements of lossless decoding, and what follows from them; a sentence if none.

    The last table is not measured but computed, from the costs of random weights and the drafts kept of real ones.

    Raises
    ------
    EvalError
        A report cannot be read or has the wrong content.
    """
    parts, reports, what = [], {}, "a report of `python -m eval lossless`"
    for path in sorted((results / "lossless").glob("*.json")):
        reports[path.stem] = report = read_json(path, what)
        with _named(path, what):
            table = _table(lossless_table.HEAD, lossless_table.lines(report), left=2)
            parts.append(lossless_table.lossless_markdown(path.stem, report, table))
    if computed := lossless_table.computed_lines(reports):
        title = "### Computed: measured costs of random weights, measured tokens per pass of real ones\n"
        parts += [title, _table(lossless_table.COMPUTED_HEAD, computed, left=4)]
    return "\n".join(parts) or "No measurements of `python -m eval lossless` are in this checkout.\n"


def host_tables(results: Path) -> str:
    """Return the tables of the profiles of the host's part of a token; a sentence if there are none.

    Raises
    ------
    EvalError
        A report cannot be read or has the wrong content.
    """
    parts, what = [], "a report of `python -m eval host-profile`"
    for path in sorted((results / "host").glob("*.json")):
        report = read_json(path, what)
        with _named(path, what):
            parts.append(host_table.heading(path.stem, report))
            parts += [_table(head, lines(report), left=1) for head, lines in host_table.TABLES]
    return "\n".join(parts) or "No measurements of `python -m eval host-profile` are in this checkout.\n"


@contextmanager
def _named(path: Path, what: str) -> Iterator[None]:
    """Turn missing or mistyped content into an error that names the file."""
    try:
        yield
    except EvalError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise EvalError(f"{path} is not {what}: {type(error).__name__}: {error}") from error


def _sweep(name: str, summaries: Sequence[dict[str, Any]], results: Path, frontier: str = "") -> str:
    first = summaries[0]
    versions = ", ".join(f"{package} {version}" for package, version in first["versions"].items())
    errors = sum(summary["errors"] for summary in summaries)
    harness = sum(summary["harness_seconds"] for summary in summaries)
    model = sum(summary["model_seconds"] for summary in summaries)
    named = (*first["config"]["method"], *(each["method"] for each in first["config"].get("variants", ())))
    methods = ", ".join(dict.fromkeys(method for method in named if method != DENSE))
    models = ", ".join(dict.fromkeys(_model_name(summary["model"]) for summary in summaries))
    lines = [
        f"## {methods}: {models}, {first['dtype']}, {first['device']}\n",
        f"`python -m eval run --config eval/configs/{name}.yaml --data-dir D --protocol-dir P`\n",
        f"{versions}; {first['date'][:10]}; {sum(summary['rows'] for summary in summaries)} records, {errors} errors; "
        f"the harness added {number(harness / model if model else None, '{:.1%}')} to what the model needed.\n",
    ]
    note = results / name / "note.txt"
    if note.exists():
        lines.append(_note(note))
    if frontier:
        lines.append(frontier)
    if parameter := _swept_parameter(summaries):
        lines += _parameter_table(summaries, parameter)
    else:
        for summary in _joined(summaries):
            if diverges(summary):
                lines += by_position(summary, _cells(summary), _table)
                lines += details(summary, _cells(summary), _table)
            else:
                lines += _benchmark(summary)
    return "\n".join(lines)


def _joined(summaries: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Put runs that differ in their tasks and lengths alone into one table."""
    joined: list[dict[str, Any]] = []
    for summary in summaries:
        last = joined[-1] if joined else None
        if last and _settings(last) == _settings(summary) and not _places(last) & _places(summary):
            joined[-1] = {**last, "table": [*last["table"], *summary["table"]]}
        else:
            joined.append(summary)
    return joined


def _settings(summary: dict[str, Any]) -> dict[str, Any]:
    config = {name: value for name, value in summary["config"].items() if name not in ("tasks", "lengths")}
    return {**config, "protocol": summary["protocol_sha256"]}


def _places(summary: dict[str, Any]) -> set[tuple[Any, ...]]:
    return {(entry["task"], entry["length"]) for entry in summary["table"]}


def _note(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise EvalError(f"{path} cannot be read: {error}") from error


def _swept_parameter(summaries: Sequence[dict[str, Any]]) -> str | None:
    """Return the only parameter that every run sets and that varies; None for other kinds of sweeps."""
    settings = [summary["config"].get("parameters", {}) for summary in summaries]
    names = {name for parameters in settings for name in parameters}
    swept = [name for name in names if len({str(parameters.get(name)) for parameters in settings}) > 1]
    return swept[0] if len(swept) == 1 and all(swept[0] in parameters for parameters in settings) else None


def _parameter_table(summaries: Sequence[dict[str, Any]], parameter: str) -> list[str]:
    """Format a sweep over a parameter: a line for each task, length and value, dense attention first."""
    config = summaries[0]["config"]
    others = {name: value for name, value in config["parameters"].items() if name != parameter}
    given = "".join(f"; {name} {value}" for name, value in others.items())
    # Dense attention has no parameters, so the first run's measurement serves for all.
    found: dict[tuple[Any, ...], dict[tuple[str, str], dict[str, Any]]] = {}
    for summary in summaries:
        for entry in summary["table"]:
            value = _NOTHING if entry["method"] == DENSE else str(summary["config"]["parameters"][parameter])
            place = (entry["benchmark"], entry["task"], entry["length"])
            found.setdefault(place, {}).setdefault((_column(*_variant(entry)), value), entry)
    lines = [
        [
            *(f"{benchmark} {task}", number(length, "{:,}"), *column),
            str(entry["samples"] - entry["errors"]),
            _score(entry, entry["samples"] - entry["errors"]),
            _percent(entry.get("selection_hit_rate")),
            number(entry["realised_budget"], "{:,.0f}"),
            _percent(entry["kv_fraction"]),
        ]
        for (benchmark, task, length), entries in found.items()
        for column, entry in entries.items()
    ]
    names = ("task", "length", "method", parameter, "samples", "score", "selections kept, %", "tokens read")
    return [
        f"### {', '.join(dict.fromkeys(summary['config']['benchmark'] for summary in summaries))}: {parameter}\n",
        f"Question: {config['question']}; seed {config['seed']}{given}.\n",
        _table((*names, "KV read, %"), lines, left=1),
    ]


def _benchmark(summary: dict[str, Any]) -> list[str]:
    config, entries = summary["config"], summary["table"]
    columns = sorted({_variant(entry) for entry in entries}, key=lambda key: column_order(*key))
    names = [_column(*column) for column in columns]
    is_perplexity = any(entry["perplexity"] is not None for entry in entries)
    hashed = f"; protocol {summary['protocol_sha256'][:12]}" if summary["protocol_sha256"] else ""
    heading = f"### {config['benchmark']}\n"
    settings = f"Question: {config['question']}; seed {config['seed']}{hashed}.\n"
    places = list(dict.fromkeys((entry["task"], entry["length"]) for entry in entries))
    found = {(entry["task"], entry["length"], *_variant(entry)): entry for entry in entries}
    what = "perplexity" if is_perplexity else "score"
    scores, complete = [], []
    for place in places:
        row = [found.get((*place, *column)) for column in columns]
        samples = max(entry["samples"] for entry in row if entry)
        scores.append([place[0], number(place[1], "{:,}"), str(samples), *(_score(entry, samples) for entry in row)])
        complete.append([entry if entry and entry["samples"] - entry["errors"] == samples else None for entry in row])
    if len(places) > 1 and not is_perplexity:
        scores += _means(list(zip(*complete, strict=True)))
    keeps_selections = any(entry.get("selection_hit_rate") is not None for entry in entries)
    has_contexts = any(entry.get("context_seconds") is not None for entry in entries)
    costs = [
        [
            *(entry["task"], number(entry["length"], "{:,}"), _column(*_variant(entry))),
            number(entry["prompt_tokens"], "{:,.0f}"),
            number(entry["realised_budget"], "{:,.0f}"),
            _percent(entry["kv_fraction"]),
            *([_percent(entry.get("selection_hit_rate"))] if keeps_selections else []),
            *([number(entry.get("context_seconds"), "{:.2f}")] if has_contexts else []),
            *([number(entry.get("first_token_seconds"), "{:.3f}")] if has_contexts else []),
            number(entry["ttft_seconds"], "{:.2f}"),
            number(entry["tpot_ms"], "{:.1f}"),
            number(entry["peak_memory_bytes"] and entry["peak_memory_bytes"] / 2**20, "{:,.0f}"),
        ]
        for entry in entries
    ]
    kept = ["selections kept, %"] if keeps_selections else []
    parts = ["context, s", "question, s"] if has_contexts else []
    read = ("tokens read", "KV read, %", *kept)
    cost_names = ("task", "length", "method", "prompt tokens", *read, *parts, "TTFT, s", "TPOT, ms")
    return [
        heading,
        settings,
        _table(("task", "length", "samples", *(f"{what}: {name}" for name in names)), scores, left=1),
        '<details markdown="1"><summary>What it cost</summary>\n',
        _table((*cost_names, "peak memory, MiB"), costs, left=1),
        "</details>\n",
    ]


def _cells(summary: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return the names that the lines of a run's divergences begin with: task, length, method."""
    return [(entry["task"], number(entry["length"], "{:,}"), _column(*_variant(entry))) for entry in summary["table"]]


def _means(columns: Sequence[Sequence[dict[str, Any] | None]]) -> list[list[str]]:
    """Return lines with the means of scores and bytes read, every task and length with the same weight.

    A column that lacks a figure or a sample of some task or length has no mean: it would cover other samples than the
    others.
    """
    lines = []
    for label, figure in (("mean", "score"), ("KV read, %", "kv_fraction")):
        values: list[list[Any]] = [[None if entry is None else entry[figure] for entry in column] for column in columns]
        means = [None if None in column else fmean(column) for column in values]
        lines.append([label, "", "", *map(_percent, means)])
    return lines


def _speed(name: str, report: dict[str, Any]) -> str:
    settings, machine = report["settings"], report["machine"]
    given = f"--shape {settings['shape']}" if settings["shape"] else f"--model {settings['model']}"
    contexts = ",".join(str(context) for context in settings["contexts"])
    budgets = ",".join(str(budget) for budget in settings["token_budget"])
    budget_option = f" --token-budget {budgets}" if budgets else ""
    versions = ", ".join(f"{key} {value}" for key, value in machine.items() if key not in ("device", "date"))
    lines = [
        [
            f"{result['context']:,}",
            side["name"],
            *(
                f"{side[key]['median']:.2f} ({side[key]['q1']:.2f} to {side[key]['q3']:.2f})"
                for key in ("ttft_ms", "tpot_ms")
            ),
            f"{side['ratio']['tpot']:.2f}" if side["ratio"] else _NOTHING,
            f"{100 * side['kv_fraction']:.1f}",
            f"{side['peak_memory_bytes'] / 2**20:,.0f}",
        ]
        for result in report["results"]
        for side in result["sides"]
    ]
    head = ("context", "side", "TTFT, ms", "ms per token", "dense over it", "KV read, %", "peak memory, MiB")
    return "\n".join(
        [
            f"## Speed through `generate()`: {name}, {settings['dtype']}, {machine['device']}\n",
            f"`python -m eval speed {given} --context {contexts} --method {','.join(settings['method'])}"
            f"{budget_option}`\n",
            f"{versions}; {machine['date'][:10]}. Medians and quartiles of {settings['repeats']} runs of "
            f"{settings['new_tokens']} tokens. TTFT covers {report['ttft_covers']}.\n",
            _table(head, lines, left=2),
        ]
    )


def _model_name(name: str) -> str:
    """A hub id or an alias as it is; of a GGUF file its name, since its folder means nothing elsewhere."""
    return Path(name).name if name.endswith(".gguf") else name


def _variant(entry: dict[str, Any]) -> tuple[str, int | None, str]:
    return entry["method"], entry["token_budget"], entry.get("variant", "")  # summaries before sweeps lack it


def _column(method: str, token_budget: int | None, variant: str) -> str:
    if method == DENSE:
        return "dense"
    return " ".join([method, *([] if token_budget is None else [f"{token_budget:,}"]), *([variant] if variant else [])])


def _score(entry: dict[str, Any] | None, samples: int) -> str:
    """Format the figure, with its number of samples if some of ``samples`` failed or are missing."""
    if entry is None or (entry["perplexity"] is None and entry["score"] is None):
        return _NOTHING
    is_perplexity = entry["perplexity"] is not None
    return of_samples(f"{entry['perplexity']:.3f}" if is_perplexity else _percent(entry["score"]), entry, samples)


def _percent(share: float | None) -> str:
    return number(None if share is None else 100 * share, "{:.1f}")


def _table(head: Iterable[str], lines: Sequence[Sequence[str]], left: int) -> str:
    names = list(head)
    rule = ["---" if number < left else "---:" for number in range(len(names))]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (names, rule, *lines)) + "\n"


_REPORTS: tuple[tuple[str, str, str, Callable[[str, dict[str, Any]], str]], ...] = (
    ("speed", "*.json", "speed", _speed),
    ("contexts", "*.json", "context-speed", _context),
    ("throughput", "*.json", "throughput", _throughput),
    ("budgets", f"**/{budget_table.RESULT}", "budget", _budget),
    ("tables", f"*/{REPORT}", "table", _paper),
)
"""Folder, files, command, and the function that formats a file's name and content."""
