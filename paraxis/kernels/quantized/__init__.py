"""Operators on quantized weights: dequantize, and linear layers that dequantize tile by tile."""

from .dequantize import dequantize
from .encoding import Encoding, Parts
from .linear import quantized_grouped_mm, quantized_linear, quantized_mm

__all__ = ["Encoding", "Parts", "dequantize", "quantized_grouped_mm", "quantized_linear", "quantized_mm"]
