"""Tables of other methods' decode steps, beside Quest's at the same shape."""

from __future__ import annotations

from collections.abc import Callable

from op_bench.registry import KEYCODES_STEP, PSA_STEP, RABITQCACHE_STEP, STEP
from op_bench.results import Record, shape_of
from op_bench.tables import by_shape, measured_with, shape_cells, step_cells, table

NAMES = ("q/kv heads", "head dim", "batch", "length")
COLUMNS = ("ours, µs", "best dense, µs", "which", "ratio", "over floor", "alone: ours, µs", "dense, µs", "ratio")


def progressive_part(report: Record) -> list[str]:
    """Return the table of Progressive Sparse Attention's decode steps, empty if none was measured."""
    return _part(report, "Progressive Sparse Attention", PSA_STEP, _of_psa)


def codes_part(report: Record) -> list[str]:
    """Return the table of KeyCodes' decode steps, empty if none was measured."""
    return _part(report, "KeyCodes", KEYCODES_STEP, _of_key_codes)


def rabitqcache_part(report: Record) -> list[str]:
    """Return the table of RaBitQCache's decode steps, empty if none was measured."""
    return _part(report, "RaBitQCache", RABITQCACHE_STEP, _of_rabitqcache)


def _of_psa(settings: Record) -> str:
    return (
        f"One decode step of one layer over rows in which every KV head reads {settings['token_budget']:,} tokens, as "
        f"many as Quest's step above, until P exceeds {settings['threshold']:g}: blocks of {settings['block_size']} "
        f"tokens, tested every {settings['microbatch']} blocks. It appends the new token, updates the 8-bit bounds, "
        "scores and ranks all blocks, and attends to them until the test passes. The floor is that of a step that "
        "knows when to stop."
    )


def _of_key_codes(settings: Record) -> str:
    return (
        f"One decode step of one layer: it appends the new token, codes the page of {settings['code_page']} tokens "
        f"that may just have filled, estimates the scores of all other tokens from codes of one bit a channel, and "
        f"attends to {settings['code_budget']:,} single tokens."
    )


def _of_rabitqcache(settings: Record) -> str:
    return (
        "One decode step of one layer, whose queries, keys and values are random: it appends the new token, codes the "
        f"page of {settings['top_p_page']} tokens that may just have filled, estimates the weights of all other tokens "
        f"from codes of one bit a channel, and attends to those that hold {settings['top_p']:g} of the weight, "
        f"{settings['code_budget']:,} at most. So many are read here, as random keys share the weight evenly."
    )


def _part(report: Record, title: str, step: tuple[str, str], describe: Callable[[Record], str]) -> list[str]:
    measured = sorted((entry for entry in report["entries"] if entry["times"]), key=by_shape)
    steps = [entry for entry in measured if (entry["op"], entry["variant"]) == step]
    if not steps:
        return []
    quest = {
        shape_of(entry): entry["times"]["layers"]["median"]
        for entry in measured
        if (entry["op"], entry["variant"]) == STEP
    }
    rows = [
        [*shape_cells(shape_of(entry)), *step_cells(entry), *_beside(entry, quest.get(shape_of(entry)))]
        for entry in steps
    ]
    return [
        f"## {title}, {report['machine']['device']}\n",
        f"{describe(report['settings'])} The last columns are Quest's step at the same shape, and the time over it.\n",
        f"Measured with {measured_with(report, steps)}.\n",
        table((*NAMES, *COLUMNS, "Quest, µs", "over Quest"), rows),
    ]


def _beside(entry: Record, quest: float | None) -> list[str]:
    if quest is None:
        return ["-", "-"]
    return [f"{quest:.1f}", f"{entry['times']['layers']['median'] / quest:.2f}"]
