"""Tables of a measurement of lossless decoding, for the terminal and for the documentation."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

HEAD = (
    "context",
    "side",
    "ms per token",
    "over fastest dense",
    "accepted, %",
    "tokens per pass",
    "ms per draft step",
    "ms per dense pass",
    "tokens per pass to break even",
    "KV read by drafts, %",
    "equal tokens",
)
COMPUTED_HEAD = (
    "costs of",
    "context",
    "side",
    "tokens per pass of",
    "context",
    "tokens per pass",
    "ms per token, computed",
    "over fastest dense",
)


def lines(report: dict[str, Any]) -> list[list[str]]:
    """Return the cells of each side under ``HEAD``."""
    found = []
    for entry in report["results"]:
        context = f"{entry['context']:,}"
        if entry["error"] is not None:
            found.append([context, entry["error"], *("-" for _ in HEAD[2:])])
        found += [[context, *_cells(side)] for side in entry["sides"]]
    return found


def _cells(side: dict[str, Any]) -> list[str]:
    name = _name(side)
    if side["error"] is not None:
        return [name, side["error"], *("-" for _ in HEAD[3:])]
    ms, speed_up = side["ms_per_token"], side["speed_up"]
    cells = [name, "-" if ms is None else _spread(ms), _number(speed_up)]
    if side["draft_tokens"] is None:
        return [*cells, *("-" for _ in HEAD[4:-1]), equal_tokens(side["tokens"])]
    acceptance = side["acceptance_rate"]
    return [
        *cells,
        "-" if acceptance is None else f"{100 * acceptance:.1f}",
        _number(side["tokens_per_pass"]),
        _number(side["draft_step_ms"]["median"]),
        _number(side["verification_ms"]["median"]),
        _number(side["break_even_tokens"]),
        f"{100 * side['kv_fraction']:.1f}",
        equal_tokens(side["tokens"]),
    ]


def side_line(context: int, side: dict[str, Any]) -> str:
    """Say in a line what was measured of a side."""
    cells = _cells(side)
    named = [f"{cell} {name}" for name, cell in zip(HEAD[2:], cells[1:], strict=True) if cell != "-"]
    return f"{context:,} tokens, {cells[0]}: {cells[1] if side['error'] is not None else '; '.join(named)}"


def computed_lines(reports: dict[str, dict[str, Any]]) -> list[list[str]]:
    """Combine the costs of models with random weights with the tokens per pass of real ones, under COMPUTED_HEAD.

    Sides are combined if method, hyperparameters and length of draft agree: a round takes the time measured of the
    first, and adds as many tokens as dense attention kept on average of the second. Of each real model the context
    nearest in length is taken.
    """
    found = []
    costs = [(name, report) for name, report in reports.items() if report["settings"]["shape"] is not None]
    real = [(name, report) for name, report in reports.items() if report["settings"]["shape"] is None]
    for name, report in costs:
        for entry in report["results"]:
            dense = {side["name"]: side.get("ms_per_token") for side in entry["sides"]}.get(entry["fastest_dense"])
            for side in entry["sides"]:
                for real_name, real_report in real:
                    context, other = _counterpart(side, entry["context"], real_report)
                    if other is None or dense is None:
                        continue
                    ms = side["round_ms"]["median"] / other["tokens_per_pass"]
                    found.append(
                        [
                            *(name, f"{entry['context']:,}", _name(side)),
                            *(real_name, f"{context:,}", _number(other["tokens_per_pass"])),
                            *(_number(ms), _number(dense["median"] / ms)),
                        ]
                    )
    return found


def _counterpart(side: dict[str, Any], context: int, report: dict[str, Any]) -> tuple[int, dict[str, Any] | None]:
    """Find a lossless side's equal in another report, at the context nearest to ``context``."""
    same = ("method", "hyperparameters", "draft_tokens")
    equals = [
        (entry["context"], other)
        for entry in report["results"]
        for other in entry["sides"]
        if side["draft_tokens"] is not None
        and side["error"] is None
        and other["error"] is None
        and all(other[key] == side[key] for key in same)
    ]
    if not equals:
        return context, None
    return min(equals, key=lambda each: (abs(each[0] - context), not each[1]["compiled"]))


def _name(side: dict[str, Any]) -> str:
    return str(side["name"]) + (", compiled" if side["compiled"] else "")


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _spread(values: dict[str, float]) -> str:
    return f"{values['median']:.2f} ({values['q1']:.2f} to {values['q3']:.2f})"


def equal_tokens(tokens: list[dict[str, Any]]) -> str:
    """Say how many tokens of all prompts equal dense attention's, and what the first differences are."""
    differing = [each for each in tokens if each["in_common"] < each["compared"]]
    text = f"{sum(each['in_common'] for each in tokens)} of {sum(each['compared'] for each in tokens)}"
    if not differing:
        return text
    ties = sum(each["is_tie"] for each in differing)
    kinds = [f"{ties} tie{'s' if ties > 1 else ''}"] * bool(ties) + [f"{len(differing) - ties} other"]
    return f"{text} ({', '.join(kinds[: 1 + (ties < len(differing))])})"


def lossless_table(report: dict[str, Any]) -> Table:
    """Format a report of :func:`~eval.lossless.measure_lossless` as a table."""
    from rich.table import Table

    from hf_sparse_attn.cli.terminal import literal

    settings, machine = report["settings"], report["machine"]
    table = Table(
        title=literal(
            f"{settings['model'] or settings['shape']} ({settings['dtype']}, {machine['device']})", "table.title"
        ),
        caption=literal(setting(report), "table.caption"),
    )
    for number, heading in enumerate(HEAD):
        table.add_column(heading, justify="left" if number == 1 else "right", no_wrap=number == 1)
    for cells in lines(report):
        table.add_row(*map(literal, cells))
    return table


def setting(report: dict[str, Any]) -> str:
    """Say what was generated, how often, and from what."""
    settings = report["settings"]
    random_weights = "" if settings["shape"] is None else " Weights are random: times are measured, acceptance is not."
    return (
        f"{settings['prompts']} x {settings['repeats']} runs (prompts x repeats) of {settings['new_tokens']} tokens, "
        f"after a context that was cached before: {report['prompts']}. Medians, and quartiles in parentheses."
        + random_weights
    )


def lossless_markdown(name: str, report: dict[str, Any], table: str) -> str:
    """Return a report as Markdown, around the table of :func:`lines`."""
    settings, machine = report["settings"], report["machine"]
    versions = ", ".join(f"{package} {version}" for package, version in machine["versions"].items())
    model = settings["model"] or ""
    model = Path(model).name if model.endswith(".gguf") else model
    options = [
        f"--shape {settings['shape']}" if settings["shape"] else f"--model {model}",
        f"--context {_listed(settings['contexts'])} --method {_listed(settings['method'])}",
        *([f"--token-budget {_listed(settings['token_budget'])}"] if settings["token_budget"] else []),
        f"--draft-tokens {_listed(settings['draft_tokens'])}",
        *(f"--parameter {key}={value}" for key, value in settings["parameters"].items()),
        f"--new-tokens {settings['new_tokens']} --prompts {settings['prompts']} --repeats {settings['repeats']}",
        *([f"--yarn {settings['yarn']:g}"] if settings.get("yarn") is not None else []),  # older reports have none
        *(["--data-dir D"] if settings["data_dir"] is not None else []),
    ]
    return "\n".join(
        [
            f"### {name}, {settings['dtype']}, {machine['device']}\n",
            f"`python -m eval lossless {' '.join(options)}`\n",
            f"{versions}; {machine['date'][:10]}. {setting(report)}\n",
            table,
        ]
    )


def _listed(values: list[Any]) -> str:
    return ",".join(map(str, values))
