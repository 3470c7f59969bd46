"""Reading a context's file without a model, and the notes in it."""

from dataclasses import replace

import pytest
import torch

from hf_sparse_attn import FixedContext, prepare_context
from hf_sparse_attn.context.contents import read_budget, read_contents
from hf_sparse_attn.context.files import read_layer
from tests.context.conftest import CONTEXT_TOKENS, SETTINGS


@pytest.mark.parametrize("levels", [1, 2])
def test_the_budget_is_read_without_keys_and_values(levels, tmp_path, contexts, monkeypatch):
    context = contexts(0.5, levels)
    context.save(tmp_path / "novel")
    names = set()

    def watched(*arguments, **options):
        tensors = read_layer(*arguments, **options)
        names.update(tensors)
        return tensors

    monkeypatch.setattr("hf_sparse_attn.context.contents.read_layer", watched)
    budget = read_budget(tmp_path / "novel")
    assert budget.target_sparsity == 0.5
    # Shares of the same whole numbers of tokens: a GPU multiplies by the reciprocal of the length, and adds up
    # a mean in another order. One token more or less would differ by 1 / CONTEXT_TOKENS.
    torch.testing.assert_close(budget.prefill, context.budget.prefill)
    torch.testing.assert_close(budget.decode, context.budget.decode)
    assert {"queries", "centroids"} <= names
    assert not {"keys", "values"} & names


def test_the_contents_have_all_bytes_and_the_counts_of_a_head(tmp_path, contexts):
    context = contexts(0.5, 2)
    context.save(tmp_path / "novel")
    contents = read_contents(tmp_path / "novel")
    assert contents.dtype == "float64"
    assert contents.kv_heads == 2
    clustered = CONTEXT_TOKENS - SETTINGS["window"]
    assert contents.clusters == {"coarse_clusters": round(0.03 * clustered), "clusters": round(0.1 * clustered)}
    metadata = context.layers[0].metadata
    assert contents.thresholds == {name: float(metadata[name]) for name in ("coarse_threshold", "threshold")}
    queries = sum(query.numel() * query.element_size() for query in context.queries)
    assert contents.num_bytes["queries"] == queries
    assert sum(contents.num_bytes.values()) == context.num_bytes + queries
    assert sum(contents.num_bytes.values()) < (tmp_path / "novel").stat().st_size


def test_a_damaged_index_is_refused(tmp_path, contexts):
    contexts(0.5).save(tmp_path / "novel")
    content = (tmp_path / "novel").read_bytes()
    centroid = contexts(0.5).layers[2].metadata["centroids"][0, 1, 3].cpu().numpy().tobytes()
    assert content.count(centroid) == 1
    (tmp_path / "novel").write_bytes(content.replace(centroid, centroid[::-1]))
    with pytest.raises(ValueError, match=r"the checksum of layers\.2\.centroids is wrong"):
        read_budget(tmp_path / "novel")


def test_notes_are_saved_with_the_context(tmp_path, model, contexts):
    assert contexts(0.5).notes == {}
    noted = replace(contexts(0.5), notes={"title": "Ein Roman, “x”\n"})
    noted.save(tmp_path / "novel")
    assert FixedContext.load(tmp_path / "novel", model).notes == noted.notes
    assert read_contents(tmp_path / "novel").header.notes == noted.notes
    assert noted.retarget(0.9).notes == noted.notes


def test_progress_may_be_shown_by_the_caller(model, context_ids):
    stages = {}

    def shown(parts, stage):
        for part in parts:
            yield part
            stages[stage] = stages.get(stage, 0) + 1

    prepare_context(model, context_ids, **{**SETTINGS, "progress": shown})
    assert stages == {"Prefill": 3, "Clustering": 4}
