"""``kv_fraction`` as a row of lm_eval's results."""

from __future__ import annotations

import functools
from typing import Any


def add_kv_fraction(results: dict[str, Any]) -> dict[str, Any]:
    """Add ``kv_fraction`` to each task's metrics in lm_eval's results, in place, and return them.

    lm_eval then prints and stores it with the scores. A task without decode steps gets none.

    Parameters
    ----------
    results : dict
        Returned by ``lm_eval.simple_evaluate``. Results of other models stay as they are.
    """
    for task, fraction in results["config"].get("kv_fraction_by_task", {}).items():
        if fraction is not None:
            results["results"][task]["kv_fraction,none"] = fraction
            results["higher_is_better"][task]["kv_fraction"] = False
    return results


def report_kv_fraction() -> None:
    """Let lm_eval's command report ``kv_fraction`` with each task's scores, in this process."""
    import lm_eval

    evaluate = lm_eval.simple_evaluate

    @functools.wraps(evaluate)
    def with_kv_fraction(*args: Any, **kwargs: Any) -> dict[str, Any] | None:
        results = evaluate(*args, **kwargs)
        return None if results is None else add_kv_fraction(results)  # None in all processes but the first

    lm_eval.simple_evaluate = with_kv_fraction
