"""The methods, by name. To add one, write a dataclass in its own file and add it to ``METHODS``."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

from hf_sparse_attn.methods.arkvale import ArkVale
from hf_sparse_attn.methods.base import Selection, SparseMethod
from hf_sparse_attn.methods.double_sparsity import DoubleSparsity
from hf_sparse_attn.methods.duo_attention import DuoAttention
from hf_sparse_attn.methods.full import Full
from hf_sparse_attn.methods.h2o import H2O
from hf_sparse_attn.methods.infinigen import InfiniGen
from hf_sparse_attn.methods.infllm import InfLLM
from hf_sparse_attn.methods.keycodes import KeyCodes
from hf_sparse_attn.methods.minference import MInference
from hf_sparse_attn.methods.ntk import NTK
from hf_sparse_attn.methods.oracle_topk import OracleTopK
from hf_sparse_attn.methods.psa import PSA
from hf_sparse_attn.methods.quest import Quest
from hf_sparse_attn.methods.rabitqcache import RaBitQCache
from hf_sparse_attn.methods.self_extend import SelfExtend
from hf_sparse_attn.methods.snapkv import SnapKV
from hf_sparse_attn.methods.squeezed import Squeezed
from hf_sparse_attn.methods.streaming_llm import StreamingLLM
from hf_sparse_attn.methods.tokenselect import TokenSelect
from hf_sparse_attn.methods.tova import TOVA

METHODS: dict[str, type[SparseMethod]] = {
    method.name: method
    for method in (
        Full,
        Quest,
        ArkVale,
        PSA,
        Squeezed,
        TokenSelect,
        KeyCodes,
        RaBitQCache,
        StreamingLLM,
        TOVA,
        H2O,
        SnapKV,
        OracleTopK,
        DoubleSparsity,
        InfLLM,
        InfiniGen,
        MInference,
        DuoAttention,
        NTK,
        SelfExtend,
    )
}

FULL = Full()
"""Dense attention, for dense layers."""

__all__ = [
    "FULL",
    "H2O",
    "METHODS",
    "NTK",
    "PSA",
    "TOVA",
    "ArkVale",
    "DoubleSparsity",
    "DuoAttention",
    "Full",
    "InfLLM",
    "InfiniGen",
    "KeyCodes",
    "MInference",
    "OracleTopK",
    "Quest",
    "RaBitQCache",
    "Selection",
    "SelfExtend",
    "SnapKV",
    "SparseMethod",
    "Squeezed",
    "StreamingLLM",
    "TokenSelect",
    "make_known",
    "make_method",
]


def make_method(method: str | SparseMethod, **hyperparameters: Any) -> SparseMethod:
    """Create a method from its name and hyperparameters; return a ``SparseMethod`` unchanged.

    Raises
    ------
    TypeError
        ``method`` is neither a name nor a ``SparseMethod``, or hyperparameters accompany a ``SparseMethod``.
    ValueError
        Unknown name or hyperparameter, or a value out of range.
    """
    if isinstance(method, SparseMethod):
        if hyperparameters:
            raise TypeError(
                f"hyperparameters ({', '.join(hyperparameters)}) are allowed only with a method's name; "
                f"set them in {method!r} itself"
            )
        return method
    if not isinstance(method, str):
        raise TypeError(f"method must be a name ({', '.join(METHODS)}) or a SparseMethod, got {method!r}")
    return make_known(METHODS, method, hyperparameters)


def make_known(
    methods: Mapping[str, type[SparseMethod]], method: str, hyperparameters: Mapping[str, Any]
) -> SparseMethod:
    """Create one of some methods from its name and hyperparameters; errors as of :func:`make_method`."""
    if method not in methods:
        raise ValueError(f"unknown method {method!r}{_near_match(method, methods)}; known: {', '.join(methods)}")
    method_class = methods[method]
    known = [field.name for field in fields(method_class)]
    for parameter in hyperparameters:
        if parameter not in known:
            raise ValueError(
                f"{method} has no parameter {parameter!r}{_near_match(parameter, known)}; it takes {', '.join(known)}"
            )
    return method_class(**hyperparameters)


def _near_match(word: str, known: Iterable[str]) -> str:
    matches = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {matches[0]!r}?)" if matches else ""
