"""Results of a comparison as JSON and as a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from rich.table import Column, Table
from rich.text import Text

from hf_sparse_attn.cli.compare import Run, Side
from hf_sparse_attn.cli.memory import PeakMemory
from hf_sparse_attn.cli.terminal import literal
from hf_sparse_attn.cli.variants import column_names, describe

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from hf_sparse_attn.methods import SparseMethod


@dataclass(frozen=True)
class Row:
    """One line of the table: a label, and a cell for dense attention and for each variant."""

    label: str
    cells: Sequence[str]
    found: Sequence[bool | None] = ()
    """Whether each answer contains the passkey; empty if the cells are not answers."""


@dataclass(frozen=True)
class Comparison:
    """The sides of a comparison, with the model and device they ran on.

    Parameters
    ----------
    model_name, device, dtype : str
        The model, its device and its dtype.
    memory_measures : str
        Kind of memory measured.
    methods : sequence of SparseMethod
        The compared variants.
    sides : sequence of Side
        Dense attention's, then one for each method.
    prompts : sequence of dict
        Facts about each prompt, such as a passkey's depth and expected answer.
    """

    model_name: str
    device: str
    dtype: str
    memory_measures: str
    methods: Sequence[SparseMethod]
    sides: Sequence[Side]
    prompts: Sequence[dict[str, Any]]

    @classmethod
    def of(
        cls,
        model_name: str,
        model: PreTrainedModel,
        methods: Sequence[SparseMethod],
        sides: Sequence[Side],
        prompts: Sequence[dict[str, Any]],
    ) -> Comparison:
        """Create a comparison, with device and dtype from the model."""
        dtype = str(model.dtype).removeprefix("torch.")
        measures = PeakMemory(model.device).measures
        return cls(model_name, str(model.device), dtype, measures, methods, sides, prompts)

    @property
    def title(self) -> str:
        """Model, dtype and device."""
        return f"{self.model_name} ({self.dtype}, {self.device})"

    @property
    def columns(self) -> list[str]:
        """Names of the sides: ``dense``, then the shortest unique name of each variant."""
        return ["dense", *column_names(self.methods)]

    @property
    def settings(self) -> list[str]:
        """The methods' parameters, one line per method."""
        return describe(self.methods)

    def as_json(self) -> dict[str, Any]:
        """Return the settings, the means of each side, and the runs of every prompt."""
        dense, *patched = self.sides
        return {
            "model": self.model_name,
            "device": self.device,
            "dtype": self.dtype,
            "peak_memory_measures": self.memory_measures,
            "dense": dense.summary(),
            "variants": [
                {
                    "name": name,
                    "method": method.name,
                    "parameters": asdict(method),
                    "agree": sum(_agreement(dense, side)),
                    **side.summary(),
                }
                for name, method, side in zip(self.columns[1:], self.methods, patched, strict=True)
            ],
            "runs": [
                {
                    **prompt,
                    "dense": _run_as_json(dense.runs[index]),
                    "variants": [
                        {"agree": _agreement(dense, side)[index], **_run_as_json(side.runs[index])} for side in patched
                    ],
                }
                for index, prompt in enumerate(self.prompts)
            ],
        }

    def answers(self) -> list[Row]:
        """Return the answers, one row per prompt."""
        rows = []
        for index, prompt in enumerate(self.prompts):
            label = f"passkey {prompt['expected']} at depth {prompt['depth']:g}" if prompt else "answer"
            runs = [side.runs[index] for side in self.sides]
            judged = [run.found for run in runs] if prompt else []
            rows.append(Row(label, [run.answer for run in runs], judged))
        return rows

    def measurements(self) -> list[Row]:
        """Return the means, one row per quantity."""
        total = len(self.prompts)
        dense, *patched = self.sides
        means = [side.summary() for side in self.sides]
        agreed = [sum(_agreement(dense, side)) for side in patched]
        rows = [
            Row("answers agree", ["", *(_of(count, total) for count in agreed)]),
            Row("KV cache read per decode step", [_number(mean["kv_fraction"], "{:.1%}") for mean in means]),
            Row("prefill, seconds", [f"{mean['prefill_seconds']:.2f}" for mean in means]),
            Row("decode, ms per token", [_number(mean["ms_per_token"]) for mean in means]),
            Row(
                f"peak memory ({self.memory_measures})",
                [f"{mean['peak_memory_bytes'] / 2**20:,.0f} MiB" for mean in means],
            ),
        ]
        if "found" in means[0]:
            rows.insert(0, Row("passkeys found", [f"{mean['found']} of {total}" for mean in means]))
        return rows if patched else [row for row in rows if row.label != "answers agree"]


def comparison_table(comparison: Comparison) -> Table:
    """Return a comparison as a table for the terminal."""
    table = Table(
        "",
        *(Column(name, overflow="fold") for name in comparison.columns),
        title=literal(comparison.title, "table.title"),
        caption=literal("\n".join(comparison.settings), "table.caption"),
    )
    for row in comparison.answers():
        cells = [literal(cell) for cell in row.cells]
        if row.found:
            cells = [_judged(cell, found) for cell, found in zip(cells, row.found, strict=True)]
        table.add_row(literal(row.label), *cells)
    table.add_section()
    for row in comparison.measurements():
        table.add_row(row.label, *row.cells)
    return table


def _agreement(dense: Side, side: Side) -> list[bool]:
    return [one.token_ids == other.token_ids for one, other in zip(dense.runs, side.runs, strict=True)]


def _run_as_json(run: Run) -> dict[str, Any]:
    return {key: value for key, value in asdict(run).items() if key != "token_ids" and value is not None}


def _judged(answer: Text, found: bool | None) -> Text:
    return answer.append(" ").append(*(("found", "green") if found else ("missed", "red")))


def _of(count: int, total: int) -> str:
    return ("yes" if count else "no") if total == 1 else f"{count} of {total}"


def _number(value: float | None, form: str = "{:.1f}") -> str:
    return "-" if value is None else form.format(value)
