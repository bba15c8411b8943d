"""`paraxis explain`: why a parameter or a module is placed as it is, and what the alternatives would cost."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from ._errors import Debug, report_errors
from ._options import (
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
    name: Annotated[str, typer.Argument(help="Parameter, module, or node of the decomposed graph.")],
    tp: Ranks = 2,
    machine: MachineOption = None,
    objective: ObjectiveOption = None,
    constraint: ConstraintOption = None,
    memory_limit: MemoryOption = None,
    as_json: JsonOption = False,
    debug: Debug = False,
) -> None:
    """Explain a placement: list the alternatives and the time, memory and collectives that each would cost.

    Needs no weights, no ranks and no GPU.

    Example: paraxis explain org/model model.layers.0.mlp.down_proj --tp 8
    """
    with report_errors(debug):
        check_model(model)
        options = planning_options(machine, objective, constraint, memory_limit)
        from .. import explain_plan

        quiet()
        found = explain_plan(model, tp, name, **options)
        if as_json:
            typer.echo(json.dumps([each.to_json() for each in found], indent=1))
        else:
            typer.echo("\n\n".join(each.text() for each in found))
