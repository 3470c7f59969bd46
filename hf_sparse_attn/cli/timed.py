"""Time ``generate()`` to the first token and from there to the last."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


class TimedOutput(NamedTuple):
    """The tokens that ``generate()`` appended to each row, and its times."""

    new_ids: torch.Tensor
    """int64 [batch, new tokens]."""
    first_token_seconds: float
    """From the call to the first new token."""
    decode_seconds: float
    """From the first new token to the last."""


class _Stopwatch:
    """Streamer that records when ``generate()`` receives the prompt and when it returns each token."""

    def __init__(self, on_step: Callable[[], None]) -> None:
        self.times: list[float] = []
        self._on_step = on_step

    def put(self, _: torch.Tensor) -> None:
        self.times.append(time.perf_counter())
        self._on_step()

    def end(self) -> None: ...


def timed_generate(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    max_new_tokens: int,
    on_step: Callable[[], None],
    **options: Any,
) -> TimedOutput:
    """Continue prompts greedily and without compilation, calling ``on_step`` with the prompt and with every token.

    Parameters
    ----------
    model : PreTrainedModel
        Patched or not.
    input_ids, attention_mask : torch.Tensor
        int64 [batch, tokens], padded on the left.
    max_new_tokens : int
        Maximum number of new tokens of each row.
    on_step : callable
        Called without arguments.
    options
        Further arguments of ``generate()``.
    """
    watch = _Stopwatch(on_step)
    started = time.perf_counter()
    output = model.generate(
        input_ids,
        attention_mask=attention_mask,
        max_new_tokens=max_new_tokens,
        do_sample=False,
        disable_compile=True,  # compilation would dominate the time
        streamer=watch,
        **options,
    )
    first_token, last_token = watch.times[1], watch.times[-1]
    return TimedOutput(output[:, input_ids.shape[1] :], first_token - started, last_token - first_token)
