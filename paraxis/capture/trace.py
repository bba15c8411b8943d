"""Capturing a graph with ``torch.compile``'s frontend, and what holds in the process while that happens.

Tracing needs two process-wide switches off: Python's garbage collection (tracing allocates millions of objects, and
scanning the live ones over and over takes a quarter of the time) and the fused encoder layer of ``nn.Transformer``
(one operator, whose inside could not be sharded). They are off from the moment Dynamo begins to trace an entry point
until the call that made it trace ends. A call that hits compiled code touches neither.
"""

from __future__ import annotations

import gc
import inspect
import itertools
import re
import threading
import traceback
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from ..compat.attention_masks import follow_eager_masks, note_full_attention
from ..compat.dynamo import (
    CAPTURE_ERRORS,
    BackendCompilerFailed,
    TorchRuntimeError,
    attribute_of_global,
    follow_side_effects,
    ignore_logging,
    keep_sizes_in_text,
    note_required_gradients,
    reads_data_of_fakes,
    skip_diagnostics,
    source_of,
)
from ..compat.flex_attention import differentiate_on_cpu
from ..compat.host_functions import HOST_FUNCTION, capture_host_functions
from ..compat.packed_attention import capture_packed_attention
from ..compat.torch import as_if_compiling
from ..compat.transformers import always_mask_padding, install_output_hooks, logger_methods
from ..errors import CaptureError, GraphBreak
from ..rules import register_replicated
from .mark_output import mark_output, mark_results
from .required_gradients import REQUIRES_GRAD


class _Captured(Exception):
    """Raised instead of running the graph by :func:`capture`, which wants nothing but the graph."""


# -- entry points --------------------------------------------------------------------------------------------------


def entry(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """What is compiled: the forward of a module, with the tensors that the caller gets marked. Hooks of the module
    itself run around it, in Python."""
    begin_tracing()
    return mark_output(model.forward(*args, **kwargs))


def entry_sharded(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The same for ``gather_outputs=False``: results leave the graph with the placement that they have."""
    begin_tracing()
    return model.forward(*args, **kwargs)


def forward_entry(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """What is compiled of a model whose forward leads into its program: the forward of its class."""
    begin_tracing()
    return mark_results(type(model).forward(model, *args, **kwargs))


def forward_entry_sharded(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The same for ``gather_outputs=False``."""
    begin_tracing()
    return type(model).forward(model, *args, **kwargs)


_serial = itertools.count()


def fresh_entry(gather_outputs: bool = True, forward: bool = False) -> Callable[..., Any]:
    """The entry point under a code object of its own: Dynamo has its caches and limits per code object.

    With ``forward``, the entry point for a model whose forward is replaced by its program.
    """
    if forward:
        function = forward_entry if gather_outputs else forward_entry_sharded
    else:
        function = entry if gather_outputs else entry_sharded
    code = function.__code__.replace(co_name=f"{function.__name__}_{next(_serial)}")
    return types.FunctionType(code, function.__globals__, code.co_name)


# -- the process while Dynamo traces -------------------------------------------------------------------------------


class _Tracing(threading.local):
    """Whether this thread is between :func:`begin_tracing` and :func:`end_tracing`."""

    active = False


_tracing = _Tracing()
_lock = threading.Lock()
_depth = 0
_before: tuple[bool, bool] = (True, True)


ADAPTATIONS = (
    keep_sizes_in_text,
    differentiate_on_cpu,
    always_mask_padding,
    follow_eager_masks,
    capture_packed_attention,
    capture_host_functions,
    skip_diagnostics,
)
"""What libraries do in another way while Dynamo traces one of our entry points."""

register_replicated(HOST_FUNCTION)


def adapt_libraries() -> None:
    """Adapt what is loaded by now. To be called before somebody notes what the classes of a model are like."""
    for adapt in ADAPTATIONS:
        adapt(is_tracing)


@torch.compiler.assume_constant_result
def begin_tracing() -> bool:
    """Dynamo runs this while it traces an entry point, and compiled code does not: its result is a constant."""
    global _depth, _before
    if not _tracing.active:
        with _lock:
            _depth += 1
            if _depth == 1:
                _before = gc.isenabled(), torch.backends.mha.get_fastpath_enabled()
                gc.disable()
                torch.backends.mha.set_fastpath_enabled(False)
        _tracing.active = True
        adapt_libraries()  # here: a model may have imported them by now
    return True


@torch.compiler.assume_constant_result
def is_tracing() -> bool:
    """Whether Dynamo traces one of our entry points, and not something that somebody else compiles."""
    return _tracing.active


def end_tracing() -> None:
    """To be called when a call of a compiled entry point has ended: undoes :func:`begin_tracing`, if that ran."""
    global _depth
    if not _tracing.active:
        return
    _tracing.active = False
    with _lock:
        _depth -= 1
        if _depth == 0:
            collect, fastpath = _before
            torch.backends.mha.set_fastpath_enabled(fastpath)
            if collect:
                gc.enable()


@contextmanager
def recording_operators() -> Iterator[None]:
    """Inside, Python code runs as it does while Dynamo traces an entry point: libraries behave so, and submodules run
    their own forward."""
    before = _tracing.active
    begin_tracing()
    try:
        with as_if_compiling():
            yield
    finally:
        if not before:
            end_tracing()


def guards_mha_fastpath(guard: Any) -> bool:
    """Whether a guard checks the switch that :func:`begin_tracing` turns off: it would fail in every later call."""
    return attribute_of_global(source_of(guard), torch.backends.mha, "_is_fastpath_enabled", globals())


note_required_gradients(REQUIRES_GRAD, lambda: _tracing.active)
follow_side_effects()


def ignore_loggers() -> None:
    """Tell Dynamo to drop logger calls and warnings: a warning inside ``forward`` must not break the graph."""
    ignore_logging([*logger_methods(), warnings.warn])


# -- capturing -----------------------------------------------------------------------------------------------------


def capture(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    on_graph: Callable[[GraphModule, list[Any]], None],
    forward: bool = False,
) -> None:
    """Capture ``model(*args, **kwargs)`` without running it and pass the graph to ``on_graph``.

    With ``forward``, capture what a call of the top-level model runs, see :func:`fresh_entry`.

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
    adapt_libraries()
    install_output_hooks(model)
    note_full_attention(model)
    compiled = torch.compile(fresh_entry(forward=forward), fullgraph=True, backend=backend, dynamic=False)
    try:
        compiled(model, *args, **kwargs)
    except _Captured:
        return
    except CAPTURE_ERRORS as error:
        raise translated(error, model) from error
    finally:
        end_tracing()


def translated(error: Exception, model: nn.Module) -> Exception:
    """The error of a capture in our terms: what our own passes raised, a graph break, or a mistake in the model."""
    if isinstance(error, BackendCompilerFailed):
        return error.inner_exception if isinstance(error.inner_exception, Exception) else error
    if isinstance(error, TorchRuntimeError) and not reads_data_of_fakes(
        error
    ):  # the model's own mistake: it would not run in eager mode either
        return CaptureError(describe(error, model))
    return GraphBreak(describe(error, model))


def describe(error: BaseException, model: nn.Module) -> str:
    """One paragraph that names the module and the source line at which Dynamo stopped."""
    text = str(error)
    reason = text.strip().split("\n")[0] + _raised(text)
    stack = getattr(error, "real_stack", None) or []
    frames = [f for f in stack if "paraxis" not in f.filename]
    where = ""
    if frames:
        last, module = frames[-1], _running(frames, model)
        where = f" in {module}" if module else ""
        where += f' at {last.filename}:{last.lineno} in {last.name}: "{(last.line or "").strip()}"'
    return f"{type(model).__name__} cannot be captured as one graph{where}. {reason}"


def _raised(text: str) -> str:
    """The exception that the model itself has raised, which Dynamo calls an observed one, and names further down."""
    found = re.search(r"raised exception (.+)", text)
    return f": {found[1].strip()}" if found else ""


def _running(frames: Sequence[traceback.FrameSummary], model: nn.Module) -> str:
    """The innermost module whose forward is in the stack, with all paths under which the model has it."""
    for frame in reversed(frames):
        found = [path for path, module in model.named_modules() if path and _is_in(frame, type(module))]
        if found:
            kinds = {type(model.get_submodule(path)).__name__ for path in found}
            places = dict.fromkeys(re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", path) for path in found)
            return f"{', '.join(places)} ({', '.join(sorted(kinds))})"
    return ""


def _is_in(frame: traceback.FrameSummary, cls: type[nn.Module]) -> bool:
    """Whether a stack frame is inside of the forward of this class."""
    code = getattr(inspect.unwrap(cls.forward), "__code__", None)
    if code is None or frame.name != code.co_name or not code.co_filename.endswith(frame.filename):
        return False
    lines = [line for _, _, line in code.co_lines() if line is not None]
    return min(lines) <= (frame.lineno or 0) <= max(lines)
