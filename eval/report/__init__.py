"""The report: plots, and one page with all results of a run."""

from eval.report.page import write_report

__all__ = ["write_report"]
