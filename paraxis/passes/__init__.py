"""The passes from a captured graph to the local program, their base classes and the pipeline."""

from .annotate import ParallelLayerAnnotatePass
from .base import AnalyzeBase, PassBase, PassPipeline, Rewrite
from .initialize import InitializeOrLoadWeightsPass
from .pipeline import build_parallel_pass_pipeline, without_loading
from .replace import ParallelLayerReplacePass
from .setting import Setting
from .solve import ParallelAxisSolverPass

__all__ = [
    "AnalyzeBase",
    "InitializeOrLoadWeightsPass",
    "ParallelAxisSolverPass",
    "ParallelLayerAnnotatePass",
    "ParallelLayerReplacePass",
    "PassBase",
    "PassPipeline",
    "Rewrite",
    "Setting",
    "build_parallel_pass_pipeline",
    "without_loading",
]
