"""Rows with bounds of all their tokens, and tokens to append to them."""

import torch
from hf_sparse_attn_kernels import page_bounds, page_scores

from tests.ops.helpers import device, empty_bounds, make_rows


def new_tokens(rows, seed):
    """A query, key and value to append to every row, as views that are not contiguous."""
    batch, kv_heads, _, head_dim = rows.keys.shape
    generator = torch.Generator().manual_seed(seed)
    heads = (rows.query.shape[1], kv_heads, kv_heads)
    drawn = (torch.randn(batch, 2, n, head_dim, generator=generator).to(device, rows.keys.dtype)[:, 1] for n in heads)
    return tuple(drawn)


def prefilled(lengths, int8, page_size=16, statistic="minmax", **options):
    """Rows and the bounds of all their tokens; room for a few more is left in the buffers."""
    rows = make_rows(lengths, **options)
    bounds = empty_bounds(rows, page_size, int8=int8)
    lengths_new = {"page_size": page_size, "num_new": 10_000, "statistic": statistic}
    page_bounds(rows.keys, seq_start=rows.start, seq_end=rows.end, impl="reference", **lengths_new, **bounds)
    return rows, bounds


def scores_by_parts(
    query, new_key, new_value, keys, values, bounds, start, end, *, impl, page_size, statistic, **options
):
    """Scores of all pages after a token is appended to every row, by the ops of each part."""
    for row in range(len(start)):
        if end[row] > start[row]:
            keys[row, :, end[row] - 1] = new_key[row]
            values[row, :, end[row] - 1] = new_value[row]
    rows = {"seq_start": start, "seq_end": end, "page_size": page_size, "impl": impl}
    page_bounds(keys, num_new=1, statistic=statistic, **rows, **bounds)
    return page_scores(query, **rows, **bounds, **options)
