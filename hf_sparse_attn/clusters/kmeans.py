"""K-means on the device: all groups of points, such as the KV heads of a layer, at once.

The cost of a 128K context of Llama-3.1-8B's shape, with 6,554 clusters: assigning the 131,072 keys of 8 KV heads to
centres takes 2 * 8 * 131,072 * 6,554 * 128 = 1.76 TFLOP a layer, and reads 0.27 GB. An iteration is one assignment; the
seeds take about as much as `TRIALS` + 1. So 20 iterations, the seeds and the last assignment take 46 TFLOP a layer,
which is 0.12 s at 400 TFLOP/s. Sorting the labels, summing the members (0.27 GB again) and drawing the seeds take a few
milliseconds an iteration or less.
"""

import math
from typing import NamedTuple

import torch
from hf_sparse_attn_kernels import cluster_sums, nearest_centres

from hf_sparse_attn.head_shard import WHOLE, HeadShard

ONE_BY_ONE = 64  # up to so many clusters, seeds are chosen one by one
GROWTH = 0.25  # share of the seeds chosen so far that a round adds
TRIALS = 4  # candidates drawn for each seed of a round
CHECKED_EVERY = 4  # iterations between two looks at the objective, each of which waits for the device
MOVED = 256  # empty clusters of a group that an iteration moves, at most
SEEDINGS = ("exact", "rounds")


class Clusters(NamedTuple):
    """A clustering of groups of points."""

    labels: torch.Tensor
    """int32 [groups, n]: cluster of each point."""
    order: torch.Tensor
    """int32 [groups, n]: the points sorted by cluster; those of a cluster keep their order."""
    offsets: torch.Tensor
    """int32 [groups, num_clusters + 1]: cluster c has the points order[offsets[c]] to order[offsets[c + 1] - 1]."""
    objective: torch.Tensor
    """float64 [groups]: the sum of the squared distances between the points and their centres."""


@torch.no_grad()
def normalised(keys: torch.Tensor) -> torch.Tensor:
    """Scale vectors to an L2 norm of 1.

    Parameters
    ----------
    keys : torch.Tensor
        [..., dim]; float32, float64, bfloat16 or float16.

    Returns
    -------
    torch.Tensor
        Contiguous, of the shape of `keys`. bfloat16 becomes float16, which has three more bits of mantissa; no other
        dtype changes. Vectors of norm 0 stay 0.
    """
    wide = torch.promote_types(keys.dtype, torch.float32)
    norms = torch.linalg.vector_norm(keys, dim=-1, keepdim=True, dtype=wide).clamp_(min=torch.finfo(wide).tiny)
    dtype = torch.float16 if keys.dtype == torch.bfloat16 else keys.dtype
    return torch.div(keys, norms, out=torch.empty(keys.shape, dtype=dtype, device=keys.device))


@torch.no_grad()
def kmeans(
    points: torch.Tensor,
    num_clusters: int,
    *,
    seed: int = 0,
    iterations: int = 20,
    tolerance: float = 5e-4,
    batch_tokens: int | None = None,
    seeding: str | None = None,
    shard: HeadShard = WHOLE,
) -> Clusters:
    """Cluster the points of every group by k-means: k-means++ seeds, then Lloyd's iterations.

    Both kinds of seeds are greedy: they draw more candidates than seeds, with probabilities proportional to the squared
    distance to the nearest seed (k-means++, Arthur and Vassilvitskii, 2007), and keep those that lower the objective
    most. "exact" chooses one seed at a time, as scikit-learn does. In "rounds", each round adds a quarter of the seeds
    chosen so far: 6,554 seeds take 38 rounds. A round draws four candidates a seed, divides the points among them, and
    keeps those whose points gain most. On keys of SmolLM2, the mean objectives of both are within 0.5 % of
    scikit-learn's. Seeds drawn without a choice among candidates end 1.7 % above it.

    A cluster that loses all its points moves to one of the points farthest from their centres. On a device, the same
    arguments give the same result.

    Parameters
    ----------
    points : torch.Tensor
        [groups, n, dim]; float32, bfloat16 or float16 (float64 on the CPU); the last stride is 1. Squeezed Attention
        (arXiv 2411.09688) clusters `normalised` keys.
    num_clusters : int
        At most n. Clusters may end empty if points are equal, or with `batch_tokens`.
    seed : int
        Of the random numbers.
    iterations : int
        At most so many of Lloyd's iterations.
    tolerance : float
        Stop when no group's objective falls by more than this share of it in an iteration, on average over
        `CHECKED_EVERY` iterations. Not used with `batch_tokens`.
    batch_tokens : int, optional
        Mini-batches, for many points: an iteration looks at so many points of each group, drawn without replacement
        until all have had their turn. A centre is then the running mean of its members; a point seen n points ago
        counts about 1/e. Batches of 5 points a cluster or more cost nothing in the objective: on 8,192 keys of
        SmolLM2 in 409 clusters, 20 iterations end within 0.2 % of scikit-learn's for batches of 2,048, and 3.1 % above
        it for 1,024. Default: all points.
    seeding : {"exact", "rounds"}, optional
        Default: "exact" for at most `ONE_BY_ONE` clusters.
    shard : HeadShard
        The part of the groups that `points` are of. Random numbers are drawn for all of them, and all stop together, so
        that the clusters are those that one process finds.

    Returns
    -------
    Clusters
        Every point has the label of its nearest final centre.

    Raises
    ------
    TypeError
        Unsupported dtype.
    ValueError
        Invalid shape, stride, number or name, or more clusters than points.
    """
    _check(points, num_clusters, iterations, tolerance, batch_tokens, seeding)
    if seeding is None:
        seeding = "exact" if num_clusters <= ONE_BY_ONE else "rounds"
    choose = _seeds_one_by_one if seeding == "exact" else _seeds_in_rounds
    draw = _Draw(torch.Generator(points.device).manual_seed(seed), shard)
    seeds = choose(points, num_clusters, draw)
    if batch_tokens is None or batch_tokens >= points.shape[1]:
        centres = _lloyd(points, seeds, iterations, tolerance, shard)
    else:
        centres = _mini_batches(points, seeds, iterations, batch_tokens, draw.generator)
    labels, distances = nearest_centres(points, centres.to(points.dtype))
    return Clusters(labels, *sort_by_cluster(labels, num_clusters), distances.sum(dim=1, dtype=torch.float64))


def _check(
    points: torch.Tensor,
    num_clusters: int,
    iterations: int,
    tolerance: float,
    batch_tokens: int | None,
    seeding: str | None,
) -> None:
    """Check the arguments of `kmeans` that the ops do not check."""
    if points.dim() != 3 or 0 in points.shape:
        raise ValueError(f"points has shape {list(points.shape)}; allowed: [groups, n, dim], all at least 1")
    if not 1 <= num_clusters <= points.shape[1]:
        raise ValueError(f"num_clusters={num_clusters}; allowed: 1 to n={points.shape[1]}, the number of points")
    if iterations < 1:
        raise ValueError(f"iterations={iterations}; allowed: at least 1")
    if not tolerance >= 0:
        raise ValueError(f"tolerance={tolerance}; allowed: at least 0")
    if batch_tokens is not None and batch_tokens < 1:
        raise ValueError(f"batch_tokens={batch_tokens}; allowed: None, or at least 1")
    if seeding is not None and seeding not in SEEDINGS:
        raise ValueError(f"seeding={seeding!r}; allowed: None, {', '.join(map(repr, SEEDINGS))}")


def _take(points: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Return the points [groups, count, dim] at int64 `indices` [groups, count]."""
    return points.gather(1, indices[:, :, None].expand(-1, -1, points.shape[2]))


class _Draw(NamedTuple):
    """Random numbers for groups of which this process may have a part only: the same as for all of them at once."""

    generator: torch.Generator
    shard: HeadShard

    def integers(self, end: int, groups: int) -> torch.Tensor:
        """Draw an integer below `end` for each group, int64 [groups, 1]."""
        size = (groups * self.shard.size, 1)
        drawn = torch.randint(end, size, generator=self.generator, device=self.generator.device)
        return self.shard.slice(drawn)  # type: ignore[no-any-return]

    def clocks(self, like: torch.Tensor) -> torch.Tensor:
        """Draw exponential numbers for each group, of the shape and dtype of `like` [groups, n]."""
        clocks = like.new_empty(like.shape[0] * self.shard.size, like.shape[1])
        return self.shard.slice(clocks.exponential_(generator=self.generator))  # type: ignore[no-any-return]


def _drawn(weights: torch.Tensor, count: int, draw: _Draw) -> torch.Tensor:
    """Draw `count` distinct indices [groups, count] with probabilities proportional to `weights` [groups, n].

    The winners of a race of exponential clocks are such a draw. Weights of 0 come last.
    """
    clocks = draw.clocks(weights)
    return (weights / clocks.clamp_(min=torch.finfo(clocks.dtype).tiny)).topk(count, dim=1)[1]


def _first_seed(points: torch.Tensor, draw: _Draw) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a random point of each group [groups, 1, dim], and the squared distances to it [groups, n]."""
    groups, n, _ = points.shape
    seed = _take(points, draw.integers(n, groups))
    return seed, nearest_centres(points, seed)[1]


def _seeds_one_by_one(points: torch.Tensor, count: int, draw: _Draw) -> torch.Tensor:
    """Choose seeds [groups, count, dim]: each is the candidate that lowers the objective most."""
    seed, closest = _first_seed(points, draw)
    seeds = [seed]
    wide = points.to(closest.dtype)
    norms = wide.square().sum(dim=2)
    trials = min(points.shape[1], 2 + int(math.log(count)))  # as scikit-learn
    for _ in range(count - 1):
        drawn = _drawn(closest, trials, draw)
        products = torch.bmm(_take(wide, drawn), wide.transpose(1, 2))  # [groups, trials, n]
        distances = (norms[:, None] + norms.gather(1, drawn)[:, :, None] - 2 * products).clamp_(min=0)
        closer = torch.minimum(closest[:, None], distances)
        best = closer.sum(dim=2).argmin(dim=1, keepdim=True)
        closest = closer.gather(1, best[:, :, None].expand(-1, -1, closest.shape[1]))[:, 0]
        seeds.append(_take(points, drawn.gather(1, best)))
    return torch.cat(seeds, dim=1)


def _seeds_in_rounds(points: torch.Tensor, count: int, draw: _Draw) -> torch.Tensor:
    """Choose seeds [groups, count, dim], several in a round: the candidates whose points gain most."""
    seed, closest = _first_seed(points, draw)
    seeds, chosen = [seed], 1
    while chosen < count:
        new = min(count - chosen, max(1, int(GROWTH * chosen)))
        candidates = _take(points, _drawn(closest, min(points.shape[1], TRIALS * new), draw))
        labels, distances = nearest_centres(points, candidates)
        gains = _sum_by_label(closest - distances, labels, candidates.shape[1])
        seeds.append(_take(candidates, gains.topk(new, dim=1)[1]))
        closest = torch.minimum(closest, nearest_centres(points, seeds[-1])[1])
        chosen += new
    return torch.cat(seeds, dim=1)


def _sum_by_label(values: torch.Tensor, labels: torch.Tensor, num_labels: int) -> torch.Tensor:
    """Sum the positive values [groups, n] of each label, in units of each group's own: int64 [groups, num_labels].

    Sums of integers do not depend on their order, so atomic additions give the same result every time.
    """
    largest = values.amax(dim=1, keepdim=True).clamp_(min=torch.finfo(values.dtype).tiny)
    levels = (values.clamp(min=0) / largest * 2**32).long()
    sums = torch.zeros((len(values), num_labels), dtype=torch.int64, device=values.device)
    return sums.scatter_add_(1, labels.long(), levels)


def sort_by_cluster(labels: torch.Tensor, num_clusters: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the order of the points by label, and the offsets of the clusters in it, as in `Clusters`."""
    groups, n = labels.shape
    every = torch.arange(groups, dtype=torch.int32, device=labels.device)[:, None]
    keys, order = (labels + every * num_clusters).flatten().sort(stable=True)  # one sort of all groups
    bounds = torch.arange(groups * num_clusters + 1, dtype=torch.int32, device=labels.device)
    offsets = torch.searchsorted(keys, bounds, out_int32=True).unfold(0, num_clusters + 1, num_clusters)
    return order.view(groups, n).int() - every * n, offsets - every * n


def _lloyd(
    points: torch.Tensor, centres: torch.Tensor, iterations: int, tolerance: float, shard: HeadShard
) -> torch.Tensor:
    """Return the centres after Lloyd's iterations, in at least float32."""
    before: torch.Tensor | None = None
    for iteration in range(iterations):
        labels, distances = nearest_centres(points, centres.to(points.dtype))
        order, offsets = sort_by_cluster(labels, centres.shape[1])
        counts = offsets.diff(dim=1)[:, :, None]
        centres = cluster_sums(points, order, offsets) / counts.clamp(min=1)
        moved, targets = _moves(distances, counts[:, :, 0] == 0)
        centres = torch.where(moved[:, :, None], _take(points, targets), centres)
        if iteration % CHECKED_EVERY == 0:
            objective = distances.sum(dim=1, dtype=torch.float64)
            if before is not None and shard.all_true(
                ((before - objective) <= tolerance * CHECKED_EVERY * before).all()
            ):
                break
            before = objective
    return centres


def _moves(distances: torch.Tensor, is_empty: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which clusters [groups, num_clusters] move, and the points that they move to, the farthest first."""
    farthest = distances.topk(min(MOVED, *distances.shape[1:], is_empty.shape[1]), dim=1)[1]
    rank = is_empty.cumsum(dim=1) - 1
    return is_empty & (rank < farthest.shape[1]), farthest.gather(1, rank.clamp(0, farthest.shape[1] - 1))


def _mini_batches(
    points: torch.Tensor, centres: torch.Tensor, iterations: int, batch_tokens: int, generator: torch.Generator
) -> torch.Tensor:
    """Return the centres after mini-batch iterations, in at least float32."""
    n = points.shape[1]
    kept = 1 - batch_tokens / n  # of the sums so far: they span about n points
    sums: torch.Tensor | float = 0.0
    weights: torch.Tensor | float = 0.0
    at = n
    for _ in range(iterations):
        if at + batch_tokens > n:
            shuffled, at = torch.randperm(n, generator=generator, device=points.device), 0
        batch = points.index_select(1, shuffled[at : at + batch_tokens])
        at += batch_tokens
        labels, _ = nearest_centres(batch, centres.to(points.dtype))
        order, offsets = sort_by_cluster(labels, centres.shape[1])
        sums = sums * kept + cluster_sums(batch, order, offsets)
        weights = weights * kept + offsets.diff(dim=1)[:, :, None].to(sums.dtype)
        # A cluster without points so far stays at its seed.
        centres = torch.where(weights > 0, sums / weights.clamp(min=torch.finfo(weights.dtype).tiny), centres)
    return centres
