"""Modules of a parallel model refuse to be pickled, with an answer, whatever they contain.

A sharded parameter says what to do instead (:class:`~paraxis.tensor.sharded_tensor.ShardedTensor`). But pickle writes
the hooks of a module before its children, and hooks are often functions that cannot be pickled: those of
transformers, which collect hidden states, are. So what a module with hooks has first is an object that says the same.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from ..compat.torch import has_module_hooks
from .sharded_tensor import ShardedTensor

REFUSES_PICKLING = "_refuses_pickling"


class RefusesPickling:
    """Raises when it is pickled. It can be copied."""

    def __init__(self, what: str) -> None:
        self.what = what

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            f"cannot pickle {self.what}: its parameters are sharded over ranks. Use model.save_pretrained(directory) "
            "for an ordinary checkpoint, or paraxis.save_state(directory, model, optimizer) to resume a training run: "
            "each of them on all ranks."
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> RefusesPickling:
        return self

    def __copy__(self) -> RefusesPickling:
        return self


def refuse_pickling(model: nn.Module) -> None:
    """Let the modules with hooks of a parallel model refuse to be pickled before their hooks are."""
    for name, module in model.named_modules():
        attributes = module.__dict__
        if REFUSES_PICKLING in attributes or not has_module_hooks(module):
            continue
        if any(isinstance(parameter, ShardedTensor) for parameter in module.parameters()):
            before = dict(attributes)
            attributes.clear()
            attributes[REFUSES_PICKLING] = RefusesPickling(f"the module {name!r}" if name else "the model")
            attributes.update(before)
