"""Sparse attention for Transformers models: patch in one line, call ``generate()`` as usual."""

from hf_sparse_attn._version import __version__
from hf_sparse_attn.cache.cache import SparseCache
from hf_sparse_attn.calibration import calibrate_channels
from hf_sparse_attn.context import ContextBudget, FixedContext, prepare_context
from hf_sparse_attn.methods import (
    H2O,
    METHODS,
    NTK,
    PSA,
    TOVA,
    ArkVale,
    DoubleSparsity,
    DuoAttention,
    Full,
    InfiniGen,
    InfLLM,
    KeyCodes,
    MInference,
    OracleTopK,
    Quest,
    RaBitQCache,
    SelfExtend,
    SnapKV,
    SparseMethod,
    Squeezed,
    StreamingLLM,
    TokenSelect,
)
from hf_sparse_attn.patch.decode_ahead import DecodeAhead
from hf_sparse_attn.patch.patch import patch_model, sparse_attention, unpatch_model
from hf_sparse_attn.patch.serving import serve_model
from hf_sparse_attn.patch.speculation import SelfSpeculation, SpeculationStats
from hf_sparse_attn.patched import sparse_attention_stats
from hf_sparse_attn.record import SelectionRecord, record_selections
from hf_sparse_attn.stats import LayerStats, SparseAttentionStats

__all__ = [
    "H2O",
    "METHODS",
    "NTK",
    "PSA",
    "TOVA",
    "ArkVale",
    "ContextBudget",
    "DecodeAhead",
    "DoubleSparsity",
    "DuoAttention",
    "FixedContext",
    "Full",
    "InfLLM",
    "InfiniGen",
    "KeyCodes",
    "LayerStats",
    "MInference",
    "OracleTopK",
    "Quest",
    "RaBitQCache",
    "SelectionRecord",
    "SelfExtend",
    "SelfSpeculation",
    "SnapKV",
    "SparseAttentionStats",
    "SparseCache",
    "SparseMethod",
    "SpeculationStats",
    "Squeezed",
    "StreamingLLM",
    "TokenSelect",
    "__version__",
    "calibrate_channels",
    "patch_model",
    "prepare_context",
    "record_selections",
    "serve_model",
    "sparse_attention",
    "sparse_attention_stats",
    "unpatch_model",
]
