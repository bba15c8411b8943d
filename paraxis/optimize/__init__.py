"""Rewrites of the local program after partitioning, one file each; the list of them is `passes/pipeline.py`."""
