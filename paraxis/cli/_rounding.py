"""Comparing models in a dtype of low precision, where sums in another order round differently.

No fixed limit separates rounding from an error there: it depends on depth and sizes. So both models are compared with
the unsharded model in float32, with the same (rounded) weights. The parallel model may be further away from it than
the unsharded one, but only by a small factor.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ._checks import Check, Outputs, compare, relative_error

if TYPE_CHECKING:
    import torch
    from torch import Tensor

RESULT_FACTOR, GRADIENT_FACTOR = 2.0, 4.0
"""How many times the rounding error of the unsharded model passes; single gradients vary more."""
LOGIT_FACTOR = 4.0
"""Two models, each with an error of e in two logits, can disagree on which is larger up to a gap of 4 e."""


def compare_rounded(
    ours: Outputs, theirs: Outputs, exact: Outputs, dtype: torch.dtype, exact_model: Any
) -> list[Check]:
    """Compare the parallel model (``ours``) and the unsharded one (``theirs``) with the latter in float32."""
    import torch

    eps = torch.finfo(dtype).eps
    names = sorted({*ours.results, *exact.results})
    checks = [
        _ratio(
            f"{name} (rounding)", {name: _errors(name, ours.results, theirs.results, exact.results)}, RESULT_FACTOR, eps
        )
        for name in names
    ]
    if exact.loss is not None:
        error, own = (_distance(each.loss, exact.loss) for each in (ours, theirs))
        # a cross-entropy changes by at most twice the largest error of a logit
        bound = LOGIT_FACTOR * _logit_error(theirs, exact) or eps * max(1.0, abs(float(exact.loss)))
        limit = max(RESULT_FACTOR * own, bound)
        checks.append(Check("loss (abs)", error, limit, f"unsharded: {own:.2g}"))
    if exact.gradients is not None:
        found = [each.gradients or {} for each in (ours, theirs, exact)]
        errors = {name: _errors(name, *found) for name in sorted({*found[0], *found[2]})}
        checks.append(_ratio("gradients (rounding)", errors, GRADIENT_FACTOR, eps))
    if theirs.tokens is not None:
        checks.append(_tokens(ours.tokens, theirs.tokens, _logit_error(theirs, exact), exact_model))
    return checks


def _errors(name: str, ours: dict[str, Any], theirs: dict[str, Any], exact: dict[str, Any]) -> tuple[float, float]:
    """The relative errors of both models; infinite where only one of two has the tensor."""
    reference = exact.get(name)
    pair = [None if each.get(name) is None else each[name].float() for each in (ours, theirs)]
    mine, own = (relative_error(each, reference) for each in pair)
    return mine, own


def _ratio(name: str, errors: dict[str, tuple[float, float]], limit: float, eps: float) -> Check:
    """The largest ratio of the two models' errors; errors below the precision of the dtype count as that."""
    ratios = {each: mine / max(own, eps) for each, (mine, own) in errors.items()}
    # NaN is neither smaller nor larger than anything: `max` alone would miss it.
    worst = max(ratios, key=lambda each: float("inf") if ratios[each] != ratios[each] else ratios[each])
    mine, own = errors[worst]
    where = f", worst of {len(errors)}: {worst}" if len(errors) > 1 else ""
    return Check(name, ratios[worst], limit, f"relative error {mine:.2g}, unsharded {own:.2g}{where}")


def _distance(ours: Tensor | None, exact: Tensor) -> float:
    return float("inf") if ours is None else abs(float(ours) - float(exact))


def _logit_error(theirs: Outputs, exact: Outputs) -> float:
    """The largest absolute rounding error of the unsharded model's logits."""
    return max(
        (
            (theirs.results[name].float() - exact.results[name]).abs().max().item()
            for name in exact.results
            if "logits" in name
        ),
        default=0.0,
    )


def _tokens(ours: Tensor | None, theirs: Tensor, error: float, exact_model: Any) -> Check:
    """Greedy tokens may differ where two logits are nearly equal: the gap in float32 where sequences first differ."""
    import torch

    name = "tokens (logit gap)"
    if ours is None or ours.shape != theirs.shape:
        return Check(name, float("inf"), LOGIT_FACTOR * error, "not the same number of tokens")
    gap = 0.0
    for mine, reference in zip(ours, theirs, strict=True):
        differing = (mine != reference).nonzero()
        if len(differing):
            at = int(differing[0])
            with torch.no_grad():
                logits = exact_model(input_ids=reference[None, :at]).logits[0, -1]
            gap = max(gap, (logits[reference[at]] - logits[mine[at]]).abs().item())
    count = int((ours != theirs).sum())
    return Check(name, gap, LOGIT_FACTOR * error, f"{count} of {theirs.numel()} tokens differ")


def compare_models(ours: Outputs, unsharded: Any, run: Any, dtype: torch.dtype) -> list[Check]:
    """Compare the outputs of the parallel model with the unsharded model, which ``run`` runs; it may be changed.

    In float32 they are compared with each other, in other dtypes both with float32.
    """
    import torch

    theirs = run(unsharded, dtype)
    if dtype == torch.float32:
        return compare(ours, theirs)
    unsharded.zero_grad()
    exact_model = unsharded.float()
    return compare_rounded(ours, theirs, run(exact_model, torch.float32), dtype, exact_model)
