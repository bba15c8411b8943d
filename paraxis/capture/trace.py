"""Capturing a graph with ``torch.compile``'s frontend."""

from __future__ import annotations

import gc
import inspect
import itertools
import logging
import re
import traceback
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import torch._dynamo as dynamo
from torch import nn
from torch._dynamo import convert_frame
from torch.fx import GraphModule

from ..compat.frames import with_room
from ..errors import CaptureError, GraphBreak
from .mark_output import mark_output, mark_results


class _Captured(Exception):
    """Raised instead of running the graph when only the graph was wanted."""


def entry(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """What is compiled: the model's call, hooks included, with the caller's tensors marked."""
    return mark_output(model._call_impl(*args, **kwargs))


def entry_sharded(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The same for callers who asked for results as they are, sharded or not."""
    return model._call_impl(*args, **kwargs)


def forward_entry(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """What is compiled of a whole model: its forward. Hooks of the model itself run around it, in Python."""
    return mark_results(type(model).forward(model, *args, **kwargs))


def forward_entry_sharded(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The same with results as they are."""
    return type(model).forward(model, *args, **kwargs)


_serial = itertools.count()


@cache
def _make_room() -> None:
    """Let what Dynamo compiles of our entry points have room for its calls."""
    convert_frame.register_bytecode_hook(lambda code, new: with_room(new) if code.co_filename == __file__ else None)


def fresh_entry(gather_outputs: bool = True, forward: bool = False) -> Callable[..., Any]:
    """The entry point under a code object of its own: Dynamo keeps its caches and limits per code object.

    With ``forward`` it is that of the model's forward alone, which is called from the model's call.
    """
    _make_room()
    if forward:
        function = forward_entry if gather_outputs else forward_entry_sharded
    else:
        function = entry if gather_outputs else entry_sharded
    code = function.__code__.replace(co_name=f"{function.__name__}_{next(_serial)}")
    return types.FunctionType(code, function.__globals__, code.co_name)


class _Ignored(str):
    """A function that stands in a set of functions under its name: torch 2.11 sorts that set when it logs."""

    function: Any

    def __new__(cls, function: Any) -> _Ignored:
        self = super().__new__(cls, getattr(function, "__qualname__", str(function)))
        self.function = function
        return self

    def __hash__(self) -> int:
        return hash(self.function)

    def __eq__(self, other: object) -> bool:
        return other is self.function or getattr(other, "function", None) is self.function


def ignore_loggers() -> None:
    """Tell Dynamo to leave out logger calls: a warning inside ``forward`` must not break the graph."""
    import transformers.utils.logging  # noqa: F401 -- adds ``warning_once`` to loggers

    names = ("debug", "info", "warning", "warning_once", "warning_advice", "info_once", "error")
    methods = {_Ignored(getattr(logging.Logger, name)) for name in names if hasattr(logging.Logger, name)}
    for option in ("ignore_logging_functions", "ignore_logger_methods"):
        if hasattr(dynamo.config, option):
            getattr(dynamo.config, option).update(methods)
            return


@contextmanager
def no_mha_fastpath() -> Iterator[None]:
    """Without torch's fused kernel for a whole encoder layer in evaluation: what is inside it could not be split."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


@contextmanager
def gc_paused() -> Iterator[None]:
    """Without Python's garbage collection: compiling makes millions of objects, and going through those that live over
    and over takes a quarter of the time."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


def install_output_hooks(model: nn.Module) -> None:
    """Install transformers' hooks for hidden states and attentions now: it does so lazily, under a lock, which cannot
    be captured."""
    if not hasattr(model, "base_model_prefix"):
        return
    try:
        from transformers.utils.output_capturing import maybe_install_capturing_hooks
    except ImportError:  # versions that collect these outputs otherwise
        return
    maybe_install_capturing_hooks(model)


def capture(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    on_graph: Callable[[GraphModule, list[Any]], None],
    forward: bool = False,
) -> None:
    """Capture ``model(*args, **kwargs)`` without running it and hand the graph to ``on_graph``.

    With ``forward`` it is what a call of the whole model runs, by :func:`fresh_entry`.

    Raises:
        CaptureError: with the line of the model's source where capture stopped; a ``GraphBreak`` if the model could
            still be run as several graphs.
    """

    def backend(graph_module: GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        on_graph(graph_module, example_inputs)

        def stop(*_: Any) -> None:
            raise _Captured

        return stop

    ignore_loggers()
    install_output_hooks(model)
    compiled = torch.compile(fresh_entry(forward=forward), fullgraph=True, backend=backend, dynamic=False)
    try:
        with no_mha_fastpath(), gc_paused():
            compiled(model, *args, **kwargs)
    except _Captured:
        return
    except dynamo.exc.TorchDynamoException as error:
        raise translated(error, model) from error


def translated(error: dynamo.exc.TorchDynamoException, model: nn.Module) -> Exception:
    """Dynamo's error in our terms: what our own passes raised, or a place where the graph breaks, or neither."""
    if isinstance(error, dynamo.exc.BackendCompilerFailed):
        return error.inner_exception if isinstance(error.inner_exception, Exception) else error
    if isinstance(error, dynamo.exc.TorchRuntimeError):  # the model's own mistake: it would not run in Python either
        return CaptureError(describe(error, model))
    return GraphBreak(describe(error, model))


def describe(error: BaseException, model: nn.Module) -> str:
    """One paragraph that names the module and the source line at which Dynamo gave up."""
    text = str(error)
    reason = text.strip().split("\n")[0]
    stack = getattr(error, "real_stack", None) or []
    frames = [f for f in stack if "paraxis" not in f.filename]
    where = ""
    if frames:
        last, module = frames[-1], _running(frames, model)
        where = f" in {module}" if module else ""
        where += f' at {last.filename}:{last.lineno} in {last.name}: "{(last.line or "").strip()}"'
    return f"{type(model).__name__} cannot be captured as one graph{where}. {reason}"


def _running(frames: Sequence[traceback.FrameSummary], model: nn.Module) -> str:
    """The innermost module whose forward is among the frames of a stack, with all places where the model has one."""
    for frame in reversed(frames):
        found = [path for path, module in model.named_modules() if path and _is_in(frame, type(module))]
        if found:
            kinds = {type(model.get_submodule(path)).__name__ for path in found}
            places = dict.fromkeys(re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", path) for path in found)
            return f"{', '.join(places)} ({', '.join(sorted(kinds))})"
    return ""


def _is_in(frame: traceback.FrameSummary, cls: type[nn.Module]) -> bool:
    code = getattr(inspect.unwrap(cls.forward), "__code__", None)
    if code is None or frame.name != code.co_name or not code.co_filename.endswith(frame.filename):
        return False
    lines = [line for _, _, line in code.co_lines() if line is not None]
    return min(lines) <= (frame.lineno or 0) <= max(lines)
