"""The CUDA graphs of compiled steps after Ctrl-C, or another exception, in one of them."""

from __future__ import annotations

import sys

import torch


def forget_interrupted_run(device: torch.device) -> None:
    """Let the next compiled step begin where an exception has ended the run before a recording.

    ``torch.compile`` runs a step once before it records the step's CUDA graph, and notes the run's outputs at its end.
    If it never comes there, torch 2.11 ends the next step, and every one after it, in an ``AssertionError`` without a
    message, since another list has an entry for each output; torch 2.13 logs that. ``torch.compiler.reset()`` would
    help too, but all steps would be compiled again.

    Parameters
    ----------
    device : torch.device
        The model's.
    """
    trees = sys.modules.get("torch._inductor.cudagraph_trees")  # not there if nothing was compiled
    if trees is None or device.type != "cuda":
        return
    index = torch.cuda.current_device() if device.index is None else device.index
    manager = trees.get_manager(index, create_if_none_exists=False)
    node = None if manager is None else manager.current_node
    if isinstance(node, trees.CUDAWarmupNode) and node.stack_traces is not None:
        node.stack_traces = node.stack_traces[: len(node.tensor_weakrefs)]
