"""Prefill over key blocks that each query block chooses for itself."""
