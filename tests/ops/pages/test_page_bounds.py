import pytest
import torch
from hf_sparse_attn_kernels import page_bounds

from tests.ops.helpers import IMPLS, device, exact_bounds, make_rows


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(
    ("lengths", "page_size", "num_new", "kv_heads", "head_dim", "dtype"),
    [
        ([1, 15, 16, 17, 63], 16, 1, 2, 64, torch.float32),
        ([1, 15, 16, 17, 63], 16, 1000, 2, 80, torch.bfloat16),
        ([33, 0, 48, 5], 16, 16, 1, 128, torch.float16),
        ([33, 0, 48, 5], 16, 17, 3, 16, torch.float32),
        ([64, 63, 1], 32, 40, 1, 256, torch.bfloat16),
        ([7, 0, 3], 1, 2, 2, 96, torch.float32),
        ([300, 257], 256, 3, 1, 64, torch.float32),
        ([1000], 16, 100, 1, 32, torch.float16),
    ],
)
def test_touched_pages_are_exact_and_others_untouched(impl, lengths, page_size, num_new, kv_heads, head_dim, dtype):
    rows = make_rows(lengths, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype)
    max_pages = -(-rows.capacity // page_size)
    page_min = torch.full((len(lengths), kv_heads, max_pages, head_dim), float("nan"), device=device, dtype=dtype)
    page_max = page_min.clone()

    page_bounds(rows.keys, page_min, page_max, rows.start, rows.end, page_size=page_size, num_new=num_new, impl=impl)

    expected_min, expected_max = exact_bounds(rows, page_size, max_pages)
    for row, length in enumerate(lengths):
        untouched = max(0, length - num_new) // page_size
        expected_min[row, :, :untouched] = float("nan")
        expected_max[row, :, :untouched] = float("nan")
    torch.testing.assert_close(page_min, expected_min, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(page_max, expected_max, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("impl", IMPLS)
def test_token_by_token_equals_all_at_once(impl):
    rows = make_rows([37, 20], kv_heads=2, head_dim=16)
    max_pages = -(-rows.capacity // 8)
    expected = exact_bounds(rows, 8, max_pages)
    page_min = torch.full_like(expected[0], float("nan"))
    page_max = page_min.clone()
    options = {"page_size": 8, "impl": impl}
    page_bounds(rows.keys, page_min, page_max, rows.start, rows.end - 13, num_new=rows.capacity, **options)
    for missing in range(12, -1, -1):
        page_bounds(rows.keys, page_min, page_max, rows.start, rows.end - missing, num_new=1, **options)
    torch.testing.assert_close(page_min, expected[0], rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(page_max, expected[1], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("impl", IMPLS)
def test_no_new_token_changes_nothing(impl):
    rows = make_rows([20])
    page_min = torch.full((1, 2, 2, 64), 7.0, device=device)
    page_max = page_min.clone()
    page_bounds(rows.keys, page_min, page_max, rows.start, rows.end, page_size=16, num_new=0, impl=impl)
    assert (page_min == 7).all()
    assert (page_max == 7).all()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"page_size": 12}, ValueError, r"page_size=12; allowed: a power of two"),
        ({"num_new": -1}, ValueError, r"num_new=-1; allowed: an int of at least 0"),
        ({"page_size": 8}, ValueError, r"max_pages=2 of page_min; allowed: at least 4"),
        ({"impl": "cuda"}, ValueError, r"impl='cuda'; allowed: None, 'triton', 'reference'"),
        ({"page_max": torch.zeros(1, 2, 3, 64)}, ValueError, r"page_max has shape \[1, 2, 3, 64\]; allowed"),
        ({"page_max": torch.zeros(1, 2, 2, 64).half()}, TypeError, r"page_max has dtype torch.float16; allowed"),
        ({"seq_end": torch.zeros(1, dtype=torch.int64)}, TypeError, r"seq_end has dtype torch.int64; allowed"),
        ({"keys": torch.zeros(1, 2, 64, 25).transpose(2, 3)}, ValueError, r"keys has stride 25 in its last dimension"),
    ],
)
def test_errors_name_the_argument(change, error, message):
    rows = make_rows([20])
    bounds = torch.zeros(1, 2, 2, 64, device=device)
    arguments = {
        "keys": rows.keys,
        "page_min": bounds,
        "page_max": bounds.clone(),
        "seq_start": rows.start,
        "seq_end": rows.end,
        "page_size": 16,
        "num_new": 1,
    }
    change = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in change.items()}
    with pytest.raises(error, match=message):
        page_bounds(**(arguments | change))
