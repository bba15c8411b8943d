"""The passes from a captured graph to the local program, their base classes and the pipeline."""

from .annotate import ParallelLayerAnnotatePass
from .base import AnalyzeBase, PassBase, PassPipeline
from .initialize import InitializeOrLoadWeightsPass
from .pipeline import build_parallel_pass_pipeline, without_loading
from .replace import ParallelLayerReplacePass
from .solve import ParallelAxisSolverPass

__all__ = [
    "AnalyzeBase",
    "InitializeOrLoadWeightsPass",
    "ParallelAxisSolverPass",
    "ParallelLayerAnnotatePass",
    "ParallelLayerReplacePass",
    "PassBase",
    "PassPipeline",
    "build_parallel_pass_pipeline",
    "without_loading",
]
