"""From a model to a graph of ATen operators whose every node knows the source line and the node it came from."""

from .decompose import to_aten
from .errors import CaptureError, GraphBreak
from .functionalize import simplify
from .trace import capture, ignore_loggers
from .whole import mark_whole, whole_op

ignore_loggers()  # also for graphs that a user captures by hand

__all__ = ["CaptureError", "GraphBreak", "capture", "ignore_loggers", "mark_whole", "simplify", "to_aten", "whole_op"]
