"""The cache of a layer with a sliding window, which stays dense."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import DynamicSlidingWindowLayer


class WindowLayer(DynamicSlidingWindowLayer):  # type: ignore[misc]
    """Transformers' layer, which also serves several steps in a row while it records what leaves the window.

    It then keeps every token until the next ``crop``, so that drafts can be taken back. Before Transformers 5.18 it
    returns them all, while the mask of a second step covers the window alone.
    """

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append keys and values [batch, kv_heads, new, head_dim]; return those that the new tokens may see."""
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        visible = self.sliding_window - 1 + key_states.shape[-2]
        return keys[:, :, -visible:], values[:, :, -visible:]
