"""Helpers for FX graphs that every later stage uses: arguments, shapes and modules of nodes, writes, patterns."""
