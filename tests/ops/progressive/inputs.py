"""Rows with ranked blocks, and the algorithm of Progressive Sparse Attention one block at a time in float64."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from hf_sparse_attn_kernels import rank_blocks

from tests.ops.helpers import Rows, device, make_rows

INF = float("inf")


@dataclass
class Progressive:
    """Arguments of `progressive_decode`, and the rows that they are made of."""

    rows: Rows
    arguments: dict[str, Any]


def make_progressive(
    lengths: list[int],
    *,
    block_size: int = 16,
    microbatch: int = 2,
    threshold: float = 0.9,
    max_blocks: int | None = None,
    sink_blocks: int = 0,
    kv_heads: int = 2,
    group: int = 1,
    head_dim: int = 64,
    dtype: torch.dtype = torch.float32,
    peak: float = 2.0,
    seed: int = 0,
    rest: str = "least",
    forced_blocks: int = 0,
) -> Progressive:
    """Rows whose attention is peaked by row, the last one flat, with their blocks ranked by noisy exact scores."""
    rows = make_rows(lengths, kv_heads=kv_heads, group=group, head_dim=head_dim, dtype=dtype, seed=seed)
    sharpness = torch.linspace(peak, 0.3, len(lengths)) if len(lengths) > 1 else torch.tensor([peak])
    rows.query *= sharpness.to(device, dtype)[:, None, None]
    batch = len(lengths)
    width = max(1, -(-max(lengths) // block_size))
    scores = torch.zeros(batch, kv_heads, width, device=device)
    for row, length in enumerate(lengths):
        for head in range(kv_heads):
            queries = rows.query[row].view(kv_heads, group, head_dim)[head].float()
            for block in range(-(-length // block_size)):
                products = queries @ _tokens(rows, row, head, block, block_size)[0].float().T
                scores[row, head, block] = products.logsumexp(dim=1).mean()
    scores += 0.1 * torch.randn(scores.shape, generator=torch.Generator().manual_seed(seed)).to(device)
    order, counts = rank_blocks(
        scores,
        rows.start,
        rows.end,
        block_size=block_size,
        max_blocks=max_blocks,
        sink_blocks=sink_blocks,
        impl="reference",
    )
    return Progressive(
        rows,
        {
            "query": rows.query,
            "keys": rows.keys,
            "values": rows.values,
            "block_order": order,
            "block_counts": counts,
            "seq_start": rows.start,
            "seq_end": rows.end,
            "block_size": block_size,
            "microbatch": microbatch,
            "threshold": threshold,
            "rest": rest,
            "forced_blocks": forced_blocks,
        },
    )


def _tokens(rows: Rows, row: int, head: int, block: int, block_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of a block."""
    start, end = rows.start[row].item(), rows.end[row].item()
    first = start + block * block_size
    tokens = slice(first, min(first + block_size, end))
    return rows.keys[row, head, tokens], rows.values[row, head, tokens]


@dataclass
class Expected:
    """Result of the loop, and how far it was from stopping elsewhere."""

    out: torch.Tensor  # float64 [batch, q_heads, head_dim]
    lse: torch.Tensor  # float64 [batch, q_heads]
    read_counts: torch.Tensor  # [batch, kv_heads]
    margin: torch.Tensor  # [batch, kv_heads]: least distance of a deciding P from the threshold, in logits
    tokens: int  # attended, over rows and KV heads


def one_block_at_a_time(case: Progressive, scale: float | None = None) -> Expected:
    """Rank by rank, block by block, head by head: P after every microbatch, and attention to what was read."""
    rows, arguments = case.rows, case.arguments
    batch, q_heads, head_dim = rows.query.shape
    kv_heads = rows.keys.shape[1]
    group = q_heads // kv_heads
    scale = head_dim**-0.5 if scale is None else scale
    out = torch.zeros(batch, q_heads, head_dim, dtype=torch.float64, device=device)
    lse = torch.full((batch, q_heads), -INF, dtype=torch.float64, device=device)
    read_counts = torch.zeros(batch, kv_heads, dtype=torch.int32, device=device)
    margin = torch.full((batch, kv_heads), INF, dtype=torch.float64)
    tokens = 0
    for row in range(batch):
        for kv_head in range(kv_heads):
            heads = range(kv_head * group, (kv_head + 1) * group)
            blocks = _read_until_enough(case, row, kv_head, heads, scale, margin)
            read_counts[row, kv_head] = len(blocks)
            if not blocks:
                continue
            pieces = [_tokens(rows, row, kv_head, block, arguments["block_size"]) for block in blocks]
            k, v = (torch.cat(each).double() for each in zip(*pieces, strict=True))
            tokens += len(k)
            for head in heads:
                scores = (k @ rows.query[row, head].double()) * scale
                out[row, head], lse[row, head] = scores.softmax(dim=0) @ v, scores.logsumexp(dim=0)
    return Expected(out, lse, read_counts, margin, tokens)


def _read_until_enough(
    case: Progressive, row: int, kv_head: int, heads: range, scale: float, margin: torch.Tensor
) -> list[int]:
    """The blocks read for one KV head; lowers its `margin`."""
    rows, arguments = case.rows, case.arguments
    block_size, threshold = arguments["block_size"], arguments["threshold"]
    length = rows.lengths[row]
    num_blocks = -(-length // block_size)
    count = arguments["block_counts"][row, kv_head].item()
    order = arguments["block_order"][row, kv_head, :count].tolist()
    sums: dict[int, list[float]] = {head: [] for head in heads}  # log A_i
    is_counted: list[bool] = []  # in the estimate of the rest
    means: dict[int, list[float]] = {head: [] for head in heads}  # log, of the microbatches
    for read, block in enumerate(order, start=1):
        k = _tokens(rows, row, kv_head, block, block_size)[0].double()
        for head in heads:
            sums[head].append(((k @ rows.query[row, head].double()) * scale).logsumexp(dim=0).item())
        is_forced = arguments["rest"] == "last" and read <= arguments["forced_blocks"]
        is_counted.append((block + 1) * block_size <= length and not is_forced)
        if read % arguments["microbatch"] or read == count or threshold == 1:
            continue
        odds = []  # log of P / (1 - P), with P = 1 / (1 + exp(estimate + log left - total))
        for head in heads:
            every = torch.tensor(sums[head], dtype=torch.float64)
            if arguments["rest"] == "least":
                estimate = every[is_counted].min().item() if any(is_counted) else INF
            else:
                newest = slice(read - arguments["microbatch"], read)
                counted = every[newest][is_counted[newest]]
                if len(counted):
                    means[head].append(counted.logsumexp(dim=0).item() - math.log(len(counted)))
                estimate = min(means[head], default=INF)
            odds.append(every.logsumexp(dim=0).item() - estimate - math.log(num_blocks - read))
        distance = min(odds) - math.log(threshold / (1 - threshold))
        margin[row, kv_head] = min(margin[row, kv_head].item(), abs(distance))
        if distance > 0:
            return order[:read]
    return order
