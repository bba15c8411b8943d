"""`paraxis plan`: how a model would be split, from its configuration alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from paraxis.cli._errors import Debug, told
from paraxis.cli._launch import console
from paraxis.cli._planning import (
    ConstraintOption,
    JsonOption,
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
    machine: MachineOption = None,
    objective: ObjectiveOption = None,
    constraint: ConstraintOption = None,
    memory_limit: MemoryOption = None,
    save: Annotated[Path | None, typer.Option("--save", help="Write the plan to a file, for `diff`.")] = None,
    as_json: JsonOption = False,
    debug: Debug = False,
) -> None:
    """Show how a model would be split, without weights, ranks or a GPU.

    Example: paraxis plan org/model --tp 8 --machine h100
    """
    with told(debug):
        check_model(model)
        options = planning_options(machine, objective, constraint, memory_limit)
        from paraxis import plan_model

        quiet()
        plan = plan_model(model, tp, **options)
        if save is not None:
            plan.save(str(save))
        if as_json:
            typer.echo(json.dumps({**plan.to_json(), "seconds_to_plan": sum(plan.timings.values())}, indent=1))
            return
        out = console()
        out.print(plan.table())
        share = plan.communication / plan.seconds if plan.seconds else 0.0
        out.print(
            f"Estimated {plan.seconds * 1e3:.3f} ms per pass, {share:.0%} of it collectives; "
            f"{'the cheapest plan there is' if plan.optimal else 'not proven to be the cheapest plan'}. "
            f"Planned in {sum(plan.timings.values()):.1f} s."
        )
