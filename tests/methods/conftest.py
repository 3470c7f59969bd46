"""The model of tests of single methods."""

import pytest
import torch

from tests.models import shared_model


@pytest.fixture
def model():
    """A model in float64 that must come back unpatched."""
    model = shared_model("llama", torch.float64)
    yield model
    assert model.config._attn_implementation == "sdpa"
