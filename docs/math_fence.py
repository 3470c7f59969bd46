"""Fences of formulas, as MathML: browsers show it by themselves, and nothing is loaded from elsewhere."""

from __future__ import annotations

from typing import Any

from latex2mathml.converter import convert


def format_math(source: str, language: str, css_class: str, options: dict[str, Any], md: Any, **more: Any) -> str:
    """Return a fence's LaTeX as a MathML block; the signature is that of SuperFences' formatters."""
    return f'<div class="{css_class}">{convert(source.strip(), display="block")}</div>'
