"""The KV cache of a patched model. Import its modules directly: this one imports nothing, which avoids cycles."""
