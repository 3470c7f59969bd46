"""Tensors that all calls share."""

import torch

from .mass_weights import step_weights
from .rotation import rotation, rotation_levels


def make_constants(head_dim: int, device: torch.device) -> None:
    """Make the tensors that the ops on codes share, before a step that may be recorded as a CUDA graph needs them.

    Memory that is first allocated while a graph is recorded belongs to the graph, which overwrites it later.
    """
    rotation(head_dim, device)
    rotation_levels(head_dim, device)
    step_weights(device)
