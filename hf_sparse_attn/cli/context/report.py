"""Tables and JSON about a context: sizes, times, and the share of it that each KV head reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from rich.table import Table

from hf_sparse_attn.cli.terminal import literal
from hf_sparse_attn.cli.variants import describe

if TYPE_CHECKING:
    import torch

    from hf_sparse_attn import ContextBudget, Squeezed

HEAT = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True)
class Facts:
    """The parts of a context.

    Parameters
    ----------
    tokens, layers, kv_heads : int
        Its shape.
    file : str
        Path of its file.
    file_bytes : int
        Size of the file.
    counts : mapping
        Clusters of a KV head, and coarse clusters if there are two levels.
    thresholds : mapping
        Least weight of a cluster that is read, by level.
    seconds : mapping, optional
        Times of the preparation.
    origin : mapping, optional
        The model, and the library that wrote the file.
    bytes : mapping, optional
        Bytes of each part of the file.
    """

    tokens: int
    layers: int
    kv_heads: int
    file: str
    file_bytes: int
    counts: Mapping[str, int]
    thresholds: Mapping[str, float]
    seconds: Mapping[str, float] = field(default_factory=dict)
    origin: Mapping[str, str] = field(default_factory=dict)
    bytes: Mapping[str, int] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Return the facts, without those that are not known."""
        return {name: value for name, value in asdict(self).items() if value != {}}

    def rows(self) -> list[tuple[str, str]]:
        """Return labels and values for a table."""
        return [
            ("tokens", f"{self.tokens:,}"),
            ("layers", str(self.layers)),
            ("KV heads of a layer", str(self.kv_heads)),
            *((f"{_words(name)} of a KV head", f"{count:,}") for name, count in self.counts.items()),
            *((f"{name}, MiB", _mib(size)) for name, size in self.bytes.items()),
            ("file, MiB", _mib(self.file_bytes)),
            *((_words(name), value) for name, value in self.origin.items()),
            *((f"{name}, seconds", f"{value:.2f}") for name, value in self.seconds.items()),
            *((_words(name), f"{value:.3g}") for name, value in self.thresholds.items()),
        ]


def facts_table(title: str, facts: Facts, budget: Sequence[tuple[str, str]], method: Squeezed) -> Table:
    """Return the facts and the budget as a table for the terminal."""
    caption = literal("\n".join(describe([method])), "table.caption")
    table = Table("", "", title=literal(title, "table.title"), caption=caption, show_header=False)
    for label, value in facts.rows():
        table.add_row(literal(label), literal(value))
    table.add_section()
    for label, value in budget:
        table.add_row(label, value)
    return table


def budget_rows(budget: ContextBudget) -> list[tuple[str, str]]:
    """Return the target beside the mean shares of the context that are read."""
    return [
        ("share of the context to read, target", f"{1 - budget.target_sparsity:.1%}"),
        ("read by a question (prefill)", f"{float(budget.prefill.mean()):.1%}"),
        ("read per token of an answer (decode)", f"{float(budget.decode.mean()):.1%}"),
    ]


def layers_table(budget: ContextBudget) -> Table:
    """Return the shares of each layer, and of its KV heads as a row of bars."""
    table = Table("layer", "prefill", "decode", "KV heads, decode", title="Share of the context that is read")
    for number, (prefill, decode) in enumerate(zip(budget.prefill, budget.decode, strict=True)):
        table.add_row(str(number), f"{float(prefill.mean()):.1%}", f"{float(decode.mean()):.1%}", _heat(decode))
    return table


def budget_as_json(budget: ContextBudget) -> dict[str, Any]:
    """Return the target, the means, and the share of each layer and KV head."""
    parts = {"prefill": budget.prefill, "decode": budget.decode}
    return {
        "target": 1 - budget.target_sparsity,
        **{f"{name}_mean": float(shares.mean()) for name, shares in parts.items()},
        **{name: shares.tolist() for name, shares in parts.items()},
    }


def _heat(shares: torch.Tensor) -> str:
    """Draw shares from 0 to 1 as bars."""
    return "".join(HEAT[min(int(share * len(HEAT)), len(HEAT) - 1)] for share in shares.tolist())


def _words(name: str) -> str:
    return name.replace("_", " ")


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.1f}"
