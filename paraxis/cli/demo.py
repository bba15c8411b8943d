"""`paraxis demo`: shard a small model over processes of this machine and compare it with the unsharded model.

It needs no GPU, no network and no checkpoint, and fails if the logits, the loss, any gradient or any generated token
differs on any rank.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ._checks import Check, all_agree, checks_table, compare, outputs
from ._errors import FAILED, Debug, report_errors
from ._launch import check_ranks, console, is_rank0, launch
from ._options import JsonOption, Ranks, quiet
from ._temporary import temporary_folder

if TYPE_CHECKING:
    from rich.table import Table
    from torch import Tensor, nn

    from ..plan import Plan

SEED = 0
BATCH, LENGTH = 2, 32  # of the input
PROMPT, NEW_TOKENS = 8, 12

MB = 1e6


@dataclass
class RankReport:
    """Checks, memory and times of one rank; `agreed` is the verdict of all ranks."""

    rank: int
    local_mb: float
    total_mb: float
    load_seconds: float
    forward_ms: float
    peak_mb: float
    checks: list[Check] = field(default_factory=list)
    agreed: bool = False


def command(
    tp: Ranks = 2,
    as_json: JsonOption = False,
    debug: Debug = False,
) -> None:
    """Shard a small Llama over local CPU processes and compare it with the unsharded model.

    Shows the plan, then compares logits, loss, gradients and generated tokens on every rank. Exits with 1 if anything
    differs.

    Example: paraxis demo --tp 4
    """
    with report_errors(debug):
        check_ranks(tp)
        quiet()
        with temporary_folder("paraxis-demo-") as directory:
            parameters = save_model(directory)
            if is_rank0() and not as_json:
                text = f"A model with {parameters / 1e6:.1f} M parameters on {tp} ranks (CPU, gloo)."
                console().print(text)
                sys.stdout.flush()  # rank 0 prints next, to its own stream
            reports = launch(tp, run_rank, directory, not as_json)
        agreed = all(report.agreed for report in reports)
        if is_rank0():
            show(reports, agreed, tp, as_json)
    if not agreed:
        raise typer.Exit(FAILED)


def show(reports: list[RankReport], agreed: bool, tp: int, as_json: bool) -> None:
    """Print the results of all ranks; under torchrun, of this rank."""
    if as_json:
        ranks = [
            {**asdict(each), "checks": [asdict(c) | {"passed": c.passed} for c in each.checks]} for each in reports
        ]
        typer.echo(json.dumps({"agreed": agreed, "world_size": tp, "ranks": ranks}, indent=1))
        return
    out = console()
    out.print(checks_table([report.checks for report in reports]))
    out.print(ranks_table(reports))
    if agreed:
        out.print(f"The parallel model on {tp} ranks matches the unsharded model.", style="bold green")
    else:
        out.print("The parallel model differs from the unsharded model.", style="bold red")


def save_model(directory: str | Path) -> int:
    """Write the demo's model as a checkpoint and return its number of parameters."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=4096,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        # With the usual standard deviation a random model repeats its last token, which would prove little.
        initializer_range=0.1,
        # Without these, every generation has the full length.
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        dtype="float32",
    )
    torch.manual_seed(SEED)
    model = LlamaForCausalLM(config)
    model.save_pretrained(directory)
    return sum(parameter.numel() for parameter in model.parameters())


def run_rank(directory: str, print_plan: bool) -> RankReport:
    """Parallelize the checkpoint, run it, and compare it with the unsharded model, on one rank."""
    import torch
    import torch.distributed as dist
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    from .. import ParallelExecutionCtx, parallelize_model
    from ..distributed.exit import end_process_groups

    dist.init_process_group("gloo")
    world = dist.group.WORLD
    assert world is not None
    ctx = ParallelExecutionCtx(tp_group=world, current_device=torch.device("cpu"))
    start = time.perf_counter()
    model = parallelize_model(directory, ctx)
    load_seconds = time.perf_counter() - start
    if dist.get_rank() == 0 and print_plan:
        assert ctx.plan is not None, "parallelize_model returned without a plan"
        show_plan(ctx.plan)

    tokens = example_tokens(model.config.vocab_size)
    forward_ms = time_forward(model, tokens)
    report = RankReport(
        rank=dist.get_rank(),
        local_mb=parameter_bytes(model, local=True) / MB,
        total_mb=parameter_bytes(model, local=False) / MB,
        load_seconds=load_seconds,
        forward_ms=forward_ms,
        peak_mb=peak_memory() / MB,  # before anything is gathered and the unsharded model is loaded
    )
    inputs = {"input_ids": tokens, "labels": tokens}
    ours = outputs(model, inputs, train=True, generate=PROMPT, new_tokens=NEW_TOKENS)
    logging.disable_progress_bar()
    unsharded = AutoModelForCausalLM.from_pretrained(directory)
    theirs = outputs(unsharded, inputs, train=True, generate=PROMPT, new_tokens=NEW_TOKENS)
    report.checks = compare(ours, theirs)
    report.agreed = all_agree(all(check.passed for check in report.checks))
    end_process_groups()
    return report


def example_tokens(vocab_size: int) -> Tensor:
    """Random tokens, the same on every rank."""
    import torch

    generator = torch.Generator().manual_seed(SEED)
    return torch.randint(vocab_size, (BATCH, LENGTH), generator=generator)


def time_forward(model: nn.Module, tokens: Tensor, repeats: int = 5) -> float:
    """Milliseconds per forward pass, without compilation."""
    import torch

    times = []
    with torch.no_grad():
        model(input_ids=tokens)
        for _ in range(repeats):
            start = time.perf_counter()
            model(input_ids=tokens)
            times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times)


def parameter_bytes(model: nn.Module, local: bool) -> int:
    """Bytes of all parameters: of this rank's shards if ``local``, else of the full model."""
    total = 0
    for parameter in model.parameters():
        tensor: Any = parameter
        if local and hasattr(tensor, "to_local"):
            tensor = tensor.to_local()
        total += tensor.numel() * tensor.element_size()
    return total


def peak_memory() -> float:
    """The peak resident memory of this process, in bytes."""
    try:
        # Not getrusage: on Linux, a process inherits the peak of the process that launched it.
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return float(line.split()[1]) * 1024
    except OSError:
        pass
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return float(peak) * (1 if sys.platform == "darwin" else 1024)


def show_plan(plan: Plan) -> None:
    """Print the plan: a row per kind of layer, and the number of replicated vectors."""
    console().print(plan.table())
    vectors = [name for name, _ in plan.replicated if len(plan.parameters[name].global_shape) < 2]
    console().print(f"Replicated: {len(vectors)} vectors (weights of norms).")


def ranks_table(reports: list[RankReport]) -> Table:
    """Time and memory of each rank."""
    from rich.table import Table

    table = Table(title="Per rank")
    for heading in ("rank", "parameters", "of", "load", "forward", "peak memory", "result"):
        table.add_column(heading, justify="right")
    for report in reports:
        passed = all(check.passed for check in report.checks)
        table.add_row(
            str(report.rank),
            f"{report.local_mb:.2f} MB",
            f"{report.total_mb:.2f} MB",
            f"{report.load_seconds:.2f} s",
            f"{report.forward_ms:.1f} ms",
            f"{report.peak_mb:.0f} MB",
            "[green]match[/green]" if passed else "[red]differs[/red]",
        )
    return table
