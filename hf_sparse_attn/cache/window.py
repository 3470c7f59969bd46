"""The cache of a layer with a sliding window, which stays dense."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import DynamicSlidingWindowLayer


class WindowLayer(DynamicSlidingWindowLayer):  # type: ignore[misc]
    """Transformers' layer, which also serves several steps in a row while it records what leaves the window.

    It then keeps every token until the next ``crop``, so that drafts can be taken back. Before Transformers 5.18 it
    returns them all, while the mask of a second step covers the window alone. It always has one token more than the
    next one may see, so that the newest token can be taken back.
    """

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append keys and values [batch, kv_heads, new, head_dim]; return those that the new tokens may see."""
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        if not self.record_past:
            self.keys, self.values = keys[:, :, -self.sliding_window :], values[:, :, -self.sliding_window :]
        visible = self.sliding_window - 1 + key_states.shape[-2]
        return keys[:, :, -visible:], values[:, :, -visible:]

    def check_crop(self, tokens: int) -> None:
        """Check that what would be visible once the last ``tokens`` tokens are removed is still here.

        Raises
        ------
        RuntimeError
            It is not.
        """
        visible = min(self.cumulative_length - tokens, self.sliding_window - 1)
        if tokens and max(self.keys.shape[-2] - tokens, 0) < visible:
            raise RuntimeError(
                f"crop: a layer with a sliding window of {self.sliding_window} has dropped tokens that would be "
                f"visible without the last {tokens}; call activate_past_recording() before these are fed"
            )

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last ``-tokens_to_remove`` tokens, and those before the window but for one."""
        end = max(self.keys.shape[-2] + tokens_to_remove, 0)
        begin = max(end - self.sliding_window, 0)
        self.keys, self.values = self.keys[:, :, begin:end], self.values[:, :, begin:end]
        self.cumulative_length += tokens_to_remove
