"""Outputs of a patched model that have no gradient, or a wrong one."""

from __future__ import annotations

from typing import Any

import torch


class _WithoutGradient(torch.autograd.Function):
    """Return the first argument; its gradient, asked for through the second one, is an error."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        raise RuntimeError(
            "a patched model has gradients only in a first pass over a prompt, with a method whose prefill is dense: "
            "its cache and its sparse attention have none; call unpatch_model(model) first"
        )


def asks_gradient(query: torch.Tensor) -> bool:
    """Whether a gradient may be asked for through a query; a compiled pass has its backward traced with it."""
    return torch.is_grad_enabled() and query.requires_grad and not torch.compiler.is_compiling()


def without_gradient(output: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """Return the attention's output so that a gradient through it is an error instead of silently wrong."""
    marked: torch.Tensor = _WithoutGradient.apply(output, query)  # type: ignore[no-untyped-call]
    return marked
