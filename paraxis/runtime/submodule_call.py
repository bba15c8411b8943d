"""What calling a submodule of a parallel model runs: the compiled program of its forward, with its hooks around it.

While a program of the full model is captured, a submodule is part of it. Its own program runs where Python calls it:
where the user does (``model.model(ids)``, ``model.get_input_embeddings()(ids)``), and where the module that contains it
runs in Python, after a graph break or because of hooks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from ..capture.trace import is_tracing
from ..compat.dynamo import never_compile
from ..compat.torch import call_forward_and_hooks, has_compiled_call, has_module_hooks, set_compiled_call


class SubmoduleCall:
    """Calls a module: its hooks in Python, its forward compiled.

    Args:
        module: The module.
        make: Makes the program of its forward, in the first call.
    """

    def __init__(self, module: nn.Module, make: Callable[[], Callable[..., Any]]) -> None:
        self.module, self._make = module, make
        self._program: Callable[..., Any] | None = None

    @property
    def program(self) -> Callable[..., Any]:
        """The compiled forward."""
        if self._program is None:
            self._program = self._make()
        return self._program

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module."""
        if torch.compiler.is_compiling():
            if is_tracing():  # it is a part of what is captured
                return call_forward_and_hooks(self.module, *args, **kwargs)
            return _outside_of_graphs(self, *args, **kwargs)
        if not has_module_hooks(self.module):
            return self.program(*args, **kwargs)
        return self._with_hooks(args, kwargs)

    def _with_hooks(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """torch calls the hooks, of all kinds, and the forward between them: until then, that is the program."""
        attributes, program = self.module.__dict__, self.program
        own = attributes.get("forward", _ABSENT)

        def restore() -> None:
            if attributes.get("forward") is forward:
                del attributes["forward"]
                if own is not _ABSENT:
                    attributes["forward"] = own

        def forward(*args: Any, **kwargs: Any) -> Any:
            restore()  # the program calls the module's own
            return program(*args, **kwargs)

        attributes["forward"] = forward
        try:
            return call_forward_and_hooks(self.module, *args, **kwargs)
        finally:
            restore()


_ABSENT = object()
never_compile(SubmoduleCall.__call__)


@torch.compiler.disable
def _outside_of_graphs(call: SubmoduleCall, *args: Any, **kwargs: Any) -> Any:
    """Call a module from something that somebody else compiles."""
    return call(*args, **kwargs)


def callable_children(module: nn.Module, prefix: str) -> list[tuple[str, nn.Module]]:
    """The children with parameters and a forward; those of a list or dictionary of modules in place of it."""
    found = []
    for name, child in module.named_children():
        path = f"{prefix}.{name}" if prefix else name
        if not has_forward(child):
            found += callable_children(child, path)
        elif any(True for _ in child.parameters()):
            found.append((path, child))
    return found


def has_forward(module: nn.Module) -> bool:
    """Whether a module can be called: not a list or dictionary of modules."""
    return type(module).forward is not nn.Module.forward and not isinstance(module, (nn.ModuleList, nn.ModuleDict))


def install_submodule_call(module: nn.Module, make: Callable[[], Callable[..., Any]]) -> None:
    """Let calling a module run the program that ``make`` makes, unless calling it runs one already."""
    if not has_compiled_call(module) and not hasattr(module.__dict__.get("forward"), "leads_in"):
        set_compiled_call(module, SubmoduleCall(module, make))
        module.compile = already_compiled  # type: ignore[method-assign]


@lru_cache(maxsize=1)
def _note() -> None:
    logging.getLogger("paraxis").info(
        "compile() has no effect on a parallel model: its programs are compiled as parallelize_model(..., compile=...) "
        "says"
    )


def already_compiled(*args: Any, **kwargs: Any) -> None:
    """What ``compile()`` of a parallel model and of its submodules does: nothing, and a line in the log, once."""
    _note()
