"""What the commands that plan share: how the model, the ranks and the wishes are given."""

from __future__ import annotations

import math
import os
from typing import Annotated, Any

import typer

from ._errors import UsageError

Model = Annotated[str, typer.Argument(help="A Hub id, or a directory with a config.json; weights are not needed.")]
MOST_RANKS = 4096
"""More ranks than any tensor-parallel group has: a slip of the hand."""
Ranks = Annotated[int, typer.Option("--tp", min=1, max=MOST_RANKS, help="Number of ranks to split the model over.")]
MachineOption = Annotated[
    str | None,
    typer.Option("--machine", help="Preset (h100, h200, a100, pcie, nodes, cpu) or a file that `calibrate` wrote."),
]
OBJECTIVES = ("prefill", "decode", "training")
ObjectiveOption = Annotated[
    str | None, typer.Option("--objective", help="What to be cheap for: prefill, decode or training.")
]
ConstraintOption = Annotated[
    list[str] | None,
    typer.Option("--constraint", "-c", help="PATTERN=WISH, as in '*.down_proj=row' or 'lm_head=not whole'."),
]
MemoryOption = Annotated[
    float | None, typer.Option("--memory-limit", help="GB that the parameters of a rank may take.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print plain data.")]


def planning_options(
    machine: str | None, objective: str | None, constraints: list[str] | None, memory: float | None
) -> dict[str, Any]:
    """The options of a plan as keyword arguments."""
    if objective not in (None, *OBJECTIVES):
        raise UsageError(f"--objective {objective!r} is not known: use one of {', '.join(OBJECTIVES)}")
    if machine is not None:
        check_machine(machine)
    if memory is not None and not (math.isfinite(memory) and memory > 0):
        raise UsageError(f"--memory-limit {memory:g}: give the GB that a rank has for parameters, as in 80")
    wishes: dict[str, list[str]] = {}
    for text in constraints or []:
        pattern, separator, wish = text.partition("=")
        if not separator or not pattern or not wish:
            raise UsageError(f"--constraint {text!r} is not of the form PATTERN=WISH, as in '*.down_proj=row'")
        wishes.setdefault(pattern, []).append(wish)
    found: dict[str, Any] = {"machine": machine, "objective": objective}
    if wishes:
        found["constraints"] = wishes
    if memory is not None:
        found["memory_limit"] = int(memory * 1e9)
    return found


def check_machine(machine: str) -> None:
    """Say that a machine is not known before the work is done."""
    from ..solver.machine import PRESETS, machine_of

    if machine not in PRESETS and not os.path.exists(machine):
        raise UsageError(
            f"--machine {machine!r} is neither a preset ({', '.join(PRESETS)}) nor a file; `paraxis calibrate` "
            "measures this machine and writes one"
        )
    machine_of(machine)


def check_model(model: str) -> None:
    """Say what is wrong with a path before anything is imported."""
    if not model.strip():
        raise UsageError("the model has no name: give a Hub id, or a directory with a config.json")
    if model.startswith((".", "~", os.sep)) and not os.path.exists(os.path.expanduser(model)):
        raise ValueError(f"there is no directory {model!r}: give one with a config.json, or a Hub id")
    if os.path.isfile(model):
        raise ValueError(f"{model!r} is a file; give the directory with its config.json, or a Hub id")
    if os.path.isdir(model) and not os.path.isfile(os.path.join(model, "config.json")):
        raise ValueError(f"{model!r} has no config.json; give a directory written by save_pretrained, or a Hub id")


def check_dtype(dtype: str) -> None:
    """Say that a dtype is not known before ranks are started."""
    import torch

    found = getattr(torch, dtype.removeprefix("torch."), None)
    if dtype != "auto" and not (isinstance(found, torch.dtype) and found.is_floating_point):
        raise UsageError(f"--dtype {dtype!r} is not a dtype of weights: use 'auto', or one as bfloat16 or float32")


def quiet() -> None:
    """Only what the command itself has to say."""
    import logging
    import warnings

    warnings.simplefilter("ignore")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
