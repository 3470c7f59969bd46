"""The command line ``hf-sparse-attn``, and what it shares with the evaluation harness."""
