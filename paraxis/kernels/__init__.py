"""Kernels, most of them for single tokens, where a step is as long as its weights take to be read.

One file per kernel; what a compiler has to leave alone is an operator. Those for a GPU are written in Triton, which
installs without a GPU do not have: such a module is imported where a program is compiled for a GPU, and not before.
Those for a CPU are written in C++. They know no gradients.
"""
