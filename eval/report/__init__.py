"""The report: plots, and one page that holds everything a run found."""

from eval.report.page import write_report

__all__ = ["write_report"]
