"""``python -m hf_sparse_attn.lm_eval``: the ``lm_eval`` command with the model ``hf-sparse``."""

from hf_sparse_attn.lm_eval import register
from hf_sparse_attn.lm_eval.results import report_kv_fraction


def main() -> None:
    """Run lm_eval's own command line."""
    try:
        register()
    except ImportError as error:
        raise SystemExit(str(error)) from error
    from lm_eval.__main__ import cli_evaluate

    report_kv_fraction()
    cli_evaluate()


if __name__ == "__main__":
    main()
