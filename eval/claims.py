"""Claims of the papers, each beside what the result files of a checkout say of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from eval.store import read_json

GPU = "kernels/benchmarks/results/nvidia-h200.json"


@dataclass(frozen=True)
class Check:
    """A figure of ours beside the paper's."""

    what: str
    """Text with the figure, without the paper's."""
    ours: float
    paper: float
    least: bool = True
    """Whether ``paper`` is the least that the claim allows, else the most."""

    @property
    def holds(self) -> bool:
        """Whether our figure is as good as the paper's."""
        return self.ours >= self.paper if self.least else self.ours <= self.paper


@dataclass(frozen=True)
class Claim:
    """A claim of a paper."""

    paper: str
    """The method, with the number on arXiv."""
    says: str
    """The claim, with its models and devices."""
    checks: Callable[[Path], Iterable[Check]]
    """Returns our figures in a checkout; raises ``FileNotFoundError`` or ``LookupError`` if they are missing."""

    def row(self, root: Path) -> tuple[str, str, str, str]:
        """Return paper, claim, our figures, and whether it holds: yes, no or in part."""
        try:
            checks = list(self.checks(root))
        except (FileNotFoundError, LookupError):
            return self.paper, self.says, "not measured in this checkout", "-"
        held = [check.holds for check in checks]
        verdict = "yes" if all(held) else "in part" if any(held) else "no"
        return self.paper, self.says, "; ".join(check.what for check in checks), verdict


def claims_rows(root: Path) -> list[tuple[str, str, str, str]]:
    """Return the rows of the table of claims, of a checkout at ``root``."""
    return [claim.row(root) for claim in CLAIMS]


def _entries(root: Path, folder: str, **wanted: Any) -> list[dict[str, Any]]:
    """Return the entries of a run's table that have the given values."""
    table = _read(root / "eval/results" / folder / "summary.json")["table"]
    found = [entry for entry in table if all(entry.get(name) == value for name, value in wanted.items())]
    if not found:
        raise LookupError(f"{folder} has no {wanted}")
    return found


def _score(entries: Sequence[dict[str, Any]]) -> float:
    """Return the mean score of cells in percent."""
    return 100 * fmean(entry["score"] for entry in entries)


def _ratio(root: Path, op: str, length: int, q_heads: int, kv_heads: int, **wanted: Any) -> float:
    """Return how many times faster than the best dense kernel an op is, in a graph of several layers."""
    for entry in _read(root / GPU)["entries"]:
        shape = {**entry["shape"], "variant": entry.get("variant")}
        here = {"length": length, "q_heads": q_heads, "kv_heads": kv_heads, "batch": 1, **wanted}
        if entry["op"] == op and all(shape.get(name) == value for name, value in here.items()):
            return float(entry["against"]["layers"]["ratio"])
    raise LookupError(f"{GPU} has no {op} of {length} tokens")


def _read(path: Path) -> Any:
    if not path.exists():
        raise FileNotFoundError(path)
    return read_json(path, "results")


def _quest_step(root: Path) -> Iterator[Check]:
    for length, label in ((32768, "32K"), (131072, "128K")):
        ratio = _ratio(root, "cluster_step", length, 32, 32, variant="clusters")
        yield Check(f"{ratio:.1f}x at {label} on an H200, 32/32 heads", ratio, 7.03)


def _quest_token(root: Path) -> Iterator[Check]:
    result = _read(root / "eval/results/speed/llama-3.1-8b-nvidia-h200.json")["results"][0]
    ratio = {side["name"]: side["ratio"] for side in result["sides"]}["quest, 2048"]["tpot"]
    context = result["context"] // 1024
    yield Check(f"{ratio:.1f}x, Llama 3.1 8B's shape in bf16 on an H200, {context}K cached", ratio, 2.23)


PASSKEYS = "tables/quest-1-qwen2.5-coder-1.5b/01-questpasskey"


def _quest_passkeys(root: Path) -> Iterator[Check]:
    dense = _score(_entries(root, PASSKEYS, method="full"))
    ours = {budget: _score(_entries(root, PASSKEYS, method="quest", token_budget=budget)) for budget in (64, 128)}
    finds = f"{ours[64]:.0f} % reading 64, {ours[128]:.0f} % reading 128, dense {dense:.0f} %"
    yield Check(f"Qwen2.5-Coder-1.5B, as long: {finds}", ours[64], 99)


def _evicting_passkeys(root: Path) -> Iterator[Check]:
    for method, name in (("h2o", "H2O"), ("tova", "TOVA"), ("streaming_llm", "StreamingLLM")):
        score = _score(_entries(root, PASSKEYS, method=method, token_budget=512))
        yield Check(f"{name} {score:.0f} %", score, 8, least=False)


LONGBENCH = "results-squeezed/01-longbench"


def _quest_longbench(root: Path) -> Iterator[Check]:
    dense = _score(_entries(root, LONGBENCH, method="full"))
    for budget in (1024, 2048):
        loss = dense - _score(_entries(root, LONGBENCH, method="quest", token_budget=budget))
        yield Check(f"{loss:.1f} of {dense:.1f} points lost with {budget:,} tokens", loss, 1, least=False)


def _squeezed_longbench(sparsity: float, saving: float) -> Callable[[Path], Iterator[Check]]:
    def checks(root: Path) -> Iterator[Check]:
        entries = _entries(root, LONGBENCH, method="squeezed", variant=f"target_sparsity={sparsity}")
        loss = _score(_entries(root, LONGBENCH, method="full")) - _score(entries)
        saved = 1 / fmean(entry["kv_fraction"] for entry in entries)
        yield Check(f"{loss:.1f} points lost", loss, 1, least=False)
        yield Check(f"{saved:.1f}x fewer bytes read", saved, saving)

    return checks


def _squeezed_kernels(root: Path) -> Iterator[Check]:
    decode = _ratio(root, "squeezed_step", 524288, 32, 32)
    yield Check(f"decode {decode:.1f}x", decode, 4.2)
    for queries, label in ((1024, "1K"), (4096, "4K")):
        prefill = _ratio(root, "squeezed_prefill", 524288, 32, 32, queries=queries)
        yield Check(f"prefill of {label} {prefill:.1f}x", prefill, 4.3)


def _tokenselect_chunk(root: Path) -> Iterator[Check]:
    ratio = _ratio(root, "tokenselect_chunk", 1048576, 28, 4)
    yield Check(f"{ratio:.1f}x, a chunk of 512 tokens over 1M keys on an H200", ratio, 23.84)


def _tokenselect_length(root: Path) -> Iterator[Check]:
    folder = "results-tokenselect-smollm2/01-passkey"
    dense, ours = (_score(_entries(root, folder, **method)) for method in ({"method": "full"}, {"token_budget": 2688}))
    what = f"SmolLM2, trained on 8,192: {ours:.0f} % of passkeys in 8,000 to 32,000 tokens, dense {dense:.0f} %"
    yield Check(what, ours - dense, 0)


def _tokenselect_infinitebench(root: Path) -> Iterator[Check]:
    folder = "tables/tokenselect-1-qwen2.5-coder-1.5b/01-infinitebench"
    for task, name, least in (
        ("passkey", "Qwen2.5-Coder-1.5B, 32K: passkeys", 100),
        ("number_string", "numbers", 100),
        ("kv_retrieval", "values", 86.6),
    ):
        ours, dense = (_score(_entries(root, folder, task=task, method=each)) for each in ("tokenselect", "full"))
        yield Check(f"{name} {ours:.0f} %, dense {dense:.0f} %", ours, least)


def _tokenselect_ruler(root: Path) -> Iterator[Check]:
    folder = "tables/tokenselect-2-qwen2.5-coder-1.5b/01-ruler"
    for tokens, setting, infllm, least in (
        (2688, {"token_budget": 2688}, 2816, 81.81 - 36.09),
        (8320, {"variant": "k=4096, n_local=4096"}, 8448, 90.22 - 52.10),
    ):
        ours = _score(_entries(root, folder, method="tokenselect", **setting))
        theirs = _score(_entries(root, folder, method="infllm", token_budget=infllm))
        what = f"Qwen2.5-Coder-1.5B, {ours:.1f} to {theirs:.1f} % with {tokens:,} tokens"
        yield Check(what, ours - theirs, least)


def _psa_reads(root: Path) -> Iterator[Check]:
    found = {
        entry["method"]: entry["found"]["kv_fraction"]
        for entry in _read(root / "eval/results/budgets/psa/longbench/budget.json")["results"]
        if entry["found"]
    }
    fixed = found["arkvale"]
    for name, label in (("psa (rest=least)", "its estimate"), ("psa (rest=last)", 'our `rest="last"`')):
        yield Check(f"{fixed / found[name]:.1f}x by {label}", fixed / found[name], 2.4)


def _psa_throughput(root: Path) -> Iterator[Check]:
    report = _read(root / "eval/results/throughput/qwen2.5-7b-128k-batch8.json")
    speeds = {side["name"]: side["tokens_per_second"] for side in report["sides"] if not side["error"]}
    ours, dense = speeds["psa, 2048"], max(speed for name, speed in speeds.items() if name.startswith("dense"))
    yield Check(f"{ours / dense:.1f}x of dense", ours / dense, 2.0)
    yield Check(f"{ours / speeds['quest, 2048']:.1f}x of Quest", ours / speeds["quest, 2048"], 1.4)


CLAIMS = (
    Claim(
        "Quest (2406.10774)",
        "attention 7.03x faster at 32K tokens, reading 2,048 (an RTX 4090)",
        _quest_step,
    ),
    Claim(
        "Quest",
        "a token 2.23x faster",
        _quest_token,
    ),
    Claim(
        "Quest",
        "finds 99 % of passkeys in 10,000 tokens reading 64 (table 1, LongChat 7B)",
        _quest_passkeys,
    ),
    Claim(
        "Quest",
        "methods that evict find at most 8 % of them keeping 512 of the 10,000",
        _evicting_passkeys,
    ),
    Claim("Quest", "a negligible loss on long tasks", _quest_longbench),
    Claim(
        "Squeezed Attention (2411.09688)",
        "LongBench with a 3.1x smaller KV budget and no noticeable loss (7B models)",
        _squeezed_longbench(0.7, 3.1),
    ),
    Claim(
        "Squeezed Attention",
        "up to 8x smaller with a small loss",
        _squeezed_longbench(0.9, 8),
    ),
    Claim(
        "Squeezed Attention",
        "kernels 4.2x (decode) and 4.3x (prefill) faster at 512K tokens, leaving 90 % out",
        _squeezed_kernels,
    ),
    Claim(
        "TokenSelect (2411.02886)",
        "attention up to 23.84x faster in a prefill of 1M tokens",
        _tokenselect_chunk,
    ),
    Claim("TokenSelect", "works beyond the trained length", _tokenselect_length),
    Claim(
        "TokenSelect",
        "finds all passkeys and numbers and 86.6 % of values in InfiniteBench, dense 28.8, 28.6 and 19.0 % (table 1)",
        _tokenselect_infinitebench,
    ),
    Claim(
        "TokenSelect",
        "81.8 % in RULER at 8,192 tokens and InfLLM 36.1 % with 2,688 tokens, 90.2 to 52.1 % with 8,320 (table 2)",
        _tokenselect_ruler,
    ),
    Claim(
        "PSA (2503.00392)",
        "reads up to 2.4x less than a fixed number of blocks for the same accuracy",
        _psa_reads,
    ),
    Claim(
        "PSA",
        "up to 2.0x the throughput of dense attention and 1.4x that of other sparse methods",
        _psa_throughput,
    ),
)
"""Speeds and shares are the papers' own, of their abstracts where no table is named."""
