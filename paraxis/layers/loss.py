"""Cross entropy on logits that are sharded on the vocabulary: the full logits never exist, forward or backward."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.function import once_differentiable

from ..compat.torch import legacy_reduction
from ..context import ParallelExecutionCtx
from ..distributed import all_gather, all_reduce
from ..placement import Layout
from ..rules.indexing import local_ids


class _CrossEntropy(torch.autograd.Function):
    """The loss of every target from logits [..., local classes]; zero for ignored targets.

    With p the softmax, w the class weights (one without), W their sum, t the target's class, e the label
    smoothing and C the number of classes, the loss is

        (1 - e) w_t (lse - z_t)  +  e/C (W lse - sum_c w_c z_c)

    and its gradient by z_c

        ((1 - e) w_t + e W/C) p_c  -  (1 - e) w_t [c = t]  -  e/C w_c.

    Forward has two all-reduces, a maximum and a sum; backward has none. Saved for the backward pass are the logits
    and a few numbers per target, not the probabilities.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        target: torch.Tensor,
        group: Any,
        start: int,
        classes: int,
        weight: torch.Tensor | None,
        ignore_index: int,
        smoothing: float,
    ) -> torch.Tensor:
        stop = start + logits.shape[-1]
        ignored = target == ignore_index
        index, elsewhere = local_ids(target.masked_fill(ignored, start), start, stop, classes)
        accumulate = torch.promote_types(logits.dtype, torch.float32)

        highest = all_reduce(logits.amax(-1).to(accumulate), group, "max").unsqueeze(-1)
        shifted = logits - highest  # promotes narrow logits without a copy of them
        chosen = shifted.gather(-1, index.unsqueeze(-1)).squeeze(-1).masked_fill(elsewhere, 0)
        sums = [chosen]
        if smoothing:
            sums.append(shifted.sum(-1) if weight is None else shifted @ weight[start:stop].to(accumulate))
        sums.append(shifted.exp_().sum(-1))  # last: it overwrites
        chosen, *spread, exps = all_reduce(torch.stack(sums), group).unbind()

        lse = exps.log()
        loss = lse - chosen
        scale = None
        if weight is not None:
            scale = weight.to(accumulate)[target.masked_fill(ignored, 0)]
            loss = loss * scale
        if smoothing:
            total = classes if weight is None else weight.to(accumulate).sum()
            loss = (1 - smoothing) * loss + smoothing / classes * (total * lse - spread[0])
        ctx.save_for_backward(logits, highest, exps, index, elsewhere, ignored, scale, weight)
        ctx.start, ctx.stop, ctx.classes, ctx.smoothing = start, stop, classes, smoothing
        return loss.masked_fill(ignored, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        logits, highest, exps, index, elsewhere, ignored, scale, weight = ctx.saved_tensors
        grad = grad.masked_fill(ignored, 0).unsqueeze(-1)
        on_target = grad if scale is None else grad * scale.unsqueeze(-1)
        on_all = on_target
        smoothing = ctx.smoothing
        if smoothing:
            on_target = (1 - smoothing) * on_target
            share = smoothing / ctx.classes
            total = ctx.classes if weight is None else weight.to(grad.dtype).sum()
            on_all = on_target + share * total * grad
        result = (logits - highest).exp_().mul_(on_all / exps.unsqueeze(-1))
        if smoothing:
            result -= share * grad * (1 if weight is None else weight[ctx.start : ctx.stop].to(grad.dtype))
        result.scatter_add_(-1, index.unsqueeze(-1), -on_target.masked_fill(elsewhere.unsqueeze(-1), 0))
        # A logit of -inf in an ignored row, or a loss of infinity, must not turn the zeros into NaN.
        result.masked_fill_(ignored.unsqueeze(-1), 0)
        return (result.to(logits.dtype), *(None,) * 7)


def vocab_parallel_cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    group: dist.ProcessGroup,
    vocab_start: int,
    vocab_size: int,
    weight: torch.Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """``F.cross_entropy`` of the full logits, value and gradient, without an all-gather.

    Args:
        logits: This rank's classes ``vocab_start`` and following, of shape [C], [N, C] or [N, C, d1, ...].
            Ranks may have different numbers of them. Narrower logits are accumulated in float32.
        target: Class indices of shape [], [N] or [N, d1, ...], the same on every rank.
        group: The ranks that hold the classes.
        vocab_start: The first class this rank holds.
        vocab_size: The total number of classes.
        weight: A weight for each of all ``vocab_size`` classes.
        ignore_index: Targets with this value do not count.
        reduction: "mean", "sum" or "none".
        label_smoothing: How much of the target is spread over all classes.
    """
    classes_last = logits.movedim(1, -1) if logits.ndim > 1 else logits
    _check(classes_last, target, vocab_start, vocab_size, weight, reduction, label_smoothing)
    loss = _CrossEntropy.apply(
        classes_last, target, group, vocab_start, vocab_size, weight, ignore_index, label_smoothing
    )
    if reduction == "mean":
        counted = target != ignore_index
        if weight is None:
            count = counted.sum()
        else:
            count = weight.to(loss.dtype)[target.masked_fill(~counted, 0)].masked_fill(~counted, 0).sum()
        loss = loss.sum() / count
    elif reduction == "sum":
        loss = loss.sum()
    return loss.to(logits.dtype)


def _check(
    logits: torch.Tensor,
    target: torch.Tensor,
    start: int,
    size: int,
    weight: torch.Tensor | None,
    reduction: str,
    label_smoothing: float,
) -> None:
    """Raise what ``F.cross_entropy`` would, in terms of the full logits."""
    if target.is_floating_point():
        raise NotImplementedError(
            "vocab_parallel_cross_entropy takes class indices, not probabilities: gather the logits first."
        )
    if target.shape != logits.shape[:-1]:
        raise ValueError(
            f"the target of shape {tuple(target.shape)} does not fit the logits: it should have shape "
            f"{tuple(logits.shape[:-1])}."
        )
    if not 0 <= start < start + logits.shape[-1] <= size:
        raise ValueError(f"classes {start} to {start + logits.shape[-1]} are not within a vocabulary of {size}.")
    if weight is not None and tuple(weight.shape) != (size,):
        raise ValueError(f"weight must have all {size} classes, but has shape {tuple(weight.shape)}.")
    if weight is not None and weight.requires_grad and torch.is_grad_enabled():
        raise RuntimeError("cross entropy has no gradient for its class weights: pass weight.detach().")
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"{reduction} is not a valid value for reduction: use 'mean', 'sum' or 'none'.")
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing must be between 0.0 and 1.0, but is {label_smoothing}.")


class VocabParallelCrossEntropyLoss(nn.Module):
    """``nn.CrossEntropyLoss`` for logits whose classes are sharded over the ranks in contiguous ranges.

    Args:
        ctx: The ranks.
        weight, size_average, ignore_index, reduce, reduction, label_smoothing: As for
            ``nn.CrossEntropyLoss``; ``weight`` has all classes.
        vocab_size: The total number of classes, sharded as by :meth:`Layout.even`. Without it (and without
            ``weight``, which has as many entries) the ranks exchange their numbers of classes in the first forward.
    """

    weight: torch.Tensor | None

    def __init__(
        self,
        ctx: ParallelExecutionCtx,
        weight: torch.Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int = -100,
        reduce: bool | None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        *,
        vocab_size: int | None = None,
    ) -> None:
        super().__init__()
        if size_average is not None or reduce is not None:
            reduction = legacy_reduction(size_average, reduce)
        self.group, self.rank, self.world_size = ctx.tp_group, ctx.rank, ctx.world_size
        self.register_buffer("weight", weight)
        self.ignore_index, self.reduction, self.label_smoothing = ignore_index, reduction, label_smoothing
        self._range: tuple[int, int] | None = None
        self.vocab_size = vocab_size if vocab_size is not None or weight is None else weight.shape[0]
        if self.vocab_size is not None:
            self._range = Layout.even(self.vocab_size, self.world_size).expand(self.vocab_size, self.rank)[0]

    def forward(self, input: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None = None) -> torch.Tensor:
        """The loss; ``weight`` overrides the module's own."""
        classes = input.shape[1] if input.ndim > 1 else input.shape[0]
        if self._range is None or self.vocab_size is None:
            sizes = all_gather(torch.tensor([classes], device=input.device), self.group).tolist()
            start = sum(sizes[: self.rank])
            self._range, self.vocab_size = (start, start + classes), sum(sizes)
        start, stop = self._range
        if classes != stop - start:
            raise ValueError(
                f"rank {self.rank} holds classes {start} to {stop} of {self.vocab_size}, which are "
                f"{stop - start}, but the logits of shape {tuple(input.shape)} have {classes}."
            )
        return vocab_parallel_cross_entropy(
            input,
            target,
            self.group,
            start,
            self.vocab_size,
            self.weight if weight is None else weight,
            self.ignore_index,
            self.reduction,
            self.label_smoothing,
        )

    def extra_repr(self) -> str:
        """Options, for ``print(model)``."""
        text = f"vocab_size={self.vocab_size}, ignore_index={self.ignore_index}, reduction={self.reduction!r}"
        return f"{text}, label_smoothing={self.label_smoothing}, rank={self.rank}/{self.world_size}"
