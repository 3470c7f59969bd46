"""one_row_linear against float64, combined_one_row_linear against it and torch, and their errors."""

import pytest
import torch
from hf_sparse_attn_kernels import combined_one_row_linear, one_row_linear
from hf_sparse_attn_kernels.products.ops import OPERATIONS

from tests.ops.helpers import IMPLS, check_schema, device, grid

SHAPES = [(1, 1), (5, 24), (7, 129), (130, 2048), (33, 3072), (6, 4100), (1027, 40)]


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
@pytest.mark.parametrize("by", OPERATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, grid(torch.float16), torch.float64], ids=str)
@pytest.mark.parametrize(("out_features", "in_features"), [(5, 24), grid(130, 2048), (33, 3072)])
def test_is_combined_with_another_tensor_as_torch_would(impl, by, dtype, out_features, in_features):
    check_combination(impl, by, dtype, out_features, in_features)


def check_combination(impl, by, dtype, out_features, in_features):
    row, weight, bias = make_arguments(out_features, in_features, dtype, True)
    other = torch.randn(1, 1, out_features, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    plain = one_row_linear(row, weight, bias=bias, impl=impl)
    out, combined = combined_one_row_linear(row, weight, other, by=by, bias=bias, impl=impl)
    assert torch.equal(out, plain)
    expected = getattr(plain, by)(other)
    truncates = impl == "triton" and device.type == "cpu" and dtype == torch.bfloat16  # Triton's interpreter does
    torch.testing.assert_close(combined, expected, rtol=torch.finfo(dtype).eps if truncates else 0, atol=0)


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
THREE = torch.zeros(1, 3, device=device)


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


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"by": "div"}, ValueError, "by='div'; allowed: 'add', 'mul'"),
        ({"other": THREE.view(3)}, ValueError, r"other has shape \[3\]; allowed: \[..., out_features\] = \[1, 3\]"),
        ({"other": THREE.half()}, TypeError, "other has dtype torch.float16; allowed: torch.float32"),
        ({"other": THREE.repeat(1, 2)[:, ::2]}, ValueError, r"other has strides \[6, 2\]; allowed: contiguous"),
        ({"input": ROW.expand(2, 8)}, ValueError, r"input has shape \[2, 8\]; allowed: one row \[..., 8\]"),
    ],
)
def test_bad_input_of_a_combination(impl, changes, error, message):
    arguments = {"input": ROW, "weight": WEIGHT, "other": THREE, "by": "add", **changes}
    with pytest.raises(error, match=message):
        combined_one_row_linear(**arguments, impl=impl)


def test_is_one_node_under_compile():
    row, weight, bias = make_arguments(5, 24, torch.float32, True)
    check_schema("one_row_linear", {"input": row, "weight": weight, "bias": bias, "weight_is_ready": True})
    combined = {"other": row.new_ones(1, 1, 5), "by": "mul"}
    check_schema("combined_one_row_linear", {"input": row, "weight": weight, **combined})
    compiled = torch.compile(one_row_linear, fullgraph=True, backend="eager")
    for each in (bias, None):
        assert torch.equal(compiled(row, weight, bias=each), one_row_linear(row, weight, bias=each))
