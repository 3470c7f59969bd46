"""Entry point of ``hf-sparse-attn`` and ``python -m hf_sparse_attn``."""

from hf_sparse_attn.cli.extras import install_command, needs


def main() -> None:
    """Run the command line, or name the missing packages in one line."""
    with needs("the command line", ("rich", "typer"), install_command("cli")):
        from hf_sparse_attn.cli.app import app
    app(prog_name="hf-sparse-attn")


if __name__ == "__main__":
    main()
