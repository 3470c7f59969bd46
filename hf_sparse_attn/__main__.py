"""``python -m hf_sparse_attn``."""

from hf_sparse_attn.cli.app import app

app(prog_name="hf-sparse-attn")
