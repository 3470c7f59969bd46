"""Triton launcher of `select_tokens_by_score`: a sample leaves few candidates, among which the choice is searched.

Two launches. In the first, all programs of a row and KV head take the same sample, and from it a bound that more scores
reach than tokens are to be chosen. Each keeps those of its own tokens that reach it. In the second, one program gathers
what the others kept, finds the least chosen score, and writes the choice. A row that one program can hold takes the
second launch alone. The bound is an estimate, the choice is exact: with fewer candidates than tokens to choose, which
is rare, or with more than a program holds at once, which ties and large budgets cause, the second launch takes longer.

Scores that are still estimates of several heads are reduced by the first launch.

Where it was measured to be faster, a launch on thread-block clusters or two in CUDA C++ take the place of both.
"""

from __future__ import annotations

from math import sqrt
from typing import Any

import torch

from .._check import check_triton_dtype
from .._triton import INTERPRET, cdiv, launch_options, multiprocessors, next_power_of_2
from .candidates import SAMPLED_TOGETHER, keep_candidates_kernel
from .choose import choose as choose_on_clusters
from .chosen import write_chosen_kernel
from .prepared import Scanned
from .reduce_keep import reduce_and_keep_kernel
from .scores import programs_at_once, reduce_estimates
from .search import LINE, TOGETHER

DEVIATIONS = 3.0
"""Standard deviations by which the sample's rank exceeds the expected one, if all tokens of a group have one score."""
LEAST_SAMPLED, MOST_SAMPLED = 512, 4096
"""Groups of tokens in a sample: fewer than 2 ** 15 tokens, which a quarter of an int64 can count."""
MOST_SAMPLED_ESTIMATES = 1 << 15
"""Estimates of a sample, all of which a program holds at once."""
TILE = 8192
"""Tokens that a program compares at once, a power of two."""
REDUCED = 1 << 14
"""Estimates that a program reduces at once."""
MOST_SPAN = (1 << 16) - int(LINE)
"""Tokens of a program: their places within it have 16 bits, not all of them ones."""
MOST_PROGRAMS = 16
"""Programs of a row and KV head, unless their spans would be too long."""
LEAST_AT_ONCE, MOST_AT_ONCE = 1024, 8192
"""Candidates that a program holds at once; at most 2 ** 15 - 1."""


def sampled_groups(num_tokens: int, group: int = 1) -> int:
    """Return how many groups of tokens a sample has; fewer if a token has the estimates of many heads."""
    most = min(MOST_SAMPLED, MOST_SAMPLED_ESTIMATES // (int(SAMPLED_TOGETHER) * group))
    return min(max(LEAST_SAMPLED, next_power_of_2(num_tokens // 128)), most)


def expected_candidates(num_tokens: int, max_tokens: int, sampled: int) -> float:
    """Return about how many tokens reach the bound of `bound_by_sample`, from so many groups."""
    together = int(SAMPLED_TOGETHER)
    share = min(1.0, sampled * together / num_tokens)
    expected = share * max_tokens
    return (expected + DEVIATIONS * sqrt(together * expected) + together) / share


def select_tokens_by_score(
    scores: torch.Tensor,
    seq_start: torch.Tensor,
    seq_end: torch.Tensor,
    *,
    max_tokens: int,
    sink_tokens: int,
    page_size: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch the kernels."""
    check_triton_dtype("scores", scores, (torch.float16,))
    row_bounds = (seq_start.contiguous(), seq_end.contiguous())
    return choose(
        Scanned(scores.contiguous()), row_bounds, max_tokens=max_tokens, sink_tokens=sink_tokens, page_size=page_size
    )


def choose(
    scanned: Scanned,
    row_bounds: tuple[torch.Tensor, torch.Tensor],
    *,
    max_tokens: int,
    sink_tokens: int,
    page_size: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose tokens by what a scan found; return the indices and the counts of `select_tokens_by_score`."""
    options = {"max_tokens": max_tokens, "sink_tokens": sink_tokens, "page_size": page_size}
    chosen = choose_on_clusters(scanned, row_bounds, **options)
    if chosen is not None:
        return chosen
    scores = scanned.scores
    batch, kv_heads, num_tokens = scores.shape
    pairs, device = batch * kv_heads, scores.device
    indices = torch.empty((batch, kv_heads, max_tokens), dtype=torch.int32, device=device)
    counts = torch.empty((batch, kv_heads), dtype=torch.int32, device=device)
    sizes = (kv_heads, num_tokens, max_tokens, sink_tokens)
    launch: dict[str, Any] = {"PAGE_SIZE": page_size, "PADDED": num_tokens % 16 == 0, **launch_options(device)}
    candidates = found = counts
    programs, pitch, at_once = 1, 0, num_tokens
    if num_tokens <= MOST_AT_ONCE:
        reduce_estimates(scanned, row_bounds, page_size=page_size)
    else:
        sampled = sampled_groups(num_tokens, scanned.group)
        # One program for each multiprocessor, of at least a tile; for very long rows several.
        programs = max(1, min(MOST_PROGRAMS, multiprocessors(device) // max(pairs, 1), cdiv(num_tokens, TILE)))
        programs *= cdiv(num_tokens, programs * MOST_SPAN)
        pitch = next_power_of_2(cdiv(cdiv(num_tokens, programs), int(LINE)) * int(LINE))
        candidates = torch.empty((pairs, programs, pitch), dtype=torch.int32, device=device)
        found = torch.empty((pairs, programs + 1), dtype=torch.int32, device=device)
        keeping = launch | {"DEVIATIONS": DEVIATIONS, "PITCH": pitch, "TILE": TILE, "SAMPLED": sampled}
        if scanned.estimates is None:
            keep_candidates_kernel[(programs, pairs)](
                scores, candidates, found, *row_bounds, *sizes, num_warps=max(1, TILE // 1024), **keeping
            )
        else:
            reduce_and_keep_kernel[(programs, pairs)](
                scanned.estimates,
                scanned.program_lse,
                scores,
                candidates,
                found,
                *row_bounds,
                *sizes,
                scanned.programs,
                scanned.tokens_per_program,
                HEADS=scanned.heads,
                GROUP=scanned.group,
                REDUCED=min(REDUCED // scanned.group, TILE),
                BLOCK_P=programs_at_once(scanned),
                INTERPRETED=INTERPRET,
                num_warps=max(1, TILE // 512),
                **keeping,
            )
        at_once = round(4 / 3 * expected_candidates(num_tokens, max_tokens, sampled))
    at_once = max(LEAST_AT_ONCE, min(next_power_of_2(at_once), MOST_AT_ONCE))
    write_chosen_kernel[(1, pairs)](
        scores,
        candidates,
        found,
        *row_bounds,
        indices,
        counts,
        *sizes,
        programs,
        PROGRAMS=next_power_of_2(programs),
        PITCH=pitch,
        GROUPS=at_once // int(TOGETHER),
        num_warps=max(1, at_once // 256),
        **launch,
    )
    return indices, counts
