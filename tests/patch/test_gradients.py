"""Gradients through a patched model: right in the first pass of a dense prefill, and an error elsewhere."""

import pytest
import torch

from hf_sparse_attn import METHODS, SparseCache, sparse_attention
from hf_sparse_attn.methods import make_method
from tests.models import SPARSE, make_model, random_ids

pytestmark = pytest.mark.usefixtures("exact")
PARAMETERS = {**SPARSE, "ntk": {"factor": 1.0}, "tokenselect": {"token_budget": 48}}
METHOD = {name: make_method(name, **PARAMETERS.get(name, {})) for name in METHODS}


def gradient_of(model, passes):
    """The gradient of the first token's embedding for a logit of the last token, after passes over parts of a text."""
    embeddings = model.get_input_embeddings()(random_ids(1, 40)).detach().requires_grad_()
    cache, begin = SparseCache.for_model(model), 0
    for end in passes:
        logits = model(inputs_embeds=embeddings[:, begin:end], past_key_values=cache).logits
        begin = end
    logits[0, -1, 5].backward()
    return embeddings.grad


@pytest.mark.parametrize("method_name", [name for name, method in METHOD.items() if method.prefills_densely])
def test_a_dense_prefill_has_the_stock_gradient(method_name):
    model = make_model("llama", dtype=torch.float64)
    with sparse_attention(model, METHOD[method_name]):
        found = gradient_of(model, [40])
    embeddings = model.get_input_embeddings()(random_ids(1, 40)).detach().requires_grad_()
    model(inputs_embeds=embeddings).logits[0, -1, 5].backward()
    torch.testing.assert_close(found, embeddings.grad)


@pytest.mark.parametrize("method_name", METHODS)
@pytest.mark.parametrize("passes", [[39, 40], [20, 40]], ids=["a step", "two passes"])
def test_there_is_none_through_the_cache(method_name, passes):
    model = make_model("llama", dtype=torch.float64)
    with (
        sparse_attention(model, METHOD[method_name]),
        pytest.raises(RuntimeError, match="gradients only in a first pass over a prompt"),
    ):
        gradient_of(model, passes)


@pytest.mark.parametrize("method_name", [name for name, method in METHOD.items() if not method.prefills_densely])
def test_there_is_none_through_a_sparse_prefill(method_name):
    model = make_model("llama", dtype=torch.float64)
    with (
        sparse_attention(model, METHOD[method_name]),
        pytest.raises(RuntimeError, match="gradients only in a first pass over a prompt"),
    ):
        gradient_of(model, [40])
