"""Triton launcher of `lookup_runs`, and its kernel that normalizes scores and chooses runs in one pass."""
# Triton's decorator is untyped, and so are a kernel's arguments.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .._check import check_triton
from .._topk import _ranks
from .._triton import cdiv, launch_options, next_power_of_2
from .clusters import Clusters
from .decode import Scores, normalize, normalizers, score_clusters, weights_of
from .select import select_runs

CHOSEN = {"block_r": 1024, "warps": 8}
ABSENT = tl.constexpr(-2)


@triton.jit
def _owners(runs, num_runs, starts_ptr, clusters_ptr):
    """Return the clusters of a tile of runs, negative if they are always read, ABSENT for runs without tokens."""
    exists = runs < num_runs
    start = tl.load(starts_ptr + runs, mask=exists, other=0)
    end = tl.load(starts_ptr + runs + 1, mask=exists, other=0)
    cluster = tl.load(clusters_ptr + runs, mask=exists, other=0)
    return tl.where(end > start, tl.maximum(cluster, -1), ABSENT)


@triton.jit
def _sums_of_numbers(numbers_ptr, earlier):
    """Return the sum of the numbers that are not negative, plus 2^32 for each of them.

    Other programs write them meanwhile. Several warps may load the same number, and find different values, of which a
    sum takes any. So whether all are there, and what they add up to, has to come of one sum.
    """
    numbers = tl.load(numbers_ptr, mask=earlier, other=0, volatile=True).to(tl.int64)
    return tl.sum(tl.where(numbers < 0, 0, numbers + (1 << 32)))


@triton.jit
def choose_runs_kernel(
    scores_ptr,  # [pairs * group, width], as in `Scores`
    maxima_ptr,  # [pairs * group, splits]
    sums_ptr,  # [pairs * group, splits]
    counts_ptr,  # [pairs, splits]
    chosen_ptr,  # [pairs, tiles]
    starts_ptr,
    clusters_ptr,
    threshold_ptr,  # [batch]
    indices_ptr,  # [pairs, num_runs]
    run_counts_ptr,  # [pairs]
    clusters_read_ptr,  # [pairs]
    kv_heads,
    group,
    num_runs,
    width,
    splits,
    starts_stride_b,
    starts_stride_h,
    clusters_stride_b,
    clusters_stride_h,
    BLOCK_R: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_T: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write the chosen runs of a tile behind those of the tiles before it, and a -1 for each other run at the end.

    Grid (tiles, pairs). A tile's place depends on what the tiles before it choose. Each program publishes its number
    and waits for theirs: they belong to programs of lower index, which start earlier.
    """
    tile = tl.program_id(0)
    tiles = tl.num_programs(0)
    pair = tl.program_id(1).to(tl.int64)
    row = pair // kv_heads
    head = pair % kv_heads
    starts_ptr += row * starts_stride_b + head * starts_stride_h
    clusters_ptr += row * clusters_stride_b + head * clusters_stride_h
    indices_ptr += pair * num_runs
    runs = tile * BLOCK_R + tl.arange(0, BLOCK_R)
    # The runs and the threshold are loaded while the scores are still computed. The kernel before this one, which
    # computes the scores, does not write them. Kernels before that one have finished and are visible: each program of
    # the score kernel waits for them before it lets this kernel start.
    owner = _owners(runs, num_runs, starts_ptr, clusters_ptr)
    bound = tl.load(threshold_ptr + row)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    tops, shares = normalizers(maxima_ptr, sums_ptr, pair, group, splits, BLOCK_G, BLOCK_S)
    scores_ptr += pair * group * width
    weight = weights_of(tl.maximum(owner, 0), owner >= 0, scores_ptr, width, tops, shares, group, BLOCK_G)
    chosen = (owner == -1) | ((owner >= 0) & (weight > bound))
    number = tl.sum(chosen.to(tl.int32))
    tl.atomic_xchg(chosen_ptr + pair * tiles + tile, number, sem="relaxed")
    rank = _ranks(chosen, BLOCK_R)
    earlier = tl.arange(0, BLOCK_T)
    earlier_at = chosen_ptr + pair * tiles + earlier
    sums = _sums_of_numbers(earlier_at, earlier < tile)
    while (sums >> 32) < BLOCK_T:
        sums = _sums_of_numbers(earlier_at, earlier < tile)
    before = sums.to(tl.int32)
    rank += before
    # Of the runs up to this one, `runs - rank` are not chosen: that many -1 end the indices.
    slot = tl.where(chosen, rank, num_runs - 1 - (runs - rank))
    tl.store(indices_ptr + slot, tl.where(chosen, runs, -1), mask=runs < num_runs)
    if tile == tiles - 1:
        tl.store(run_counts_ptr + pair, before + number)
        every = tl.arange(0, BLOCK_S)
        taking_part = tl.load(counts_ptr + pair * splits + every, mask=every < splits, other=0)
        tl.store(clusters_read_ptr + pair, tl.sum(taking_part))


def _choose(
    scored: Scores, run_starts: torch.Tensor, run_clusters: torch.Tensor, threshold: torch.Tensor, block_r: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Launch the kernel that chooses runs by scores."""
    batch, kv_heads, num_runs = run_clusters.shape
    pairs, device = batch * kv_heads, run_clusters.device
    group = len(scored.scores) // pairs
    indices = torch.empty((batch, kv_heads, num_runs), dtype=torch.int32, device=device)
    run_counts = torch.empty((batch, kv_heads), dtype=torch.int32, device=device)
    clusters_read = torch.empty((batch, kv_heads), dtype=torch.int32, device=device)
    tiles = scored.chosen.shape[1]
    choose_runs_kernel[(tiles, pairs)](
        *scored,
        run_starts,
        run_clusters,
        threshold.contiguous(),
        indices,
        run_counts,
        clusters_read,
        kv_heads,
        group,
        num_runs,
        scored.width,
        scored.splits,
        *run_starts.stride()[:2],
        *run_clusters.stride()[:2],
        BLOCK_R=block_r,
        BLOCK_G=next_power_of_2(group),
        BLOCK_S=next_power_of_2(scored.splits),
        BLOCK_T=next_power_of_2(tiles),
        num_warps=max(1, min(CHOSEN["warps"], block_r // 128)),
        **launch_options(device),
    )
    return indices, run_counts, clusters_read


def lookup_runs(
    query: torch.Tensor,
    centroids: torch.Tensor,
    cluster_sizes: torch.Tensor,
    run_starts: torch.Tensor,
    run_clusters: torch.Tensor,
    threshold: torch.Tensor,
    *,
    parents: torch.Tensor | None,
    parent_weights: torch.Tensor | None,
    parent_threshold: torch.Tensor | None,
    max_tokens: torch.Tensor | None,
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Launch the kernel that scores clusters, then the one that chooses; with a budget, those of `select_runs`."""
    check_triton("query", query)
    batch, _, head_dim = query.shape
    scale = head_dim**-0.5 if scale is None else scale
    clusters = Clusters(cluster_sizes, parents, parent_weights, parent_threshold)
    num_runs = run_clusters.shape[2]
    block_r = max(32, min(CHOSEN["block_r"], next_power_of_2(num_runs)))
    run_tiles = cdiv(num_runs, block_r) if max_tokens is None else 0
    scored = score_clusters(query[:, :, None], centroids, clusters, scale, run_tiles)
    if max_tokens is None:
        return _choose(scored, run_starts, run_clusters, threshold, block_r)
    weights = normalize(scored, None, batch, centroids.shape[2])
    chosen = select_runs(weights, cluster_sizes, run_starts, run_clusters, threshold, max_tokens=max_tokens)
    return *chosen, scored.counts.sum(dim=1, dtype=torch.int32).view(batch, -1)
