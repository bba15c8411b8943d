"""`paraxis verify`: a model over ranks of this machine, compared with the same model unsharded."""

from __future__ import annotations

import json
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from ._checks import Check, all_agree, checks_table, compare, outputs
from ._errors import FAILED, Debug, told
from ._launch import check_ranks, console, is_first, launch
from ._planning import JsonOption, Model, Ranks, check_model, quiet

SEED = 0
BATCH, LENGTH, PROMPT = 2, 16, 6


@dataclass(frozen=True)
class Task:
    """What every rank is to compare."""

    folder: str
    train: bool
    generate: bool


@dataclass
class Report:
    """What a rank found."""

    checks: list[Check]
    fraction: float
    collectives: dict[str, int]
    agreed: bool


def command(
    model: Model,
    tp: Ranks = 2,
    train: Annotated[bool, typer.Option("--train", help="Compare loss and every gradient, too.")] = False,
    generate: Annotated[bool, typer.Option("--generate", help="Compare greedily generated tokens, too.")] = False,
    layers: Annotated[
        int | None, typer.Option(min=1, help="Only so many layers, with random weights: for models that do not fit.")
    ] = None,
    as_json: JsonOption = False,
    debug: Debug = False,
) -> None:
    """Run a model over ranks of this machine and compare it with the unsharded one, in float32.

    Weights are those of the checkpoint, or random where there are none. Exits with 1 if anything differs.

    Example: paraxis verify org/model --tp 4 --layers 2 --train --generate
    """
    with told(debug), tempfile.TemporaryDirectory(prefix="paraxis-verify-") as made:
        check_model(model)
        check_ranks(tp)
        quiet()
        folder, what = checkpoint(model, layers, made)
        reports = launch(tp, run_rank, Task(folder, train, generate))
        agreed = all(report.agreed for report in reports)
        if is_first():
            show(reports, agreed, tp, what, as_json)
    if not agreed:
        raise typer.Exit(FAILED)


def checkpoint(model: str, layers: int | None, made: str) -> tuple[str, str]:
    """A folder with weights for the ranks to load, and what they are."""
    import torch

    from ..weights.hub import load_config_and_class, resolve_checkpoint

    if layers is None:
        folder = resolve_checkpoint(model, weights=True)
        if any(Path(folder).glob("*.safetensors")):
            return str(folder), "the checkpoint's weights"
    folder = resolve_checkpoint(model, weights=False)
    config, cls, _ = load_config_and_class(folder, {} if layers is None else {"num_hidden_layers": layers})
    config.dtype = torch.float32
    torch.manual_seed(SEED)
    built = cls(config)
    built.save_pretrained(made)
    return made, "random weights" if layers is None else f"random weights, {layers} layers"


def run_rank(task: Task) -> Report:
    """What each rank does."""
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
    """The same random inputs on every rank; ``labelled`` for a model that computes a loss of tokens."""
    import torch

    from ..capture.dummy_inputs import example_call, gives_loss_of_tokens

    _, inputs = example_call(model, None, torch.device("cpu"))
    generator = torch.Generator().manual_seed(SEED)
    vocabulary = getattr(model.config.get_text_config(), "vocab_size", None) or 2
    for name, value in inputs.items():
        if name.endswith("input_ids"):
            inputs[name] = torch.randint(0, vocabulary, (value.shape[0], LENGTH), generator=generator)
        elif value.is_floating_point():
            inputs[name] = torch.randn(value.shape, generator=generator)
    if labelled and gives_loss_of_tokens(model):
        inputs["labels"] = inputs.get("decoder_input_ids", inputs.get("input_ids"))
    return inputs


def show(reports: list[Report], agreed: bool, tp: int, what: str, as_json: bool) -> None:
    first = reports[0]
    if as_json:
        checks = [[asdict(check) | {"passed": check.passed} for check in report.checks] for report in reports]
        data = {
            "agreed": agreed,
            "world_size": tp,
            "weights": what,
            "sharded_fraction": first.fraction,
            "collectives": first.collectives,
            "checks": checks,
        }
        typer.echo(json.dumps(data, indent=1))
        return
    out = console()
    out.print(checks_table([report.checks for report in reports]))
    kinds = ", ".join(f"{n} {kind}" for kind, n in first.collectives.items()) or "no collectives"
    out.print(f"With {what}, {first.fraction:.1%} of the parameters on each of {tp} ranks, {kinds} in a forward pass.")
    verdict = "is the same as" if agreed else "differs from"
    out.print(f"The parallel model {verdict} the unsharded one.", style="bold green" if agreed else "bold red")
