"""Oracles that check every result before it is timed: the ops' references, and attention in float32."""

from __future__ import annotations

import hf_sparse_attn_kernels as ops
import torch

from op_bench.workload import DTYPE, STATISTICS, Bounds, Layer

ERROR_MARGIN = 2.0
"""Allowed error of an output, in multiples of the error of plain attention in the inputs' precision."""
ROUNDINGS = 32
"""Allowed difference of scores, in float32 roundings of the largest one; scores closer than that tie."""


class Mismatch(Exception):  # noqa: N818 -- the measured op is wrong, not the program
    """A result differs from the oracle's."""


def check_bounds(found: Bounds, expected: Bounds, what: str) -> None:
    """Raise unless all bounds and exponents are equal."""
    names = ("page_min", "page_max", "page_exponent", "channel_exponent")
    for name, ours, theirs in zip(names, found.tensors, expected.tensors, strict=False):
        if not torch.equal(ours, theirs):
            wrong = int((ours != theirs).sum())
            raise Mismatch(f"{what}: {wrong} of {ours.numel()} values of {name} differ from the reference's")


def check_prompt_bounds(layer: Layer, kind: str) -> None:
    """Raise unless the bounds are those of a prompt of all tokens but the newest."""
    for head in range(layer.shape.kv_heads):  # one by one: the reference holds several copies of the keys
        found = layer.bounds[kind].of_head(head)
        expected = found.clone()
        keys = layer.keys[:, head : head + 1]
        _reference_bounds(layer, kind, keys, expected, layer.context_end, layer.shape.length)
        check_bounds(found, expected, f"page_bounds of KV head {head}")


def check_step_bounds(layer: Layer, kind: str) -> None:
    """Raise unless the newest token is in the bounds of its page."""
    expected = layer.bounds[kind].clone()
    _reference_bounds(layer, kind, layer.keys, expected, layer.seq_end, 1)
    check_bounds(layer.bounds[kind], expected, "bounds after the newest token")


def check_appended(layer: Layer) -> None:
    """Raise unless the newest token's key and value are in the buffers."""
    for name, buffer, new in (("keys", layer.keys, layer.new_key), ("values", layer.values, layer.new_value)):
        if not torch.equal(buffer[:, :, -1], new):
            raise Mismatch(f"{name} do not end with the new token's")


def reference_scores(layer: Layer, kind: str) -> torch.Tensor:
    """Compute the scores of all pages, float32 [batch, kv_heads, pages]."""
    bounds = layer.bounds[kind]
    scores: torch.Tensor = ops.page_scores(
        layer.query,
        bounds.page_min,
        bounds.page_max,
        layer.seq_start,
        layer.seq_end,
        page_size=layer.settings.page_size,
        **bounds.exponents,
        impl="reference",
    )
    return scores


def score_rounding(scores: torch.Tensor) -> float:
    """Return the largest difference that rounding alone may make between scores."""
    largest = float(scores.nan_to_num(0.0, 0.0, 0.0).abs().max())
    return ROUNDINGS * torch.finfo(torch.float32).eps * (1.0 + largest)


def check_scores(found: torch.Tensor, layer: Layer, kind: str) -> None:
    """Raise unless the scores equal the reference's up to rounding."""
    expected = reference_scores(layer, kind)
    error = float((found - expected).abs().max())
    if not error <= score_rounding(expected):  # NaN is an error too
        raise Mismatch(f"page_scores: off by {error:.2e}, allowed {score_rounding(expected):.2e}")


def check_selection(
    found: tuple[torch.Tensor, torch.Tensor], scores: torch.Tensor, layer: Layer, rounding: float = 0.0
) -> None:
    """Raise unless the selected blocks are the reference's; scores at most ``rounding`` apart tie."""
    settings, pages = layer.settings, scores.shape[-1]
    indices, counts = found
    expected_indices, expected_counts = ops.select_blocks(
        scores,
        layer.seq_start,
        layer.seq_end,
        block_size=settings.page_size,
        **settings.budget,
        impl="reference",
    )
    if not torch.equal(counts, expected_counts):
        raise Mismatch("selection: counts differ from the reference's")
    if torch.equal(indices, expected_indices):
        return
    used = torch.arange(indices.shape[-1], device=indices.device) < counts[..., None]
    in_range = ((indices >= 0) & (indices < pages)) == used
    ascending = (indices[..., 1:] > indices[..., :-1]) | ~used[..., 1:]
    if not bool(in_range.all() and ascending.all()):
        raise Mismatch("selection: not ascending, in range, then -1")
    for block in (*range(settings.sink_blocks), *range(pages - settings.recent_blocks, pages)):
        if not bool((indices == block).any(dim=-1).all()):
            raise Mismatch(f"selection: block {block} is missing, which must always be read")
    ours, theirs = (
        scores.gather(2, blocks.clamp(min=0).long()).masked_fill(~used, 0.0).sort(dim=-1)[0]
        for blocks in (indices, expected_indices)
    )
    apart = float((ours - theirs).abs().max())
    if not apart <= rounding:
        raise Mismatch(
            f"selection: selected scores differ from the reference's by {apart:.2e}, ties allowed to {rounding:.2e}"
        )


def check_sparse_output(
    found: torch.Tensor, layer: Layer, block_indices: torch.Tensor, block_counts: torch.Tensor
) -> None:
    """Raise unless ``found`` is attention to the selected blocks."""
    page_size = layer.settings.page_size
    read = int(block_counts.min())
    if read != int(block_counts.max()):
        raise Mismatch("selection: rows of one length have different counts")
    offsets = torch.arange(page_size, device=layer.keys.device)
    positions = (block_indices[..., :read, None].long() * page_size + offsets).flatten(2)
    index = positions[..., None].expand(-1, -1, -1, layer.shape.head_dim)
    keys, values = layer.keys.gather(2, index), layer.values.gather(2, index)
    truth, rough = (attention(layer.query, keys, values, dtype) for dtype in (torch.float32, DTYPE))
    check_output(found, truth, rough)


def check_dense_output(found: torch.Tensor, layer: Layer) -> None:
    """Raise unless ``found`` is attention to all tokens."""
    if "dense" not in layer.expected:
        for name, dtype in (("dense", torch.float32), ("dense, rough", DTYPE)):
            layer.expected[name] = attention(layer.query, layer.keys, layer.values, dtype)
    check_output(found, layer.expected["dense"], layer.expected["dense, rough"])


def attention(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Compute plain attention in a dtype, one KV head after another; return float32 [batch, q_heads, head_dim]."""
    group = query.shape[1] // keys.shape[1]
    outputs = []
    for head in range(keys.shape[1]):
        heads = query[:, head * group : (head + 1) * group].to(dtype)
        scores = heads @ keys[:, head].to(dtype).transpose(1, 2) * query.shape[-1] ** -0.5
        outputs.append(scores.softmax(dim=-1) @ values[:, head].to(dtype))
    return torch.cat(outputs, dim=1).float()


def check_counter(layer: Layer, expected: tuple[int, int, int, int]) -> None:
    """Raise unless the ops counted their reads correctly."""
    found = tuple(layer.counter.tolist())
    if found != expected:
        raise Mismatch(f"counter {found}, expected {expected}")


def _reference_bounds(
    layer: Layer, kind: str, keys: torch.Tensor, bounds: Bounds, end: torch.Tensor, num_new: int
) -> None:
    levels = (bounds.page_min, bounds.page_max)
    options = {"page_size": layer.settings.page_size, "num_new": num_new, "statistic": STATISTICS[kind]}
    ops.page_bounds(keys, *levels, layer.seq_start, end, **bounds.exponents, **options, impl="reference")


def check_output(found: torch.Tensor, truth: torch.Tensor, rough: torch.Tensor) -> None:
    """Raise unless ``found`` is as close to the truth as plain attention in the inputs' precision."""
    error, plain_error = ((each.float() - truth).abs().max().item() for each in (found, rough))
    allowed = ERROR_MARGIN * plain_error
    if not error <= allowed:  # NaN is an error too
        raise Mismatch(f"output off by {error:.2e} from float32 attention, allowed {allowed:.2e}")
