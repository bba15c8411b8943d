"""Comparing a parallel model with the unsharded one: outputs, loss, gradients and generated tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table
    from torch import Tensor

OUTPUT_LIMIT = 1e-4  # largest absolute difference
LOSS_LIMIT = 1e-5
GRADIENT_LIMIT = 1e-3  # norm of the difference, relative to the norm of the gradient


@dataclass(frozen=True)
class Check:
    """One comparison with the unsharded model: the error, and the largest error that passes."""

    name: str
    error: float
    limit: float
    detail: str = ""

    @property
    def passed(self) -> bool:
        """Whether the error is within the limit."""
        return self.error <= self.limit  # False for NaN, too


@dataclass
class Outputs:
    """The full tensors to compare; None for those that were not requested."""

    results: dict[str, Tensor] = field(default_factory=dict)
    loss: Tensor | None = None
    gradients: dict[str, Tensor | None] | None = None
    tokens: Tensor | None = None


def outputs(
    model: Any, inputs: dict[str, Any], train: bool = False, generate: int | None = None, new_tokens: int = 12
) -> Outputs:
    """Run a forward pass, with ``train`` a backward pass, and generation after ``generate`` tokens of the input.

    The backward pass starts from the loss if ``inputs`` have ``labels``, else from a weighted sum of all results.
    """
    import torch

    plain = {name: value for name, value in inputs.items() if name != "labels"}
    with torch.no_grad():
        found = Outputs(results(model(**plain)))
    if train:
        returned = model(**inputs)
        loss = getattr(returned, "loss", None)
        found.loss = None if loss is None else full_tensor(loss.detach())
        (weighted_sum(returned) if loss is None else loss).backward()
        found.gradients = {
            name: None if parameter.grad is None else full_tensor(parameter.grad)
            for name, parameter in model.named_parameters()
        }
    if generate is not None:
        prompt = inputs["input_ids"][:, :generate]
        options = {"attention_mask": torch.ones_like(prompt), "do_sample": False}
        found.tokens = model.generate(prompt, max_new_tokens=new_tokens, min_new_tokens=new_tokens, **options)
    return found


def results(returned: Any) -> dict[str, Tensor]:
    """Every floating-point tensor that a model returns, by name, without KV caches."""
    import torch

    named: dict[str, Tensor] = {}

    def add(name: str, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            if value.is_floating_point():
                named[name or "output"] = full_tensor(value)
        elif isinstance(value, dict):
            for key, inner in value.items():
                add(f"{name}.{key}" if name else str(key), inner)
        elif isinstance(value, (tuple, list)):
            for index, inner in enumerate(value):
                add(f"{name}.{index}" if name else str(index), inner)

    add("", returned)
    return {name: value for name, value in named.items() if not name.startswith("past_key_values")}


def weighted_sum(returned: Any) -> Tensor:
    """A scalar that depends on every element of every result, each with its own random weight."""
    import torch

    generator = torch.Generator().manual_seed(0)
    total = torch.zeros(())
    for _, value in sorted(results(returned).items()):
        weights = torch.randn(value.shape, generator=generator).to(value)
        if value.requires_grad:
            total = total.to(value.device) + (value * weights).sum() / value.numel() ** 0.5
    return total


def full_tensor(tensor: Any) -> Tensor:
    """The full tensor of a sharded one; a plain tensor unchanged."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def compare(ours: Outputs, theirs: Outputs) -> list[Check]:
    """Compare the outputs of the parallel model (``ours``) with those of the unsharded one (``theirs``)."""
    checks = [
        Check(f"{name} (max abs)", difference(ours.results.get(name), theirs.results.get(name)), OUTPUT_LIMIT)
        for name in sorted({*ours.results, *theirs.results})
    ]
    if theirs.loss is not None:
        checks.append(Check("loss (abs)", difference(ours.loss, theirs.loss), LOSS_LIMIT))
    if theirs.gradients is not None:
        checks.append(compare_gradients(ours.gradients or {}, theirs.gradients))
    if theirs.tokens is not None:
        checks.append(compare_tokens(ours.tokens, theirs.tokens))
    return checks


def compare_tokens(ours: Tensor | None, theirs: Tensor) -> Check:
    """The number of generated tokens that differ: none may."""
    comparable = ours is not None and ours.shape == theirs.shape
    differing = (ours != theirs).sum().item() if comparable else float("inf")  # type: ignore[union-attr]
    return Check("tokens (differing)", differing, 0, f"{theirs.numel()} tokens, prompts included")


def difference(ours: Tensor | None, theirs: Tensor | None) -> float:
    """The largest absolute difference; infinite if a tensor is missing or the shapes differ."""
    if ours is None or theirs is None or ours.shape != theirs.shape:
        return float("inf")
    return (ours - theirs).abs().max().item() if theirs.numel() else 0.0


def compare_gradients(ours: dict[str, Tensor | None], theirs: dict[str, Tensor | None]) -> Check:
    """The largest relative error over all parameters, and its parameter."""
    errors = {name: relative_error(ours.get(name), theirs.get(name)) for name in sorted({*ours, *theirs})}
    # NaN is neither smaller nor larger than anything: `max` alone would miss it.
    worst = max(errors, key=lambda name: float("inf") if errors[name] != errors[name] else errors[name])
    return Check("gradients (relative)", errors[worst], GRADIENT_LIMIT, f"worst of {len(errors)}: {worst}")


def relative_error(ours: Tensor | None, theirs: Tensor | None) -> float:
    """The norm of the difference over the norm of the reference; infinite if one of them is missing."""
    if ours is None or theirs is None or ours.shape != theirs.shape:
        return 0.0 if ours is theirs else float("inf")
    return ((ours - theirs).norm() / theirs.norm().clamp_min(1e-12)).item()


def all_agree(passed: bool, device: Any = None) -> bool:
    """Whether the checks passed on every rank; ``device`` is the one that the ranks communicate from."""
    import torch
    import torch.distributed as dist

    flag = torch.tensor(int(passed), device=device)
    dist.all_reduce(flag, op=dist.ReduceOp.MIN)
    return bool(flag.item())


def checks_table(by_rank: Sequence[list[Check]]) -> Table:
    """One row per check, with its largest error over the ranks."""
    from rich.table import Table

    table = Table("check", "error (worst rank)", "limit", "result", "", title="Parallel vs. unsharded model")
    for checks in zip(*by_rank):
        failed = [check for check in checks if not check.passed]
        worst = failed[0] if failed else max(checks, key=lambda check: check.error)
        verdict = "[red]differs[/red]" if failed else "[green]match[/green]"
        table.add_row(worst.name, f"{worst.error:.3g}", f"{worst.limit:.3g}", verdict, worst.detail)
    return table
