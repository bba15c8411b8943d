"""The plan of a model as one HTML file that needs nothing else."""

from .page import report

__all__ = ["report"]
