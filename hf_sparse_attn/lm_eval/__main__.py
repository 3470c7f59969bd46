"""``python -m hf_sparse_attn.lm_eval``: the ``lm_eval`` command with the model ``hf-sparse``."""

from hf_sparse_attn.lm_eval import register


def main() -> None:
    """Run lm_eval's own command line."""
    try:
        register()
    except ImportError as error:
        raise SystemExit(str(error)) from error
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()


if __name__ == "__main__":
    main()
