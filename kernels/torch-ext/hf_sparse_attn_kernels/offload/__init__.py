"""Blocks of the KV cache that come from host memory."""
