"""Attention to the KV cache: whole, to selected blocks, and of a chunk of the prompt."""
