"""Tables of a measurement of lossless decoding, for the terminal and for the documentation."""

from __future__ import annotations

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
    cells = [name, _spread(side["ms_per_token"]), f"{side['speed_up']:.2f}"]
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
    kinds = [f"{ties} at a tie"] * bool(ties) + [f"{len(differing) - ties} not at a tie"] * (ties < len(differing))
    return f"{text}; then {' and '.join(kinds)}"


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
        table.add_column(heading, justify="left" if number == 1 else "right")
    for cells in lines(report):
        table.add_row(*map(literal, cells))
    return table


def setting(report: dict[str, Any]) -> str:
    """Say what was generated, how often, and from what."""
    settings = report["settings"]
    return (
        f"Medians and quartiles of {settings['repeats']} runs of {settings['new_tokens']} tokens for each of "
        f"{settings['prompts']} prompts ({report['prompts']}). The context is cached before. A pass is a dense one, a "
        "round a draft and its pass. Equal tokens: up to the first difference from the first dense side, prompt by "
        "prompt."
    )
