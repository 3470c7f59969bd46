"""Attention to the KV cache: dense decoding, sparse decoding, and sparse prefill of a chunk."""
