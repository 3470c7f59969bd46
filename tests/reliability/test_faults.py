"""A fault at any line leaves a cache and a model that go on, or a cache that says that it must be reset."""

import json
from pathlib import Path

import pytest
import torch
from hf_sparse_attn_kernels import use_impl

import hf_sparse_attn.cache.forward_pass
import hf_sparse_attn.cache.layer
import hf_sparse_attn.cache.storage
import hf_sparse_attn.methods.infinigen
from hf_sparse_attn import METHODS
from hf_sparse_attn.cache.layer import SparseLayer
from tests.reliability.injection import Line, failing_at, lines_of, sample
from tests.reliability.operations import FED, fail_in_operation, operation_lines
from tests.reliability.passes import PASSES, Bench, expected_of, fail_in_pass, pass_lines, same, steps
from tests.reliability.runner import run_faults
from tests.reliability.tables import fault_table

pytestmark = pytest.mark.usefixtures("exact")
LATER, FIRST_STEP = "later prompt", "first step, which grows the buffers"


def line_with(module, text, hit):
    """Find a line of the library by its text."""
    found = [n for n, line in enumerate(Path(module.__file__).read_text().splitlines(), 1) if text in line]
    assert len(found) == 1, text
    return Line(module.__file__, found[0], hit)


@pytest.mark.parametrize(
    ("method", "name", "module", "text", "hit"),
    [
        ("quest", FIRST_STEP, hf_sparse_attn.cache.storage, "return like.new_empty(batch, kv_heads, capacity", 2),
        ("quest", FIRST_STEP, hf_sparse_attn.cache.storage, "larger.metadata = {", 3),
        ("keycodes", LATER, hf_sparse_attn.cache.layer, "self.storage.write(key_states", 2),
        ("infinigen", LATER, hf_sparse_attn.cache.layer, "self.storage.write(key_states", 3),
        ("h2o", FIRST_STEP, hf_sparse_attn.cache.forward_pass, "storages = [(layer.storage, layer.storage.state())", 6),
    ],
    ids=["values-of-grown-keys", "metadata-of-grown-keys", "centre-of-codes", "columns", "finished-prompt"],
)
@pytest.mark.parametrize("repeats", [True, False], ids=["repeated", "replaced"])
@torch.inference_mode()
def test_a_failed_pass_is_as_if_it_had_not_been(method, name, module, text, hit, repeats):
    bench, situation = Bench(method, "growing"), PASSES[name]
    line = line_with(module, text, hit)
    outcome = fail_in_pass(bench, situation, expected_of(bench, situation), line, "out of memory", repeats)
    assert outcome == "unchanged"


@pytest.mark.parametrize("name", ["crop", "reset", "reorder_cache", "batch_select_indices"])
@torch.inference_mode()
def test_an_operation_that_fails_midway_says_that_the_cache_must_be_reset(name):
    bench = Bench("quest", "growing")
    texts = {"crop": "self._held = length", "reset": "self.storage.clear_metadata(self._make_metadata)"}
    text = texts.get(name, "self.storage.replace_all(change)")
    hit = 2
    assert (
        fail_in_operation(bench, name, line_with(hf_sparse_attn.cache.layer, text, hit), "out of memory") == "refused"
    )
    cache = bench.filled((90,))
    cache._cut_off = name
    for use in (lambda: bench.feed(cache, 1), lambda: cache.crop(-1), lambda: cache.fork("quest")):
        with pytest.raises(ValueError, match=rf"{name} failed midway.*call reset\(\)"):
            use()


@pytest.mark.filterwarnings("ignore:module forward hook")
@torch.inference_mode()
def test_an_undo_that_fails_is_repeated(monkeypatch):
    bench = Bench("quest", "growing")
    cache, expected = bench.filled((150, 1)), bench.filled((150, 1))
    roll_back, calls = SparseLayer.roll_back, []

    def fails_once(layer, keeps_metadata):
        calls.append(layer.layer_idx)
        if calls == [0, 1]:
            raise torch.OutOfMemoryError("in the undo")
        roll_back(layer, keeps_metadata)

    monkeypatch.setattr(SparseLayer, "roll_back", fails_once)
    line = line_with(hf_sparse_attn.cache.layer, "self.storage.write(key_states", hit=3)
    with pytest.raises(torch.OutOfMemoryError), failing_at(line, torch.OutOfMemoryError("in the pass")):
        bench.feed(cache, 40)
    assert cache.get_seq_length() == 151
    same(steps(bench, cache), steps(bench, expected), "the steps after it")
    assert calls == [0, 1, 0, 1, 2]


@pytest.mark.parametrize("method", METHODS)
@torch.inference_mode()
def test_a_line_of_each_pass(method):
    bench = Bench(method, "growing")
    for name in (LATER, FIRST_STEP):
        expected = expected_of(bench, PASSES[name])
        for line in pass_lines(bench, PASSES[name], 1, seed=1):
            fail_in_pass(bench, PASSES[name], expected, line, "Ctrl-C", repeats=True)


@torch.inference_mode()
def test_the_injection_itself():
    bench = Bench("quest", "growing")
    cache = bench.filled(FED)
    counts = lines_of(lambda: cache.crop(-2))
    assert any(file.endswith("cache.py") for file, _ in counts)
    assert sample(counts, 5, seed=0) == sample(counts, 5, seed=0)
    assert len(operation_lines(bench, "crop", 10**6, seed=0)) == len(counts)
    absent = Line(hf_sparse_attn.cache.layer.__file__, 1, 1)
    with pytest.raises(AssertionError, match="not reached"):
        fail_in_pass(bench, PASSES["step"], expected_of(bench, PASSES["step"]), absent, "Ctrl-C", repeats=True)


@torch.inference_mode()
def test_the_counts_of_a_method_fill_the_table(tmp_path):
    with use_impl("reference"):
        counts, harm = run_faults("streaming_llm", lines=1, seed=0)
    assert not harm
    assert {row["storage"] for row in counts} == {"growing", "static"}
    machine = {"device": "a processor", "date": "2026-01-01", "versions": {"torch": "2"}}
    (tmp_path / "faults.json").write_text(json.dumps({"machine": machine, "counts": counts}))
    table = fault_table(tmp_path)
    assert f"| **all** | {sum(row['cases'] for row in counts if row['outcome'] == 'unchanged')} |" in table
    assert "Run on a processor, 2026-01-01, with torch 2." in table
