"""Patching models. Private Transformers names appear only in this folder, and in the cache's base classes."""
