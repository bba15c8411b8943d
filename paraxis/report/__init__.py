"""The plan of a model as a self-contained HTML report."""

from .page import report, report_plan

__all__ = ["report", "report_plan"]
