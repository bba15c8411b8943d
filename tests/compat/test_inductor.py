"""Private names of Inductor."""

from __future__ import annotations

import inspect
import subprocess
import sys
import warnings

import pytest
import torch
from torch.fx import Graph, GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

import paraxis.optimize.kv_cache_append  # noqa: F401 -- defines append_rows
from paraxis.compat import inductor as compat
from paraxis.kernels.cpu.build import load_kernel


def test_every_name_exists() -> None:
    assert all(hasattr(compat, name) for name in compat.__all__)


def test_options_of_modes() -> None:
    assert compat.options_of_mode("default") == {}
    assert compat.options_of_mode("reduce-overhead")["triton.cudagraphs"] is True
    with pytest.raises(Exception, match="no-such-mode"):
        compat.options_of_mode("no-such-mode")


def test_custom_pass_of_the_user() -> None:
    from torch._inductor import config

    assert not compat.has_custom_pre_pass()
    with config.patch(post_grad_custom_pre_pass=lambda graph: None):
        assert compat.has_custom_pre_pass()


def test_failed_cpp_compilation_is_recognised() -> None:
    from torch._inductor.exc import CppCompileError, InductorError

    def wrapped(error: Exception) -> Exception:
        wrapper = InductorError.__new__(InductorError)  # its constructor differs between versions
        wrapper.inner_exception = error
        return wrapper

    assert compat.cpp_compile_failed(wrapped(CppCompileError(["g++"], "undeclared")))
    assert not compat.cpp_compile_failed(wrapped(ValueError())) and not compat.cpp_compile_failed(ValueError())


def test_compiling_a_graph() -> None:
    if load_kernel("gemv") is None:
        pytest.skip("needs a C++ compiler")
    graph = Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_function(torch.ops.aten.add.Tensor, (x, 1)),))
    example = torch.ones(3)
    with torch.no_grad():
        compiled = compat.compile_graph(GraphModule({}, graph), [example], {"triton.cudagraphs": False})
        assert torch.equal(compiled(example)[0], torch.full((3,), 2.0))
    library = compat.load_cpp_library('extern "C" int run() { return 3; }')
    assert library.run() == 3


def test_the_slow_parts_are_imported_when_used() -> None:
    """Inductor itself takes a second to import, and models that run without a compiler never need it."""
    slow = ("torch._inductor.compile_fx", "torch._inductor.codecache", "transformers")
    code = (
        "import sys, paraxis.compat.inductor, paraxis.compat.transformers\n"
        f"print([m for m in {slow} if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_compile_workers_are_shut_down_if_there_are_any() -> None:
    code = """
import sys
from paraxis.compat.inductor import shut_down_compile_workers
shut_down_compile_workers()
assert "torch._inductor.async_compile" not in sys.modules
from torch._inductor import async_compile
pool = type("Pool", (), {"shutdown": lambda self: print("shut down")})()
async_compile._pool_set.add(pool)
shut_down_compile_workers()
assert not async_compile._pool_set
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0 and ended.stdout == "shut down\n", ended.stderr


def test_a_graph_whose_first_run_may_alias_runs_again_where_torch_raises_for_aliases() -> None:
    config = torch._functorch.config
    if not hasattr(config, "error_on_custom_op_aliasing"):
        pytest.skip("this version of torch does not check them")

    def appended(past: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        return torch.ops.paraxis.append_rows(past, new)

    new = torch.randn(1, 2, 1, 4)
    past = torch.ops.paraxis.append_rows(
        torch.randn(1, 2, 3, 4), new
    )  # a buffer with free rows: the next ones go there
    with config.patch(error_on_custom_op_aliasing=True), torch.no_grad():
        graph = make_fx(appended, tracing_mode="fake")(past, new)
        compiled = compat.compile_graph(graph, [past, new], {})
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with compat.aliases_allowed():
                (first,) = compiled(past, new)
        assert first.untyped_storage().data_ptr() == past.untyped_storage().data_ptr(), "it did not append in place"
        past = torch.ops.paraxis.append_rows(torch.randn(1, 2, 3, 4), new)
        (second,) = compiled(past, new)
        assert second.untyped_storage().data_ptr() == past.untyped_storage().data_ptr()


def test_a_library_is_built_without_probing_vector_extensions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each probe is a process."""
    from torch._inductor import codecache

    if "needs_vec_isa" not in inspect.signature(codecache.CppCodeCache.load_async).parameters:
        pytest.skip("this version of torch always asks")
    if load_kernel("gemv") is None:
        pytest.skip("needs a C++ compiler")
    asked: list[str] = []
    monkeypatch.setattr(codecache, "pick_vec_isa", lambda: asked.append("") or codecache.invalid_vec_isa)
    library = compat.load_cpp_library('extern "C" int of_a_test() { return 42; }')
    assert library.of_a_test() == 42 and not asked
