"""Results that are combined ahead of the call for it: where, with the same bits, and only if nothing has changed."""

import pytest
import torch
from torch.nn import Parameter
from torch.nn.functional import linear, silu

from hf_sparse_attn.patch import fused as fusing
from hf_sparse_attn.patch.combinations import Combinations
from hf_sparse_attn.patch.fused import fused
from tests.families import tiny_model
from tests.models import make_model, random_ids

WEIGHTS = [Parameter(torch.randn(8, 8, generator=torch.Generator().manual_seed(seed))) for seed in range(3)]
SCALE = torch.randn(8)


@pytest.fixture
def made(monkeypatch):
    """The operations that products have made with their results."""
    operations, combined = [], fusing.combined_one_row_linear

    def observed(*arguments, **options):
        operations.append(options["by"])
        return combined(*arguments, **options)

    monkeypatch.setattr(fusing, "combined_one_row_linear", observed)
    monkeypatch.setattr(fusing, "BACKEND", "eager")
    return operations


def check_three_passes(model):
    """Compare passes with those that combine nothing ahead, to the bit."""
    combinations = Combinations()
    for index in range(3):
        ids = random_ids(1, 1, seed=index)
        with fused(model):
            expected = model(ids).logits
        with fused(model, combinations):
            actual = model(ids).logits
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
@torch.no_grad()
def test_residual_connections_and_gates_of_a_model(family, made):
    model = make_model(family, dtype=torch.float64)
    check_three_passes(model)
    assert made == ["add", "mul", "add"] * 2 * model.config.num_hidden_layers  # of the second and the third pass


@pytest.mark.parametrize(
    "model_type", ["gemma2", "gemma3_text", "glm4", "gpt_oss", "granite", "mixtral", "olmo2", "phi3"]
)
@pytest.mark.usefixtures("made")
@torch.no_grad()
def test_models_with_other_connections_keep_their_results(model_type):
    check_three_passes(tiny_model(model_type))


class Toy(torch.nn.Module):
    """Passes of a few calls, which may differ from one to the next."""

    def forward(self, row, change=None):
        residual = row.clone()
        result = linear(residual * SCALE, WEIGHTS[0])
        if change == "result":
            result.mul_(2)
        if change == "residual":
            residual.add_(1)
        if change == "another":
            residual = residual + 0.0
        if change == "order":
            total = result + residual
        elif change == "operation":
            total = residual * result
        elif change == "scaled":
            total = torch.add(residual, result, alpha=2)
        else:
            total = residual + result
        return silu(linear(total, WEIGHTS[1])) * linear(total, WEIGHTS[2]), result, residual


@pytest.mark.parametrize(
    ("change", "operations"),
    [
        (None, ["add", "mul"]),
        ("order", ["add", "mul"]),
        ("operation", ["add", "mul"]),
        ("scaled", ["add", "mul"]),
        ("result", ["add"]),
        ("residual", ["add"]),
        ("another", ["add"]),
    ],
)
@torch.no_grad()
def test_what_has_changed_since_is_computed_again(change, operations, made):
    """An additional call moves the numbers of all later ones, so that nothing after it is made ahead."""
    toy, combinations, (first, second) = Toy(), Combinations(), torch.randn(2, 1, 8)
    with fused(toy, combinations):
        toy(first)
    assert made == []
    with fused(toy, combinations):
        actual = toy(second, change)
    assert made == operations
    for each, expected in zip(actual, toy(second, change), strict=True):
        torch.testing.assert_close(each, expected)


@torch.no_grad()
def test_other_shapes_and_several_rows_are_not_combined(made):
    toy, combinations = Toy(), Combinations()
    for rows in (1, 2, 1):
        row = torch.randn(rows, 8)
        with fused(toy, combinations):
            actual = toy(row)
        for each, expected in zip(actual, toy(row), strict=True):
            torch.testing.assert_close(each, expected)
    assert made == ["add", "mul"]


@torch.inference_mode()
def test_tensors_that_do_not_tell_whether_they_changed_are_not_combined(made):
    toy, combinations = Toy(), Combinations()
    for _ in range(2):
        with fused(toy, combinations):
            toy(torch.randn(1, 8))
    assert made == []


@pytest.mark.usefixtures("made")
@torch.no_grad()
def test_what_a_part_compiles_by_itself_is_left_to_it():
    """Dynamo would trace the mode, whose state changes from call to call."""
    gated = torch.compile(lambda first, second: (first + second) * torch.sin(second * 2 + first), backend="eager")
    toy, combinations = Toy(), Combinations()
    for row in torch.randn(3, 1, 8):
        with fused(toy, combinations):
            result, *_ = toy(row)
            actual = gated(result, row)
        torch.testing.assert_close(actual, (result + row) * torch.sin(row * 2 + result))


@pytest.mark.usefixtures("made")
@torch.no_grad()
def test_tensors_without_memory_of_their_own_pass_through():
    toy, combinations, rows = Toy(), Combinations(), torch.randn(3, 8)
    for _ in range(2):
        with fused(toy, combinations):
            mapped = torch.vmap(lambda row: row * 2 + row)(rows)
            sparse = (rows.to_sparse() + rows.to_sparse()).to_dense()
            nested = torch.nested.nested_tensor([rows, rows[:1]]) * 2.0
        torch.testing.assert_close(mapped, rows * 3)
        torch.testing.assert_close(sparse, rows * 2)
        torch.testing.assert_close(nested[1], rows[:1] * 2)


@torch.no_grad()
def test_what_a_kernel_writes_is_no_longer_what_a_product_made(made):
    """As sums over processes do, of which PyTorch learns nothing."""
    toy, combinations, row = Toy(), Combinations(), torch.randn(1, 8)

    def run():
        residual = row.clone()
        result = linear(residual * SCALE, WEIGHTS[0])
        result.data.mul_(2)
        combinations.note_written(result)
        return residual + result

    for _ in range(3):
        with fused(toy, combinations):
            actual = run()
        torch.testing.assert_close(actual, row + 2 * linear(row * SCALE, WEIGHTS[0]))
    assert made == []


@torch.no_grad()
def test_the_first_pass_keeps_rows_alone(made):
    toy, combinations, row = Toy(), Combinations(), torch.randn(1, 8)
    with fused(toy, combinations):
        toy(row)
        torch.zeros(1 << 20)[:8].clone()
        kept = list(combinations._tensors.values())
        assert sum(tensor.untyped_storage().nbytes() for tensor in kept) < 1 << 12
    assert not combinations._tensors


@torch.no_grad()
def test_a_pass_that_fails_leaves_nothing_behind(made):
    toy, combinations, row = Toy(), Combinations(), torch.randn(1, 8)
    with fused(toy, combinations):
        toy(row)
    wider = torch.randn(1, 9)
    with pytest.raises(RuntimeError, match="size"), fused(toy, combinations):
        toy(wider)
    assert not combinations._tensors
    with fused(toy, combinations):
        actual = toy(row)
    assert made == ["add", "mul"]
    for each, expected in zip(actual, toy(row), strict=True):
        torch.testing.assert_close(each, expected)
