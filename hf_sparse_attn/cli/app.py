"""``hf-sparse-attn``: list the methods, compare them with dense attention, serve a model, and ask prepared contexts."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import Annotated

import typer
from rich.table import Table

from hf_sparse_attn import __version__
from hf_sparse_attn.cli.compare_command import compare
from hf_sparse_attn.cli.context.app import context_app
from hf_sparse_attn.cli.serve_command import serve
from hf_sparse_attn.cli.terminal import print_table
from hf_sparse_attn.cli.unpack_command import unpack

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)

app.command()(compare)
app.command()(serve)
app.command()(unpack)
app.add_typer(context_app, name="context")


def _print_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"hf-sparse-attn {__version__}")
        raise typer.Exit


@app.callback()
def main(
    _version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Sparse attention for Hugging Face Transformers models."""


@app.command("methods")
def list_methods(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """List the methods with their papers, parameters and sparse phases."""
    from hf_sparse_attn import METHODS

    methods = [
        {
            "name": name,
            "summary": method.summary,
            "paper": method.paper,
            "parameters": asdict(method()),
            "sparse_phases": list(method.sparse_phases),
        }
        for name, method in METHODS.items()
    ]
    if as_json:
        sys.stdout.write(json.dumps(methods, indent=2) + "\n")
        return
    table = Table("method", "what it does", "paper", "parameters", "sparse phase", show_lines=True)
    for name, method in METHODS.items():
        parameters = "\n".join(f"{parameter}={value}" for parameter, value in asdict(method()).items())
        table.add_row(name, method.summary, method.paper, parameters, ", ".join(method.sparse_phases))
    print_table(table)
