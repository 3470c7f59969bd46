"""Runs the command line in this process."""

from typer.testing import CliRunner, Result

from hf_sparse_attn.cli.app import app


def invoke(*arguments: str, columns: int = 200) -> Result:
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": str(columns)})
