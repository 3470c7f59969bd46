"""Docstrings' Sphinx roles, such as ``:meth:`select```, as links to what the site documents and as code elsewhere."""

from __future__ import annotations

import re
from typing import Any

import griffe

_ROLE = re.compile(r":(?:attr|class|func|meth):`~?([\w.]+)`")


class DocstringRoles(griffe.Extension):
    """Rewrites the roles in every docstring, names resolved as where they stand."""

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        """Go through a package that is loaded."""
        _rewrite(pkg)


def _rewrite(item: griffe.Object | griffe.Alias) -> None:
    if item.is_alias:
        return
    if item.docstring:
        item.docstring.value = _ROLE.sub(lambda found: _link(item, found[1]), item.docstring.value)
    for member in item.members.values():
        _rewrite(member)


def _link(item: griffe.Object | griffe.Alias, name: str) -> str:
    """Return an optional reference: a link where the site documents the object."""
    short = name.rpartition(".")[2] if name.startswith("hf_sparse_attn") else name
    try:
        path = name if name.startswith("hf_sparse_attn") else item.resolve(name)
    except griffe.NameResolutionError:
        return f"`{short}`"
    return f'<autoref identifier="{path}" optional><code>{short}</code></autoref>'
