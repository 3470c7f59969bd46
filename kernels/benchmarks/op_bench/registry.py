"""Every measured op, family by family."""

from __future__ import annotations

from op_bench.cluster_entries import CLUSTERS, CLUSTERS_ON_TEXT
from op_bench.code_entries import CODES
from op_bench.code_step_entries import (
    CODE_CLUSTERS,
    CODE_CLUSTERS_ON_TEXT,
    QUEST_BESIDE,
    QUEST_WITH_AS_MANY_TOKENS,
    STEPS,
)
from op_bench.entry import Entry, Family, Outputs
from op_bench.keep_entries import KEPT
from op_bench.load_entries import LOADS
from op_bench.progressive_entries import PROGRESSIVE
from op_bench.psa_step_entries import LAUNCHES, ON_CLUSTERS, PSA_CLUSTERS
from op_bench.quest_entries import QUEST, STEP
from op_bench.rabitqcache_entries import RABITQCACHE
from op_bench.shapes import Shape
from op_bench.squeezed_entries import SQUEEZED_DECODE, SQUEEZED_PREFILL
from op_bench.token_entries import TOKEN_CHUNK, TOKEN_DECODE

__all__ = [
    "CHUNK_STEP",
    "CLUSTER_STEPS",
    "CODE_STEPS",
    "ENTRIES",
    "FAMILIES",
    "KEYCODES_STEP",
    "LOAD",
    "PSA_CLUSTER_STEPS",
    "PSA_STEP",
    "QUEST_BESIDE_CODES",
    "RABITQCACHE_STEP",
    "SQUEEZED_PREFILL_STEP",
    "SQUEEZED_STEP",
    "STEP",
    "TOKEN_STEPS",
    "Entry",
    "Family",
    "Outputs",
    "family_shapes",
    "matching_entries",
]

FAMILIES: tuple[Family, ...] = (
    QUEST,
    TOKEN_DECODE,
    TOKEN_CHUNK,
    SQUEEZED_DECODE,
    SQUEEZED_PREFILL,
    PROGRESSIVE,
    CODES,
    RABITQCACHE,
    KEPT,
    LOADS,
    CLUSTERS,
    CLUSTERS_ON_TEXT,
    CODE_CLUSTERS,
    CODE_CLUSTERS_ON_TEXT,
    QUEST_WITH_AS_MANY_TOKENS,
    PSA_CLUSTERS,
)
ENTRIES: tuple[Entry, ...] = tuple(entry for family in FAMILIES for entry in family.entries)

TOKEN_STEPS = (("tokenselect_step", "chosen anew"), ("tokenselect_step", "choice kept"))
"""The entries of TokenSelect's decode step in tables: without the selection cache, and with a hit."""
CHUNK_STEP = ("tokenselect_chunk", "")
"""The entry of TokenSelect's prefill in tables."""
SQUEEZED_STEP = ("squeezed_step", "")
"""The entry of Squeezed Attention's decode step in tables."""
SQUEEZED_PREFILL_STEP = ("squeezed_prefill", "")
"""The entry of Squeezed Attention's prefill in tables."""
PSA_STEP = ("psa_step", "")
"""The entry of Progressive Sparse Attention's decode step."""
KEYCODES_STEP = ("keycodes_step", "softmax")
"""The entry of a decode step with key codes in tables: the default reduction over the group."""
RABITQCACHE_STEP = ("rabitqcache_step", "")
"""The entry of RaBitQCache's decode step."""
CLUSTER_STEPS = (("cluster_step", "clusters"), ("cluster_step", "separate launches"))
"""The entries of Quest's whole step: by default, on clusters where they are faster, and as Triton launches."""
CODE_STEPS = {
    group_reduce: ((clusters.op, clusters.variant), (launches.op, launches.variant))
    for group_reduce, (clusters, launches) in STEPS.items()
}
"""The entries of KeyCodes' whole step in both ways, by the reduction over the group."""
PSA_CLUSTER_STEPS = tuple((entry.op, entry.variant) for entry in (ON_CLUSTERS, LAUNCHES))
"""The entries of PSA's whole step: by default, on clusters where they are faster, and as Triton launches."""
QUEST_BESIDE_CODES = (QUEST_BESIDE.op, QUEST_BESIDE.variant)
"""The entry of Quest's whole step that reads as many tokens as KeyCodes'."""
LOAD = "load_blocks"
"""The op whose entries are the loads from host memory."""


def matching_entries(filters: list[str]) -> list[Entry]:
    """Return the entries of the named ops, or all entries if none is named.

    Raises
    ------
    ValueError
        Unknown op.
    """
    known = list(dict.fromkeys(entry.op for entry in ENTRIES))
    for name in filters:
        if name not in known:
            raise ValueError(f"--op {name!r} is unknown; known: {', '.join(known)}")
    return [entry for entry in ENTRIES if not filters or entry.op in filters]


def family_shapes(entries: list[Entry], *, quick: bool) -> list[Shape]:
    """Return the shapes at which any of the entries is measured, each once."""
    families = [family for family in FAMILIES if any(entry in family.entries for entry in entries)]
    shapes = [shape for family in families for shape in family.shapes_of(quick=quick)]
    return list(dict.fromkeys(shapes))
