"""Methods that exist to be measured: the harness knows them, the package does not."""

from __future__ import annotations

from eval.studies.key_codes import KeyCodesStudy
from hf_sparse_attn import METHODS, SparseMethod

STUDIES: dict[str, type[SparseMethod]] = {KeyCodesStudy.name: KeyCodesStudy}


def known_methods() -> dict[str, type[SparseMethod]]:
    """Return the methods that a run may name: the package's, and those of the studies."""
    return {**METHODS, **STUDIES}
