"""`paraxis explain`: why a parameter or a module is split as it is, and what else would have cost."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from ._errors import Debug, told
from ._planning import (
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
    name: Annotated[str, typer.Argument(help="A parameter, a module, or a node of the decomposed graph.")],
    tp: Ranks = 2,
    machine: MachineOption = None,
    objective: ObjectiveOption = None,
    constraint: ConstraintOption = None,
    memory_limit: MemoryOption = None,
    as_json: JsonOption = False,
    debug: Debug = False,
) -> None:
    """Say why something is split as it is: the alternatives, and what each would have cost.

    Example: paraxis explain org/model model.layers.0.mlp.down_proj --tp 8
    """
    with told(debug):
        check_model(model)
        options = planning_options(machine, objective, constraint, memory_limit)
        from .. import explain_plan

        quiet()
        found = explain_plan(model, tp, name, **options)
        if as_json:
            typer.echo(json.dumps([each.to_json() for each in found], indent=1))
        else:
            typer.echo("\n\n".join(each.text() for each in found))
