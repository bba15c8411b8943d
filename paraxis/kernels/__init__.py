"""Kernels for single tokens, where a step is as long as its weights take to be read.

One file per kernel, each an operator that computes what plain operators compute, rounding included. Those for a GPU are
written in Triton, which installs without a GPU do not have: such a module is imported where a program is compiled for
a GPU, and not before. The one for a CPU is written in C++. They know no gradients.
"""
