"""one_row_linear against float64, and its errors."""

import pytest
import torch
from hf_sparse_attn_kernels import one_row_linear

from tests.ops.helpers import IMPLS, check_schema, device, grid

SHAPES = [(1, 1), (5, 24), (7, 129), (130, 2048), (33, 3072), (6, 4100), (4099, 40)]


def make_arguments(out_features, in_features, dtype, with_bias, seed=0):
    """A row, a matrix and a bias, each in a buffer with NaN around it."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape):
        buffer = torch.full((shape[0] + 2, *shape[1:-1], shape[-1] + 9), torch.nan)
        buffer[1:-1, ..., 4:-5] = torch.randn(shape, generator=generator)
        return buffer.to(device, dtype)[1:-1, ..., 4:-5]

    row = drawn(1, in_features)[0].view(1, 1, in_features)
    return row, drawn(out_features, in_features) / in_features**0.5, drawn(1, out_features)[0] if with_bias else None


def exact(row, weight, bias):
    out = row.double() @ weight.double().T
    return out if bias is None else out + bias.double()


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("weight_is_ready", [False, True], ids=["waits", "ready"])
@pytest.mark.parametrize(
    ("dtype", "with_bias"),
    [
        (torch.float32, True),
        (torch.bfloat16, False),
        grid(torch.bfloat16, True),
        grid(torch.float16, True),
        (torch.float64, True),
    ],
    ids=str,
)
@pytest.mark.parametrize(("out_features", "in_features"), SHAPES)
def test_is_the_product(impl, weight_is_ready, dtype, with_bias, out_features, in_features):
    check_product(impl, weight_is_ready, dtype, with_bias, out_features, in_features)


def check_product(impl, weight_is_ready, dtype, with_bias, out_features, in_features):
    row, weight, bias = make_arguments(out_features, in_features, dtype, with_bias)
    out = one_row_linear(row, weight, bias=bias, weight_is_ready=weight_is_ready, impl=impl)
    assert out.shape == (1, 1, out_features)
    assert out.dtype == dtype
    expected = exact(row, weight, bias)
    # What one rounding costs, and a sum in the dtype of the sums; Triton's interpreter truncates bfloat16.
    sums = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps * in_features**0.5
    one_rounding = torch.finfo(dtype).eps * (2 if device.type == "cpu" else 1)
    assert ((out.double() - expected).abs() <= one_rounding * expected.abs() + 4 * sums).all()


@pytest.mark.parametrize("impl", IMPLS)
def test_is_the_same_from_call_to_call(impl):
    row, weight, bias = make_arguments(70, 5000, torch.bfloat16, True)
    first = one_row_linear(row, weight, bias=bias, impl=impl)
    for ready in (False, True):
        assert torch.equal(one_row_linear(row, weight, bias=bias, weight_is_ready=ready, impl=impl), first)


@pytest.mark.parametrize("impl", IMPLS)
def test_takes_a_row_of_any_number_of_dimensions(impl):
    row, weight, _ = make_arguments(6, 40, torch.float32, False)
    expected = one_row_linear(row, weight, impl=impl)
    for shape in ((40,), (1, 40), (1, 1, 1, 40)):
        assert torch.equal(one_row_linear(row.view(shape), weight, impl=impl), expected.view(*shape[:-1], 6))


ROW, WEIGHT = torch.zeros(1, 8, device=device), torch.zeros(3, 8, device=device)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"input": ROW.expand(2, 8)}, ValueError, r"input has shape \[2, 8\]; allowed: one row \[..., 8\]"),
        ({"input": ROW.view(8, 1)}, ValueError, r"input has shape \[8, 1\]; allowed: one row \[..., 8\]"),
        ({"input": ROW.repeat(1, 2)[:, ::2]}, ValueError, "input has stride 2 in its last dimension; allowed: 1"),
        ({"input": ROW.int()}, TypeError, "input has dtype torch.int32"),
        ({"weight": WEIGHT[0]}, ValueError, r"weight.*\[out_features, in_features\]"),
        ({"weight": WEIGHT[:0]}, ValueError, r"weight.*\[out_features, in_features\]"),
        ({"weight": WEIGHT.half()}, TypeError, "weight has dtype torch.float16; allowed: torch.float32"),
        ({"weight": WEIGHT.T.contiguous().T}, ValueError, "weight has stride 3 in its last dimension; allowed: 1"),
        ({"bias": WEIGHT[0]}, ValueError, r"bias has shape \[8\]; allowed: \[out_features\] = \[3\]"),
        ({"bias": WEIGHT[:, 0]}, ValueError, "bias has stride 8 in its last dimension; allowed: 1"),
        ({"bias": WEIGHT[0, :3].double()}, TypeError, "bias has dtype torch.float64; allowed: torch.float32"),
    ],
)
def test_bad_input(impl, changes, error, message):
    arguments = {"input": ROW, "weight": WEIGHT, **changes}
    with pytest.raises(error, match=message):
        one_row_linear(arguments.pop("input"), arguments.pop("weight"), **arguments, impl=impl)


def test_is_one_node_under_compile():
    row, weight, bias = make_arguments(5, 24, torch.float32, True)
    check_schema("one_row_linear", {"input": row, "weight": weight, "bias": bias, "weight_is_ready": True})
    compiled = torch.compile(one_row_linear, fullgraph=True, backend="eager")
    for each in (bias, None):
        assert torch.equal(compiled(row, weight, bias=each), one_row_linear(row, weight, bias=each))
