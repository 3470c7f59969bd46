"""Contexts cut into runs, a choice of them, and exact attention to it; NaN in every token that nothing may read."""

from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from hf_sparse_attn_kernels.runs import MAX_RUN

from tests.ops.helpers import device

SHARES = (0.3, 0.05, 0.0, 1.0)  # of its runs that a head chooses, in turn


@dataclass
class Runs:
    """Arguments of `runs_decode` and `runs_prefill`, and the positions that they must read."""

    arguments: dict[str, Any]
    chosen: list[list[list[int]]]  # row, KV head: positions in context_keys
    tails: list[range]  # row: positions in keys
    dense: int  # tokens that dense attention reads, over rows and KV heads

    @property
    def read(self) -> int:
        """Count the tokens to read, over rows and KV heads."""
        return sum(len(head) + len(tail) for row, tail in zip(self.chosen, self.tails, strict=True) for head in row)


def make_runs(
    sizes: list[int],
    tails: list[int],
    *,
    kv_heads: int = 2,
    group: int = 1,
    head_dim: int = 64,
    dtype: torch.dtype = torch.float32,
    queries: int | None = None,
    shared: bool = False,
    in_place: bool = False,
    seed: int = 0,
) -> Runs:
    """Cut contexts of `sizes` tokens into random runs, choose some of them, and put tails of `tails` tokens behind.

    With `shared`, all rows have one context, of batch stride 0. With `in_place`, contexts and tails lie in the same
    buffers, and slots hold the context's tokens in random order. `queries`: of a prefill.
    """
    generator = torch.Generator().manual_seed(seed)
    batch, contexts = len(tails), len(sizes)
    starts = [2 * context + 1 for context in range(contexts)]
    most_runs = max(sizes) + 2
    run_starts = torch.tensor(sizes, dtype=torch.int32)[:, None, None].repeat(1, kv_heads, most_runs + 1)
    token_order = torch.zeros(contexts, kv_heads, max(sizes) + 1, dtype=torch.int32)
    for context, size in enumerate(sizes):
        for head in range(kv_heads):
            bounds = [0]
            while bounds[-1] < size:
                bounds.append(min(size, bounds[-1] + int(torch.randint(1, MAX_RUN + 1, (), generator=generator))))
            run_starts[context, head, : len(bounds)] = torch.tensor(bounds)
            token_order[context, head, :size] = torch.randperm(size, generator=generator)

    run_indices = torch.full((batch, kv_heads, most_runs), -1, dtype=torch.int32)
    run_counts = torch.zeros(batch, kv_heads, dtype=torch.int32)
    chosen: list[list[list[int]]] = [[[] for _ in range(kv_heads)] for _ in range(batch)]
    for row in range(batch):
        context = 0 if shared else row
        for head in range(kv_heads):
            keep = torch.rand(most_runs, generator=generator) < SHARES[(row * kv_heads + head) % len(SHARES)]
            lengths = run_starts[context, head].diff()
            runs = (keep & (lengths > 0)).nonzero().flatten()
            run_indices[row, head, : len(runs)] = runs
            run_counts[row, head] = len(runs)
            for run in runs.tolist():
                first = int(run_starts[context, head, run])
                slots = torch.arange(first, first + int(lengths[run]))
                tokens = token_order[context, head, slots] if in_place else slots
                chosen[row][head] += (tokens + starts[context]).tolist()

    seq_starts = [starts[row] + sizes[row] if in_place else 3 * row for row in range(batch)]
    tail_ranges = [range(start, start + tail) for start, tail in zip(seq_starts, tails, strict=True)]
    places = [[list(tail)] * kv_heads for tail in tail_ranges]
    keys_capacity = max(tail.stop for tail in tail_ranges) + 5
    if in_place:
        places = [[a + b for a, b in zip(*pair, strict=True)] for pair in zip(chosen, places, strict=True)]
        keys, values = (_buffer(places, keys_capacity, head_dim, dtype, generator) for _ in range(2))
        context_keys, context_values = keys, values
    else:
        keys, values = (_buffer(places, keys_capacity, head_dim, dtype, generator) for _ in range(2))
        kept = [[[*chain(*heads)] for heads in zip(*chosen, strict=True)]] if shared else chosen
        capacity = max(start + size for start, size in zip(starts, sizes, strict=True)) + 3
        context_keys, context_values = (_buffer(kept, capacity, head_dim, dtype, generator) for _ in range(2))
    shape = (batch, kv_heads * group, head_dim) if queries is None else (batch, kv_heads * group, queries, head_dim)
    each = [0 if shared else row for row in range(batch)]
    arguments = {
        "query": torch.randn(shape, generator=generator).to(device, dtype),
        "context_keys": context_keys.expand(batch, -1, -1, -1),
        "context_values": context_values.expand(batch, -1, -1, -1),
        "context_start": torch.tensor([starts[context] for context in each], dtype=torch.int32),
        "run_starts": run_starts.expand(batch, -1, -1),
        "run_indices": run_indices,
        "run_counts": run_counts,
        "keys": keys,
        "values": values,
        "seq_start": torch.tensor([tail.start for tail in tail_ranges], dtype=torch.int32),
        "seq_end": torch.tensor([tail.stop for tail in tail_ranges], dtype=torch.int32),
        "token_order": token_order.expand(batch, -1, -1) if in_place else None,
    }
    arguments = {name: None if value is None else value.to(device) for name, value in arguments.items()}
    dense = kv_heads * (sum(sizes[context] for context in each) + sum(tails))
    return Runs(arguments, chosen, tail_ranges, dense)


def _buffer(
    places: list[list[list[int]]], capacity: int, head_dim: int, dtype: torch.dtype, generator: torch.Generator
) -> torch.Tensor:
    """Random vectors at `places[row][head]` and NaN elsewhere, a strided view [batch, kv_heads, capacity, head_dim]."""
    random = torch.randn(len(places), capacity, len(places[0]), head_dim, generator=generator)
    kept = torch.zeros(random.shape[:3], dtype=torch.bool)
    for row, heads in enumerate(places):
        for head, positions in enumerate(heads):
            kept[row, positions, head] = True
    return random.masked_fill_(~kept[..., None], float("nan")).to(device, dtype).transpose(1, 2)


def attend(runs: Runs, dtype: torch.dtype, scale: float | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Plain attention of each query to its tokens, every step rounded to `dtype`; decode or prefill, by the query."""
    query = runs.arguments["query"]
    keys, values = runs.arguments["keys"], runs.arguments["values"]
    contexts = runs.arguments["context_keys"], runs.arguments["context_values"]
    prefill = query.dim() == 4
    query = query if prefill else query[:, :, None]
    batch, q_heads, queries, head_dim = query.shape
    scale = head_dim**-0.5 if scale is None else scale
    out = torch.zeros(query.shape, dtype=dtype, device=device)
    lse = torch.full(query.shape[:3], float("-inf"), dtype=dtype, device=device)
    for row in range(batch):
        for head in range(q_heads):
            kv = head // (q_heads // keys.shape[1])
            for i in range(queries):
                seen = len(runs.tails[row]) - (queries - 1 - i)  # the tail up to the query itself
                if seen <= 0 and prefill:
                    continue
                tail = list(runs.tails[row])[:seen]
                k, v = (
                    torch.cat((context[row, kv, runs.chosen[row][kv]], buffer[row, kv, tail])).to(dtype)
                    for context, buffer in zip(contexts, (keys, values), strict=True)
                )
                if len(k):
                    scores = (k @ query[row, head, i].to(dtype)) * scale
                    out[row, head, i] = scores.softmax(dim=0) @ v
                    lse[row, head, i] = scores.logsumexp(dim=0)
    return (out, lse) if prefill else (out[:, :, 0], lse[:, :, 0])
