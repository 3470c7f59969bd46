"""Tables of a measurement of questions about a fixed context, for the terminal and for the documentation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

HEAD = ("side", "answer, s", "first token, s", "ms per token", "stock over it", "KV read, %", "first answer, s")


def context_table(report: dict[str, Any]) -> Table:
    """Format a report of :func:`~eval.context_speed.measure_context_speed` as a table."""
    from rich.table import Table

    settings, machine = report["settings"], report["machine"]
    title = f"{settings['shape']}, {settings['context']:,} tokens ({settings['dtype']}, {machine['device']})"
    table = Table(title=title, title_justify="left", caption=preparation(report), caption_justify="left")
    for number, heading in enumerate(HEAD):
        table.add_column(heading, justify="right" if number else "left")
    for cells in side_lines(report):
        table.add_row(*cells)
    return table


def context_markdown(name: str, report: dict[str, Any], table: str) -> str:
    """Return a report as Markdown, around the table of :func:`side_lines`."""
    settings, machine = report["settings"], report["machine"]
    versions = ", ".join(f"{package} {version}" for package, version in machine["versions"].items())
    options = (
        f"--shape {settings['shape']} --context {settings['context']} --question {settings['question']} "
        f"--new-tokens {settings['new_tokens']} --repeats {settings['repeats']}"
    )
    return "\n".join(
        [
            f"## Questions about a fixed context: {name}, {settings['dtype']}, {machine['device']}\n",
            f"`python -m eval context-speed {options}`\n",
            f"{versions}; {machine['date']}; random weights, {settings['method']}. A question of "
            f"{settings['question']} tokens is answered with {settings['new_tokens']} tokens; medians of "
            f"{settings['repeats']} answers. The stock model has the same {settings['context']:,} tokens in its cache. "
            f"{preparation(report)}\n",
            table,
        ]
    )


def side_lines(report: dict[str, Any]) -> list[list[str]]:
    """Return the cells of each side under ``HEAD``."""
    return [
        [
            side["name"] + (", compiled" if side["compiled"] else ""),
            f"{side['answer_seconds']['median']:.2f}",
            f"{side['first_token_seconds']['median']:.3f}",
            "-" if side["tpot_ms"] is None else f"{side['tpot_ms']:.2f}",
            f"{side['ratio']:.2f}" if "ratio" in side else "-",
            f"{100 * side['kv_fraction']:.1f}" if "kv_fraction" in side else "100.0",
            f"{side['first_answer_seconds']:.1f}",
        ]
        for side in report["sides"]
    ]


def preparation(report: dict[str, Any]) -> str:
    """Say how long the preparation took, and what the context's last queries read of it."""
    seconds, budget = report["preparation_seconds"], report["budget"]
    return (
        f"Preparing the context took {seconds['prefill']:.1f} s of prefill (stock: "
        f"{report['stock_prefill_seconds']:.1f} s), {seconds['clustering']:.1f} s of clustering and "
        f"{seconds['calibration']:.1f} s of calibration. Target: {budget['target']:.1%} of the context; its last "
        f"queries choose {budget['prefill']:.1%} together and {budget['decode']:.1%} one by one."
    )
