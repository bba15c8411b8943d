"""From a model to a graph of ATen operators whose every node knows the source line and the node it came from."""

from ..errors import CaptureError, GraphBreak
from .decompose import to_aten
from .functionalize import simplify
from .mark_output import mark_output, mark_output_op
from .trace import capture, ignore_loggers

ignore_loggers()  # also for graphs that a user captures by hand

__all__ = [
    "CaptureError",
    "GraphBreak",
    "capture",
    "ignore_loggers",
    "mark_output",
    "mark_output_op",
    "simplify",
    "to_aten",
]
