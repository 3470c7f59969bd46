"""Names of a method's variants: the hyperparameters in which those of one section differ."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from eval.config import DENSE
from eval.report.records import Record

_Values = Mapping[str, str]
"""Hyperparameters by name, as JSON; one that a record lacks is not among them."""


def with_variant_names(records: Sequence[Record]) -> list[Record]:
    """Add to the method's name what tells its variants apart; token budgets stay apart, in their own field.

    A variant is named by as few hyperparameters as tell all variants of the method apart. Of three variants or more, a
    value that most of them have is left out.
    """
    variants: dict[str, dict[str, _Values]] = defaultdict(dict)
    for record in records:
        variants[record["method"]][_identity(record)] = _values(record)
    names = {
        (method, identity): name
        for method, of_method in variants.items()
        for identity, name in zip(of_method, _names(method, list(of_method.values())), strict=True)
    }
    return [{**record, "method": names[record["method"], _identity(record)], "variant": ""} for record in records]


def _values(record: Record) -> _Values:
    return {name: json.dumps(value) for name, value in record["parameters"].items() if name != "token_budget"}


def _identity(record: Record) -> str:
    return json.dumps(_values(record), sort_keys=True)


def _names(method: str, variants: Sequence[_Values]) -> list[str]:
    if method == DENSE or len(variants) == 1:
        return [method] * len(variants)
    telling = _telling(variants)
    usual = {name: _usual([variant.get(name) for variant in variants]) for name in telling}
    named = []
    for variant in variants:
        parts = [_part(name, variant.get(name)) for name in telling if (variant.get(name),) != usual[name]]
        named.append(f"{method} ({', '.join(parts)})" if parts else method)
    return named


def _telling(variants: Sequence[_Values]) -> list[str]:
    """Return hyperparameters that tell all variants apart, without any that is not needed for it.

    Those that some variants lack are left out first, then those with the fewest values.
    """
    values = {name: {variant.get(name) for variant in variants} for variant in variants for name in variant}
    telling = sorted(name for name, found in values.items() if len(found) > 1)
    for name in sorted(telling, key=lambda name: (None not in values[name], len(values[name]))):
        others = [other for other in telling if other != name]
        if len({tuple(variant.get(other) for other in others) for variant in variants}) == len(variants):
            telling = others
    return telling


def _usual(values: Sequence[str | None]) -> tuple[str | None] | None:
    """Return the value that most variants have, in a tuple; None if there is none, or only two variants."""
    value, count = Counter(values).most_common(1)[0]
    return (value,) if len(values) > 2 and 2 * count > len(values) else None


def _part(name: str, value: str | None) -> str:
    if value is None:
        return f"without {name}"
    loaded = json.loads(value)
    return f"{name}={loaded}"
