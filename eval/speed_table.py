"""The printed table of a speed measurement, in its own module so that measuring needs no rich."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from eval.costs import link_rate

if TYPE_CHECKING:
    from rich.table import Table

TRAFFIC_HEAD = ("loaded per step, MiB", "over the link, GB/s")
"""Further columns if keys and values are in host memory; see :func:`~eval.costs.link_rate`."""


def speed_table(report: dict[str, Any]) -> Table:
    """Format a report of :func:`measure` as a table, with quartiles in parentheses."""
    from rich.table import Table

    from hf_sparse_attn.cli.terminal import literal

    settings, machine = report["settings"], report["machine"]
    table = Table(
        title=literal(
            f"{settings['model'] or settings['shape']} ({settings['dtype']}, {machine['device']})", "table.title"
        ),
        caption=f"Median (quartiles) of {settings['repeats']} runs of {settings['new_tokens']} tokens. TTFT covers "
        f"{report['ttft_covers']}. Speed-up: against the fastest dense side. Memory: {report['memory_measures']}."
        + compilation(settings),
    )
    table.add_column("context", justify="right")
    table.add_column("side")
    has_traffic = any(side.get("traffic") for result in report["results"] for side in result["sides"])
    for heading in (
        "TTFT, ms",
        "ms per token",
        "speed-up",
        "KV read",
        "tokens read",
        "peak memory, MiB",
        "first run, s more",
        *(TRAFFIC_HEAD if has_traffic else ()),
    ):
        table.add_column(heading, justify="right")
    for result in report["results"]:
        for side in result["sides"]:
            table.add_row(
                f"{result['context']:,}",
                side["name"],
                *(f"{s['median']:.2f} ({s['q1']:.2f}-{s['q3']:.2f})" for s in (side["ttft_ms"], side["tpot_ms"])),
                f"{side['ratio']['tpot']:.2f}x" if side["ratio"] else "",
                f"{side['kv_fraction']:.1%}",
                f"{side['realised_budget']:,.0f}",
                f"{side['peak_memory_bytes'] / 2**20:,.0f}",
                f"{side['first_run_extra_seconds']:.1f}",
                *(_traffic_cells(side) if has_traffic else ()),
            )
        for name in result.get("skipped", ()):
            table.add_row(f"{result['context']:,}", name, "out of memory")
        table.add_section()
    return table


def compilation(settings: dict[str, Any]) -> str:
    """Say how compiled sides of a report were compiled; nothing if as Transformers does by default."""
    options = ", ".join(f"{name}={value}" for name, value in settings.get("compile_options", {}).items())
    guards = "" if settings.get("module_guards", True) else "without guards on the model's modules"
    chosen = " and ".join(filter(None, [options and f"with {options}", guards]))
    return chosen and f" Compiled {chosen}."


def _traffic_cells(side: dict[str, Any]) -> list[str]:
    traffic = side.get("traffic")
    if not traffic:
        return ["" for _ in TRAFFIC_HEAD]
    rate = link_rate(traffic, side["tpot_ms"]["median"])
    return [f"{traffic['bytes_loaded'] / 2**20:,.0f}", f"{rate:.1f}"]
