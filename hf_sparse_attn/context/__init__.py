"""Fixed contexts: prepared once, saved, and asked many questions."""

from hf_sparse_attn.context.fixed import ContextBudget, FixedContext
from hf_sparse_attn.context.prepare import prepare_context

__all__ = ["ContextBudget", "FixedContext", "prepare_context"]
