"""From a model to a graph of ATen operators whose every node knows the source line and the node it came from."""

from .decompose import to_aten
from .functionalize import simplify
from .trace import CaptureError, capture, ignore_loggers
from .whole import mark_whole, whole_op

ignore_loggers()  # also for graphs that a user captures by hand

__all__ = ["CaptureError", "capture", "ignore_loggers", "mark_whole", "simplify", "to_aten", "whole_op"]
