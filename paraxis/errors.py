"""Errors that Paraxis raises by name."""

from __future__ import annotations


class CollectiveError(RuntimeError):
    """A collective failed on this rank: a rank did not join it, joined another one, or died.

    The message names the collective, the tensor and the rank; the backend's own error is the cause.
    """


class RankMismatchError(ValueError):
    """Ranks that must have the same do not: inputs of a call, sampled tokens, or replicated parameters.

    The message names the argument or parameter, the ranks, and what to do.
    """


class UnsoundRuleError(ValueError):
    """A rule was refused: one of its strategies does not give the operator's result, or nothing shows that they do.

    The message names the operator, the number of ranks, the placements and what is wrong.
    """


class CheckpointError(ValueError):
    """A checkpoint that cannot be found, read, or matched with the model. The message says what to do."""


class DivisibilityError(RuntimeError, ValueError):
    """A size is not divisible by the number of ranks.

    A ``RuntimeError`` for programs that come from optimum.fx.parallelization, whose function raises that,
    and a ``ValueError`` as other sizes that do not fit.
    """


class CaptureError(RuntimeError):
    """The model cannot be captured."""


class GraphBreak(CaptureError):
    """The model cannot be captured as one graph, but it can be run as several."""


class ConstraintError(ValueError):
    """A constraint that means nothing for this model, or constraints that cannot hold together."""


class WrapperError(RuntimeError):
    """A data-parallel wrapper of torch was put around a parallel model, which has data parallelism of its own."""

    def __init__(self, wrapper: str, what: str) -> None:
        super().__init__(
            f"{wrapper} cannot wrap {what}: its parameters are sharded over tensor-parallel ranks, which hold "
            "different shards and need the same batch. For data parallelism, give the ranks a mesh and parallelize the "
            "model on it: mesh = init_device_mesh('cuda', (dp, tp), mesh_dim_names=('dp', 'tp')), then "
            "parallelize_model(..., ParallelExecutionCtx(mesh=mesh, current_device=...), data_parallel='replicate') "
            "in place of DDP, or data_parallel='shard' in place of FSDP. With tensor-parallel ranks only, use the "
            "model without a wrapper."
        )
