"""Sparse attention for Transformers models: patch in one line, call ``generate()`` as usual."""

from hf_sparse_attn.cache.cache import SparseCache
from hf_sparse_attn.methods import METHODS, Full, Quest, SparseMethod, TokenSelect
from hf_sparse_attn.patch.patch import patch_model, sparse_attention, unpatch_model
from hf_sparse_attn.patched import sparse_attention_stats
from hf_sparse_attn.record import SelectionRecord, record_selections
from hf_sparse_attn.stats import LayerStats, SparseAttentionStats

__version__ = "0.1.0"

__all__ = [
    "METHODS",
    "Full",
    "LayerStats",
    "Quest",
    "SelectionRecord",
    "SparseAttentionStats",
    "SparseCache",
    "SparseMethod",
    "TokenSelect",
    "patch_model",
    "record_selections",
    "sparse_attention",
    "sparse_attention_stats",
    "unpatch_model",
]
