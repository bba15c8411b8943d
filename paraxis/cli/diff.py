"""`paraxis diff`: what differs between two saved plans."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from ._errors import Debug, report_errors
from ._options import JsonOption

PlanFile = Annotated[Path, typer.Argument(help="Plan written by `paraxis plan --save`.")]


def command(first: PlanFile, second: PlanFile, as_json: JsonOption = False, debug: Debug = False) -> None:
    """Show how two saved plans differ: placements, collectives, estimated time, parameters per rank.

    Example: paraxis diff prefill.json decode.json
    """
    with report_errors(debug):
        from .. import Plan, compare_plans

        plans = []
        for path in (first, second):
            try:
                plans.append(Plan.load(str(path)))
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ValueError(f"{str(path)!r} is not a plan: write one with `paraxis plan --save`") from error
        found = compare_plans(*plans)
        typer.echo(json.dumps(found.to_json(), indent=1) if as_json else found.text())
