"""Turn Sphinx roles in docstrings, such as ``:meth:`select```, into links or code."""

from __future__ import annotations

import re
from typing import Any

import griffe

_ROLE = re.compile(r":(?:attr|class|func|meth):`~?([\w.]+)`")


class DocstringRoles(griffe.Extension):
    """Rewrite the roles in every docstring, resolving names in the scope of the docstring."""

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        """Rewrite the docstrings of a loaded package."""
        _rewrite(pkg)


def _rewrite(item: griffe.Object | griffe.Alias) -> None:
    if item.is_alias:
        return
    if item.docstring:
        item.docstring.value = _ROLE.sub(lambda found: _link(item, found[1]), item.docstring.value)
    for member in item.members.values():
        _rewrite(member)


def _link(item: griffe.Object | griffe.Alias, name: str) -> str:
    """Return an optional reference: a link if the site documents the object, else code."""
    short = name.rpartition(".")[2] if name.startswith("hf_sparse_attn") else name
    try:
        path = name if name.startswith("hf_sparse_attn") else item.resolve(name)
    except griffe.NameResolutionError:
        return f"`{short}`"
    return f'<autoref identifier="{path}" optional><code>{short}</code></autoref>'
