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
    "ms per round",
    "KV read by drafts, %",
    "equal tokens",
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
    name = side["name"] + (", compiled" if side["compiled"] else "")
    if side["error"] is not None:
        return [name, side["error"], *("-" for _ in HEAD[3:])]
    cells = [name, _spread(side["ms_per_token"]), "-" if side["speed_up"] is None else f"{side['speed_up']:.2f}"]
    if side["draft_tokens"] is None:
        return [*cells, *("-" for _ in HEAD[4:-1]), equal_tokens(side["tokens"])]
    return [
        *cells,
        f"{100 * side['acceptance_rate']:.1f}",
        f"{side['tokens_per_pass']:.2f}",
        f"{side['round_ms']['median']:.2f}",
        f"{100 * side['kv_fraction']:.1f}",
        equal_tokens(side["tokens"]),
    ]


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
    return (
        f"{settings['prompts']} x {settings['repeats']} runs (prompts x repeats) of {settings['new_tokens']} tokens, "
        f"after a context that was cached before: {report['prompts']}. Medians, and quartiles in parentheses."
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
