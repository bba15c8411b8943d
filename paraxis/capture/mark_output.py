"""Marking which results go to the user.

A captured graph returns everything the program still needs, in one flat list: the logits that the caller reads and the
KV cache that only the next call reads. The first must be a full tensor, the second should stay sharded. So the entry
point marks the tensors of the *returned structure* with the operator ``paraxis::mark_output`` ("the caller reads
this"), and the passes replace it by an all-gather. Objects that are not plain containers (a cache) are not marked.

In training a model returns its logits beside the loss, and usually nobody reads them: they are not marked, and gathered
only on access (see :mod:`paraxis.runtime.gather_on_access`).
"""

from __future__ import annotations

from typing import Any

import torch

from ..rules import register_replicated

_library = torch.library.Library("paraxis", "DEF")
_library.define("mark_output(Tensor x) -> Tensor")
_library.impl("mark_output", lambda x: x.clone(), "CompositeExplicitAutograd")


@torch.library.register_fake("paraxis::mark_output")
def _mark_output_fake(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


mark_output_op = torch.ops.paraxis.mark_output.default
register_replicated(mark_output_op)  # what the caller reads is a full tensor


def mark_output(result: Any) -> Any:
    """Mark every tensor in the returned containers; traced by Dynamo as part of the model."""
    if isinstance(result, torch.Tensor):
        return torch.ops.paraxis.mark_output(result)
    if isinstance(result, dict):
        for key in list(result.keys()):
            result[key] = mark_output(result[key])
        return result
    if type(result) in (tuple, list):
        return type(result)([mark_output(item) for item in result])
    return result


def mark_results(result: Any) -> Any:
    """Mark what the caller will read: all results, but of an output with a loss to differentiate no other tensor."""
    if not torch.is_grad_enabled() or not has_loss(result):
        return mark_output(result)
    for key in list(result.keys()):
        if key == "loss" or not isinstance(result[key], torch.Tensor):
            result[key] = mark_output(result[key])
    return result


def has_loss(result: Any) -> bool:
    """Whether this is a transformers output with a scalar loss."""
    if not isinstance(result, dict) or not hasattr(result, "to_tuple") or "loss" not in result:
        return False
    loss = result["loss"]
    return isinstance(loss, torch.Tensor) and loss.ndim == 0
