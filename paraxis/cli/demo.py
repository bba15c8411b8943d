"""`paraxis demo`: a small model, split over a few processes of this machine, and compared with the whole one.

It needs no GPU, no network and no checkpoint, and it fails if the parallel model differs from the original in
its logits, its loss, any gradient or any generated token, on any rank.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from paraxis.cli._launch import RankFailed, console, launch

if TYPE_CHECKING:
    from torch import Tensor, nn

    from paraxis.plan import Plan

SEED = 0
BATCH, LENGTH = 2, 32  # of the tokens that are compared
PROMPT, NEW_TOKENS = 8, 12

LOGITS_LIMIT = 1e-4  # largest absolute difference
LOSS_LIMIT = 1e-5
GRADIENT_LIMIT = 1e-3  # norm of the difference, relative to the norm of the gradient

MB = 1e6


@dataclass(frozen=True)
class Check:
    """One comparison with the unsharded model: how far off it is, and how far off it may be."""

    name: str
    error: float
    limit: float
    detail: str = ""

    @property
    def passed(self) -> bool:
        return self.error <= self.limit  # False for NaN, too


@dataclass(frozen=True)
class Outputs:
    """All that is compared, as whole tensors."""

    logits: Tensor
    loss: Tensor
    gradients: dict[str, Tensor | None]
    tokens: Tensor


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
    tp: Annotated[int, typer.Option("--tp", min=1, help="Number of processes to split the model over.")] = 2,
) -> None:
    """Split a small Llama over local processes and check it against the whole model.

    Shows the plan, then compares logits, loss, gradients and tokens on every rank.
    Exits with an error if anything differs.
    """
    out = console()
    with tempfile.TemporaryDirectory(prefix="paraxis-demo-") as directory:
        parameters = save_model(directory)
        out.print(f"A Llama of {parameters / 1e6:.1f} M parameters over {tp} ranks (CPU, gloo).")
        try:
            reports = launch(tp, run_rank, directory)
        except RankFailed as error:
            out.print(str(error), style="red", markup=False, highlight=False)
            raise typer.Exit(1) from None
    out.print(checks_table(reports))
    out.print(ranks_table(reports))
    if not all(report.agreed for report in reports):
        out.print("The parallel model differs from the original.", style="bold red")
        raise typer.Exit(1)
    out.print(f"The model on {tp} ranks is the same as on one.", style="bold green")


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


def run_rank(directory: str) -> RankReport:
    """What each rank does: parallelize the checkpoint, use it, and compare it with the unsharded model."""
    import torch
    import torch.distributed as dist
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    from paraxis import ParallelExecutionCtx, parallelize_model

    dist.init_process_group("gloo")
    world = dist.group.WORLD
    assert world is not None  # for the type checker: it was made a line above
    ctx = ParallelExecutionCtx(tp_group=world, current_device=torch.device("cpu"))
    start = time.perf_counter()
    model = parallelize_model(directory, ctx)
    load_seconds = time.perf_counter() - start
    if dist.get_rank() == 0:
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
    ours = outputs(model, tokens)
    logging.disable_progress_bar()
    theirs = outputs(AutoModelForCausalLM.from_pretrained(directory), tokens)
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


def outputs(model: Any, tokens: Tensor) -> Outputs:
    """Uses the model as any user would, sharded or not: a forward pass, a backward pass, a generation."""
    import torch

    with torch.no_grad():
        logits = whole(model(input_ids=tokens).logits)
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    gradients = {
        name: None if parameter.grad is None else whole(parameter.grad) for name, parameter in model.named_parameters()
    }
    prompt = tokens[:, :PROMPT]
    generated = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=NEW_TOKENS, do_sample=False
    )
    return Outputs(logits, whole(loss.detach()), gradients, generated)


def whole(tensor: Any) -> Tensor:
    """The full tensor of a sharded one, and a plain one as it is."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def compare(ours: Outputs, theirs: Outputs) -> list[Check]:
    """The checks of the demo, the parallel model's outputs against the unsharded one's."""
    return [
        Check("logits (max abs)", difference(ours.logits, theirs.logits), LOGITS_LIMIT),
        Check("loss (abs)", difference(ours.loss, theirs.loss), LOSS_LIMIT),
        compare_gradients(ours.gradients, theirs.gradients),
        compare_tokens(ours.tokens, theirs.tokens),
    ]


def compare_tokens(ours: Tensor, theirs: Tensor) -> Check:
    """How many generated tokens differ: none may."""
    differing = (ours != theirs).sum().item() if ours.shape == theirs.shape else float("inf")
    return Check("tokens (differing)", differing, 0, f"{NEW_TOKENS} new tokens for each of {BATCH} prompts")


def difference(ours: Tensor, theirs: Tensor) -> float:
    """The largest absolute difference; infinite where the shapes differ."""
    if ours.shape != theirs.shape:
        return float("inf")
    return (ours - theirs).abs().max().item()


def compare_gradients(ours: dict[str, Tensor | None], theirs: dict[str, Tensor | None]) -> Check:
    """The worst relative error over all parameters, and whose it is."""
    errors = {name: relative_error(ours.get(name), theirs.get(name)) for name in sorted({*ours, *theirs})}
    # NaN compares with nothing, so it has to be looked for.
    worst = max(errors, key=lambda name: float("inf") if errors[name] != errors[name] else errors[name])
    return Check("gradients (relative)", errors[worst], GRADIENT_LIMIT, f"worst of {len(errors)}: {worst}")


def relative_error(ours: Tensor | None, theirs: Tensor | None) -> float:
    """The norm of the difference over the norm of the reference; infinite where one of them is missing."""
    if ours is None or theirs is None or ours.shape != theirs.shape:
        return 0.0 if ours is theirs else float("inf")
    return ((ours - theirs).norm() / theirs.norm().clamp_min(1e-12)).item()


def all_agree(passed: bool) -> bool:
    """Whether every rank has passed, known to every rank."""
    import torch
    import torch.distributed as dist

    flag = torch.tensor(int(passed))
    dist.all_reduce(flag, op=dist.ReduceOp.MIN)
    return bool(flag.item())


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


def checks_table(reports: list[RankReport]) -> Table:
    """Each check with its worst result over the ranks."""
    table = Table("check", "error (worst rank)", "limit", "result", "", title="Against the unsharded model")
    for checks in zip(*(report.checks for report in reports)):
        failed = [check for check in checks if not check.passed]
        worst = failed[0] if failed else max(checks, key=lambda check: check.error)
        verdict = "[red]differs[/red]" if failed else "[green]same[/green]"
        table.add_row(worst.name, f"{worst.error:.3g}", f"{worst.limit:g}", verdict, worst.detail)
    return table


def ranks_table(reports: list[RankReport]) -> Table:
    """Time and memory of each rank."""
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
