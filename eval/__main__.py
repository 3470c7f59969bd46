"""``python -m eval``."""

from eval.extras import needs_extra

if __name__ == "__main__":
    with needs_extra():
        from eval.cli import app

        app(prog_name="python -m eval")
