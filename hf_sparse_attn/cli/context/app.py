"""The commands of ``hf-sparse-attn context``."""

from __future__ import annotations

import typer

from hf_sparse_attn.cli.context.ask import ask
from hf_sparse_attn.cli.context.inspect import inspect
from hf_sparse_attn.cli.context.prepare import prepare

context_app = typer.Typer(
    no_args_is_help=True, help="Prepare a long text once, and ask it many questions (Squeezed Attention)."
)
for command in (prepare, inspect, ask):
    context_app.command()(command)
