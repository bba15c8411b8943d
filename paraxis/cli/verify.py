"""`paraxis verify`: compare a parallel model on ranks of this machine with the unsharded model."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from ._checks import Check, all_agree, checks_table, compare, outputs
from ._errors import FAILED, Debug, report_errors
from ._fits import RESERVED_PER_RANK, available_memory, check_disk, check_fits, local_ranks, parameter_count
from ._launch import check_ranks, console, is_rank0, launch
from ._options import JsonOption, LayersOption, Model, Ranks, check_model, quiet
from ._temporary import temporary_folder

SEED = 0
LENGTH, PROMPT = 16, 6


@dataclass(frozen=True)
class Task:
    """What to compare, the same on every rank."""

    folder: str
    train: bool
    generate: bool


@dataclass
class Report:
    """The result of one rank; ``agreed`` is the verdict of all ranks."""

    checks: list[Check]
    fraction: float
    collectives: dict[str, int]
    agreed: bool


def command(
    model: Model,
    tp: Ranks = 2,
    train: Annotated[bool, typer.Option("--train", help="Also compare the loss and every gradient.")] = False,
    generate: Annotated[bool, typer.Option("--generate", help="Also compare greedily decoded tokens.")] = False,
    layers: LayersOption = None,
    as_json: JsonOption = False,
    debug: Debug = False,
) -> None:
    """Run a model on CPU ranks of this machine and compare it with the unsharded model, in float32.

    Uses the checkpoint's weights, or random weights if there are none. Every rank also holds the unsharded model. A
    model that does not fit into memory this way is refused at once: check fewer layers of it with --layers. Exits with
    1 if anything differs.

    Example: paraxis verify org/model --tp 4 --layers 2 --train --generate
    """
    with report_errors(debug), temporary_folder("paraxis-verify-") as temporary:
        check_model(model)
        check_ranks(tp)
        quiet()
        check_memory(model, layers, tp, train)
        folder, weights = checkpoint(model, layers, temporary)
        reports = launch(tp, run_rank, Task(folder, train, generate))
        agreed = all(report.agreed for report in reports)
        if is_rank0():
            show(reports, agreed, tp, weights, as_json)
    if not agreed:
        raise typer.Exit(FAILED)


def check_memory(model: str, layers: int | None, tp: int, train: bool) -> None:
    """Raise before anything is built if the ranks of this machine do not fit into its memory."""
    ranks = local_ranks(tp)

    def needed(parameters: int) -> dict[str, float]:
        size = 4 * parameters
        parts = {
            f"for {ranks} copies of the unsharded model, one per rank": ranks * size,
            "for the shards": ranks * size / tp,
            # of the unsharded model, of the shards, and gathered for the comparison
            "for gradients": ranks * size * (2 + 1 / tp) if train else 0,
        }
        return {**parts, "for the processes": ranks * RESERVED_PER_RANK}

    check_fits(lambda n: parameter_count(model, n), layers, needed, available_memory(), "on this machine")


def checkpoint(model: str, layers: int | None, temporary: str) -> tuple[str, str]:
    """A directory for the ranks to load weights from, and a description of the weights.

    Random weights are written to ``temporary`` if there is no checkpoint or ``layers`` are requested.
    """
    import torch

    from ..weights.hub import load_config_and_class, resolve_checkpoint

    if layers is None:
        folder = resolve_checkpoint(model, weights=True)
        if any(Path(folder).glob("*.safetensors")):
            return str(folder), "the checkpoint's weights"
    folder = resolve_checkpoint(model, weights=False)
    config, cls, _ = load_config_and_class(folder, {} if layers is None else {"num_hidden_layers": layers})
    config.dtype = torch.float32
    check_disk(temporary, 4 * parameter_count(model, layers))
    torch.manual_seed(SEED)
    built = cls(config)
    built.save_pretrained(temporary)
    return temporary, "random weights" if layers is None else f"random weights, {layers} layers"


def run_rank(task: Task) -> Report:
    """Compare the parallel model with the unsharded one, on one rank."""
    import torch
    import torch.distributed as dist

    from .. import ParallelExecutionCtx, parallelize_model

    quiet()
    dist.init_process_group("gloo")
    try:
        assert dist.group.WORLD is not None
        ctx = ParallelExecutionCtx(tp_group=dist.group.WORLD, current_device=torch.device("cpu"))
        model = parallelize_model(task.folder, ctx, torch_dtype=torch.float32, show_progress=False).eval()
        unsharded = type(model).from_pretrained(task.folder, dtype=torch.float32).eval()
        inputs = example_inputs(unsharded, task.train)
        generates = task.generate and unsharded.can_generate()
        options: dict[str, Any] = {"train": task.train, "generate": PROMPT if generates else None}
        checks = compare(outputs(model, inputs, **options), outputs(unsharded, inputs, **options))
        assert ctx.plan is not None
        agreed = all_agree(all(check.passed for check in checks))
        return Report(checks, ctx.plan.sharded_fraction, ctx.plan.count(), agreed)
    finally:
        dist.destroy_process_group()


def example_inputs(model: Any, labelled: bool) -> dict[str, Any]:
    """Random inputs, the same on every rank; ``labelled`` adds labels if the model computes a loss over tokens."""
    import torch

    from ..capture.dummy_inputs import example_call, takes_token_labels

    _, inputs = example_call(model, None, torch.device("cpu"))
    generator = torch.Generator().manual_seed(SEED)
    vocabulary = getattr(model.config.get_text_config(), "vocab_size", None) or 2
    for name, value in inputs.items():
        if name.endswith("input_ids"):
            inputs[name] = torch.randint(0, vocabulary, (value.shape[0], LENGTH), generator=generator)
        elif value.is_floating_point():
            inputs[name] = torch.randn(value.shape, generator=generator)
    if labelled and takes_token_labels(model):
        inputs["labels"] = inputs.get("decoder_input_ids", inputs.get("input_ids"))
    return inputs


def show(reports: list[Report], agreed: bool, tp: int, weights: str, as_json: bool) -> None:
    """Print the comparison of all ranks."""
    first = reports[0]
    if as_json:
        checks = [[asdict(check) | {"passed": check.passed} for check in report.checks] for report in reports]
        data = {
            "agreed": agreed,
            "world_size": tp,
            "weights": weights,
            "sharded_fraction": first.fraction,
            "collectives": first.collectives,
            "checks": checks,
        }
        typer.echo(json.dumps(data, indent=1))
        return
    out = console()
    out.print(checks_table([report.checks for report in reports]))
    kinds = ", ".join(f"{n} {kind.replace('_', '-')}" for kind, n in first.collectives.items()) or "no collectives"
    out.print(f"{tp} ranks, {weights}: {first.fraction:.1%} of the parameters per rank, {kinds} per forward pass.")
    verdict = "matches" if agreed else "differs from"
    out.print(f"The parallel model {verdict} the unsharded model.", style="bold green" if agreed else "bold red")
