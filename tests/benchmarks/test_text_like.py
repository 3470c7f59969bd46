"""Keys whose attention is spread as in a text: their logits, the steps that are timed with them, and the tables."""

import pytest
import torch
from op_bench import code_oracle, oracle, registry, tune
from op_bench.cluster_entries import CLUSTERS, CLUSTERS_ON_TEXT, KIND
from op_bench.cluster_tables import TEXT, cluster_part, code_step_part
from op_bench.code_step_entries import CODE_CLUSTERS, CODE_CLUSTERS_ON_TEXT
from op_bench.measure import check_entry
from op_bench.registry import CLUSTER_STEPS, CODE_STEPS
from op_bench.shapes import CLUSTER_SHAPES, CODE_STEP_SHAPES, Settings, Shape
from op_bench.text_like import (
    FIRST,
    PAGE,
    PASSAGE,
    PASSAGE_PLACE,
    PASSAGE_TOKENS,
    RECENT,
    SPREAD,
    SPREAD_OF_PAGE,
    make_text_like,
)

from tests.benchmarks.records import LONG, SHORT, entry, report

CPU = torch.device("cpu")
ROWS, KV_HEADS, GROUP, LENGTH, HEAD_DIM = 2, 4, 3, 4096, 32
PASSAGE_START = int(PASSAGE_PLACE * LENGTH) - PASSAGE_TOKENS // 2 + 1
REST = slice(PAGE, 2048)
"""Whole pages before the passage, where the last tokens' part of the logits is below a hundredth."""
DTYPES = (torch.float32, torch.float64, torch.bfloat16)

FAMILIES = {CLUSTERS_ON_TEXT: CLUSTERS, CODE_CLUSTERS_ON_TEXT: CODE_CLUSTERS}
"""The families with such keys, and those with random ones."""
SHAPE = Shape(q_heads=6, kv_heads=2, head_dim=16, batch=2, length=640)
SETTINGS = Settings(token_budget=64, code_budget=128)
each_family = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.entries[0].op)
each_entry = pytest.mark.parametrize(
    ("family", "each"), [pytest.param(family, each, id=each.name) for family in FAMILIES for each in family.entries]
)


def random_tensors(dtype=torch.float32):
    generator = torch.Generator().manual_seed(7)
    sizes = ((ROWS, KV_HEADS * GROUP, HEAD_DIM), (ROWS, KV_HEADS, LENGTH, HEAD_DIM))
    return (torch.randn(size, generator=generator).to(dtype) for size in sizes)


def logits_of(query, keys):
    """Float64 [batch, kv_heads, group, length]."""
    queries = query.double().unflatten(1, (keys.shape[1], -1)) * query.shape[-1] ** -0.5
    return queries @ keys.double().transpose(2, 3)


@pytest.fixture(scope="module")
def logits():
    query, keys = random_tensors()
    make_text_like(query, keys, seed=3)
    return logits_of(query, keys)


def test_the_first_token_the_last_ones_and_a_passage_have_higher_logits_than_the_rest(logits):
    rest = logits[..., REST].mean()
    passage = logits[..., PASSAGE_START : PASSAGE_START + PASSAGE_TOKENS - 1].mean()
    assert logits[..., 0].mean() - rest == pytest.approx(FIRST, abs=3.0)
    assert logits[..., -16:].mean() - rest == pytest.approx(RECENT, abs=2.5)
    assert passage - rest == pytest.approx(PASSAGE, abs=2.5)
    assert rest == pytest.approx(0.0, abs=0.3)
    before, after = logits[..., PASSAGE_START - PAGE : PASSAGE_START].mean(), logits[..., -1024:-960].mean()
    assert max(before, after) < passage - 3.0  # the passage ends, and the last tokens' part falls
    first_is_highest = logits[..., REST].amax(dim=3) < logits[..., 0]
    assert first_is_highest.double().mean() > 0.75


def test_tokens_of_a_page_are_alike(logits):
    pages = logits[..., REST].unflatten(3, (-1, PAGE))
    assert pages.mean(dim=4).std() == pytest.approx(SPREAD_OF_PAGE, rel=0.1)
    assert pages.std(dim=4).mean() == pytest.approx(SPREAD, rel=0.1)


def test_the_heads_of_a_group_differ_in_which_pages_and_tokens_have_high_logits(logits):
    for heads in logits[..., REST].flatten(0, 1):
        correlation = torch.corrcoef(heads) - torch.eye(GROUP, dtype=torch.float64)
        assert correlation.abs().max() < 0.35  # of 31 pages


def test_the_heads_of_a_group_differ_in_how_much_each_part_counts(monkeypatch):
    for name in ("SPREAD", "SPREAD_OF_PAGE"):
        monkeypatch.setattr(f"op_bench.text_like.{name}", 0.0)
    query, keys = random_tensors()
    make_text_like(query, keys, seed=3)
    logits = logits_of(query, keys)
    assert logits[..., REST].abs().max() < 0.02
    for tokens, mean in ((0, FIRST), (LENGTH - 1, RECENT), (PASSAGE_START, PASSAGE)):
        strengths = logits[..., tokens] / mean
        assert 0.45 < strengths.min() < strengths.max() < 1.55
        assert strengths.std(dim=2).mean() > 0.15


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_key_changes_in_the_span_of_its_groups_queries_alone(dtype):
    query, keys = random_tensors(dtype)
    before = keys.clone()
    make_text_like(query, keys)
    assert keys.dtype == dtype
    spans = torch.linalg.qr(query.double().unflatten(1, (KV_HEADS, GROUP)).transpose(2, 3))[0]
    change = keys.double() - before.double()
    inside = change @ spans @ spans.transpose(2, 3)
    allowed = 1e-5 if dtype != torch.bfloat16 else torch.finfo(dtype).eps / 2 * float(keys.abs().max())
    assert (change - inside).abs().max() < allowed
    assert inside.norm(dim=3).median() > 1.0


def test_a_seed_decides_and_rows_and_heads_are_drawn_apart():
    made = []
    for seed in (0, 0, 1):
        query, keys = random_tensors()
        make_text_like(query, keys, seed)
        made.append(logits_of(query, keys)[..., REST])
    assert torch.equal(made[0], made[1])
    assert torch.corrcoef(torch.stack([made[0].flatten(), made[2].flatten()]))[0, 1].abs() < 0.1
    apart = torch.corrcoef(made[0][:, :, 0].flatten(0, 1)) - torch.eye(ROWS * KV_HEADS, dtype=torch.float64)
    assert apart.abs().max() < 0.35


def test_rows_longer_than_what_is_changed_at_a_time_are_the_same(monkeypatch):
    """But for the random numbers, which are drawn in another order."""
    monkeypatch.setattr("op_bench.text_like.CHUNK", 1000)
    query, keys = random_tensors()
    make_text_like(query, keys, seed=3)
    found = logits_of(query, keys)
    assert found[..., 0].mean() - found[..., REST].mean() == pytest.approx(FIRST, abs=3.0)
    assert found[..., -16:].mean() - found[..., REST].mean() == pytest.approx(RECENT, abs=2.5)
    pages = found[..., REST].unflatten(3, (-1, PAGE))
    assert pages.mean(dim=4).std() == pytest.approx(SPREAD_OF_PAGE, rel=0.1)


def test_logits_are_not_of_the_random_numbers_that_the_keys_were_made_of():
    """A layer's keys and logits have the same seed, and lengths at which both fill whole blocks of random numbers."""
    shape = Shape(q_heads=4, kv_heads=1, head_dim=16, batch=1, length=LENGTH)
    drawn, layer = (family.make_layer(shape, SETTINGS, CPU, 0) for family in (CLUSTERS, CLUSTERS_ON_TEXT))
    pages = logits_of(layer.query, layer.keys)[0, 0].T[REST].unflatten(0, (-1, PAGE))
    signal = (pages - pages.mean(dim=1, keepdim=True)).flatten() / SPREAD
    numbers = drawn.keys.double().flatten()
    spectrum = torch.fft.rfft(numbers) * torch.fft.rfft(signal, n=len(numbers)).conj()
    at_every_shift = torch.fft.irfft(spectrum, n=len(numbers)) / len(signal)
    assert at_every_shift.abs().max() < 0.1


@each_entry
@pytest.mark.parametrize("impl", ["reference", None])
def test_every_step_passes_the_check_and_can_be_repeated(family, each, impl):
    layer = family.make_layer(SHAPE, SETTINGS, CPU, 0)
    for _ in range(2):
        check_entry(each, layer, impl)


@each_family
def test_only_the_keys_differ_and_the_step_appends_the_last(family):
    layer, drawn = (each.make_layer(SHAPE, SETTINGS, CPU, 5) for each in (family, FAMILIES[family]))
    assert torch.equal(layer.new_key, layer.keys[:, :, -1])
    assert not (layer.keys == drawn.keys).all(dim=3).any()
    for name in ("query", "values", "new_value"):
        assert torch.equal(getattr(layer, name), getattr(drawn, name))
    logits = logits_of(layer.query, layer.keys)
    assert logits[..., 0].mean() - logits[..., PAGE:128].mean() > FIRST / 2


def test_the_metadata_are_of_these_keys():
    shape, settings = SHAPE, SETTINGS
    quest = CLUSTERS_ON_TEXT.make_layer(shape, settings, CPU, 0)
    assert list(quest.bounds) == [KIND]
    oracle.check_step_bounds(quest, KIND)
    quest.context_bounds(KIND, shape.length, "reference")
    oracle.check_prompt_bounds(quest, KIND)
    coded, drawn = (each.make_layer(shape, settings, CPU, 0) for each in (CODE_CLUSTERS_ON_TEXT, CODE_CLUSTERS))
    code_oracle.check_codes(coded)
    assert bool((coded.coded == shape.length // settings.code_page).all())
    assert not torch.equal(coded.block_indices, drawn.block_indices)
    drawn.keys.copy_(coded.keys)
    with pytest.raises(oracle.Mismatch):
        code_oracle.check_codes(drawn)


@each_family
def test_the_same_ways_are_measured_at_a_few_of_the_shapes_without_details(family):
    drawn = FAMILIES[family]
    names = [(each.op, f"{each.variant}, text", each.against_dense) for each in drawn.entries]
    assert [(each.op, each.variant, each.against_dense) for each in family.entries] == names
    assert all(each.details([]) == {} for each in family.entries)
    assert set(family.shapes) < set(drawn.shapes)
    assert family.quick_shapes == drawn.quick_shapes
    assert family.name != drawn.name  # each is set up
    # After the random ones, with whose layers dense attention is timed for both.
    assert registry.FAMILIES.index(family) > registry.FAMILIES.index(drawn)
    assert family not in tune.FAMILIES
    assert family.more_tuned == ()
    assert family.layer_bytes(SHAPE, SETTINGS) == drawn.layer_bytes(SHAPE, SETTINGS)


def test_long_rows_several_rows_and_large_groups_are_among_the_shapes():
    of_one = {(32, 8, 131072), (32, 8, 524288), (28, 4, 131072), (32, 32, 131072)}
    for family, shapes in ((CLUSTERS_ON_TEXT, CLUSTER_SHAPES), (CODE_CLUSTERS_ON_TEXT, CODE_STEP_SHAPES)):
        assert {(each.q_heads, each.kv_heads, each.length) for each in family.shapes if each.batch == 1} == of_one
        assert Shape(32, 8, 128, 8, 131072) in family.shapes
        assert set(family.shapes) < set(shapes)


def _measured(steps, on_text=True, date="2026-02-03T04:05:06"):
    """Both ways at two lengths, with keys as in a text at the longer one, measured later."""
    entries = [
        entry(shape, us, 100.0, *step) for shape in (SHORT, LONG) for step, us in zip(steps, (20.0, 25.0), strict=True)
    ]
    if on_text:
        for (op, variant), us in zip(steps, (16.0, 40.0), strict=True):
            entries.append(entry(LONG, us, 100.0, op, f"{variant}, text") | {"machine": {"date": date}})
    return entries


ROW = "| 32/8 | 128 | 1 | 32K | 16.0 | 6.25 | 20.0 | 40.0 | 2.50 | 25.0 |"


def test_the_table_shows_them_beside_those_with_random_keys():
    text = "\n".join(cluster_part(report(*_measured(CLUSTER_STEPS))))
    assert text.count(ROW) == 1
    assert "| 32/8 | 128 | 1 | 32K | - | 20.0 | 5.00 | 25.0 | 4.00 | 100.0 | SDPA cuDNN | - | - |" in text
    assert text.index("20.0 | 5.00") < text.index(TEXT) < text.index(ROW)
    assert "2026-01-02, 2026-02-03.\n" in text
    without = "\n".join(cluster_part(report(*_measured(CLUSTER_STEPS, on_text=False))))
    assert TEXT not in without
    assert "2026-02-03" not in without


def test_the_table_shows_both_reductions_and_a_shape_only_beside_its_times_with_random_keys():
    both = [each for steps in CODE_STEPS.values() for each in _measured(steps)]
    text = "\n".join(code_step_part(report(*both)))
    assert text.count(ROW) == text.count(TEXT) + 1 == 2
    _, _, of_text = text.partition(TEXT)
    assert of_text.index('`"softmax"`') < of_text.index(ROW) < of_text.index('`"max"`') < of_text.rindex(ROW)
    at_random = ("max, clusters", LONG.name)
    fewer = [each for each in both if (each["variant"], each["shape"]["name"]) != at_random]
    assert "\n".join(code_step_part(report(*fewer))).count(ROW) == 1
    one = [each for each in both if each["variant"] != "max, separate launches, text"]
    text = "\n".join(code_step_part(report(*one)))
    assert text.count(ROW) == 1
    assert '`"max"`' not in text.partition(TEXT)[2]
