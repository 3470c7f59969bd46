"""The ``hf-sparse-attn context`` commands: prepare a context once, look into its file, and ask it questions."""
