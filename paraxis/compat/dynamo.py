"""Private APIs of Dynamo, the frontend of ``torch.compile``. Seen on torch 2.11, 2.13 and 2.15.

Guards: ``torch.compile(options={"guard_filter_fn": f})`` is public, and so are the fields of the entries that ``f`` is
called with (name, type, value). What a guard looks at is told by its *source*, a chain from an attribute or item down
to a local or global variable of the compiled function. The functions here answer questions about that chain. A source
of a class that they do not know answers no, so that its guard stays.
"""

from __future__ import annotations

import dis
import logging
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from types import CodeType, ModuleType
from typing import Any

import torch
import torch._dynamo as dynamo
from torch import nn
from torch._C._dynamo.eval_frame import set_code_exec_strategy
from torch._dynamo.exc import BackendCompilerFailed, TorchDynamoException, TorchRuntimeError
from torch._dynamo.source import (
    AttrSource,
    CellContentsSource,
    ClosureSource,
    DefaultsSource,
    DictGetItemSource,
    GetItemSource,
    GlobalSource,
    LocalSource,
    NNModuleSource,
    SubclassAttrListSource,
    TypeDictSource,
    TypeMROSource,
    TypeSource,
)
from torch._dynamo.types import FrameAction, FrameExecStrategy
from torch._dynamo.variables.tensor import TensorVariable
from torch._guards import TracingContext, detect_fake_mode, tracing
from torch._logging._internal import trace_log
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.fx import GraphModule
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, PendingUnbackedSymbolNotFound

__all__ = [
    "CAPTURE_ERRORS",
    "BackendCompilerFailed",
    "TorchDynamoException",
    "TorchRuntimeError",
    "TracingContext",
    "attribute_of",
    "attribute_of_global",
    "buffer_of",
    "class_attribute_of_module",
    "detect_fake_mode",
    "follow_side_effects",
    "guards_global_constant",
    "guards_subclass_metadata",
    "guards_torch_module",
    "ignore_logging",
    "is_class_attribute_of_local",
    "is_training_flag",
    "keep_sizes_in_text",
    "mark_maybe_dynamic",
    "name_inputs",
    "never_compile",
    "note_required_gradients",
    "parameter_of",
    "raise_recompile_limit",
    "reads_data_of_fakes",
    "skip_diagnostics",
    "source_of",
    "specialize",
    "subclass_owner",
    "traced_methods",
    "tracing",
]

DATA_DEPENDENT = (
    GuardOnDataDependentSymNode,
    PendingUnbackedSymbolNotFound,
    DynamicOutputShapeException,
    DataDependentOutputException,
)
"""What Dynamo raises where Python code branches on a value that is known only when the graph runs."""

CAPTURE_ERRORS = (TorchDynamoException, *DATA_DEPENDENT)
"""What capturing a function as one graph raises. Dynamo does not wrap all errors of symbolic shapes in its own."""


def reads_data_of_fakes(error: Exception) -> bool:
    """Whether an operator failed since it reads the data of fake tensors, as indexing with tuples of scalars does.

    The model runs, then, though Dynamo reports it like a model's own mistake. Told by the text, seen on torch 2.13.
    """
    return any(text in str(error) for text in ("data is not allocated yet", "Cannot access data pointer"))


mark_maybe_dynamic: Callable[[torch.Tensor, int], None] = dynamo.maybe_mark_dynamic
"""Hint that a size may change: a graph that depends on the number itself is still specialized, without an error."""

specialize: Callable[..., None] = dynamo.mark_static
"""Specialize on all sizes of a tensor."""


def raise_recompile_limit(limit: int) -> None:
    """Let Dynamo compile a function at least so many times before it falls back to eager. Never lowers the limit."""
    dynamo.config.recompile_limit = max(dynamo.config.recompile_limit, limit)


def never_compile(function: Callable[..., Any]) -> None:
    """Let a ``torch.compile`` of somebody else run this function in Python, and all that it calls, even if it asks for
    one graph. Unlike a function under ``torch.compiler.disable`` it costs a call nothing, and may be inlined."""
    skip = FrameAction.SKIP
    set_code_exec_strategy(function.__code__, FrameExecStrategy(skip, skip))  # type: ignore[attr-defined]


# -- logger calls in a forward -------------------------------------------------------------------------------------


def ignore_logging(functions: list[Callable[..., Any]]) -> None:
    """Let Dynamo drop calls of these logging functions instead of breaking the graph."""
    dynamo.config.ignore_logging_functions.update(functions)
    if _SORTS_IGNORED_FUNCTIONS and _unsortable not in _metrics_logger.filters:
        _metrics_logger.addFilter(_unsortable)


_metrics_logger = logging.getLogger("torch._dynamo.metrics_context")

_SORTS_IGNORED_FUNCTIONS = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)
"""torch 2.11 sorts every set of its configuration for its compile metrics, functions included, which raises; it
catches the error, loses the metrics of that compilation and logs a traceback. 2.13 leaves the set out."""


def _unsortable(record: logging.LogRecord) -> bool:
    """Whether to log a record: all but the traceback of sorting functions."""
    error = record.exc_info[1] if record.exc_info else None
    return not (isinstance(error, TypeError) and str(error).startswith("'<' not supported between instances"))


# -- requires_grad_() in a forward ---------------------------------------------------------------------------------

_requires_grad = TensorVariable.method_requires_grad_


def note_required_gradients(key: str, applies: Callable[[], bool]) -> None:
    """Where ``applies()``, trace ``x.requires_grad_()`` of an intermediate result: its node gets ``meta[key] = True``.

    Dynamo itself breaks the graph: torch 2.11 at the call, torch 2.13 if a result of the graph depends on ``x``. The
    method of its variable has no argument for the translator in torch 2.11.
    """

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        value = self.as_proxy().node.meta.get("example_value")
        flag = kwargs.get("requires_grad", next((a for a in args if not hasattr(a, "output")), True))
        wanted = flag if isinstance(flag, bool) else flag.as_python_constant()
        if self.source or not wanted or value is None or value.requires_grad or not applies():
            return _requires_grad(self, *args, **kwargs)
        value.requires_grad_()
        self.requires_grad = True
        self.as_proxy().node.meta[key] = True
        return self

    TensorVariable.method_requires_grad_ = method  # type: ignore[method-assign]


# -- attributes that are set in a forward --------------------------------------------------------------------------


def follow_side_effects() -> None:
    """Let the attributes of an object that a forward writes be looked up in the current record of side effects.

    Dynamo replaces that record when it has traced the subgraph of a higher-order operator. The dictionary of an object
    that was written to before keeps the old one (torch 2.13), so that what is written to it later is lost: a KV cache
    that a layer fills after FlexAttention of the layer before has "no attribute 'dtype'".
    """
    from torch._dynamo.variables import dicts

    proxy = getattr(dicts, "SideEffectsProxyDict", None)  # torch 2.11 has no such dictionary
    if proxy is None or isinstance(getattr(proxy, "side_effects", None), property):
        return

    def current(self: Any) -> Any:
        known = self.__dict__["side_effects"]
        graph = known.output_graph_weakref()
        return known if graph is None else graph.side_effects

    def note(self: Any, side_effects: Any) -> None:
        self.__dict__["side_effects"] = side_effects

    proxy.side_effects = property(current, note)


# -- sizes in messages ---------------------------------------------------------------------------------------------


def keep_sizes_in_text(applies: Callable[[], bool]) -> None:
    """Where ``applies()``, a string with a symbolic size in it is made when something reads it.

    ``check(x.shape == y.shape, f"got {x.shape[0]}")`` makes its message in any case, and Dynamo specializes on the size
    to do so: each size would be compiled by itself. Seen on torch 2.11 and 2.13.
    """
    from torch._dynamo import symbolic_convert
    from torch._dynamo.variables import ConstantVariable, LazyVariableTracker
    from torch._dynamo.variables.lazy import LazySymNodeFormatString
    from torch._dynamo.variables.misc import StringFormatVariable

    translator = symbolic_convert.InstructionTranslatorBase
    build = translator.BUILD_STRING
    if hasattr(build, "_before"):
        return

    constants = (ConstantVariable, *_subclasses(ConstantVariable))

    class Text:
        """What a string is made of, in the place of a size."""

        def __init__(self, parts: list[Any]) -> None:
            self.parts = parts

        def evaluate_expr(self) -> str:
            return "".join(str(part.as_python_constant()) for part in self.parts)

    def is_size(part: Any) -> bool:
        if type(part) is not LazyVariableTracker or part.is_realized():  # isinstance() would make the string
            return False
        return isinstance(part.peek_value(), LazySymNodeFormatString)

    def build_string(self: Any, instruction: Any) -> None:
        parts = self.stack[-instruction.arg :]
        sizes, texts = [*filter(is_size, parts)], [p for p in parts if type(p) is StringFormatVariable]
        known = len(sizes) + len(texts) + sum(type(p) in constants for p in parts)
        if not sizes or known < len(parts) or any(p.sym_kwargs for p in texts) or not applies():
            build(self, instruction)
            return
        self.popn(instruction.arg)
        if not texts:
            text = LazySymNodeFormatString(Text(parts), ConstantVariable.create(""))  # type: ignore[arg-type]
            self.push(LazyVariableTracker.create(text, source=None))
            return
        pattern = "".join(p.format_string if p in texts else "{}" for p in parts)
        arguments = [x for p in parts for x in (p.sym_args if p in texts else [p])]
        self.push(StringFormatVariable(pattern, arguments, {}))

    build_string._before = build  # type: ignore[attr-defined]
    code = dis.opmap["BUILD_STRING"]
    for cls in (translator, *_subclasses(translator)):
        cls.BUILD_STRING = build_string
        cls.dispatch_table[code] = build_string


def _subclasses(cls: Any) -> Iterator[Any]:
    found: list[Any] = cls.__subclasses__()
    for each in found:
        yield each
        yield from _subclasses(each)


# -- what is computed for logs alone -------------------------------------------------------------------------------


def skip_diagnostics(applies: Callable[[], bool]) -> None:
    """Where ``applies()``, do not compute what only logs show, unless they are on.

    Once per compilation, Dynamo flushes the processor's caches to measure how long guards take (150 ms). From Python
    3.11 on it splits the source of each file that it traces into tokens, to name the function of a line (20 ms per
    file). For each object that a forward changes, such as the layers of a KV cache, it formats the stack (torch 2.13).
    """
    from torch._dynamo import guards, output_graph, side_effects, symbolic_convert

    if hasattr(guards.profile_guard_manager, "_before"):
        return

    def without(function: Callable[..., Any], logs: list[logging.Logger], default: Any) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            shown = any(log.isEnabledFor(logging.DEBUG) for log in logs) or trace_log.handlers
            return function(*args) if shown or not applies() else default

        run._before = function  # type: ignore[attr-defined]
        return run

    guards.profile_guard_manager = without(guards.profile_guard_manager, [guards.guards_log], 0.0)
    of_lines = [output_graph.trace_call_log, symbolic_convert.trace_source_log]
    symbolic_convert.get_funcname = without(symbolic_convert.get_funcname, of_lines, None)
    format_message = getattr(side_effects.SideEffects, "_format_side_effect_message", None)
    if format_message is not None:
        of_effects = [side_effects.side_effects_log]
        side_effects.SideEffects._format_side_effect_message = without(format_message, of_effects, "")  # type: ignore[method-assign]


# -- what was traced -----------------------------------------------------------------------------------------------


def traced_methods() -> set[tuple[type, str]]:
    """(class, name) of the methods that are part of the graph that a backend is called with, modules' forwards aside.

    Dynamo has no guards on the methods of objects that a forward creates, such as a KV cache. Told are those of all
    classes that are defined in the same files, so that a class below another one is among them. torch's own are left
    out.
    """
    codes: list[CodeType] | None = TracingContext.get_traced_code()
    names: dict[str, set[str]] = {}
    for code in codes or ():
        names.setdefault(code.co_filename, set()).add(code.co_name)
    found: set[tuple[type, str]] = set()
    for name, module in [*sys.modules.items()]:
        traced = names.get(getattr(module, "__file__", None) or "")
        if traced is None or name.split(".")[0] in ("torch", "paraxis"):
            continue
        for cls in [*vars(module).values()]:
            if isinstance(cls, type) and cls.__module__ == name and "forward" not in vars(cls):
                found.update((cls, method) for method in traced if hasattr(cls, method))
    return found


# -- guards --------------------------------------------------------------------------------------------------------


def source_of(entry: Any) -> Any:
    """What a guard looks at, as a chain of sources; None if this version of torch does not tell."""
    return getattr(getattr(entry, "orig_guard", None), "originating_source", None)


def _chain(source: Any) -> Iterator[Any]:
    """The source, what it is an attribute or item of, and so on down to a variable."""
    while source is not None:
        yield source
        source = getattr(source, "base", None)


def subclass_owner(source: Any, inner: str) -> Any:
    """The tensor subclass that a source is inside of: its attribute ``inner``, or its list of attributes; else None."""
    is_inner = type(source) is AttrSource and source.member == inner
    if type(source) is SubclassAttrListSource or is_inner:
        return source.base
    below: Any = getattr(source, "base", None)  # an item of the list of attributes
    return below.base if type(below) is SubclassAttrListSource else None


def is_class_attribute_of_local(source: Any) -> bool:
    """Whether it is an attribute of the class of what an argument leads to: ``type(model.layer).forward``."""
    *links, root = _chain(source)
    return type(root) is LocalSource and any(type(link) is TypeSource for link in links)


def class_attribute_of_module(source: Any) -> tuple[str, bool] | None:
    """(name, whether it is inside of it) of the attribute of a module's class that a source is, or is inside of.

    None for anything else: the class itself, the inside of a function, attributes of classes that are no module's.
    """
    *links, _ = _chain(source)
    where = next((i for i, link in enumerate(links) if type(link) is TypeSource), len(links))
    if where + 1 >= len(links) or not isinstance(links[where + 1], NNModuleSource):
        return None
    above = links[:where]
    while above and type(above[-1]) in (TypeMROSource, TypeDictSource, GetItemSource):
        above.pop()  # which of the base classes
    if any(type(link) in (ClosureSource, CellContentsSource, DefaultsSource) for link in above):
        return None
    if not above:
        return ("", True) if where else None  # which names the class has
    name = above[-1].member if type(above[-1]) is AttrSource else getattr(above[-1], "index", "")
    return str(name), len(above) > 1


def guards_global_constant(entry: Any) -> bool:
    """Whether a guard checks that a global name still is the same module or class, or a built-in name the same.

    Functions of a module (``F.scaled_dot_product_attention``) are not meant: somebody may patch them.
    """
    if entry.guard_type not in ("MODULE_MATCH", "CLASS_MATCH", "BUILTIN_MATCH"):
        return False
    source = source_of(entry)
    if source is None or (entry.guard_type == "BUILTIN_MATCH" and type(source) is AttrSource):
        return False
    *links, root = _chain(source)
    return type(root) is GlobalSource and all(type(link) in (AttrSource, DictGetItemSource) for link in links)


def guards_subclass_metadata(entry: Any) -> bool:
    """Whether a guard compares the metadata of a tensor subclass: what ``__tensor_flatten__`` returns second."""
    return bool(entry.guard_type == "TENSOR_SUBCLASS_METADATA_MATCH")


def attribute_of(source: Any) -> str | None:
    """The name of the attribute that a source is; None if it is something else."""
    return str(source.member) if type(source) is AttrSource else None


def is_training_flag(source: Any) -> bool:
    """Whether it is ``module.training``."""
    return type(source) is AttrSource and source.member == "training"


def guards_torch_module(entry: Any) -> bool:
    """Whether a guard is on a module that torch provides (``nn.Linear``), or on something inside of one."""
    return bool(entry.orig_guard.source.is_unspecialized_builtin_nn_module())


def attribute_of_global(source: Any, owner: ModuleType, name: str, namespace: Mapping[str, Any]) -> bool:
    """Whether it is the attribute ``name`` of a module that ``namespace``, the compiled function's globals, holds."""
    if type(source) is not AttrSource or source.member != name or type(source.base) is not GlobalSource:
        return False
    return namespace.get(source.base.global_name) is owner


# -- names of placeholders -----------------------------------------------------------------------------------------
# Dynamo names a placeholder after its source: ``L_model_modules_layers_modules_0_parameters_weight_``.


def parameter_of(placeholder: str) -> str | None:
    """The qualified name of the parameter that a placeholder is called after; None if it is called after no parameter.

    An underscore in the name of a module cannot be told from a dot: the metadata of a parameter, if any, is exact.
    """
    if "_parameters_" not in placeholder:
        return None
    path, _, leaf = placeholder.rpartition("_parameters_")
    modules = path.split("_modules_")[1:] if "_modules_" in path else [path]
    return ".".join([*modules, leaf.rstrip("_")]) if leaf else placeholder


def buffer_of(placeholder: str) -> str | None:
    """The qualified name of the buffer of a submodule that a placeholder is called after; None if it is not."""
    match = re.fullmatch(r"L_model_modules_(.*)_buffers_(.*?)_*", placeholder)
    return f"{'.'.join(match[1].split('_modules_'))}.{match[2]}" if match else None


# -- describing a graph to Inductor --------------------------------------------------------------------------------


def name_inputs(module: GraphModule, static: set[int]) -> None:
    """Say about a graph what Dynamo would: sources of inputs and parameters, and which inputs have a fixed address.

    Inductor's CUDA graphs copy the inputs that are not static.
    """
    module.meta["dynamo_compile_id"] = "paraxis"
    tensors: list[tuple[str, nn.Parameter | torch.Tensor]] = [*module.named_parameters(), *module.named_buffers()]
    module._param_name_to_source = {name: LocalSource(name) for name, _ in tensors}  # type: ignore[assignment]
    for i, node in enumerate(module.graph.find_nodes(op="placeholder")):
        node._dynamo_source = LocalSource(f"argument_{i}")
        if i in static:
            node.meta["tensor_dict"] = {"_dynamo_static_input_type": "unguarded"}
