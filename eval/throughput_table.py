"""Tables of a throughput measurement, for the terminal and for the documentation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from eval.costs import link_rate

if TYPE_CHECKING:
    from rich.table import Table

HEAD = (
    "side",
    "tokens per second",
    "over best dense",
    "between tokens, ms",
    "P99, ms",
    "first token P99, ms",
    "KV read, %",
    "tokens read",
    "peak memory, MiB",
)

TRAFFIC_HEAD = ("held already, %", "loaded per step, MiB", "over the link, GB/s", "stalled per step, ms")
"""Further columns if keys and values are in host memory: see :func:`~eval.costs.traffic_per_step`."""


STORAGE_HEAD = (
    "workload",
    "method",
    "keys and values",
    "tokens per second",
    "on the device",
    "between tokens, ms",
    "held already, %",
    "loaded per step, MiB",
    "over the link, GB/s",
)


def storage_lines(report: dict[str, Any]) -> list[list[str]]:
    """Return the cells under ``STORAGE_HEAD`` of every side whose keys and values are in host memory."""
    return [_storage_cells(side, report) for side in report["sides"] if side["error"] is None and side.get("traffic")]


def _storage_cells(side: dict[str, Any], report: dict[str, Any]) -> list[str]:
    settings, traffic = report["settings"], side["traffic"]
    resident = [
        other["tokens_per_second"]
        for other in report["sides"]
        if other["error"] is None and not other.get("traffic") and _choice(other) == _choice(side)
    ]
    is_read_there = side["kv_storage"] == "host"
    milliseconds = side["between_tokens_ms"]["mean"]
    return [
        f"{settings['shape']}, {settings['batch']} x {settings['context']:,}",
        f"{side['method']} {side['token_budget'] or ''}".strip(),
        "host memory, read by kernels" if is_read_there else "pool on the device",
        f"{side['tokens_per_second']:,.1f}",
        f"{max(resident):,.1f}" if resident else "-",
        f"{milliseconds:.2f}",
        f"{100 * traffic['pool_hits']:.1f}",
        f"{traffic['bytes_loaded'] / 2**20:,.0f}",
        f"{link_rate(traffic, milliseconds):.1f}",
    ]


def _choice(side: dict[str, Any]) -> dict[str, Any]:
    """Return what decides which tokens a side reads."""
    places = ("offload", "gpu_cache_tokens", "eviction")
    return {"method": side["method"]} | {k: v for k, v in side["hyperparameters"].items() if k not in places}


def head(report: dict[str, Any]) -> tuple[str, ...]:
    """Return the column headings."""
    return HEAD + (TRAFFIC_HEAD if _has_traffic(report) else ())


def lines(report: dict[str, Any]) -> list[list[str]]:
    """Return the cells of each side under :func:`head`."""
    with_traffic = _has_traffic(report)
    return [[*_cells(side), *(_traffic_cells(side) if with_traffic else ())] for side in report["sides"]]


def _has_traffic(report: dict[str, Any]) -> bool:
    return any(side.get("traffic") for side in report["sides"])


def _traffic_cells(side: dict[str, Any]) -> list[str]:
    traffic = side.get("traffic")
    if not traffic:
        return ["-" for _ in TRAFFIC_HEAD]
    return [
        f"{100 * traffic['pool_hits']:.1f}",
        f"{traffic['bytes_loaded'] / 2**20:,.0f}",
        f"{link_rate(traffic, side['between_tokens_ms']['mean']):.1f}",
        f"{traffic['stall_ms']:.2f}",
    ]


def _cells(side: dict[str, Any]) -> list[str]:
    if side["error"] is not None:
        return [side["name"], side["error"], *("-" for _ in HEAD[2:])]
    return [
        side["name"] + (", compiled" if side["compiled"] else ""),
        f"{side['tokens_per_second']:,.1f}",
        f"{side['ratio']:.2f}" if "ratio" in side else "-",
        f"{side['between_tokens_ms']['mean']:.2f}",
        f"{side['between_tokens_ms']['p99']:.2f}",
        f"{side['first_token_ms']['p99']:,.1f}",
        f"{100 * side['kv_fraction']:.1f}",
        f"{side['realised_budget']:,.0f}",
        f"{side['peak_memory_bytes'] / 2**20:,.0f}",
    ]


def throughput_table(report: dict[str, Any]) -> Table:
    """Format a report of :func:`~eval.throughput.measure_throughput` as a table."""
    from rich.table import Table

    settings, machine = report["settings"], report["machine"]
    title = (
        f"{settings['shape']}, batch {settings['batch']} x {settings['context']:,} tokens "
        f"({settings['dtype']}, {machine['device']})"
    )
    table = Table(title=title, title_justify="left", caption=setting(report), caption_justify="left")
    for number, heading in enumerate(head(report)):
        table.add_column(heading, justify="right" if number else "left")
    for cells in lines(report):
        table.add_row(*cells)
    return table


def throughput_markdown(name: str, report: dict[str, Any], table: str) -> str:
    """Return a report as Markdown, around the table of :func:`lines`."""
    settings, machine = report["settings"], report["machine"]
    versions = ", ".join(f"{package} {version}" for package, version in machine["versions"].items())
    budgets = ",".join(str(budget) for budget in settings["token_budget"])
    options = [
        f"--shape {settings['shape']} --context {settings['context']} --batch {settings['batch']}",
        f"--method {','.join(settings['method'])}",
        *([f"--token-budget {budgets}"] if budgets else []),
        *(f"--parameter {key}={value}" for key, value in settings["parameters"].items()),
        *(["--kv-storage host"] if settings.get("kv_storage") == "host" else []),
        *([f"--rate {settings['rate']:g}"] if settings["rate"] is not None else []),
        f"--requests {settings['requests']} --new-tokens {settings['new_tokens']}",
    ]
    return "\n".join(
        [
            f"## Throughput of batched decoding: {name}, {settings['dtype']}, {machine['device']}\n",
            f"`python -m eval throughput {' '.join(options)}`\n",
            f"{versions}; {machine['date']}. {setting(report)}\n",
            table,
        ]
    )


def setting(report: dict[str, Any]) -> str:
    """Say which requests were served, and how."""
    settings = report["settings"]
    rate, best = settings["rate"], report["best_dense"]
    compared = "No dense side fits in memory." if best is None else f"Best dense side: {best}."
    when = "all there from the start" if rate is None else f"Poisson arrivals, {rate:g} per second"
    return (
        f"{settings['requests']} requests ({when}), each with {settings['context']:,} cached tokens and "
        f"{settings['new_tokens']} new ones, in static batches of at most {settings['batch']}. Weights, keys and "
        f"values are random; there is no prefill. {compared}"
    )
