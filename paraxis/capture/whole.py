"""Marking which results go to the user.

A captured graph returns everything the program still needs, in one flat list: the logits that the caller reads and the
cache tensors that only the next call reads. The first must be whole, the second should stay sharded. So the entry
point marks the tensors of the *returned structure* with an operator that stands for "the caller reads this", and the
passes turn it into a gather. Objects that are not plain containers (a cache) are not entered.
"""

from __future__ import annotations

from typing import Any

import torch

_library = torch.library.Library("paraxis", "DEF")
_library.define("whole(Tensor x) -> Tensor")
_library.impl("whole", lambda x: x.clone(), "CompositeExplicitAutograd")


@torch.library.register_fake("paraxis::whole")
def _whole_fake(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


whole_op = torch.ops.paraxis.whole.default


def mark_whole(result: Any) -> Any:
    """Mark every tensor in the returned containers; traced by Dynamo as part of the model."""
    if isinstance(result, torch.Tensor):
        return torch.ops.paraxis.whole(result)
    if isinstance(result, dict):
        for key in list(result.keys()):
            result[key] = mark_whole(result[key])
        return result
    if type(result) in (tuple, list):
        return type(result)([mark_whole(item) for item in result])
    return result
