"""Requests that arrive over time, served in static batches, and what each of them waited for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Times = Sequence[float]
"""Seconds at which each token of a batch was there, from the batch's start."""


def arrivals(requests: int, rate: float | None, seed: int) -> list[float]:
    """Return the seconds at which requests arrive, in order.

    Parameters
    ----------
    requests : int
        Number of requests.
    rate : float or None
        Mean requests per second of a Poisson process; None if all requests are there from the start (saturation).
    seed : int
        Seed of the process.
    """
    if rate is None:
        return [0.0] * requests
    gaps = np.random.default_rng(seed).exponential(1 / rate, requests)
    times: list[float] = np.cumsum(gaps).tolist()
    return times


@dataclass(frozen=True)
class Served:
    """A trace of requests that were all served."""

    tokens: list[list[float]]
    """Seconds at which each request got each of its tokens, from the first arrival."""
    waited: list[float]
    """Seconds from each request's arrival to the start of its batch."""
    batches: list[int]
    """Requests in each batch."""

    def figures(self, arrived: Sequence[float]) -> dict[str, Any]:
        """Return rates and times of the trace.

        Returns
        -------
        dict
            ``tokens_per_second`` from the first arrival to the last token; ``between_tokens_ms``, the mean and the
            median and 99th percentile of the times between a request's tokens; ``first_token_ms``, the same for the
            time from arrival to first token; ``waited_ms``, the mean time before a request's batch; ``batches`` and
            ``mean_batch``.
        """
        seconds = max(times[-1] for times in self.tokens) - min(arrived)
        between = np.concatenate([np.diff(times) for times in self.tokens])
        first = np.array([times[0] - at for times, at in zip(self.tokens, arrived, strict=True)])
        return {
            "tokens_per_second": sum(map(len, self.tokens)) / seconds,
            "between_tokens_ms": _spread(1e3 * between),
            "first_token_ms": _spread(1e3 * first),
            "waited_ms": float(1e3 * np.mean(self.waited)),
            "batches": len(self.batches),
            "mean_batch": float(np.mean(self.batches)),
        }


def _spread(values: np.ndarray[Any, np.dtype[np.float64]]) -> dict[str, float]:
    median, p99 = np.quantile(values, (0.5, 0.99)).tolist()
    return {"mean": float(values.mean()), "median": median, "p99": p99}


def serve(arrived: Sequence[float], batch: int, run_batch: Callable[[], Times]) -> Served:
    """Serve requests first come, first served, at most ``batch`` at a time.

    As soon as a batch has ended, the requests that have arrived are the next one; if there are none, it begins with the
    next arrival. The clock is advanced by the measured times, so nothing sleeps between arrivals.

    Parameters
    ----------
    arrived : sequence of float
        Seconds at which the requests arrive, ascending.
    batch : int
        The most requests in a batch.
    run_batch : callable
        Runs one batch of ``batch`` rows, whose unused rows count for nothing, and returns its token times.
    """
    served = Served([], [], [])
    clock = 0.0
    while (first := len(served.tokens)) < len(arrived):
        start = max(clock, arrived[first])
        count = sum(at <= start for at in arrived[first : first + batch])
        times = run_batch()
        served.waited.extend(start - at for at in arrived[first : first + count])
        served.tokens.extend([start + time for time in times] for _ in range(count))
        served.batches.append(count)
        clock = start + times[-1]
    return served
