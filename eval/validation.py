"""One-line errors from pydantic's."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

_RULES = {
    "int_type": "a whole number",
    "float_type": "a number",
    "string_type": "text",
    "bool_type": "true or false",
    "dict_type": "a mapping of names to values",
    "list_type": "a list",
    "tuple_type": "a list",
}
_LIMITS = {
    "greater_than_equal": "at least {ge:g}",
    "greater_than": "above {gt:g}",
    "less_than_equal": "at most {le:g}",
    "string_too_short": "text that is not empty",
    "too_short": "a list of at least {min_length}",
    "too_long": "a list of at most {max_length}",
}


def first_problem(error: ValidationError) -> str:
    """Return the first of a validation's errors: the field, its value, and what is allowed."""
    details = error.errors()[0]
    name = ".".join(part for part in details["loc"] if isinstance(part, str))
    if details["type"] == "missing":
        return f"{name} is missing"
    if details["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        return f"{name} is unknown"
    if details["type"] == "value_error":  # raised by a check of our own, which names the field
        return str(details["ctx"]["error"])
    return f"{name}={details['input']!r:.80} is not allowed: {_rule(details)}"


def _rule(details: Any) -> str:
    kind, context = details["type"], details.get("ctx", {})
    if kind in _LIMITS:
        return _LIMITS[kind].format(**context)
    if kind == "literal_error":
        return f"one of {context['expected'].replace(' or ', ', ')}".replace("'", "")
    return _RULES.get(kind) or str(details["msg"])
