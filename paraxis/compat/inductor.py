"""Private APIs of Inductor.

Most of Inductor takes a second to import, and a planned model that runs eagerly never needs it: hence the imports
inside of functions. Seen on torch 2.11, 2.13 and 2.15.
"""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx import GraphModule

__all__ = [
    "CustomGraphPass",
    "aliases_allowed",
    "compile_graph",
    "cpp_compile_failed",
    "get_hash_for_files",
    "has_custom_pre_pass",
    "load_cpp_library",
    "options_of_mode",
    "shut_down_compile_workers",
    "start_compile_workers",
]


def options_of_mode(mode: str) -> dict[str, Any]:
    """Inductor's options for a mode of ``torch.compile``; public are the names of the modes alone."""
    from torch._inductor import list_mode_options

    return dict(list_mode_options(mode))


def compile_graph(module: GraphModule, inputs: Sequence[Any], options: dict[str, Any]) -> Callable[..., Any]:
    """Compile a graph of ATen operators for these (fake) inputs; ``torch.compile`` would capture it once more."""
    from torch._inductor.compile_fx import compile_fx

    return compile_fx(module, inputs, config_patches=options)


@contextmanager
def aliases_allowed() -> Iterator[None]:
    """Inside, the first run of a compiled graph accepts that results of our custom operators alias their arguments.

    In its first run torch 2.13 looks at the aliases of every custom operator, and warns, or raises if ``CI`` is set. An
    operator that appends in place to a buffer with free rows, and copies to a new one without them, has no schema that
    says so. The check itself must run: without it, the second run would be the first that is looked at.
    """
    from torch._functorch import config

    if not hasattr(config, "error_on_custom_op_aliasing"):
        yield
        return
    with config.patch(error_on_custom_op_aliasing=False), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "paraxis::")
        yield


def has_custom_pre_pass() -> bool:
    """Whether the user has set ``post_grad_custom_pre_pass``, the slot for a pass before Inductor's own."""
    from torch._inductor import config

    return config.post_grad_custom_pre_pass is not None


def cpp_compile_failed(error: BaseException) -> bool:
    """Whether Inductor failed because the C++ that it generated does not compile."""
    from torch._inductor.exc import CppCompileError, InductorError

    return isinstance(error, InductorError) and isinstance(error.inner_exception, CppCompileError)


def load_cpp_library(source: str) -> Any:
    """Build C++ source with Inductor's compiler flags, or load what was built before; a ``ctypes`` library.

    The flags are those for this processor (``-march=native``), unless somebody has set others. Inductor also finds out
    which vector extensions the compiler knows, in three processes that take a second; torch 2.13 can be told not to.
    """
    from torch._inductor import config
    from torch._inductor.codecache import CppCodeCache

    optional = inspect.signature(CppCodeCache.load_async).parameters
    native = "needs_vec_isa" in optional and getattr(config.cpp, "march", None) is None
    return CppCodeCache.load(source, **({"needs_vec_isa": False} if native else {}))


def start_compile_workers() -> None:
    """Start the processes that Inductor compiles Triton kernels in, without waiting for them: it takes them as long as
    it takes to import torch."""
    from torch._inductor.async_compile import AsyncCompile

    AsyncCompile.use_process_pool()  # it gives them a first, empty job


def shut_down_compile_workers() -> None:
    """End the processes that Inductor compiles in, and the threads that wait for them, if there are any."""
    workers = sys.modules.get("torch._inductor.async_compile")
    if workers is not None:
        workers.shutdown_compile_workers()
