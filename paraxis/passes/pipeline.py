"""The default pipeline."""

from __future__ import annotations

from .annotate import ParallelLayerAnnotatePass
from .base import PassPipeline
from .initialize import InitializeOrLoadWeightsPass
from .replace import ParallelLayerReplacePass
from .solve import ParallelAxisSolverPass


def build_parallel_pass_pipeline() -> PassPipeline:
    """Solve, annotate, replace, load: what turns a captured graph into the program of this rank."""
    return PassPipeline(
        [
            ParallelAxisSolverPass(),
            ParallelLayerAnnotatePass(),
            ParallelLayerReplacePass(),
            InitializeOrLoadWeightsPass(),
        ]
    )
