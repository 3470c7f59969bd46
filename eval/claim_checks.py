"""Figures of ours for the claims of the papers, from the result files of a checkout."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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


def quest_step(root: Path) -> Iterator[Check]:
    """Yield how many times faster than dense attention Quest's step is."""
    for length, label in ((32768, "32K"), (131072, "128K")):
        ratio = _ratio(root, "cluster_step", length, 32, 32, variant="clusters")
        yield Check(f"{ratio:.1f}x at {label} on an H200, 32/32 heads", ratio, 7.03)


def quest_token(root: Path) -> Iterator[Check]:
    """Yield how many times faster a token is with Quest."""
    result = _read(root / "eval/results/speed/llama-3.1-8b-nvidia-h200.json")["results"][0]
    ratio = {side["name"]: side["ratio"] for side in result["sides"]}["quest, 2048"]["tpot"]
    context = result["context"] // 1024
    yield Check(f"{ratio:.1f}x, Llama 3.1 8B's shape in bf16 on an H200, {context}K cached", ratio, 2.23)


PASSKEYS = "tables/quest-1-qwen2.5-coder-1.5b/01-questpasskey"


def quest_passkeys(root: Path) -> Iterator[Check]:
    """Yield the share of passkeys that Quest finds."""
    dense = _score(_entries(root, PASSKEYS, method="full"))
    ours = {budget: _score(_entries(root, PASSKEYS, method="quest", token_budget=budget)) for budget in (64, 128)}
    finds = f"{ours[64]:.0f} % reading 64, {ours[128]:.0f} % reading 128, dense {dense:.0f} %"
    yield Check(f"Qwen2.5-Coder-1.5B, as long: {finds}", ours[64], 99)


def evicting_passkeys(root: Path) -> Iterator[Check]:
    """Yield the shares of passkeys that methods find that evict."""
    for method, name in (("h2o", "H2O"), ("tova", "TOVA"), ("streaming_llm", "StreamingLLM")):
        score = _score(_entries(root, PASSKEYS, method=method, token_budget=512))
        yield Check(f"{name} {score:.0f} %", score, 8, least=False)


LONGBENCH = "results-squeezed/01-longbench"


def quest_longbench(root: Path) -> Iterator[Check]:
    """Yield the points that Quest loses on LongBench."""
    dense = _score(_entries(root, LONGBENCH, method="full"))
    for budget in (1024, 2048):
        loss = dense - _score(_entries(root, LONGBENCH, method="quest", token_budget=budget))
        yield Check(f"{loss:.1f} of {dense:.1f} points lost with {budget:,} tokens", loss, 1, least=False)


def quest_perplexity(root: Path) -> Iterator[Check]:
    """Yield by how much the perplexities of a book exceed dense attention's, on two models."""
    for run, what in (
        ("smollm2-cpu", "SmolLM2, 1,024 of 8,000 tokens"),
        ("qwen2.5-coder-1.5b", "Qwen2.5-Coder-1.5B, 512 of 4,096"),
    ):
        folder = f"tables/quest-fig6-{run}/01-pg19"
        methods = ("full", "quest", "h2o", "tova")
        found = {method: _entries(root, folder, method=method)[0]["perplexity"] for method in methods}
        above = {method: 100 * (perplexity / found["full"] - 1) for method, perplexity in found.items()}
        dense = f"{what}: Quest {above['quest']:.1f} % above dense"
        yield Check(dense, above["quest"], 100 * (6.819 / 6.808 - 1), least=False)
        for method, name in (("h2o", "H2O"), ("tova", "TOVA")):
            yield Check(f"{name} {above[method]:.1f} %", above[method], above["quest"])


def quest_six_tasks(root: Path) -> Iterator[Check]:
    """Yield Quest's lead on figure 7's tasks, and its loss with 1,024 tokens."""
    folder = "tables/quest-fig7-qwen2.5-coder-1.5b/01-longbench"
    yield from _quest_leads(root, folder)
    dense = _score(_entries(root, folder, method="full"))
    loss = dense - _score(_entries(root, folder, method="quest", token_budget=1024))
    yield Check(f"{loss:.1f} of dense attention's {dense:.1f} points lost with 1,024", loss, 1, least=False)


def _quest_leads(root: Path, folder: str) -> Iterator[Check]:
    """Yield by how many points Quest is ahead of the best method that evicts, for each budget."""
    for budget in (256, 512, 1024, 2048, 4096):
        quest, *others = (
            _score(_entries(root, folder, method=method, token_budget=budget))
            for method in ("quest", "h2o", "tova", "streaming_llm")
        )
        lead = quest - max(others)
        where = "Qwen2.5-Coder-1.5B, points ahead: " if budget == 256 else ""
        yield Check(f"{where}{lead:+.1f} with {budget:,}", lead, 0)


def squeezed_longbench(sparsity: float, saving: float, loss: float) -> Callable[[Path], Iterator[Check]]:
    """Return checks of the points lost on LongBench, and of the bytes saved."""

    def checks(root: Path) -> Iterator[Check]:
        lost, saved = _squeezed_loss(root, LONGBENCH, f"target_sparsity={sparsity}")
        yield Check(f"{lost:.1f} points lost", lost, loss, least=False)
        yield Check(f"{saved:.1f}x fewer bytes read", saved, saving)

    return checks


def squeezed_table(table: str, benchmark: str) -> Callable[[Path], Iterator[Check]]:
    """Return checks of the loss at the abstract's two budgets in a table of the paper, without and with a chat."""

    def checks(root: Path) -> Iterator[Check]:
        for variant, out, most in (("sink_tokens=0, target_sparsity=0.7", 70, 1), ("sink_tokens=0", 90, 0.5)):
            (plain, saved), (chat, _) = (
                _squeezed_loss(root, f"tables/{table}-qwen2.5-coder-1.5b/{run}-{benchmark}", variant)
                for run in ("01", "02")
            )
            yield Check(
                f"leaving {out} % out ({saved:.1f}x fewer bytes), {plain:.1f} points lost", plain, most, least=False
            )
            yield Check(f"{chat:.1f} in a conversation", chat, most, least=False)

    return checks


def _squeezed_loss(root: Path, folder: str, variant: str) -> tuple[float, float]:
    """Return the points that a variant loses to dense attention, and how many times fewer bytes it reads."""
    entries = _entries(root, folder, method="squeezed", variant=variant)
    lost = _score(_entries(root, folder, method="full")) - _score(entries)
    return lost, 1 / fmean(entry["kv_fraction"] for entry in entries)


def squeezed_kernels(root: Path) -> Iterator[Check]:
    """Yield how many times faster than dense attention Squeezed Attention's kernels are."""
    decode = _ratio(root, "squeezed_step", 524288, 32, 32)
    yield Check(f"decode {decode:.1f}x", decode, 4.2)
    for queries, label in ((1024, "1K"), (4096, "4K")):
        prefill = _ratio(root, "squeezed_prefill", 524288, 32, 32, queries=queries)
        yield Check(f"prefill of {label} {prefill:.1f}x", prefill, 4.3)


def tokenselect_chunk(root: Path) -> Iterator[Check]:
    """Yield how many times faster than dense attention a chunk of a prefill is."""
    ratio = _ratio(root, "tokenselect_chunk", 1048576, 28, 4)
    yield Check(f"{ratio:.1f}x, a chunk of 512 tokens over 1M keys on an H200", ratio, 23.84)


def tokenselect_length(root: Path) -> Iterator[Check]:
    """Yield how many more passkeys TokenSelect finds beyond the trained length."""
    folder = "results-tokenselect-smollm2/01-passkey"
    dense, ours = (_score(_entries(root, folder, **method)) for method in ({"method": "full"}, {"token_budget": 2688}))
    what = f"SmolLM2, trained on 8,192: {ours:.0f} % of passkeys in 8,000 to 32,000 tokens, dense {dense:.0f} %"
    yield Check(what, ours - dense, 0)


def tokenselect_infinitebench(root: Path) -> Iterator[Check]:
    """Yield the scores of InfiniteBench's retrieval."""
    folder = "tables/tokenselect-1-qwen2.5-coder-1.5b/01-infinitebench"
    for task, name, least in (
        ("passkey", "Qwen2.5-Coder-1.5B, 32K: passkeys", 100),
        ("number_string", "numbers", 100),
        ("kv_retrieval", "values", 86.6),
    ):
        ours, dense = (_score(_entries(root, folder, task=task, method=each)) for each in ("tokenselect", "full"))
        yield Check(f"{name} {ours:.0f} %, dense {dense:.0f} %", ours, least)


def tokenselect_ruler(root: Path) -> Iterator[Check]:
    """Yield TokenSelect's lead over InfLLM on RULER at 8,192 and 16,384 tokens."""
    folder = "tables/tokenselect-2-qwen2.5-coder-1.5b/01-ruler"
    budgets: tuple[tuple[int, dict[str, Any], int], ...]
    budgets = ((2688, {"token_budget": 2688}, 2816), (8320, {"variant": "k=4096, n_local=4096"}, 8448))
    of_paper = {8192: (81.81 - 36.09, 90.22 - 52.10), 16384: (68.68 - 29.36, 82.06 - 40.53)}
    for length, leads in of_paper.items():
        for (tokens, setting, infllm), least in zip(budgets, leads, strict=True):
            ours = _score(_entries(root, folder, length=length, method="tokenselect", **setting))
            theirs = _score(_entries(root, folder, length=length, method="infllm", token_budget=infllm))
            what = f"Qwen2.5-Coder-1.5B, {length:,}: {ours:.1f} to {theirs:.1f} % with {tokens:,} tokens"
            yield Check(what, ours - theirs, least)


def tokenselect_votes(root: Path) -> Iterator[Check]:
    """Yield by how many points the soft vote is ahead of the other two in InfiniteBench's values."""
    folder = "tables/tokenselect-4-qwen2.5-coder-1.5b/01-infinitebench"
    values = {"task": "kv_retrieval"}
    soft, logits, head = (
        _score(_entries(root, folder, **values, method="tokenselect", variant=variant))
        for variant in ("", "vote=logits", "vote=head")
    )
    dense = _score(_entries(root, folder, **values, method="full"))
    what = f"Qwen2.5-Coder-1.5B, 32K: soft {soft:.0f} %, logits {logits:.0f} %, heads {head:.0f} %, dense {dense:.0f} %"
    yield Check(what, soft - max(logits, head), 86.60 - 22.40)


def tokenselect_chosen(root: Path) -> Iterator[Check]:
    """Yield how many numbers 128 chosen tokens find, and how many more values 2,048 do."""
    folder = "tables/tokenselect-5-qwen2.5-coder-1.5b/01-infinitebench"
    few, many = {"variant": "k=128"}, {"token_budget": 2688}
    numbers, first, last = (
        _score(_entries(root, folder, method="tokenselect", task=task, **setting))
        for task, setting in (("number_string", few), ("kv_retrieval", few), ("kv_retrieval", many))
    )
    yield Check(f"Qwen2.5-Coder-1.5B, 32K: numbers {numbers:.0f} %", numbers, 100)
    yield Check(f"values {first:.0f} and {last:.0f} %", last - first, 86.60 - 13.40)


def tokenselect_prefill(root: Path) -> Iterator[Check]:
    """Yield the seconds to the first token of prompts, beside dense attention's and MInference's."""
    folder = "tables/tokenselect-8-qwen2.5-coder-1.5b/01-passkey"
    for length, of_paper in ((10_000, (0.832 / 1.290, 2.762 / 1.290)), (32_000, (7.717 / 5.712, 7.540 / 5.712))):
        ours, dense, sparse = (
            fmean(entry["ttft_seconds"] for entry in _entries(root, folder, method=method, length=length))
            for method in ("tokenselect", "full", "minference")
        )
        where = "Qwen2.5-Coder-1.5B, " if length == 10_000 else ""
        yield Check(f"{where}{length:,}: {ours:.2f} s, dense {dense:.2f} s", dense / ours, of_paper[0])
        yield Check(f"MInference {sparse:.2f} s", sparse / ours, of_paper[1])


def psa_reads(root: Path) -> Iterator[Check]:
    """Yield how many times less PSA reads than a fixed number of blocks that is as good."""
    found = {
        entry["method"]: entry["found"]["kv_fraction"]
        for entry in _read(root / "eval/results/budgets/psa/longbench/budget.json")["results"]
        if entry["found"]
    }
    fixed = found["arkvale"]
    for name, label in (("psa (rest=least)", "its estimate"), ("psa (rest=last)", 'our `rest="last"`')):
        yield Check(f"{fixed / found[name]:.1f}x by {label}", fixed / found[name], 2.4)


def psa_reads_of_dense(root: Path) -> Iterator[Check]:
    """Yield how many times less than dense attention PSA reads, and the points that it loses."""
    folder = "tables/psa-fig5-qwen2.5-coder-1.5b/01-longbench"
    dense = _score(_entries(root, folder, method="full"))
    for threshold in (0.95, 0.98):
        entries = _entries(root, folder, method="psa", variant=f"threshold={threshold}")
        saved, lost = 1 / fmean(entry["kv_fraction"] for entry in entries), dense - _score(entries)
        yield Check(f"{saved:.1f}x with threshold {threshold}", saved, 8.8)
        yield Check(f"{lost:.1f} of {dense:.1f} points lost", lost, 1, least=False)


def psa_throughput(root: Path) -> Iterator[Check]:
    """Yield how many times the throughput of dense attention and of Quest PSA has."""
    report = _read(root / "eval/results/throughput/qwen2.5-7b-128k-batch8.json")
    speeds = {side["name"]: side["tokens_per_second"] for side in report["sides"] if not side["error"]}
    ours, dense = speeds["psa, 2048"], max(speed for name, speed in speeds.items() if name.startswith("dense"))
    yield Check(f"{ours / dense:.1f}x of dense", ours / dense, 2.0)
    yield Check(f"{ours / speeds['quest, 2048']:.1f}x of Quest", ours / speeds["quest, 2048"], 1.4)
