import pytest
import torch
from hf_sparse_attn_kernels import _tuning as tuning
from hf_sparse_attn_kernels import runs_decode

from tests.ops.helpers import IMPLS, allowed_error, check_schema, device, grid
from tests.ops.runs.inputs import attend, make_runs


@pytest.mark.parametrize(
    ("sizes", "tails", "options"),
    [
        ([63, 111, 1], [0, 17, 1], {"group": 3, "head_dim": 80, "dtype": torch.bfloat16}),
        ([400, 90], [5, 70], {}),
        ([300], [12, 0, 1, 130, 7], {"shared": True, "group": 4, "dtype": torch.float16}),
        ([150, 77, 200], [20, 1, 0], {"in_place": True, "group": 7, "head_dim": 128, "dtype": torch.bfloat16}),
        ([40, 33], [64, 65], {"kv_heads": 9, "head_dim": 16}),
        ([120], [3], {"kv_heads": 1, "group": 9, "head_dim": 256}),
    ],
)
def test_error_is_bounded_by_the_eager_error(sizes, tails, options):
    runs = make_runs(sizes, tails, **options)
    exact, exact_lse = attend(runs, torch.float64)
    query = runs.arguments["query"]
    eager, _ = attend(runs, query.dtype)
    for impl in IMPLS:
        out, lse = runs_decode(**runs.arguments, impl=impl)
        assert out.dtype == query.dtype
        assert lse.dtype == torch.float32
        allowed = allowed_error(eager, exact, query.shape[-1], impl)
        assert (out.double() - exact).abs().max().item() <= allowed, impl
        torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=1e-5)
        assert (out[exact_lse == float("-inf")] == 0).all()


CANDIDATES = tuning.CANDIDATES["runs_decode"]
CHOICES = [
    *(candidate if candidate in (CANDIDATES[0], CANDIDATES[-1]) else grid(candidate) for candidate in CANDIDATES),
    {"block_n": 16, "per_multiprocessor": 1, "warps": 4, "stages": 1},  # several tiles and pairs for each program
    {"block_n": 32, "per_multiprocessor": 16, "warps": 4, "stages": 1},  # fewer tiles than programs
    {"block_n": 16, "per_multiprocessor": 1, "warps": 4, "stages": 1, "waves": 3},
]


@pytest.mark.parametrize("choice", CHOICES, ids=lambda choice: "-".join(map(str, choice.values())))
@pytest.mark.parametrize("in_place", [False, True])
def test_no_choice_changes_a_result(choice, in_place, monkeypatch):
    runs = make_runs([350, 77, 20], [40, 0, 3], kv_heads=3, group=3, head_dim=32, in_place=in_place)
    expected = attend(runs, torch.float64)
    counter = torch.zeros(4, dtype=torch.int64, device=device)
    new_empty = torch.Tensor.new_empty

    def poisoned(self, *size, **options):  # partial results that no program has written must not be read
        tensor = new_empty(self, *size, **options)
        return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned)
    with tuning.forced(runs_decode=choice):
        out, lse = runs_decode(**runs.arguments, counter=counter, impl="triton")
    torch.testing.assert_close(out.double(), expected[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.double(), expected[1], rtol=1e-5, atol=1e-5)
    assert counter.tolist() == [runs.read, runs.dense, 0, 1]


def test_reference_is_exact_in_float64():
    runs = make_runs([100, 40], [30, 20], group=3, dtype=torch.float64, in_place=True)
    out = runs_decode(**runs.arguments, scale=0.7, impl="reference")
    torch.testing.assert_close(out, attend(runs, torch.float64, scale=0.7), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("impl", IMPLS)
def test_nothing_to_read_gives_zeros(impl):
    runs = make_runs([50, 30], [0, 4], group=3)
    runs.arguments["run_counts"].zero_()
    out, lse = runs_decode(**runs.arguments, impl=impl)
    assert (out[0] == 0).all()
    assert (lse[0] == float("-inf")).all()
    assert (lse[1] > float("-inf")).all()


@pytest.mark.parametrize("impl", IMPLS)
def test_large_scores_stay_finite(impl):
    runs = make_runs([300], [40], group=2)
    runs.arguments["query"] *= 1000
    out, lse = runs_decode(**runs.arguments, impl=impl)
    exact, exact_lse = attend(runs, torch.float64)
    torch.testing.assert_close(out.double(), exact, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("options", [{"shared": True}, {"in_place": True}])
def test_counter_adds_the_tokens_read(impl, options):
    runs = make_runs([150] if "shared" in options else [150, 40], [20, 3], **options)
    counter = torch.tensor([1, 2, 3, 4], device=device)
    for _ in range(2):
        runs_decode(**runs.arguments, counter=counter, impl=impl)
    assert counter.tolist() == [1 + 2 * runs.read, 2 + 2 * runs.dense, 3, 4 + 2]


def test_schema():
    runs = make_runs([20, 30], [6, 2], in_place=True)
    check_schema("runs_decode", runs.arguments | {"counter": torch.zeros(4, dtype=torch.int64, device=device)})


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"query": torch.zeros(1, 3, 64)}, ValueError, r"q_heads=3 of query; allowed: a multiple of kv_heads=2"),
        (
            {"context_values": torch.zeros(1, 2, 3, 64)},
            ValueError,
            r"context_values has shape \[1, 2, 3, 64\]; allowed",
        ),
        ({"context_keys": torch.zeros(1, 2, 24, 64).half()}, TypeError, r"context_keys has dtype torch.float16; allow"),
        (
            {"context_start": torch.zeros(2).int()},
            ValueError,
            r"context_start has shape \[2\]; allowed: \[batch\] = \[",
        ),
        (
            {"run_starts": torch.zeros(1, 2, 22).int()},
            ValueError,
            r"run_starts has shape \[1, 2, 22\]; allowed: .*23\]",
        ),
        (
            {"run_indices": torch.zeros(1, 2, 22)},
            TypeError,
            r"run_indices has dtype torch.float32; allowed: torch.int3",
        ),
        ({"run_counts": torch.zeros(1, 1).int()}, ValueError, r"run_counts has shape \[1, 1\]; allowed"),
        ({"token_order": torch.zeros(1, 1, 9).int()}, ValueError, r"token_order has shape \[1, 1, 9\]; allowed"),
        ({"token_order": torch.zeros(1, 9, 2).int().mT}, ValueError, r"token_order has stride 2 in its last dimension"),
        ({"counter": torch.zeros(4).int()}, TypeError, r"counter has dtype torch.int32; allowed: torch.int64"),
    ],
)
def test_errors_name_the_argument(change, error, message):
    runs = make_runs([20], [6])
    change = {name: value.to(device) for name, value in change.items()}
    with pytest.raises(error, match=message):
        runs_decode(**(runs.arguments | change))


@pytest.mark.parametrize("impl", IMPLS)
def test_given_lengths_of_the_contexts_are_counted(impl):
    runs = make_runs([40, 23], [5, 0])
    counters = [torch.zeros(4, dtype=torch.int64, device=device) for _ in range(2)]
    runs_decode(**runs.arguments, counter=counters[0], impl=impl)
    lengths = torch.tensor([1000, 100], dtype=torch.int32, device=device)
    runs_decode(**runs.arguments, context_lengths=lengths, counter=counters[1], impl=impl)
    tail = runs.arguments["seq_end"] - runs.arguments["seq_start"]
    assert counters[1][1] == int((lengths + tail).sum()) * runs.arguments["keys"].shape[1]
    assert counters[0][[0, 2, 3]].tolist() == counters[1][[0, 2, 3]].tolist()
