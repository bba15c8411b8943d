"""Kernels for CPU ranks, in C++."""
