"""Options that several commands have, and their checks."""

from __future__ import annotations

import math
import os
from typing import Annotated, Any

import typer

from ._errors import UsageError

Model = Annotated[str, typer.Argument(help="Hub id, or directory with a config.json.")]
MAX_RANKS = 4096
"""No tensor-parallel group is larger; more is a typing error."""
Ranks = Annotated[int, typer.Option("--tp", min=1, max=MAX_RANKS, help="Tensor-parallel size: the number of ranks.")]
MachineOption = Annotated[
    str | None,
    typer.Option(
        "--machine",
        help="Hardware for the cost model: h100, h200, a100, pcie, nodes, cpu, or a file from `paraxis calibrate`.",
    ),
]
OBJECTIVES = ("prefill", "decode", "training")
ObjectiveOption = Annotated[
    str | None,
    typer.Option(
        "--objective", help="Workload to optimize for: prefill, decode or training; default: a short prefill."
    ),
]
ConstraintOption = Annotated[
    list[str] | None,
    typer.Option(
        "--constraint",
        "-c",
        help="Required NAME=PLACEMENT: '*.down_proj=row', 'lm_head=replicated', 'wte=not vocab'; repeatable.",
    ),
]
MemoryOption = Annotated[
    float | None,
    typer.Option(
        "--memory-limit", help="GB of parameters per rank; within it, parameters stay replicated if that is faster."
    ),
]
RevisionOption = Annotated[
    str | None, typer.Option("--revision", help="Branch, tag or commit of the model on the Hub.")
]
SubfolderOption = Annotated[
    str | None, typer.Option("--subfolder", help="Folder of the model inside its repository or directory.")
]
VariantOption = Annotated[
    str | None, typer.Option("--variant", help="Variant of the weights, as fp16 in model.fp16.safetensors.")
]
TrustOption = Annotated[
    bool,
    typer.Option("--trust-remote-code", help="Run the code that comes with the model; read it first. Nothing asks."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
LayersOption = Annotated[
    int | None, typer.Option("--layers", min=1, help="Use only this many layers, with random weights.")
]
DtypeOption = Annotated[
    str, typer.Option("--dtype", help="Dtype of the weights, as in bfloat16; 'auto' uses the checkpoint's.")
]


def planning_options(
    machine: str | None, objective: str | None, constraints: list[str] | None, memory: float | None
) -> dict[str, Any]:
    """The planning options as keyword arguments of ``plan_model``."""
    if objective not in (None, *OBJECTIVES):
        raise UsageError(f"unknown --objective {objective!r}: use one of {', '.join(OBJECTIVES)}")
    if machine is not None:
        check_machine(machine)
    if memory is not None and not (math.isfinite(memory) and memory > 0):
        raise UsageError(f"--memory-limit {memory:g}: give the GB of parameters per rank, as in 80")
    placements: dict[str, list[str]] = {}
    for text in constraints or []:
        name, separator, placement = text.partition("=")
        if not separator or not name or not placement:
            raise UsageError(f"--constraint {text!r} is not NAME=PLACEMENT, as in '*.down_proj=row'")
        placements.setdefault(name, []).append(placement)
    found: dict[str, Any] = {"machine": machine, "objective": objective}
    if placements:
        found["constraints"] = placements
    if memory is not None:
        found["memory_limit"] = int(memory * 1e9)
    return found


def check_machine(machine: str) -> None:
    """Raise before the work starts if a machine is neither a preset nor a readable file."""
    from ..solver.machine import PRESETS, machine_of

    if machine not in PRESETS and not os.path.exists(machine):
        raise UsageError(
            f"--machine {machine!r} is neither a preset ({', '.join(PRESETS)}) nor a file; `paraxis calibrate` "
            "measures this machine and writes one"
        )
    machine_of(machine)


def check_model(model: str, subfolder: str | None = None) -> None:
    """Raise before anything is imported if a path cannot be a model."""
    if subfolder and os.path.isdir(model):
        model = os.path.join(model, subfolder)
        if not os.path.isdir(model):
            raise ValueError(f"--subfolder {subfolder!r}: there is no directory {model!r}")
    if not model.strip():
        raise UsageError("the model name is empty: give a Hub id, or a directory with a config.json")
    if model.startswith((".", "~", os.sep)) and not os.path.exists(os.path.expanduser(model)):
        raise ValueError(f"the directory {model!r} does not exist: give one with a config.json, or a Hub id")
    if os.path.isfile(model):
        raise ValueError(f"{model!r} is a file: give the directory with its config.json, or a Hub id")
    if os.path.isdir(model) and not os.path.isfile(os.path.join(model, "config.json")):
        raise ValueError(f"{model!r} has no config.json: give a directory written by save_pretrained, or a Hub id")


def check_dtype(dtype: str) -> None:
    """Raise before ranks start if a dtype is no floating-point dtype of torch."""
    import torch

    found = getattr(torch, dtype.removeprefix("torch."), None)
    if dtype != "auto" and not (isinstance(found, torch.dtype) and found.is_floating_point):
        raise UsageError(
            f"--dtype {dtype!r} is no floating-point dtype: use 'auto', or for example bfloat16 or float32"
        )


def quiet() -> None:
    """Silence warnings and progress bars of libraries: only the command prints."""
    import logging
    import warnings

    warnings.simplefilter("ignore")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
