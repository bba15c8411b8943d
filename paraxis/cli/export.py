"""`paraxis export`: the plan of a model in a form that another library runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ._errors import Debug, told
from ._launch import console
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

if TYPE_CHECKING:
    from ..export import Export

FORMATS = ("transformers", "torch", "vllm")


def command(
    model: Model,
    tp: Ranks = 2,
    target: Annotated[str, typer.Option("--format", help="For whom: transformers, torch or vllm.")] = "transformers",
    out: Annotated[Path | None, typer.Option("--out", help="Write the plan to a file: JSON, for torch Python.")] = None,
    verify: Annotated[
        bool, typer.Option(help="Run a small model of the same code, to find which layers can stay split together.")
    ] = True,
    machine: MachineOption = None,
    objective: ObjectiveOption = None,
    constraint: ConstraintOption = None,
    memory_limit: MemoryOption = None,
    as_json: JsonOption = False,
    debug: Debug = False,
) -> None:
    """Write the plan of a model for transformers, torch or vLLM, as far as they run it exactly.

    transformers: a tp_plan for `DistributedConfig`, and the base model's part of it. torch: a Python module with a plan
    for `parallelize_module`. vllm: the base_model_tp_plan that its transformers backend reads; vLLM itself was not run.
    What cannot be said exactly stays whole and is listed with the reason. For inference, under torch.no_grad: gradients
    are not tried. Exits with 1 if nothing is left.

    Examples: paraxis export org/model --tp 4

    paraxis export org/model --tp 2 --format torch --out plan.py

    paraxis export org/model --tp 8 --format vllm --json
    """
    with told(debug):
        check_model(model)
        if target not in FORMATS:
            raise typer.BadParameter(f"{target!r} is none of {', '.join(FORMATS)}", param_hint="--format")
        if out is not None and (out.is_dir() or not out.resolve().parent.is_dir()):
            raise ValueError(f"--out {str(out)!r}: give a file in a directory that exists")
        options = planning_options(machine, objective, constraint, memory_limit)
        from ..export import export_plan

        quiet()
        found = export_plan(model, tp, target, verify=verify, **options)
        if out is not None:
            out.write_text(written(found), encoding="utf-8")
        if as_json:
            typer.echo(json.dumps(found.to_json(), indent=1))
        else:
            show(found, out)


def written(found: Export) -> str:
    """The contents of a file that the other library's user reads the plan from."""
    if found.source:
        return found.source
    names = {"transformers": ("tp_plan", "base_model_tp_plan"), "vllm": ("base_model_tp_plan",)}[found.target]
    return json.dumps({name: found.to_json()[name] for name in names}, indent=1) + "\n"


def show(found: Export, out: Path | None) -> None:
    """The plan itself, unless it is in a file, and what there is to know of it."""
    if out is None:
        if found.source:
            typer.echo(found.source, nl=False)
        else:
            name = "tp_plan" if found.target == "transformers" else "base_model_tp_plan"
            lines = [f"    {json.dumps(key)}: {json.dumps(style)}," for key, style in found.plan.items()]
            typer.echo("\n".join([f"{name} = {{", *lines, "}"]))
    lines = [
        f"{found.model} over {found.world_size} ranks for {found.target}: {found.sharded_fraction:.1%} of the "
        "parameters on each."
    ]
    if found.target == "vllm":
        lines[0] = f"{found.model} over {found.world_size} ranks for vLLM, which splits embedding and head by itself."
    if found.groups:
        lines.append(f"Split from layer to layer: {', '.join(found.groups)}.")
    lines += grouped("Split alone and gathered", found.gathered)
    lines += grouped("Whole", found.whole)
    if found.error is None:
        lines.append("Not tried: only layers that are exact each by itself are split.")
    else:
        lines.append(
            f"Tried on {found.world_size} simulated ranks, with a small model of the same code and with its cache: "
            f"off by {found.error:.1g} at most. For inference; gradients were not tried."
        )
    if out is not None:
        lines.append(f"Written to {out}.")
    screen = console()
    for line in lines:
        screen.print(line, markup=False, highlight=False, soft_wrap=True)


def grouped(title: str, reasons: dict[str, str]) -> list[str]:
    """One line per reason, with all that it is given for."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        by_reason.setdefault(reason, []).append(name)
    return [f"{title}: {', '.join(names)}: {reason}." for reason, names in by_reason.items()]
