"""mean_query against float64, and its errors."""

import pytest
import torch
from hf_sparse_attn_kernels import mean_query

from tests.ops.helpers import IMPLS, check_schema, device, rope_table


def zeros(*shape):
    return torch.zeros(shape, device=device)


def exact(query, cos, sin, first_slot):
    """The mean in float64, query by query."""
    turned = []
    for number in range(query.shape[2]):
        slot = min(first_slot + number, len(cos) - 1)
        first, second = query[:, :, number].double().chunk(2, dim=-1)
        c, s = cos[slot].double(), sin[slot].double()
        turned.append(torch.cat([first * c - second * s, second * c + first * s], dim=-1))
    return sum(turned) / len(turned)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("queries", "head_dim", "first_slot"), [(1, 64, 7), (70, 80, 0), (512, 128, 40), (129, 6, 3)])
def test_is_the_mean_of_the_rotated_queries(impl, dtype, queries, head_dim, first_slot):
    cos, sin = rope_table(150, head_dim).values()  # shorter than the longest chunk: its end stays at the last slot
    generator = torch.Generator().manual_seed(0)
    # As a model makes them: heads are not the outer dimension, and more tokens lie around.
    buffer = torch.randn(2, queries + 3, 5, head_dim, generator=generator).to(device, dtype)
    query = buffer.transpose(1, 2)[:, :3, 2 : 2 + queries]
    expected = exact(query, cos, sin, first_slot)
    low_precision = exact(query, cos, sin, first_slot).to(dtype).double()
    # Triton's interpreter truncates bfloat16 instead of rounding it.
    roundings = 4 if device.type == "cpu" and dtype == torch.bfloat16 else 2
    bound = roundings * (low_precision - expected).abs().max() + 1e-6
    buffer[:, :2] = buffer[:, 2 + queries :] = torch.nan
    buffer[:, :, 3:] = torch.nan
    mean = mean_query(query, cos, sin, first_slot=first_slot, impl=impl)
    assert mean.shape == (2, 3, head_dim)
    assert mean.dtype == dtype
    assert (mean.double() - expected).abs().max() <= bound


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"query": zeros(1, 2, 8)}, ValueError, r"query.*\[batch, q_heads, queries, head_dim\]"),
        ({"query": zeros(1, 2, 3, 8).int()}, TypeError, "query has dtype torch.int32"),
        ({"query": zeros(1, 2, 3, 16)[..., ::2]}, ValueError, "query has stride 2 in its last dimension; allowed: 1"),
        ({"rope_cos": zeros(9, 5)}, ValueError, r"allowed: \[slots, head_dim // 2\]"),
        ({"rope_cos": None, "rope_sin": None}, TypeError, "rope_cos has type NoneType; allowed: torch.Tensor"),
        ({"rope_sin": zeros(9, 4).double()}, TypeError, "rope_sin has dtype torch.float64"),
        ({"first_slot": -1}, ValueError, "first_slot=-1; allowed: an int of at least 0"),
    ],
)
def test_bad_input(impl, changes, error, message):
    arguments = {"query": zeros(1, 2, 3, 8), "rope_cos": zeros(9, 4), "rope_sin": zeros(9, 4)}
    arguments |= {"first_slot": 0, **changes}
    tensors = [arguments.pop(name) for name in ("query", "rope_cos", "rope_sin")]
    with pytest.raises(error, match=message):
        mean_query(*tensors, **arguments, impl=impl)


def test_is_one_node_under_compile():
    cos, sin = rope_table(20, 8).values()
    query = torch.randn(1, 2, 3, 8, device=device)
    arguments = {"query": query, "rope_cos": cos, "rope_sin": sin, "first_slot": 2}
    check_schema("mean_query", arguments)
    compiled = torch.compile(mean_query, fullgraph=True, backend="eager")
    assert torch.equal(compiled(query, cos, sin, first_slot=2), mean_query(query, cos, sin, first_slot=2))
