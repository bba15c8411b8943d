"""`paraxis export`: the plan of a model in a format that another library runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ._errors import Debug, report_errors
from ._launch import console
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

if TYPE_CHECKING:
    from ..export import Export

FORMATS = ("transformers", "torch", "vllm")


def command(
    model: Model,
    tp: Ranks = 2,
    target: Annotated[str, typer.Option("--format", help="Library to export for: transformers, torch or vllm.")] = (
        "transformers"
    ),
    out: Annotated[
        Path | None, typer.Option("--out", help="File to write: JSON, or a Python module for torch.")
    ] = None,
    verify: Annotated[
        bool,
        typer.Option("--verify/--no-verify", help="Test which layers can stay sharded, on a small copy of the model."),
    ] = True,
    machine: MachineOption = None,
    objective: ObjectiveOption = None,
    constraint: ConstraintOption = None,
    memory_limit: MemoryOption = None,
    as_json: JsonOption = False,
    debug: Debug = False,
) -> None:
    """Export the plan of a model to transformers, torch or vLLM, as far as they can run it exactly.

    transformers: a tp_plan for `DistributedConfig`, and the base_model_tp_plan. torch: a Python module with a plan for
    `parallelize_module`. vllm: the base_model_tp_plan that its transformers backend reads (not tested with vLLM
    itself). Layers that the library cannot shard exactly are replicated and listed with the reason. Plans are for
    inference: gradients are not tested. Exits with 1 if no layer can be sharded.

    Examples: paraxis export org/model --tp 4

    paraxis export org/model --tp 2 --format torch --out plan.py

    paraxis export org/model --tp 8 --format vllm --json
    """
    with report_errors(debug):
        check_model(model)
        if target not in FORMATS:
            raise typer.BadParameter(f"{target!r} is not one of {', '.join(FORMATS)}", param_hint="--format")
        if out is not None and (out.is_dir() or not out.resolve().parent.is_dir()):
            raise ValueError(f"--out {str(out)!r}: give a file in an existing directory")
        options = planning_options(machine, objective, constraint, memory_limit)
        from ..export import export_plan

        quiet()
        found = export_plan(model, tp, target, verify=verify, **options)
        if out is not None:
            out.write_text(file_contents(found), encoding="utf-8")
        if as_json:
            typer.echo(json.dumps(found.to_json(), indent=1))
        else:
            show(found, out)


def file_contents(found: Export) -> str:
    """What ``--out`` writes: the Python module for torch, else the plans as JSON."""
    if found.source:
        return found.source
    names = {"transformers": ("tp_plan", "base_model_tp_plan"), "vllm": ("base_model_tp_plan",)}[found.target]
    return json.dumps({name: found.to_json()[name] for name in names}, indent=1) + "\n"


def show(found: Export, out: Path | None) -> None:
    """Print the plan, unless it is in a file, and a summary."""
    if out is None:
        if found.source:
            typer.echo(found.source, nl=False)
        else:
            name = "tp_plan" if found.target == "transformers" else "base_model_tp_plan"
            lines = [f"    {json.dumps(key)}: {json.dumps(style)}," for key, style in found.plan.items()]
            typer.echo("\n".join([f"{name} = {{", *lines, "}"]))
    lines = [
        f"{found.model} on {found.world_size} ranks for {found.target}: {found.sharded_fraction:.1%} of the "
        "parameters per rank."
    ]
    if found.target == "vllm":
        lines[0] = f"{found.model} on {found.world_size} ranks for vLLM, which shards embedding and lm_head itself."
    if found.groups:
        lines.append(f"Sharded without gathers in between: {', '.join(found.groups)}.")
    lines += by_reason("Sharded layer by layer, with gathers", found.gathered)
    # vLLM shards some of them itself
    lines += by_reason("Not in the plan" if found.target == "vllm" else "Replicated", found.replicated)
    if found.error is None:
        lines.append("Not verified: only layers that are exact on their own are sharded.")
    else:
        lines.append(
            f"Verified on {found.world_size} simulated ranks with a small model of the same code and its KV cache: "
            f"largest error {found.error:.1g}. For inference; gradients are not tested."
        )
    if out is not None:
        lines.append(f"Wrote {out}.")
    screen = console()
    for line in lines:
        screen.print(line, markup=False, highlight=False, soft_wrap=True)


def by_reason(title: str, reasons: dict[str, str]) -> list[str]:
    """One line per reason, with the modules it applies to."""
    modules: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        modules.setdefault(reason, []).append(name)
    return [f"{title}: {', '.join(names)}: {reason}." for reason, names in modules.items()]
