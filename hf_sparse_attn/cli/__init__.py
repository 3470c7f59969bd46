"""The command line ``hf-sparse-attn``, and helpers that it shares with the evaluation harness."""
