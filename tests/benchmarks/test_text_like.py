"""Keys whose attention is spread as in a text: their logits, and the families and tables that have them."""

from dataclasses import replace

import pytest
import torch
from op_bench import text_like
from op_bench.cluster_entries import CLUSTERS, CLUSTERS_ON_TEXT
from op_bench.cluster_tables import TEXT, cluster_part
from op_bench.code_step_entries import CODE_CLUSTERS, CODE_CLUSTERS_ON_TEXT
from op_bench.measure import check_entry
from op_bench.registry import CLUSTER_STEPS
from op_bench.shapes import Settings, Shape

from tests.benchmarks.records import LONG, SHORT, entry, report

SHAPE = Shape(q_heads=6, kv_heads=2, head_dim=64, batch=2, length=4096)


@pytest.fixture(scope="module")
def drawn():
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(SHAPE.batch, SHAPE.q_heads, SHAPE.head_dim, generator=generator)
    keys = torch.randn(SHAPE.batch, SHAPE.kv_heads, SHAPE.length, SHAPE.head_dim, generator=generator)
    made = keys.clone()
    text_like.make_text_like(query, made)
    queries = query.view(SHAPE.batch, SHAPE.kv_heads, 3, SHAPE.head_dim) * SHAPE.head_dim**-0.5
    return queries, keys, made


def test_the_first_token_the_last_ones_and_a_passage_stand_out(drawn):
    queries, _, made = drawn
    logits = queries @ made.transpose(2, 3)  # [batch, kv_heads, group, length]
    centre = int(text_like.PASSAGE_PLACE * SHAPE.length)
    passage = logits[..., centre - 64 : centre + 64].mean(-1)
    others = logits[..., 64:1500]
    assert others.mean().abs() < 0.2
    assert abs(float(others.std()) - (text_like.SPREAD**2 + text_like.SPREAD_OF_PAGE**2) ** 0.5) < 0.3
    for weight, expected in ((logits[..., 0], text_like.FIRST), (passage, text_like.PASSAGE)):
        assert (weight > 0.5 * expected - 7).all()
        assert weight.std() > 0.1 * expected  # heads differ
        assert abs(float(weight.mean()) - expected) < 0.4 * expected
    recent = logits[..., -64:].mean(-1)
    assert (recent > logits[..., -1100:-1000].mean(-1)).all()


def test_tokens_of_a_page_have_a_part_in_common(drawn):
    queries, _, made = drawn
    logits = (queries @ made.transpose(2, 3))[..., 64:1600].unflatten(-1, (-1, text_like.PAGE))
    assert logits.mean(-1).std() > 0.7 * text_like.SPREAD_OF_PAGE


def test_keys_change_in_the_span_of_their_queries_alone(drawn):
    queries, keys, made = drawn
    change = made - keys
    along = change @ torch.linalg.pinv(queries) @ queries
    torch.testing.assert_close(along, change, rtol=1e-4, atol=1e-3)


FAMILIES = [
    (CLUSTERS, CLUSTERS_ON_TEXT, Settings(token_budget=48)),
    (CODE_CLUSTERS, CODE_CLUSTERS_ON_TEXT, replace(Settings(), code_budget=128)),
]


@pytest.mark.parametrize(("family", "on_text", "settings"), FAMILIES, ids=["Quest", "KeyCodes"])
def test_families_have_the_entries_and_pass_their_checks(family, on_text, settings):
    assert [each.variant for each in on_text.entries] == [f"{each.variant}, text" for each in family.entries]
    assert set(on_text.shapes) < set(family.shapes)
    shape = Shape(q_heads=4, kv_heads=2, head_dim=16, batch=2, length=960)
    random, layer = (each.make_layer(shape, settings, torch.device("cpu"), 3) for each in (family, on_text))
    assert torch.equal(random.query, layer.query)
    assert not torch.equal(random.keys, layer.keys)
    assert torch.equal(layer.keys[:, :, -1], layer.new_key)
    for each in on_text.entries:
        assert each.details([layer]) == {}
        check_entry(each, layer)


def test_the_table_has_times_beside_those_of_random_keys():
    def of(shape, suffix, *times):
        steps = ((op, variant + suffix) for op, variant in CLUSTER_STEPS)
        return [entry(shape, us, 100.0, *step) for step, us in zip(steps, times, strict=True)]

    random = [*of(SHORT, "", 20.0, 25.0), *of(LONG, "", 30.0, 35.0)]
    text = "\n".join(cluster_part(report(*random, *of(LONG, ", text", 40.0, 50.0))))
    assert TEXT in text
    assert "| 32/8 | 128 | 1 | 32K | 40.0 | 30.0 | 2.50 | 50.0 | 35.0 | 2.00 |" in text
    assert TEXT not in "\n".join(cluster_part(report(*random)))
