import math

import pytest
import torch
from hf_sparse_attn_kernels.codes import reference_encode
from hf_sparse_attn_kernels.codes.mass_weights import step_weights
from hf_sparse_attn_kernels.codes.rotation import rotation, rotation_levels
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from tests.ops.codes.inputs import HALF, Coded, centres_of, make_coded, values_of
from tests.ops.helpers import IMPLS, POISON, check_schema, device, grid

ONE_ULP = 2.0**-10


def _check_centre(coded: Coded, row: int, head: int, page: int, mean: torch.Tensor) -> None:
    """The stored centre of a page with this mean."""
    scale = coded.metadata["centre_scale"][row, head, page].double()
    wanted = (mean.abs().max() / 127).clamp(2.0**-14, 65504)
    assert abs(scale - wanted) <= ONE_ULP * wanted
    levels = coded.metadata["centres"][row, head, page].double()
    # Rounded to nearest, except that the scale's rounding may push the greatest level past 127.
    assert ((mean / scale).clamp(-127, 127) - levels).abs().max() <= 0.5 + 1e-3


def _check_page(coded: Coded, row: int, head: int, page: int) -> None:
    """One page against the definition, from its stored centre on."""
    size, bits = coded.page_size, coded.options["bits"]
    first = coded.rows.start[row].item() + page * size
    keys = coded.rows.keys[row, head, first : first + size].double()
    if not coded.has_shared_centre:
        _check_centre(coded, row, head, page, keys.mean(dim=0))
    residual = keys - centres_of(coded)[row, head, page]
    rotated = residual @ rotation(keys.shape[1], device).double().T
    lengths = residual.norm(dim=1, keepdim=True)
    values = values_of(coded)[row, head, page * size : (page + 1) * size].double()
    unit = lengths / math.sqrt(keys.shape[1]) * 0.9957
    steps = torch.where(unit > 0, rotated / unit, 0.0) if bits == 2 else rotated
    offset = 2 if bits == 2 else 1
    rounding = 1e-5 * (1 if bits == 2 else lengths)  # of values on the border between two steps
    lower = torch.where(values > 0, values - offset, -torch.inf)
    upper = torch.where(values < 2**bits - 1, values - offset + 1, torch.inf)
    assert (steps >= lower - rounding).all()
    assert (steps <= upper + rounding).all()

    factors = coded.metadata["factors"][row, head, page * size : (page + 1) * size].double()
    symbols = 2 * values - (2**bits - 1)
    along = (rotated * symbols).sum(dim=1)
    if coded.correction == "unbiased":
        wanted = torch.where(along > 0, lengths[:, 0] ** 2 / along, 0.0)
    else:
        wanted = along / symbols.square().sum(dim=1)
    assert (factors[:, 0] - wanted).abs().max() <= 1.01 * HALF * wanted.max() + 1e-7
    centre = coded.options["query_centre"]
    if centre is not None:
        wanted = residual @ centre[row, head].double() / math.sqrt(keys.shape[1])
        assert ((factors[:, 1] - wanted).abs() <= 1.01 * HALF * wanted.abs() + 1e-6 * lengths[:, 0] + 1e-7).all()


def _check(coded: Coded, pages: list[int]) -> None:
    """All pages of rows with so many coded ones; what lies behind them is untouched."""
    assert coded.coded.tolist() == [[count] * coded.coded.shape[1] for count in pages]
    for row, count in enumerate(pages):
        for head in range(coded.coded.shape[1]):
            for page in range(count):
                _check_page(coded, row, head, page)
        tokens = count * coded.page_size
        assert (coded.metadata["codes"][row, :, tokens:] == POISON).all()
        assert coded.metadata["factors"][row, :, tokens:].isnan().all()
        if not coded.has_shared_centre:
            assert (coded.metadata["centres"][row, :, count:] == POISON).all()
            assert coded.metadata["centre_scale"][row, :, count:].isnan().all()


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(
    ("lengths", "options"),
    [
        ([0, 15, 16, 111], {}),
        ([63, 100], {"head_dim": 80, "page_size": 48, "bits": 2}),
        ([40], {"head_dim": 128, "centred": False, "dtype": torch.bfloat16, "kv_heads": 3}),
        ([20], {"head_dim": 256, "bits": 2, "dtype": torch.float16, "kv_heads": 1}),
        ([70], {"head_dim": 8, "page_size": 64, "kv_heads": 1}),
        ([63, 100, 10], {"head_dim": 80, "shared": True}),
        ([63, 20], {"head_dim": 80, "correction": "least_squares"}),
        ([63, 20], {"head_dim": 72, "bits": 2, "correction": "least_squares"}),
        ([20], {"head_dim": 8, "bits": 2, "correction": "least_squares", "kv_heads": 1}),
        grid([70], {"page_size": 64, "bits": 2, "centred": False, "shared": True, "dtype": torch.bfloat16}),
        grid([33, 64], {"head_dim": 32, "page_size": 32, "bits": 2, "centred": False}),
        grid([130], {"head_dim": 64, "page_size": 64, "dtype": torch.bfloat16}),
    ],
)
def test_codes_are_those_of_the_definition(impl, lengths, options):
    coded = make_coded(lengths, **options)
    given = [coded.metadata[name].clone() for name in ("centres", "centre_scale")]
    coded.encode(impl=impl)
    _check(coded, [length // coded.page_size for length in lengths])
    if coded.has_shared_centre:
        assert all(map(torch.equal, given, [coded.metadata[name] for name in ("centres", "centre_scale")]))


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("correction", ["unbiased", "least_squares"])
@pytest.mark.parametrize("bits", [1, 2])
def test_factors_are_those_of_a_plain_loop(impl, correction, bits):
    """On a head_dim that is padded by the kernels; from the stored symbols on, one number at a time."""
    head_dim = 24
    coded = make_coded([16], kv_heads=1, head_dim=head_dim, bits=bits, correction=correction)
    coded.rows.keys[0, 0, coded.rows.start[0].item() + 3] *= 30
    coded.encode(impl=impl)
    matrix = rotation(head_dim, device).double().tolist()
    centre = centres_of(coded)[0, 0, 0].tolist()
    for token, values in enumerate(values_of(coded)[0, 0, :16].tolist()):
        key = coded.rows.keys[0, 0, coded.rows.start[0].item() + token].double().tolist()
        residual = [key[d] - centre[d] for d in range(head_dim)]
        along = squares = symbol_squares = 0.0
        for channel in range(head_dim):
            rotated = sum(matrix[channel][d] * residual[d] for d in range(head_dim))
            symbol = 2 * values[channel] - (2**bits - 1)
            along += rotated * symbol
            squares += residual[channel] ** 2
            symbol_squares += symbol**2
        wanted = squares / along if correction == "unbiased" else along / symbol_squares
        assert coded.metadata["factors"][0, 0, token, 0].item() == pytest.approx(wanted, rel=1.01 * HALF)


def test_the_reference_in_float64():
    coded = make_coded([63, 16], head_dim=80, bits=2, dtype=torch.float64)
    coded.encode(impl="reference")
    _check(coded, [3, 1])


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(("bits", "shared"), [(1, False), (2, False), (1, True)])
def test_codes_do_not_depend_on_the_split_into_calls(impl, bits, shared):
    whole, split = (make_coded([70, 37], head_dim=80, bits=bits, shared=shared) for _ in range(2))
    whole.encode(impl=impl)
    for lengths, max_pages in (
        ([5, 0], None),
        ([16, 15], 1),
        ([17, 16], 1),
        ([33, 16], 1),
        ([69, 36], None),
        ([70, 37], 1),
    ):
        split.encode(lengths, max_pages=max_pages, impl=impl)
        assert split.coded.tolist() == [[length // 16] * 2 for length in lengths]
    for first, second in zip(whole.tensors(), split.tensors(), strict=True):
        torch.testing.assert_close(first, second, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("max_pages", [1, 2])
def test_no_more_than_max_pages_in_a_call(impl, max_pages):
    coded = make_coded([60, 20])
    coded.encode(max_pages=max_pages, impl=impl)
    _check(coded, [max_pages, 1])
    coded.encode(max_pages=max_pages, impl=impl)
    _check(coded, [min(3, 2 * max_pages), 1])


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("max_pages", [1, None])
def test_coded_pages_are_not_read_and_cropped_rows_coded_again(impl, max_pages):
    coded = make_coded([50])
    coded.encode(impl=impl)
    expected = [tensor.clone() for tensor in coded.tensors()]
    keys = coded.rows.keys.clone()
    coded.rows.keys[:, :, :48] = float("nan")
    coded.encode(max_pages=max_pages, impl=impl)
    for found, wanted in zip(coded.tensors(), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)
    coded.encode([40], max_pages=max_pages, impl=impl)
    assert coded.coded.tolist() == [[2, 2]]
    coded.rows.keys.copy_(keys)
    coded.rows.keys[:, :, 40:48] += 1
    coded.encode(max_pages=max_pages, impl=impl)
    _check(coded, [3])


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(("bits", "correction"), [(1, "unbiased"), (2, "unbiased"), (2, "least_squares")])
def test_equal_keys_and_extremes(impl, bits, correction):
    coded = make_coded([48], bits=bits, kv_heads=1, correction=correction)
    coded.rows.keys[0, :, :16] = 0.0
    coded.rows.keys[0, :, 16:32] = torch.arange(64, device=device) / 64.0 - 0.5
    coded.rows.keys[0, :, 32:48] *= 1e6
    coded.encode(impl=impl)
    factors = coded.metadata["factors"][0, 0]
    assert (factors[:16] == 0).all()
    assert coded.metadata["centre_scale"][0, 0, 0].item() == 2.0**-14
    assert (factors[16:32, 0] < 0.01).all()  # half a level of the centre at most
    assert factors[:48].isfinite().all()
    assert (factors[32:48, 0] == 65504).any()


def test_without_lengths_on_the_host(monkeypatch):
    known, unknown = (make_coded([0, 15, 70], head_dim=80, bits=2) for _ in range(2))
    known.encode([0, 15, 20], impl="reference")
    known.encode(impl="reference")
    monkeypatch.setattr(reference_encode, "host_lengths", lambda start, end: None)
    unknown.encode([0, 15, 20], impl="reference")
    unknown.encode(max_pages=3, impl="reference")
    for first, second in zip(known.tensors(), unknown.tensors(), strict=True):
        torch.testing.assert_close(first, second, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("head_dim", [8, 64, 80, 96, 128, 256])
def test_the_rotation_is_orthogonal(head_dim):
    matrix = rotation(head_dim, device).double()
    assert (matrix @ matrix.T - torch.eye(head_dim, device=device)).abs().max() < 1e-6
    if head_dim & (head_dim - 1) == 0:
        assert torch.allclose(matrix.abs(), torch.tensor(head_dim**-0.5, device=device).double())


def test_the_rotation_is_the_same_everywhere():
    signs = (rotation(64, device)[0] > 0).int().tolist()
    assert sum(sign << bit for bit, sign in enumerate(signs)) == SIGNS_64
    assert torch.allclose(rotation(80, device)[0, :4].cpu(), torch.tensor(FIRST_80), rtol=0, atol=1e-7)


@pytest.mark.parametrize(
    "make",
    [
        lambda: rotation(24, device),
        lambda: rotation(32, device),
        lambda: rotation_levels(40, device)[0],
        lambda: step_weights(device),
    ],
)
def test_no_fake_outlives_its_mode_and_no_constant_follows_the_default_device(make):
    with FakeTensorMode():
        assert isinstance(make(), FakeTensor)
    with torch.device("meta"):
        found = make()
    assert not isinstance(found, FakeTensor)
    assert found.device.type == device.type
    with FakeTensorMode():
        assert isinstance(make(), FakeTensor)


SIGNS_64 = 0x930666E75D9BB610
FIRST_80 = [-0.08917408436536789, 0.1578482985496521, -0.013667574152350426, 0.1351986825466156]


def test_errors():
    coded = make_coded([40, 34])
    for change, message in (
        ({"page_size": 24}, r"page_size=24; allowed: a multiple of 16"),
        ({"bits": 3}, r"bits=3; allowed: 1, 2"),
        ({"correction": "norm"}, r"correction='norm'; allowed: 'unbiased', 'least_squares'"),
        ({"query_centre": None}, r"factors has shape .* allowed: \[batch, kv_heads, pages \* page_size, 1\]"),
        ({"query_centre": coded.options["query_centre"].double()}, r"query_centre has dtype torch.float64"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            Coded(coded.rows, coded.metadata, coded.coded, coded.options).encode(**change)
    with pytest.raises(ValueError, match="max_pages=0; allowed: an int of at least 1"):
        coded.encode(max_pages=0)
    for name, tensor, message in (
        ("codes", coded.metadata["codes"][:, :, :32], r"codes has 32 tokens; allowed: at least capacity=45 of keys"),
        ("codes", coded.metadata["codes"][:, :, :40], r"codes has 40 tokens; allowed: a multiple of page_size=16"),
        ("centres", coded.metadata["centres"].float(), r"centres has dtype torch.float32; allowed: torch.int8"),
        ("factors", coded.metadata["factors"].transpose(0, 1).contiguous().transpose(0, 1), "factors has strides"),
    ):
        metadata = coded.metadata | {name: tensor}
        if name == "codes" and tensor.shape[2] == 32:
            metadata = {
                "codes": tensor.contiguous(),
                "factors": coded.metadata["factors"][:, :, :32].contiguous(),
                "centres": coded.metadata["centres"][:, :, :2].contiguous(),
                "centre_scale": coded.metadata["centre_scale"][:, :, :2].contiguous(),
            }
        with pytest.raises((TypeError, ValueError), match=message):
            Coded(coded.rows, metadata, coded.coded, coded.options).encode()
    odd = make_coded([40], head_dim=64)
    odd.rows.keys = odd.rows.keys[..., :60]
    with pytest.raises(ValueError, match="head_dim=60 of keys; allowed: a multiple of 8"):
        odd.encode()


def test_the_schema_declares_what_is_written():
    coded = make_coded([40, 20])
    arguments = {"keys": coded.rows.keys, "coded": coded.coded, **coded.metadata, **coded.ends(), **coded.options}
    check_schema("encode_keys", arguments)


@pytest.mark.parametrize("head_dim", [32, 80, 128])
def test_the_rotation_in_whole_numbers(head_dim):
    levels, unit = rotation_levels(head_dim, device)
    error = (levels.double() * unit - rotation(head_dim, device).double()).abs().max()
    if head_dim == 80:
        assert levels.abs().max() == 127
        assert 0 < error <= 0.5 * unit
    else:
        assert (levels.abs() == 1).all()
        assert error == 0
