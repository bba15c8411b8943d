"""`paraxis demo`: a small model, split over a few processes of this machine, and compared with the whole one.

It needs no GPU, no network and no checkpoint, and it fails if the parallel model differs from the original in
its logits, its loss, any gradient or any generated token, on any rank.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ._checks import Check, all_agree, checks_table, compare, outputs
from ._errors import FAILED, Debug, told
from ._launch import check_ranks, console, is_first, launch
from ._planning import MOST_RANKS, JsonOption, quiet

if TYPE_CHECKING:
    from rich.table import Table
    from torch import Tensor, nn

    from ..plan import Plan

SEED = 0
BATCH, LENGTH = 2, 32  # of the tokens that are compared
PROMPT, NEW_TOKENS = 8, 12

MB = 1e6


@dataclass
class RankReport:
    """What one rank found and used. `agreed` is the verdict of all ranks together."""

    rank: int
    local_mb: float
    total_mb: float
    load_seconds: float
    forward_ms: float
    peak_mb: float
    checks: list[Check] = field(default_factory=list)
    agreed: bool = False


def command(
    tp: Annotated[
        int, typer.Option("--tp", min=1, max=MOST_RANKS, help="Number of processes to split the model over.")
    ] = 2,
    as_json: JsonOption = False,
    debug: Debug = False,
) -> None:
    """Split a small Llama over local processes and check it against the whole model.

    Shows the plan, then compares logits, loss, gradients and tokens on every rank.
    Exits with an error if anything differs.

    Example: paraxis demo --tp 4
    """
    with told(debug):
        check_ranks(tp)
        quiet()
        with tempfile.TemporaryDirectory(prefix="paraxis-demo-") as directory:
            parameters = save_model(directory)
            if is_first() and not as_json:
                text = f"A model of {parameters / 1e6:.1f} M parameters over {tp} ranks (CPU, gloo)."
                console().print(text)
                sys.stdout.flush()  # the first rank goes on, with a stream of its own
            reports = launch(tp, run_rank, directory, not as_json)
        agreed = all(report.agreed for report in reports)
        if is_first():
            show(reports, agreed, tp, as_json)
    if not agreed:
        raise typer.Exit(FAILED)


def show(reports: list[RankReport], agreed: bool, tp: int, as_json: bool) -> None:
    """What all ranks found; under another launcher, what this one did."""
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
        out.print(f"The model on {tp} ranks is the same as on one.", style="bold green")
    else:
        out.print("The parallel model differs from the original.", style="bold red")


def save_model(directory: str | Path) -> int:
    """Writes the demo's model as a checkpoint and returns its number of parameters."""
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
        # Random weights of the usual size repeat the last token for ever, which would prove little.
        initializer_range=0.1,
        # No token ends a sequence, so every generation has its full length.
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        dtype="float32",
    )
    torch.manual_seed(SEED)
    model = LlamaForCausalLM(config)
    model.save_pretrained(directory)
    return sum(parameter.numel() for parameter in model.parameters())


def run_rank(directory: str, shown: bool) -> RankReport:
    """What each rank does: parallelize the checkpoint, use it, and compare it with the unsharded model."""
    import torch
    import torch.distributed as dist
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    from .. import ParallelExecutionCtx, parallelize_model

    dist.init_process_group("gloo")
    world = dist.group.WORLD
    assert world is not None  # for the type checker: it was made a line above
    ctx = ParallelExecutionCtx(tp_group=world, current_device=torch.device("cpu"))
    start = time.perf_counter()
    model = parallelize_model(directory, ctx)
    load_seconds = time.perf_counter() - start
    if dist.get_rank() == 0 and shown:
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
        peak_mb=peak_memory() / MB,  # before anything is gathered, and before the unsharded model is there
    )
    inputs = {"input_ids": tokens, "labels": tokens}
    ours = outputs(model, inputs, train=True, generate=PROMPT, new_tokens=NEW_TOKENS)
    logging.disable_progress_bar()
    unsharded = AutoModelForCausalLM.from_pretrained(directory)
    theirs = outputs(unsharded, inputs, train=True, generate=PROMPT, new_tokens=NEW_TOKENS)
    report.checks = compare(ours, theirs)
    report.agreed = all_agree(all(check.passed for check in report.checks))
    dist.destroy_process_group()
    return report


def example_tokens(vocab_size: int) -> Tensor:
    """The same random tokens on every rank."""
    import torch

    generator = torch.Generator().manual_seed(SEED)
    return torch.randint(vocab_size, (BATCH, LENGTH), generator=generator)


def time_forward(model: nn.Module, tokens: Tensor, repeats: int = 5) -> float:
    """Milliseconds of a forward pass, compilation not included."""
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
    """Bytes of all parameters: those this rank holds, or those of the whole model."""
    total = 0
    for parameter in model.parameters():
        held: Any = parameter
        if local and hasattr(held, "to_local"):
            held = held.to_local()
        total += held.numel() * held.element_size()
    return total


def peak_memory() -> float:
    """The largest resident size of this process so far, in bytes."""
    try:
        # Not getrusage: on Linux, a process starts with the peak of the one that launched it.
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return float(line.split()[1]) * 1024
    except OSError:
        pass
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return float(peak) * (1 if sys.platform == "darwin" else 1024)


def show_plan(plan: Plan) -> None:
    """Print the plan: a row per kind of layer, and what stays whole."""
    console().print(plan.table())
    vectors = [name for name, _ in plan.replicated if len(plan.parameters[name].global_shape) < 2]
    console().print(f"Whole on every rank: {len(vectors)} vectors (the weights of norms).")


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
            "[green]same[/green]" if passed else "[red]differs[/red]",
        )
    return table
