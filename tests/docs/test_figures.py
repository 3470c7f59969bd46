"""Figures that pages repeat in their sentences are those of the results files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from eval.frontier import frontiers

ROOT = Path(__file__).parents[2]
CONTEXT = 131072
BESIDE = ("code_step", "Quest, as many tokens")


def side(report: str, name: str) -> tuple[float, float]:
    """Return the ms a token of a side in a report of `eval speed`, and how often as fast as dense attention it is."""
    found = _measured(report, name)
    return found["tpot_ms"]["median"], (found.get("ratio") or {"tpot": 1.0})["tpot"]


def first_run(report: str, name: str) -> float:
    """Return by how many seconds a side's first run in a report of `eval speed` exceeds the later ones."""
    seconds: float = _measured(report, name)["first_run_extra_seconds"]
    return seconds


def _measured(report: str, name: str) -> dict[str, Any]:
    read = json.loads((ROOT / f"eval/results/speed/llama-3.1-{report}-nvidia-h200.json").read_text())
    sides = next(result["sides"] for result in read["results"] if result["context"] == CONTEXT)
    found: dict[str, Any] = next(each for each in sides if each["name"] == name)
    return found


def compiled_decoding() -> list[str]:
    """Return sentences of the page on compiled decoding, with the figures of the results."""
    names = ("quest, 2048, ahead", "quest, 2048", "quest, 2048, CUDA graph", "quest, 2048, not compiled")
    ahead, plain, graph, eager = (side("8b-ahead", name)[0] for name in names)
    codes, plain_codes = (side("8b-ahead", f"keycodes, 2048{way}")[0] for way in (", ahead", ""))
    assert ahead < 6.2 < min(plain, graph)
    assert codes < 7.8 < plain_codes
    of_products = [side("8b-ahead-fused", f"quest, 2048{way}")[0] for way in ("", ", ahead", ", ahead, fused")]
    slow, slow_ahead, products = of_products
    assert products < min(ahead, slow_ahead)
    fused, _ = side("8b-graph", "quest, 2048, CUDA graph, fused")
    fused_codes, _ = side("8b-graph", "keycodes, 2048, CUDA graph, fused")
    return [
        f"a compiled step of Quest takes {plain:.1f} ms, {ahead:.1f} ahead, and {products:.1f} ahead with the kernel "
        f"for products of one row. The host of the last run was slower: the others took {slow:.1f} and "
        f"{slow_ahead:.1f} ms there. A step in a CUDA graph takes {graph:.1f} ms, or {fused:.1f} ms with norms, RoPE "
        f"and products fused. Not compiled, it takes {eager:.1f} ms.",
        f"KeyCodes' step takes {codes:.1f} ms ahead, and {fused_codes:.1f} ms in a CUDA graph with the same parts "
        "fused. Compiled and no more, neither reaches its goal, 6.2 ms with Quest and 7.8 ms with KeyCodes, whose step "
        f"takes {plain_codes:.1f} ms.",
    ]


def first_calls() -> list[str]:
    """Return sentences on the first compiled call and on guards, with the figures of the results."""
    profiles = {
        name: json.loads((ROOT / f"eval/results/host/llama-3.1-8b-{name}.json").read_text())["sides"][1]
        for name in ("nvidia-h100", "without-module-guards-nvidia-h100", "nvidia-h200")
    }
    whole, bare, other_profile = profiles.values()
    dense_profile = json.loads((ROOT / "eval/results/host/llama-3.1-8b-nvidia-h100.json").read_text())["sides"][0]
    assert [each["first_call"]["found_on_disk"] for each in profiles.values()] == [0, 1, 1]
    first, later, other = (each["first_call"]["calls_seconds"][0] for each in profiles.values())
    phases = whole["first_call"]["phases_seconds"]
    reports = [
        json.loads((ROOT / f"eval/results/speed/llama-3.1-8b-{name}nvidia-h200.json").read_text())
        for name in ("", "ahead-", "ahead-fused-", "one-row-", "separate-launches-")
    ]
    compiled = sorted(
        each["compile_seconds"]
        for report in reports
        for each in report["results"][0]["sides"]
        if each["name"] == "quest, 2048"
    )
    recorded = [
        first_run(name, "quest, 2048, CUDA graph, fused")
        for name in ("8b-graph", "8b-heads-2-one-shot", "70b-heads-2-one-shot")
    ]
    assert max(recorded) < compiled[0] / 2
    fast, slow_dense = other_profile["compiled"], dense_profile["compiled"]
    token, call = (fast[name]["median"] for name in ("token_ms", "call_ms"))
    guards = fast["guards"]["microseconds"] / 1000
    ahead, _ = side("8b-ahead", "quest, 2048, ahead")
    without, guarded = (side(f"8b-{name}module-guards", "quest, 2048")[0] for name in ("without-", ""))
    slow_calls = [each["call_ms"]["median"] for each in (whole["compiled"], slow_dense)]
    fewer, number = (each["compiled"]["guards"]["number"] for each in (bare, whole))
    bare_ms, ms = (each["compiled"]["token_ms"]["median"] for each in (bare, whole))
    return [
        f"with Quest it takes {first:.0f} s on the H100, whose host is the slower one, {phases['aot_autograd']:.0f} of "
        f"them in AOTAutograd and {phases['inductor']:.0f} in Inductor, and {compiled[0]:.0f} to {compiled[-1]:.0f} s "
        "on the H200s",
        f"With the graph of an earlier process on disk it takes {later:.1f} s and {other:.1f} s.",
        f"its first call takes {recorded[0]:.1f} s more than a later one on an H200 on which other sides had run "
        f"before, and {recorded[1]:.1f} and {recorded[2]:.1f} s more with the shapes of 8B and 70B over two H200s",
        f"on the slower host of the H100 it takes {slow_calls[0]:.1f} ms instead of {slow_calls[1]:.1f}. A token takes "
        f"{token:.1f} ms in the profile of the H200, and {ahead:.1f} ms ahead of the device, where the host's part is "
        f"hidden. So that part is about {token - ahead:.1f} ms: {call:.1f} in the call, of which guards are "
        f"{guards:.1f}, and {token - ahead - call:.1f} in the loop.",
        f"a token takes {bare_ms:.1f} ms on the H100 instead of {ms:.1f}, with {fewer:,} guards instead of {number:,}. "
        f"On an H200, whose host is faster, there is less to gain: {without:.1f} ms instead of {guarded:.1f} in two",
    ]


def tensor_parallel() -> list[str]:
    """Return sentences of the page on tensor parallelism, with the figures of the results."""
    graph, fused = "quest, 2048, CUDA graph", "quest, 2048, CUDA graph, fused"
    (large, large_ratio), (small, small_ratio) = (side(f"{size}b-heads-2-one-shot", graph) for size in (70, 8))
    best_dense, _ = side("70b-heads-2", "dense, DynamicCache")
    large_fused, small_fused = (side(f"{size}b-heads-2-one-shot", fused)[0] for size in (70, 8))
    one_graph, one_fused = (side("8b-graph", name)[0] for name in (graph, fused))
    codes = "keycodes, 2048, CUDA graph, fused"
    codes_fused, one_codes_fused = (side(f"8b-{name}", codes)[0] for name in ("heads-2-one-shot", "graph"))
    assert one_fused > 1.5 * small_fused
    assert one_codes_fused > 1.5 * codes_fused
    layers = [side("8b-layers-2", name)[0] for name in ("keycodes, 2048, ahead", "quest, 2048", "dense, DynamicCache")]
    return [
        f"takes {large:.1f} ms a token with Quest, and {large_fused:.1f} ms with norms, RoPE and products fused. The "
        f"best dense side takes {large * large_ratio:.0f} ms in that run, and {best_dense:.0f} ms in the fastest of "
        f"three runs, {best_dense / large:.1f} times as long as Quest unfused.",
        f"The shape of 8B takes {small:.1f} ms, {small_ratio:.1f} times as fast, and {small_fused:.1f} ms fused. On "
        f"one H200 of that machine the same step takes {one_graph:.1f} ms as a CUDA graph, and {one_fused:.1f} ms with "
        f"the same parts fused: two GPUs are {one_fused / small_fused:.2f} times as fast as one. That "
        f"of KeyCodes takes {codes_fused:.1f} and {one_codes_fused:.1f} ms.",
        f"takes {layers[0]:.0f} to {layers[1]:.0f} ms a token with KeyCodes and Quest at 128K tokens, and "
        f"{layers[2]:.0f} without a patch",
    ]


def draft(report: str, name: str) -> tuple[float, float, float, int, int]:
    """Return a side of lossless decoding: ms a token, over dense, ms a pass, tokens of dense attention, of all."""
    read = json.loads((ROOT / f"eval/results/lossless/qwen2.5-coder-1.5b-{report}.json").read_text())
    (entry,) = read["results"]
    found = next(each for each in entry["sides"] if each["name"] == name)
    (tokens,) = found["tokens"]
    dense_pass = found["verification_ms"]["median"] if "verification_ms" in found else 0.0
    return found["ms_per_token"]["median"], found["speed_up"], dense_pass, tokens["in_common"], tokens["compared"]


def lossless() -> list[str]:
    """Return sentences of the page on lossless decoding, with the figures of the results."""
    long, short, other = "yarn-nvidia-h100", "nvidia-h100", "nvidia-h200"
    graph = "draft 7, CUDA graph, fused"
    codes, pages = (draft(long, f"{method}, 1024, {graph}") for method in ("keycodes", "quest"))
    compiled = draft(long, "keycodes, 1024, draft 7")
    near, near_pages = (draft(short, f"{method}, 1024, {graph}") for method in ("keycodes", "quest"))
    tied = draft(short, "quest, 1024, draft 3, CUDA graph")
    h200, h200_compiled = draft(other, f"quest, 1024, {graph}"), draft(other, "quest, 1024, draft 7")
    for whole in (codes, pages, near, near_pages, h200):
        assert whole[3] == whole[4] == 128
    report = json.loads((ROOT / f"eval/results/lossless/qwen2.5-coder-1.5b-{short}.json").read_text())
    drafting = [side for side in report["results"][0]["sides"] if side["draft_tokens"] and side["tokens"]]
    left = [side for side in drafting if side["tokens"][0]["in_common"] < 128]
    assert (len(left), len(drafting) - 2) == (10, 12)
    return [
        f"takes {draft(long, 'dense, StaticCache')[0]:.1f} ms at best, over Transformers' compiled static cache. "
        f"KeyCodes' drafts of 7 tokens take {codes[0]:.1f} ms in CUDA graphs with fused parts, {codes[1]:.1f} times as "
        f"fast, and Quest's {pages[0]:.1f} ms, {pages[1]:.1f} times as fast (the goal was 1.8). All 128 tokens are",
        f"a dense pass over 8 tokens takes {codes[2]:.1f} ms",
        f"leave dense attention at token {compiled[3] + 1}, where",
        f"the fastest dense side takes {draft(short, 'dense, StaticCache')[0]:.1f} ms there, KeyCodes' drafts of 7 "
        f"tokens {near[0]:.1f} ms ({near[1]:.1f} times as fast) and Quest's {near_pages[0]:.1f} ms "
        f"({near_pages[1]:.1f} times), both with all tokens",
        f"leave it at token {tied[3] + 1}, where two tokens tie. On an H200 Quest's drafts of 7 take {h200[0]:.1f} ms, "
        f"{h200[1]:.1f} times as fast as the best dense side, and compiled {h200_compiled[0]:.1f} ms, "
        f"{h200_compiled[1]:.1f} times, leaving dense attention at token {h200_compiled[3] + 1}, a tie too.",
    ]


def keycodes() -> list[str]:
    """Return sentences of KeyCodes' page, with the figures of the results."""
    measured = json.loads((ROOT / "kernels/benchmarks/results/nvidia-h200.json").read_text())["entries"]
    (layer,) = (
        entry["times"]["layers"]["median"] / 1000
        for entry in measured
        if (entry["op"], entry["variant"], entry["shape"]["name"]) == ("encode_keys", "prompt", "q32-kv8-d128-b1-128K")
    )
    prefill = json.loads((ROOT / "eval/results/contexts/llama-3.1-8b-nvidia-h200.json").read_text())
    seconds = prefill["preparation_seconds"]["prefill"]
    assert prefill["settings"]["context"] == CONTEXT
    found = {}
    for method in ("full", "quest", "keycodes"):
        for budget in (None, 1024, 2048):
            scores = needles_among_needles(method, budget)
            found[method, budget] = 100 * sum(scores) / max(1, len(scores))
    layers = {"1.5b": 28, "0.5b": 24}
    codes = [layer_share(model, "keycodes", number, 0) for model, number in layers.items()]
    pages = [layer_share(model, "quest", number, 2) for model, number in layers.items()]
    return [
        f"Coding a prompt of 128K tokens takes {32 * layer:.0f} ms on an H200 with the shape of Llama-3.1-8B, "
        f"{layer:.2f} ms a layer. Its prefill takes {seconds:.0f} s.",
        f"a sparse layer of Quest reads {pages[0]:.1f} and {pages[1]:.1f} % on the needles of these models, one of "
        f"KeyCodes {codes[0]:.1f} and {codes[1]:.1f} %.",
        f"it finds {found['keycodes', 1024]:.0f} % with 1,024 tokens and {found['keycodes', 2048]:.0f} % with 2,048, "
        f"dense attention {found['full', None]:.0f} %, Quest {found['quest', 1024]:.0f} % and "
        f"{found['quest', 2048]:.0f} %.",
    ]


def rabitqcache() -> list[str]:
    """Return sentences of RaBitQCache's page, with the figures of the results."""
    steps = {
        (each["op"], each["variant"]): each
        for each in json.loads((ROOT / "kernels/benchmarks/results/nvidia-h200.json").read_text())["entries"]
        if each["shape"]["name"] == "q32-kv8-d128-b1-128K"
    }
    step, codes = (
        steps[name]["times"]["layers"]["median"]
        for name in (("rabitqcache_step", ""), ("code_step", "softmax, separate launches"))
    )
    dense = steps["rabitqcache_step", ""]["against"]["layers"]["best_us"]
    token, codes_token = (side("8b-rabitqcache", f"{name}, 1024, ahead")[0] for name in ("rabitqcache", "keycodes"))
    return [
        f"takes {step:.0f} µs, dense attention {dense:.0f} µs, and KeyCodes with as many tokens {codes:.0f} µs as "
        f"separate launches. `generate()` with the shape of Llama-3.1-8B takes {token:.1f} ms a token ahead of the "
        f"device, with KeyCodes {codes_token:.1f} ms.",
    ]


def offload() -> list[str]:
    """Return sentences of the page on host memory, with the figures of the results."""
    report = json.loads((ROOT / "eval/results/throughput/llama-3.1-8b-512k-host.json").read_text())
    on_device, in_host = (
        next(side for side in report["sides"] if side["name"] == "keycodes, 1024" + suffix)
        for suffix in ("", ", in host memory")
    )
    ms, host_ms = (side["between_tokens_ms"]["mean"] for side in (on_device, in_host))
    loaded = in_host["traffic"]["bytes_loaded"]
    cached = 2 * 32 * 8 * 128 * 2 * report["settings"]["context"]
    return [
        f"a token takes {host_ms:.1f} ms, with keys and values on the GPU {ms:.1f}; 15 was the goal. Each token loads "
        f"{loaded / 1e6:.0f} MB, in pieces of 512 bytes out of {cached / 1e9:.0f} GB, at "
        f"{loaded / 1e6 / (host_ms - ms):.0f} GB/s if the loads are all that is added.",
        f"{100 * in_host['traffic']['pool_hits']:.0f} % of it was in a slot.",
    ]


def layer_share(model: str, method: str, layers: int, dense_layers: int) -> float:
    """Return the bytes that a sparse layer reads of the needles' prompts with 1,024 tokens, in % of a dense one's."""
    shares = [
        (record["kv_bytes"] + record["metadata_bytes"]) / record["dense_bytes"]
        for benchmark in ("passkey", "needle", "ruler")
        for path in (ROOT / "eval/results/results-keycodes-bytes").glob(f"*-{benchmark}/rows.jsonl")
        for record in map(json.loads, path.read_text().splitlines())
        if model in record["model"]
        and (record["method"], record["token_budget"], record["variant"] or "") == (method, 1024, "")
    ]
    return 100 * (layers * sum(shares) / len(shares) - dense_layers) / (layers - dense_layers)


def needles_among_needles(method: str, budget: int | None) -> list[float]:
    """Return the scores of RULER's samples in the study of bytes, with a method's defaults but for the budget."""
    scores = {}
    for path in (ROOT / "eval/results/results-keycodes-bytes").glob("*-ruler/rows.jsonl"):
        for line in path.read_text().splitlines():
            record = json.loads(line)
            if (record["method"], record["token_budget"], record["variant"] or "") == (method, budget, ""):
                scores[record["sample_id"]] = record["score"]
    return list(scores.values())


@pytest.mark.parametrize(
    ("page", "sentences"),
    [
        ("methods/keycodes", keycodes),
        ("methods/rabitqcache", rabitqcache),
        ("offload", offload),
        ("compiled-decoding", compiled_decoding),
        ("compiled-decoding", first_calls),
        ("tensor-parallel", tensor_parallel),
        ("lossless", lossless),
    ],
)
def test_sentences_have_the_figures_of_the_results(page, sentences):
    text = " ".join((ROOT / f"docs/{page}.md").read_text().split())
    for sentence in sentences():
        assert sentence in text


def test_the_kernels_page_has_the_figures_of_the_h100():
    entries = json.loads((ROOT / "kernels/benchmarks/results/nvidia-h100-80gb-hbm3.json").read_text())["entries"]
    steps = {(each["op"], each["variant"], each["shape"]["name"]): each for each in entries if each["times"]}

    def ratio(op, variant, shape):
        return steps[op, variant, shape]["against"]["layers"]["ratio"]

    def us(op, variant):
        return steps[op, variant, "q32-kv8-d128-b1-128K"]["times"]["layers"]["median"]

    shapes = [f"q32-kv8-d128-b1-{length}" for length in ("128K", "512K")]
    shapes += ["q32-kv32-d128-b1-32K", "q28-kv4-d128-b1-128K", "q32-kv8-d128-b1-8K", "q32-kv8-d128-b8-128K"]
    quest = [ratio("cluster_step", "clusters", shape) for shape in shapes]
    codes = {
        name: [ratio("code_step", f"{name}, clusters", shape) for shape in (*shapes[:2], shapes[-1])]
        for name in ("softmax", "max")
    }
    many = ratio("code_step", "softmax, clusters", "q32-kv32-d128-b1-128K")
    over = {
        name: [us("code_step", f"{name}, clusters") / us(*other) for other in (("cluster_step", "clusters"), BESIDE)]
        for name in codes
    }
    text = (ROOT / "kernels/README.md").read_text()
    assert (
        f"{quest[0]:.1f}x with 32/8 heads at 128K, {quest[1]:.1f}x at 512K, {quest[2]:.1f}x with 32/32 heads at 32K "
        f"(goal 7.03x), {quest[3]:.1f}x with 28/4 at 128K (goal 4.8x), {quest[4]:.2f}x with 32/8 at 8K (goal 1.4x) and "
        f"{quest[5]:.1f}x at batch 8."
    ) in text
    assert (
        f"{many:.1f}x dense with 32/32 heads at 128K (goal 9x); with 32/8 heads at 128K {codes['softmax'][0]:.1f}x "
        f'(goal 4x), and {codes["max"][0]:.1f}x with `"max"`, which takes {over["max"][0]:.2f} times as long as '
        f"Quest's step with 2,048 tokens, where softmax takes {over['softmax'][0]:.2f} times as long (goal 1.25), and "
        f"{over['max'][1]:.2f} and {over['softmax'][1]:.2f} times as long as Quest's step with as many tokens; as "
        f"separate launches at 512K {codes['softmax'][1]:.1f}x and {codes['max'][1]:.1f}x, and at batch 8 "
        f"{codes['softmax'][2]:.1f}x and {codes['max'][2]:.1f}x (goals 9x)."
    ) in text


def test_the_kernels_page_has_keycodes_figures_of_the_h200():
    entries = json.loads((ROOT / "kernels/benchmarks/results/nvidia-h200.json").read_text())["entries"]
    steps = {(each["op"], each["variant"], each["shape"]["name"]): each for each in entries if each["times"]}
    first, *others = (f"q32-kv8-d128-{rest}" for rest in ("b1-128K", "b1-512K", "b8-128K"))

    def us(op, variant):
        return steps[op, variant, first]["times"]["layers"]["median"]

    def ratio(reduction, shape, keys=""):
        return steps["code_step", f"{reduction}, clusters{keys}", shape]["against"]["layers"]["ratio"]

    many = ratio("softmax", "q32-kv32-d128-b1-128K")
    over = [us("code_step", f"{name}, clusters") / us("cluster_step", "clusters") for name in ("max", "softmax")]
    long, batch = ((ratio("softmax", shape), ratio("max", shape)) for shape in others)
    codes, quick = ratio("softmax", first), ratio("max", first)
    text_like = [ratio(name, others[0], ", text") for name in ("softmax", "max")]
    assert (
        f"There it is {many:.1f}x with 32/32 heads at 128K; with 32/8 heads at 128K {codes:.1f}x, and "
        f'{quick:.1f}x with `"max"`, which takes {over[0]:.2f} times as long as Quest\'s step with 2,048 '
        f"tokens, where softmax takes {over[1]:.2f} times as long; at 512K {long[0]:.1f}x and {long[1]:.1f}x, and at "
        f"batch 8 {batch[0]:.1f}x and {batch[1]:.1f}x. With keys as in a text, {text_like[0]:.1f}x and "
        f"{text_like[1]:.1f}x at 512K."
    ) in (ROOT / "kernels/README.md").read_text()


def test_the_kernels_page_says_what_guards_on_modules_take():
    without, guarded = (side(f"8b-{name}module-guards", "quest, 2048")[0] for name in ("without-", ""))
    expected = f"Without the guards alone a token took {without:.1f} ms instead of {guarded:.1f}."
    assert expected in (ROOT / "kernels/README.md").read_text()


def test_keycodes_page_has_the_figures_of_variants_with_as_many_bytes():
    large, *smaller = (
        {point.name: point for point in frontier.points}
        for frontier in frontiers(ROOT / "eval/results/results-keycodes-bytes")
    )

    def needles(name, points=large):
        point = points[name]
        return (
            f"{point.kv_percent_needles:.1f} %",
            f"{100 * point.found.value:.0f} %",
            point.divergence_needles.text(4)[:6],
        )

    def others(points, name):
        return points[name].divergence_others.value

    at_needles, elsewhere = (
        [
            getattr(points["quest 1,024"], kind).value / getattr(points["keycodes 1,024"], kind).value
            for points in (large, *smaller)
        ]
        for kind in ("divergence_needles", "divergence_others")
    )
    pages, codes = needles("quest 1,024 dense_layers=0"), needles("keycodes 208")
    more_pages, more_codes = needles("quest 2,048 dense_layers=0"), needles("keycodes 1,344")
    text = " ".join((ROOT / "docs/methods/keycodes.md").read_text().split())
    assert (
        f"On the needles Quest's divergence is {at_needles[0]:.0f} times KeyCodes' on the 1.5B model, "
        f"{at_needles[1]:.0f} times on the 0.5B model and {at_needles[2]:.0f} times on SmolLM2; on the LongBench "
        f"examples, whose contexts are shorter, {elsewhere[0]:.1f}, {elsewhere[1]:.1f} and {elsewhere[2]:.1f} times."
    ) in text
    assert (
        f"On the needles of the 1.5B model Quest without them reads {pages[0]} with 1,024 tokens and finds {pages[1]}, "
        f"at a divergence of {pages[2]}; KeyCodes with 208 tokens reads {codes[0]} and finds {codes[1]}, at "
        f"{codes[2]}. With 2,048 tokens Quest reads {more_pages[0]} so, and finds {more_pages[1]} at {more_pages[2]}; "
        f"KeyCodes with 1,344 reads {more_codes[0]} and finds {more_codes[1]} at {more_codes[2]}. On the LongBench "
        "examples KeyCodes with 208 tokens is farther than Quest's 1,024 on that model, "
        f"{others(large, 'keycodes 208'):.4f} to {others(large, 'quest 1,024 dense_layers=0'):.4f}, and nearer by a "
        "tenth on the two smaller ones; KeyCodes with 1,344 "
        "is nearer than Quest's 2,048 by a factor of two to four on all three."
    ) in text
    (pages, codes), (small_pages, small_codes) = (
        [needles(name, points) for name in ("quest 1,024 dense_layers=0", "keycodes 208")] for points in smaller
    )
    assert (
        f"On the needles of the 0.5B model Quest reads {pages[0]} so, and finds {pages[1]} at {pages[2]}, KeyCodes "
        f"with 208 tokens {codes[0]} and all of them at {codes[2]}; on SmolLM2's {small_pages[0]} and "
        f"{small_pages[1]} at {small_pages[2]}, {small_codes[0]} and {small_codes[1]} at {small_codes[2]}."
    ) in text
    assert codes[1] == "100 %"
    for points in smaller:
        assert others(points, "keycodes 208") / others(points, "quest 1,024 dense_layers=0") == pytest.approx(
            0.9, abs=0.02
        )
    for points in (large, *smaller):
        assert 2 < others(points, "quest 2,048 dense_layers=0") / others(points, "keycodes 1,344") < 4.5


def test_tokens_of_one_gpu_and_of_two():
    reports = {
        name: json.loads((ROOT / f"eval/results/split/{name}.json").read_text()) for name in ("one", "heads", "layers")
    }
    tokens = {
        name: {each["name"]: each["tokens"] for each in report["results"][0]["sides"]}
        for name, report in reports.items()
    }
    for name in ("dense, DynamicCache", "quest, 2048"):
        assert tokens["one"][name] == tokens["heads"][name] == tokens["layers"][name]
        assert len(tokens["one"][name]) == 33
    one, heads, layers = (tokens[name]["keycodes, 2048"] for name in ("one", "heads", "layers"))
    assert one == layers
    assert [one[0] == heads[0], one[1] == heads[1]] == [True, False]  # "only the first in common"
