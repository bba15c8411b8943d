"""The plan of a model as one HTML file that needs nothing else."""

from .page import report, report_plan

__all__ = ["report", "report_plan"]
