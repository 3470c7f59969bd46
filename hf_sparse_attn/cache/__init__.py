"""The KV cache of a patched model. Imports nothing, so that the modules above and below it may import its parts."""
