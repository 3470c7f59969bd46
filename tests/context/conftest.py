"""A tiny model with a fixed context, in float64, so that no token depends on rounding."""

import pytest
import torch
from hf_sparse_attn_kernels import use_impl

from hf_sparse_attn import prepare_context
from tests.models import random_ids, shared_model

CONTEXT_TOKENS = 230
SETTINGS = {"window": 20, "clusters": 0.1, "coarse_clusters": 0.03, "progress": False, "chunk_size": 100}


@pytest.fixture(autouse=True)
def exact():
    """Run the references, which take float64, on CUDA too."""
    with use_impl("reference"):
        yield


@pytest.fixture
def model():
    """A model that must come back unpatched."""
    model = shared_model("llama", torch.float64)
    yield model
    assert model.config._attn_implementation == "sdpa"


@pytest.fixture(scope="session")
def context_ids():
    return random_ids(1, CONTEXT_TOKENS)


@pytest.fixture(scope="session")
def contexts(context_ids):
    """Contexts of the shared model by target sparsity and levels."""
    found = {}

    def get(target_sparsity, levels=1):
        if (target_sparsity, levels) not in found:
            options = {"target_sparsity": target_sparsity, "levels": levels, **SETTINGS}
            with use_impl("reference"):
                found[target_sparsity, levels] = prepare_context(
                    shared_model("llama", torch.float64), context_ids, **options
                )
        return found[target_sparsity, levels]

    return get
