"""Kernels, most of them for decode steps, which take as long as reading the weights does.

One file per kernel; those that a compiler must not look into are registered operators. GPU kernels are written in
Triton, which installations without a GPU lack: such a module is imported only where a program is compiled for a GPU.
CPU kernels are written in C++. None of them supports autograd.
"""
