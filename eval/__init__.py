"""The evaluation harness: ``python -m eval``, run from a checkout."""
