"""`paraxis code`: the program that one rank runs, as Python to read."""

from __future__ import annotations

from typing import Annotated

import typer

from ._errors import Debug, UsageError, told
from ._planning import (
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
    rank: Annotated[int, typer.Option(min=0, help="Whose program to show.")] = 0,
    machine: MachineOption = None,
    objective: ObjectiveOption = None,
    constraint: ConstraintOption = None,
    memory_limit: MemoryOption = None,
    debug: Debug = False,
) -> None:
    """Show the local program of one rank: operators with local shapes, placements and collectives, by module.

    Example: paraxis code org/model --tp 8 --rank 3 | less
    """
    with told(debug):
        if rank >= tp:
            raise UsageError(f"--rank {rank}: of {tp} ranks the last is {tp - 1}")
        check_model(model)
        options = planning_options(machine, objective, constraint, memory_limit)
        from ..plan.listing import list_program
        from ..plan.make import plan_offline

        quiet()
        with plan_offline(model, tp, None, options, rank=rank) as planned:
            typer.echo(list_program(planned), nl=False)
