"""`paraxis verify`: compare a parallel model on ranks of this machine with the unsharded model."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from ._checks import Check, all_agree, checks_table, outputs
from ._devices import CPU, CUDA, DeviceOption, choose_device, init_process_group, ranks_per_gpu
from ._errors import FAILED, Debug, UsageError, report_errors
from ._evidence import ReportOption, check_report, write_report
from ._fits import (
    RESERVED_PER_RANK,
    available_memory,
    check_disk,
    check_fits,
    gpu_memory,
    local_ranks,
    parameter_count,
)
from ._launch import check_ranks, console, is_rank0, launch
from ._options import JsonOption, LayersOption, Model, Ranks, check_model, quiet
from ._rounding import compare_models
from ._temporary import temporary_folder

SEED = 0
LENGTH, PROMPT = 16, 6
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Task:
    """What to compare, the same on every rank."""

    folder: str
    train: bool
    generate: bool
    device: str = CPU
    dtype: str = "float32"


@dataclass
class Report:
    """The result of one rank; ``agreed`` is the verdict of all ranks."""

    device: str
    backend: str
    checks: list[Check]
    fraction: float
    collectives: dict[str, int]
    agreed: bool


def command(
    model: Model,
    tp: Ranks = 2,
    train: Annotated[bool, typer.Option("--train", help="Also compare the loss and every gradient.")] = False,
    generate: Annotated[bool, typer.Option("--generate", help="Also compare greedily decoded tokens.")] = False,
    device: DeviceOption = CPU,
    dtype: Annotated[
        str, typer.Option("--dtype", help="float32, or bfloat16 or float16: then both are compared with float32.")
    ] = "float32",
    layers: LayersOption = None,
    report: ReportOption = None,
    as_json: JsonOption = False,
    debug: Debug = False,
) -> None:
    """Run a model on ranks of this machine and compare it with the unsharded model.

    Uses the checkpoint's weights, or random weights if there are none. Every rank also holds the unsharded model. A
    model that does not fit into memory this way is refused at once: check fewer layers of it with --layers. --report
    writes the result with versions, machine and GPUs to a file that you can send. With --device cuda and fewer GPUs
    than ranks, the ranks share GPUs over gloo. Exits with 1 if anything differs.

    Examples: paraxis verify org/model --tp 4 --layers 2 --train --generate

    paraxis verify org/model --tp 8 --device cuda --dtype bfloat16 --generate --report verify.md
    """
    with report_errors(debug), temporary_folder("paraxis-verify-") as temporary:
        if dtype not in DTYPES:
            raise UsageError(f"--dtype {dtype!r} is none of {', '.join(DTYPES)}")
        check_report(report)
        check_model(model)
        check_ranks(tp)
        chosen = choose_device(device, tp, share=True)
        quiet()
        check_memory(model, layers, tp, train, chosen, dtype)
        folder, weights = checkpoint(model, layers, temporary)
        reports = launch(tp, run_rank, Task(folder, train, generate, chosen, dtype))
        agreed = all(each.agreed for each in reports)
        if is_rank0():
            figures = {"model": model, "weights": weights, "dtype": dtype, **figures_of(reports, agreed, tp)}
            if report is not None:
                write_report(report, "Parallel model and unsharded model compared", table_rows(figures))
            show(reports, agreed, figures, as_json)
    if not agreed:
        raise typer.Exit(FAILED)


def check_memory(model: str, layers: int | None, tp: int, train: bool, device: str, dtype: str) -> None:
    """Raise before anything is built if the ranks of this machine do not fit into its memory, or that of a GPU."""
    import torch

    itemsize = getattr(torch, dtype).itemsize
    ranks = ranks_per_gpu(tp) if device == CUDA else local_ranks(tp)

    def needed(parameters: int) -> dict[str, float]:
        shard, unsharded = itemsize * parameters / tp, 4 * parameters  # float32 is the reference for other dtypes
        gathered = itemsize * parameters * (1 if itemsize == 4 else 2)  # for the comparison
        copies = "for the unsharded model" if ranks == 1 else f"for {ranks} copies of the unsharded model, one per rank"
        return {
            copies: ranks * unsharded,
            "for the shards" if ranks > 1 else "for the shard": ranks * shard,
            "for gradients": ranks * (unsharded + shard + gathered) if train else 0,
            "for the processes": ranks * RESERVED_PER_RANK,
        }

    where = "on a GPU" if device == CUDA else "on this machine"
    available = gpu_memory() if device == CUDA else available_memory()
    check_fits(lambda n: parameter_count(model, n), layers, needed, available, where)


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

    def built(parameters: int) -> dict[str, float]:
        return {"for random weights in float32": 4 * parameters}

    check_fits(lambda n: parameter_count(model, n), layers, built, available_memory(), "on this machine")
    check_disk(temporary, 4 * parameter_count(model, layers))
    torch.manual_seed(SEED)
    cls(config).save_pretrained(temporary)
    return temporary, "random weights" if layers is None else f"random weights, {layers} layers"


def run_rank(task: Task) -> Report:
    """Compare the parallel model with the unsharded one, on one rank."""
    import torch
    import torch.distributed as dist

    from .. import ParallelExecutionCtx, parallelize_model
    from ..distributed.exit import end_process_groups

    quiet()
    device = init_process_group(task.device)
    try:
        assert dist.group.WORLD is not None
        dtype = getattr(torch, task.dtype)
        ctx = ParallelExecutionCtx(tp_group=dist.group.WORLD, current_device=device)
        model = parallelize_model(task.folder, ctx, torch_dtype=dtype, show_progress=False).eval()
        unsharded = type(model).from_pretrained(task.folder, dtype=dtype).to(device).eval()
        inputs = rounded(example_inputs(unsharded, task.train), dtype, device)
        prompt = PROMPT if task.generate and unsharded.can_generate() else None

        def run(each: Any, dtype: torch.dtype) -> Any:
            return outputs(each, rounded(inputs, dtype, device), train=task.train, generate=prompt)

        checks = compare_models(run(model, dtype), unsharded, run, dtype)
        assert ctx.plan is not None
        agreed = all_agree(all(check.passed for check in checks), device)
        found = device_name(device), dist.get_backend()
        return Report(*found, checks, ctx.plan.sharded_fraction, ctx.plan.count(), agreed)
    finally:
        end_process_groups()


def rounded(inputs: dict[str, Any], dtype: Any, device: Any) -> dict[str, Any]:
    """The inputs on the device, numbers in the dtype of the model."""
    return {
        name: value.to(device, dtype) if value.is_floating_point() else value.to(device)
        for name, value in inputs.items()
    }


def device_name(device: Any) -> str:
    """The name of a rank's device: the GPU's, or ``cpu``."""
    import torch

    return f"{device}: {torch.cuda.get_device_name(device)}" if device.type == CUDA else str(device)


def example_inputs(model: Any, labelled: bool) -> dict[str, Any]:
    """Random inputs, the same on every rank; ``labelled`` adds labels if the model computes a loss over tokens."""
    import torch

    from ..capture.dummy_inputs import takes_token_labels, text_call

    inputs = text_call(model, torch.device("cpu"))
    alone = not any(value.is_floating_point() for value in inputs.values())  # else ids have to agree with images
    generator = torch.Generator().manual_seed(SEED)
    vocabulary = getattr(model.config.get_text_config(), "vocab_size", None) or 2
    for name, value in inputs.items():
        if name.endswith("input_ids") and alone:
            inputs[name] = torch.randint(0, vocabulary, (value.shape[0], LENGTH), generator=generator)
        elif value.is_floating_point():
            inputs[name] = torch.randn(value.shape, generator=generator)
    if labelled and takes_token_labels(model):
        inputs["labels"] = inputs.get("decoder_input_ids", inputs.get("input_ids"))
    return inputs


def figures_of(reports: list[Report], agreed: bool, tp: int) -> dict[str, Any]:
    """The comparison of all ranks, JSON-serializable."""
    return {
        "agreed": agreed,
        "world_size": tp,
        "devices": [each.device for each in reports],
        "backend": reports[0].backend,
        "sharded_fraction": reports[0].fraction,
        "collectives": reports[0].collectives,
        "checks": [[asdict(check) | {"passed": check.passed} for check in each.checks] for each in reports],
    }


def table_rows(figures: dict[str, Any]) -> dict[str, Any]:
    """The figures with all checks in one list, each with its rank: a table."""
    checks = [{"rank": rank, **check} for rank, each in enumerate(figures["checks"]) for check in each]
    return {**figures, "checks": checks}


def show(reports: list[Report], agreed: bool, figures: dict[str, Any], as_json: bool) -> None:
    """Print the comparison of all ranks."""
    if as_json:
        typer.echo(json.dumps(figures, indent=1))
        return
    first, tp = reports[0], figures["world_size"]
    out = console()
    out.print(checks_table([report.checks for report in reports]))
    kinds = ", ".join(f"{n} {kind.replace('_', '-')}" for kind, n in first.collectives.items()) or "no collectives"
    where = f"{tp} rank{'s' if tp > 1 else ''} ({first.device.partition(':')[0]}, {first.backend}, {figures['dtype']})"
    out.print(
        f"{where}, {figures['weights']}: {first.fraction:.1%} of the parameters per rank, {kinds} per forward pass."
    )
    verdict = "matches" if agreed else "differs from"
    out.print(f"The parallel model {verdict} the unsharded model.", style="bold green" if agreed else "bold red")
