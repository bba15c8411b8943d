"""The default pipeline."""

from __future__ import annotations

from dataclasses import replace

from ..config import Config
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


def without_loading(config: Config) -> Config:
    """The options with a pipeline that reads no weights: for a model that is looked at, not run."""
    passes = config.pipeline or build_parallel_pass_pipeline()
    return replace(config, pipeline=PassPipeline([p for p in passes if not isinstance(p, InitializeOrLoadWeightsPass)]))
