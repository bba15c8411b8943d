"""`paraxis plan`: how a model would be split, from its configuration alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from ._errors import Debug, UsageError, check_output, told
from ._fitting import USABLE, bytes_of, fewest, room_on
from ._launch import console
from ._planning import (
    MOST_RANKS,
    ConstraintOption,
    JsonOption,
    MachineOption,
    MemoryOption,
    Model,
    ObjectiveOption,
    check_model,
    planning_options,
    quiet,
)

CONTEXT = 2048
"""Tokens that have to fit beside the weights, unless asked otherwise, for --tp auto."""


def command(
    model: Model,
    tp: Annotated[str, typer.Option("--tp", help="Number of ranks, or 'auto' for the fewest that fit.")] = "2",
    gpu: Annotated[
        str | None, typer.Option("--gpu", help="What a rank has to fit on, as in H100, A100-40GB or 24GB.")
    ] = None,
    machine: MachineOption = None,
    objective: ObjectiveOption = None,
    constraint: ConstraintOption = None,
    memory_limit: MemoryOption = None,
    batch: Annotated[int, typer.Option(min=1, help="Sequences at a time, for cache and activations.")] = 1,
    context: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens of each, all in one prompt; without, cache and activations are not counted."),
    ] = None,
    train: Annotated[
        bool,
        typer.Option(
            "--train", help="Count gradients, AdamW and, with --context, activations as a step keeps them for backward."
        ),
    ] = False,
    save: Annotated[Path | None, typer.Option("--save", help="Write the plan to a file, for `diff`.")] = None,
    html: Annotated[Path | None, typer.Option("--html", help="Write a page with pictures to a file.")] = None,
    as_json: JsonOption = False,
    debug: Debug = False,
) -> None:
    """Show how a model would be split and what memory it takes, without weights, ranks or a GPU.

    Activations are counted by running the program of a rank on tensors without memory: a prompt with the logits of its
    last position, or with --train a step forward and backward.

    Examples: paraxis plan org/model --tp 8 --machine h100

    paraxis plan org/model --tp auto --gpu H100-80GB --batch 8 --context 8192

    paraxis plan org/model --tp 8 --html plan.html
    """
    with told(debug):
        count = ranks_of(tp, gpu)
        check_model(model)
        options = planning_options(machine, objective, constraint, memory_limit)
        if count is None and context is None:
            context = CONTEXT
        check_output("--html", html)
        check_output("--save", save)
        from .. import Plan
        from ..plan.make import plan_offline
        from ..plan.memory import Sizes

        quiet()

        def planned(ranks: int, page: Path | None = None) -> Plan:
            with plan_offline(model, ranks, None, dict(options), Sizes(batch, context, train)) as found:
                if page is not None:
                    from ..report import report

                    page.write_text(report(found, model), encoding="utf-8")
                return found.plan

        plan = planned(count, html) if count is not None else fewest(str(gpu), planned)
        if html is not None and count is None:
            planned(plan.world_size, html)
        if save is not None:
            plan.save(str(save))
        assert plan.memory is not None
        fits = None if gpu is None else plan.memory.total <= room_on(gpu)
        if as_json:
            more = {"seconds_to_plan": sum(plan.timings.values()), **({} if fits is None else {"fits": fits})}
            typer.echo(json.dumps({**plan.to_json(), **more}, indent=1))
            return
        out = console()
        out.print(plan.table())
        out.print(f"Memory: {plan.memory}.")
        if fits is not None:
            out.print(f"That {'fits' if fits else 'does not fit'} on {gpu}, of which {USABLE:.0%} are counted on.")
        share = plan.communication / plan.seconds if plan.seconds else 0.0
        out.print(
            f"Estimated {plan.seconds * 1e3:.3f} ms per pass, {share:.0%} of it collectives; "
            f"{'the cheapest plan there is' if plan.optimal else 'not proven to be the cheapest plan'}. "
            f"Planned in {sum(plan.timings.values()):.1f} s."
        )


def ranks_of(text: str, gpu: str | None) -> int | None:
    """The number of ranks that is asked for; None for as few as fit on the GPU."""
    if gpu is not None:
        bytes_of(gpu)
    if text == "auto":
        if gpu is None:
            raise UsageError("--tp auto needs --gpu: what a rank has to fit on, as in H100 or A100-40GB")
        return None
    if not text.isdecimal() or not 1 <= int(text) <= MOST_RANKS:
        raise typer.BadParameter(
            f"{text!r} is neither a number of ranks from 1 to {MOST_RANKS} nor 'auto'", param_hint="--tp"
        )
    return int(text)
