"""Tables of the whole steps of Quest, KeyCodes and PSA on clusters and as separate launches."""

from __future__ import annotations

from collections.abc import Sequence

from op_bench.registry import CLUSTER_STEPS, CODE_STEPS, PSA_CLUSTER_STEPS, QUEST_BESIDE_CODES
from op_bench.results import Record, shape_of
from op_bench.shapes import Shape
from op_bench.tables import by_shape, measured_with, shape_cells, table
from op_bench.text_like import SUFFIX

Step = tuple[str, str]
"""Op and variant of an entry."""

NAMES = ("q/kv heads", "head dim", "batch", "length")
COLUMNS = (
    "clusters of",
    "µs",
    "ratio",
    "separate launches, µs",
    "ratio",
    "best dense, µs",
    "which",
    "host: clusters, µs",
    "host: separate launches, µs",
)
TEXT_COLUMNS = (
    "by default, µs",
    "ratio",
    "at random, µs",
    "separate launches, µs",
    "ratio",
    "at random, µs",
)
TEXT = (
    "With keys whose attention is spread as in a text: the first token has much weight, and so have the last ones and "
    "those of a passage; tokens of a page are alike, and heads differ in how much each counts. The times with keys "
    "drawn at random, from the tables above, stand beside:\n"
)
QUEST_STAGES = (
    "The stages: `query` loads the query and makes whole numbers of it; `scores` scores pages and appends the "
    "token; `exchange` shares the log-sum-exp of the heads; `keys` reduces scores over the group; `edge` finds the "
    "bin of the last chosen page; `list` sends the chosen pages to the blocks; `rank` ranks the candidates; "
    "`attend` attends to the pages; `merge` shares the partial outputs; `write` adds them up.\n"
)
CODE_STAGES = (
    "The stages: `query` loads the query and rotates it; `centres` scores the pages' centres; `scan` estimates tokens' "
    "scores from their codes; `exchange` shares the log-sum-exp of the heads; `keys` reduces scores over the group; "
    "`edge` finds the score of the last chosen token; `list` lists the chosen tokens; `attend` attends to them; "
    "`merge` shares the partial outputs; `write` adds them up; `code` codes a page that has filled.\n"
)


PSA_STAGES = (
    "The stages: `query` loads the query and makes whole numbers of it; `scores` scores pages and appends the token; "
    "`exchange` shares the log-sum-exp of the heads; `bins` counts pages by score; `list` sends the best ones to the "
    "blocks; `rank` sorts them; `attend` attends to a wave of them; `stop` finds the page after which enough was read; "
    "`merge` shares the partial outputs; `write` adds them up. Of stages that come several times, the last counts.\n"
)


def cluster_part(report: Record) -> list[str]:
    """Return the tables of Quest's step by implementation and of the stages' clocks, empty if none was measured."""
    return _step_part(report, "Quest's step", {"": CLUSTER_STEPS}, QUEST_STAGES)


def code_step_part(report: Record) -> list[str]:
    """Return the tables of KeyCodes' step by implementation and of the stages' clocks, empty if none was measured."""
    by_reduction = {f'Scores reduced over a group by `"{name}"`:\n': steps for name, steps in CODE_STEPS.items()}
    return [*_step_part(report, "KeyCodes' step", by_reduction, CODE_STAGES), *_beside_quest(report)]


def psa_step_part(report: Record) -> list[str]:
    """Return the tables of PSA's step by implementation and of the stages' clocks, empty if none was measured."""
    return _step_part(report, "Progressive Sparse Attention's step", {"": PSA_CLUSTER_STEPS}, PSA_STAGES)


def _beside_quest(report: Record) -> list[str]:
    """Return the table of KeyCodes' step over Quest's with as many tokens and with its own, empty without the first."""
    of_step: dict[Step, dict[Shape, float]] = {}
    for entry in sorted((entry for entry in report["entries"] if entry["times"]), key=by_shape):
        step = (entry["op"], entry["variant"])
        of_step.setdefault(step, {})[shape_of(entry)] = entry["times"]["layers"]["median"]
    equal, own = of_step.get(QUEST_BESIDE_CODES, {}), of_step.get(CLUSTER_STEPS[0], {})
    codes = {name: of_step.get(by_default, {}) for name, (by_default, _) in CODE_STEPS.items()}
    rows = [
        [*shape_cells(shape), *(f"{times[shape]:.1f}" if shape in times else "-" for times in (equal, own))]
        + [
            f"{times[shape] / quest[shape]:.2f}" if shape in times and shape in quest else "-"
            for times in codes.values()
            for quest in (equal, own)
        ]
        for shape in equal
        if any(shape in times for times in codes.values())
    ]
    if not rows:
        return []
    settings = report["settings"]
    budgets = [f"{settings[name]:,}" for name in ("code_budget", "token_budget")]
    columns = [f"Quest, {budget} tokens, µs" for budget in budgets]
    columns += [f"`{name}` over Quest, {budget}" for name in codes for budget in budgets]
    return [
        f"KeyCodes' step, which reads {budgets[0]} single tokens, over Quest's, which reads pages with as many tokens, "
        f"or with {budgets[1]}, Quest's budget in the other tables:\n",
        table((*NAMES, *columns), rows),
    ]


def _step_part(report: Record, title: str, steps: dict[str, tuple[Step, Step]], described: str) -> list[str]:
    """Return a table for each pair of entries, on clusters and as separate launches, each after its heading."""
    measured = sorted((entry for entry in report["entries"] if entry["times"]), key=by_shape)
    tables, timed, clocked, of_text = [], [], [], []
    for heading, both in steps.items():
        pairs = _measured_both(measured, both)
        if not pairs:
            continue
        rows = [[*shape_cells(shape), *_cells(*pair)] for shape, pair in pairs.items()]
        tables += [heading] if heading else []
        tables.append(table((*NAMES, *COLUMNS), rows))
        timed += [entry for pair in pairs.values() for entry in pair]
        clocked += [clusters for clusters, _ in pairs.values() if clusters.get("stages")]
        text = _measured_both(measured, [(op, variant + SUFFIX) for op, variant in both])
        text = {shape: pair for shape, pair in text.items() if shape in pairs}
        if text:
            rows = [[*shape_cells(shape), *_text_cells(*pair, *pairs[shape])] for shape, pair in text.items()]
            of_text += [*([heading] if heading else []), table((*NAMES, *TEXT_COLUMNS), rows)]
            timed += [entry for pair in text.values() for entry in pair]
    if not tables:
        return []
    return [
        f"## {title} in one launch, {report['machine']['device']}\n",
        'The same step on thread-block clusters, the default, and as separate launches (`impl="triton"`), in one run '
        'with the best dense kernel: medians inside a CUDA graph of several layers. "Clusters of" gives the blocks of '
        "a cluster and the threads of a block; without them, separate launches were chosen. A ratio is dense "
        "attention's time over the step's. The host's time is that of one uncompiled call.\n",
        f"Measured with {measured_with(report, timed)}.\n",
        *tables,
        *((TEXT, *of_text) if of_text else ()),
        *(_stage_part(clocked, described) if clocked else ()),
    ]


def _measured_both(measured: Sequence[Record], both: Sequence[Step]) -> dict[Shape, tuple[Record, ...]]:
    """Return the entries of two steps by shape, where both were measured."""
    first, second = (
        {shape_of(entry): entry for entry in measured if (entry["op"], entry["variant"]) == step} for step in both
    )
    return {shape: (first[shape], second[shape]) for shape in first if shape in second}


def _text_cells(*entries: Record) -> list[str]:
    """Return cells of a step with keys as in a text, by default and as separate launches; then come those at random."""
    cells = []
    for entry, random in zip(entries[:2], entries[2:], strict=True):
        time, of_random = (each["times"]["layers"]["median"] for each in (entry, random))
        ratio = f"{entry['against']['layers']['ratio']:.2f}" if entry["against"] else "-"
        cells += [f"{time:.1f}", ratio, f"{of_random:.1f}"]
    return cells


def _cells(clusters: Record, launches: Record) -> list[str]:
    launch = clusters.get("launch")
    cells = [f"{launch['cluster']} x {launch['threads']}" if launch else "-"]
    for entry in (clusters, launches):
        against = entry["against"]["layers"] if entry["against"] else None
        cells += [f"{entry['times']['layers']['median']:.1f}", f"{against['ratio']:.2f}" if against else "-"]
    cells += [f"{against['best_us']:.1f}", against["best"]] if against else ["-", "-"]
    hosts = (entry.get("host_us") for entry in (clusters, launches))
    return [*cells, *(f"{host['median']:.0f}" if host else "-" for host in hosts)]


def _stage_part(entries: list[Record], described: str) -> list[str]:
    stages = list(entries[0]["stages"]["median"])
    rows = [
        [
            *shape_cells(shape_of(entry)),
            *(f"{entry['stages']['median'][stage]:,.0f}" for stage in stages),
            f"{entry['stages']['whole']:,.0f}",
        ]
        for entry in entries
    ]
    return [
        "Cycles of each stage of the step on clusters, medians over the blocks, and of the slowest block as a whole. "
        "The kernel that is timed above does not store them.\n",
        table((*NAMES, *stages, "whole"), rows),
        described,
    ]
