"""`paraxis plan`: the tensor-parallel plan of a model, from its configuration alone."""

from __future__ import annotations

import json
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ._errors import Debug, UsageError, check_output, report_errors
from ._gpu_memory import USABLE, gpu_bytes, smallest_fitting_plan, usable_bytes
from ._launch import console
from ._options import (
    MAX_RANKS,
    ConstraintOption,
    JsonOption,
    MachineOption,
    MemoryOption,
    Model,
    ObjectiveOption,
    RevisionOption,
    SubfolderOption,
    TrustOption,
    check_model,
    planning_options,
    quiet,
)

if TYPE_CHECKING:
    from rich.table import Table

    from .. import Plan

QUANTIZATIONS = ("fp8", "int8", "int4", "nf4")
"""The names of ``quantization_config=``; the test compares them with those of the engine."""
DEFAULT_CONTEXT = 2048
"""Tokens per sequence that must fit with ``--tp auto``, unless ``--context`` says otherwise."""


def command(
    model: Model,
    tp: Annotated[
        str, typer.Option("--tp", help="Tensor-parallel size, or 'auto' for the smallest that fits on --gpu.")
    ] = "2",
    gpu: Annotated[
        str | None, typer.Option("--gpu", help="GPU that each rank must fit on, as in H100, A100-40GB or 24GB.")
    ] = None,
    machine: MachineOption = None,
    objective: ObjectiveOption = None,
    constraint: ConstraintOption = None,
    memory_limit: MemoryOption = None,
    batch: Annotated[
        int, typer.Option("--batch", min=1, help="Sequences in a batch, for KV cache and activations.")
    ] = 1,
    context: Annotated[
        int | None,
        typer.Option(
            "--context", min=1, help="Tokens per sequence, for the estimated time; adds KV cache and activations."
        ),
    ] = None,
    train: Annotated[
        bool,
        typer.Option("--train", help="Add gradients and AdamW state to the memory, and size activations for training."),
    ] = False,
    save: Annotated[
        Path | None, typer.Option("--save", help="Write the plan as JSON, for `plan=` and `paraxis diff`.")
    ] = None,
    html: Annotated[Path | None, typer.Option("--html", help="Write an HTML report with diagrams.")] = None,
    only: Annotated[
        str | None,
        typer.Option("--filter", metavar="PATTERN", help="Show only layers with matching names, as in '*.down_proj'."),
    ] = None,
    quantization: Annotated[
        str | None,
        typer.Option("--quantization", help="Quantize a plain checkpoint while it is loaded: fp8, int8, int4 or nf4."),
    ] = None,
    revision: RevisionOption = None,
    subfolder: SubfolderOption = None,
    trust_remote_code: TrustOption = False,
    timings: Annotated[bool, typer.Option("--timings", help="Print the seconds of every stage and pass.")] = False,
    as_json: JsonOption = False,
    debug: Debug = False,
) -> None:
    """Show how a model would be sharded, its collectives, and its memory per rank.

    Needs no weights, no ranks and no GPU. Activations are those of a prefill of --context tokens that computes the last
    logits, or with --train those of a forward and backward pass.

    Examples: paraxis plan org/model --tp 8 --machine h100

    paraxis plan org/model --tp auto --gpu H100-80GB --batch 8 --context 8192

    paraxis plan org/model --tp 8 --html plan.html

    paraxis plan org/model --tp 8 --filter '*.self_attn.*'

    paraxis plan org/model --tp 8 --quantization fp8
    """
    with report_errors(debug):
        ranks = ranks_of(tp, gpu)
        check_model(model, subfolder)
        options = planning_options(machine, objective, constraint, memory_limit)
        if quantization is not None:
            if quantization not in QUANTIZATIONS:
                raise UsageError(f"--quantization {quantization!r}: use one of {', '.join(QUANTIZATIONS)}")
            options["quantization_config"] = quantization
        options |= {"revision": revision, "subfolder": subfolder, "trust_remote_code": trust_remote_code}
        if ranks is None and context is None:
            context = DEFAULT_CONTEXT
        check_output("--html", html)
        check_output("--save", save)
        if only is not None and as_json:
            raise UsageError("--filter is for the table; --json prints all layers")
        from ..plan.memory import Sizes
        from ..plan.offline import plan_offline

        quiet()

        def plan_for(count: int, page: Path | None = None) -> Plan:
            with plan_offline(model, count, None, dict(options), Sizes(batch, context, train)) as found:
                if page is not None:
                    from ..report import report

                    page.write_text(report(found, model), encoding="utf-8")
                return found.plan

        plan = plan_for(ranks, html) if ranks is not None else smallest_fitting_plan(str(gpu), plan_for)
        if html is not None and ranks is None:
            plan_for(plan.world_size, html)
        if save is not None:
            plan.save(str(save))
        if only is not None:
            check_filter(plan, only)
        show(plan, gpu, as_json, only or "*")
        if timings and not as_json:
            console().print(timings_table(plan))


def check_filter(plan: Plan, pattern: str) -> None:
    """Raise if ``--filter`` matches no layer."""
    names = [*(layer.name for layer in plan.layers), *plan.parameters]
    if not any(fnmatchcase(name, pattern) for name in names):
        some = ", ".join(names[:3])
        raise UsageError(f"--filter {pattern!r} matches no layer; names are like {some}; * stands for any text")


def show(plan: Plan, gpu: str | None, as_json: bool, pattern: str = "*") -> None:
    """Print the layers whose names match a pattern, the memory, and whether that fits on the GPU."""
    assert plan.memory is not None
    fits = None if gpu is None else plan.memory.total <= usable_bytes(gpu)
    if as_json:
        more = {
            "seconds_to_plan": sum(plan.timings.values()),
            "timings": dict(plan.timings),
            "pass_timings": dict(plan.pass_timings),
            **({} if fits is None else {"fits": fits}),
        }
        typer.echo(json.dumps({**plan.to_json(), **more}, indent=1))
        return
    out = console()
    out.print(plan.table(pattern))
    out.print(f"Memory: {plan.memory}.")
    if fits is not None:
        out.print(f"{'Fits' if fits else 'Does not fit'} on {gpu} (limit: {USABLE:.0%} of its memory).")
    out.print(
        f"{estimate(plan)} "
        f"{'This plan is optimal' if plan.optimal else 'This plan may not be optimal'} under the cost model. "
        f"Planned in {sum(plan.timings.values()):.1f} s."
    )


def estimate(plan: Plan) -> str:
    """The estimated time, of the requested call if it is known, else of the call that was planned."""
    assert plan.memory is not None
    memory, requested = plan.memory, f"{plan.memory.batch} × {plan.memory.context} tokens"
    seconds, communication, what = plan.seconds, plan.communication, "forward pass"
    if memory.seconds is not None and memory.communication is not None:
        seconds, communication, what = memory.seconds, memory.communication, f"forward pass of {requested}"
    elif memory.context:
        what = f"forward pass of the planned call (that of {requested} is unknown)"
    collectives = f", {communication / seconds:.0%} of it in collectives" if plan.world_size > 1 and seconds else ""
    return f"Estimated {seconds * 1e3:.3f} ms per {what}{collectives}."


def timings_table(plan: Plan) -> Table:
    """The seconds of every stage of planning, and of every pass in it."""
    from rich.table import Table

    table = Table(title="Seconds", caption="A stage may contain passes: solve is decompose and search.")
    table.add_column("stage or pass")
    table.add_column("s", justify="right")
    for name, seconds in plan.timings.items():
        table.add_row(name, f"{seconds:.3f}")
    table.add_section()
    for name, seconds in plan.pass_timings.items():
        table.add_row(f"pass {name}", f"{seconds:.3f}")
    return table


def ranks_of(text: str, gpu: str | None) -> int | None:
    """The number of ranks of ``--tp``; None for ``auto``."""
    if gpu is not None:
        gpu_bytes(gpu)
    if text == "auto":
        if gpu is None:
            raise UsageError("--tp auto needs --gpu, the GPU that each rank must fit on, as in H100 or A100-40GB")
        return None
    if not text.isdecimal() or not 1 <= int(text) <= MAX_RANKS:
        raise typer.BadParameter(f"{text!r} is neither a number from 1 to {MAX_RANKS} nor 'auto'", param_hint="--tp")
    return int(text)
