"""`paraxis code`: the local program of one rank, as readable Python."""

from __future__ import annotations

from typing import Annotated

import typer

from ._errors import Debug, UsageError, report_errors
from ._options import (
    ConstraintOption,
    MachineOption,
    MemoryOption,
    Model,
    ObjectiveOption,
    Ranks,
    check_model,
    planning_options,
    quiet,
)


def command(
    model: Model,
    tp: Ranks = 2,
    rank: Annotated[int, typer.Option("--rank", min=0, help="Rank whose program to print.")] = 0,
    after: Annotated[
        str | None,
        typer.Option(
            "--after", metavar="PASS", help="Print the program after this pass of the pipeline; `list` names all."
        ),
    ] = None,
    compiled: Annotated[
        bool, typer.Option("--compile", help="Build the program as for compile='inductor', with the passes for it.")
    ] = False,
    machine: MachineOption = None,
    objective: ObjectiveOption = None,
    constraint: ConstraintOption = None,
    memory_limit: MemoryOption = None,
    debug: Debug = False,
) -> None:
    """Print the local program of one rank: operators, local shapes, placements and collectives, by module.

    Needs no weights, no ranks and no GPU.

    Examples: paraxis code org/model --tp 8 --rank 3 | less

    paraxis code org/model --after cpu_matmul

    paraxis code org/model --after list
    """
    with report_errors(debug):
        if after == "list":
            typer.echo(_passes(), nl=False)
            return
        if rank >= tp:
            raise UsageError(f"--rank {rank}: the last of {tp} ranks is {tp - 1}")
        check_model(model)
        options = planning_options(machine, objective, constraint, memory_limit)
        if compiled:
            options["compile"] = "inductor"
        from ..plan.listing import LOCAL_PROGRAM, list_program
        from ..plan.offline import plan_offline

        quiet()
        with plan_offline(model, tp, None, options, rank=rank) as planned:
            typer.echo(list_program(planned, after or LOCAL_PROGRAM), nl=False)


def _passes() -> str:
    """The passes of the default pipeline, in order, a line each."""
    from ..passes import build_parallel_pass_pipeline

    return "".join(f"{step.title:<34}{step.summary}\n" for step in build_parallel_pass_pipeline())
