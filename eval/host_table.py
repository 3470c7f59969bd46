"""Tables of a profile of the host's part of a token, for the terminal and for the documentation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from eval.terminal import number

if TYPE_CHECKING:
    from rich.table import Table

STEP_HEAD = ("uncompiled step", "ms a token", "loop", "modules", "cache", "checks", "dispatch", "launch")
COMPILED_HEAD = ("compiled step", "ms a token", "call", "between calls", "guards", "of the cache", "in Python", "us")
FIRST_HEAD = ("first call", "s", "tracing", "guards", "AOTAutograd", "Inductor", "kernels", "second call, s", "graphs")


def step_lines(report: dict[str, Any]) -> list[list[str]]:
    """Return the parts of an uncompiled step under STEP_HEAD, in milliseconds of a token."""
    return [
        [side["name"], *map(_ms, (side["uncompiled"]["token_ms"]["median"], *side["uncompiled"]["parts_ms"].values()))]
        for side in report["sides"]
    ]


def compiled_lines(report: dict[str, Any]) -> list[list[str]]:
    """Return the parts of a compiled step under COMPILED_HEAD: medians, and the numbers of guards."""
    found = []
    for side in report["sides"]:
        compiled = side["compiled"]
        medians = (compiled[name]["median"] for name in ("token_ms", "call_ms", "between_calls_ms"))
        counts = (f"{compiled['guards'][name]:,}" for name in ("number", "of_cache", "in_python"))
        found.append([side["name"], *map(_ms, medians), *counts, number(compiled["guards"]["microseconds"], "{:.0f}")])
    return found


def first_lines(report: dict[str, Any]) -> list[list[str]]:
    """Return the phases of the first compiled call under FIRST_HEAD, in seconds."""
    names = ("dynamo_tracing", "dynamo_guards", "aot_autograd", "inductor", "kernels")
    return [
        [
            side["name"],
            _seconds(side["first_call"]["calls_seconds"][0]),
            *(_seconds(side["first_call"]["phases_seconds"][name]) for name in names),
            f"{side['first_call']['calls_seconds'][1]:.2f}",
            str(side["first_call"]["graphs"]),
        ]
        for side in report["sides"]
    ]


def _ms(value: float) -> str:
    return f"{value:.2f}"


def _seconds(value: float) -> str:
    return f"{value:.1f}"


TABLES = ((STEP_HEAD, step_lines), (COMPILED_HEAD, compiled_lines), (FIRST_HEAD, first_lines))


def host_tables(report: dict[str, Any]) -> list[Table]:
    """Format a report of :func:`~eval.host_profile.profile_host` as three tables."""
    from rich.table import Table

    from hf_sparse_attn.cli.terminal import literal

    tables = []
    for head, lines in TABLES:
        table = Table(title=literal(title(report), "table.title"))
        for place, heading in enumerate(head):
            table.add_column(heading, justify="right" if place else "left")
        for cells in lines(report):
            table.add_row(*map(literal, cells))
        tables.append(table)
    return tables


def title(report: dict[str, Any]) -> str:
    """Say what was profiled, and where."""
    settings, machine = report["settings"], report["machine"]
    return (
        f"{settings['shape']}, {settings['layers']} layers, {settings['context']:,} tokens, {settings['dtype']}, "
        f"{settings['backend']}, {machine['device']}"
    )


def heading(name: str, report: dict[str, Any]) -> str:
    """Return a report's heading as Markdown, with the name of its file, its command and versions."""
    settings, machine = report["settings"], report["machine"]
    names = ", ".join(f"{package} {version}" for package, version in machine["versions"].items())
    options = [
        f"--shape {settings['shape']} --layers {settings['layers']} --context {settings['context']}",
        f"--method {','.join(settings['method'])}",
        *([f"--token-budget {','.join(map(str, settings['token_budget']))}"] if settings["token_budget"] else []),
        *(f"--parameter {key}={value}" for key, value in settings["parameters"].items()),
        f"--new-tokens {settings['new_tokens']} --backend {settings['backend']}",
        *([] if settings["module_guards"] else ["--no-module-guards"]),
    ]
    found = ", ".join(f"{side['first_call']['found_on_disk']} ({side['name']})" for side in report["sides"])
    return (
        f"### {name.replace('-', ' ').capitalize()}\n\n{title(report)}.\n\n"
        f"`python -m eval host-profile {' '.join(options)}`\n\n"
        f"{names}; {machine['date'][:10]}. Compiled graphs found on disk: {found}.\n"
    )
