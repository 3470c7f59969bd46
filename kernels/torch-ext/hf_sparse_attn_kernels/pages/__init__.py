"""Block selection over fixed pages of the KV cache."""
