"""Building and calling the C++ kernels."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest
import torch

from paraxis.kernels.cpu import build


def test_every_kernel_source_compiles() -> None:
    if build.load_kernel("gemv") is None:
        pytest.skip("needs a C++ compiler")
    names = [path.stem for path in Path(build.__file__).parent.glob("*.cpp")]
    assert len(names) >= 3 and all(build.load_kernel(name) is not None for name in names)


def test_a_missing_source_is_an_error_and_no_fallback() -> None:
    """A kernel under a wrong name must not silently fall back to torch."""
    with pytest.raises(FileNotFoundError):
        build.load_kernel("no_such_kernel")


def test_plain_tensors() -> None:
    x = torch.randn(4, 4)
    assert build.is_plain(x) and build.is_plain(torch.nn.Parameter(x)) and build.is_plain(x.t())
    for other in (x.double(), x.to("meta"), torch._neg_view(x), x.to_sparse()):
        assert not build.is_plain(other)


def test_call_struct_lays_out_arguments_by_kind() -> None:
    call = build.call_struct("a b", "n", "scale")(1, 2, 3, 0.5)
    assert (call.a, call.b, call.n, call.scale) == (1, 2, 3, 0.5)


def test_helpers_for_arguments() -> None:
    x = torch.randn(2, 3, 4, 5)
    scattered = x.transpose(2, 3).contiguous().transpose(2, 3)
    same, copied = build.contiguous_rows([x, scattered])
    assert same is x and copied.stride(3) == 1 and torch.equal(copied, x)
    assert build.strides([x, x], 2) == [60, 20, 60, 20]
    assert build.pointers([x]) == [x.data_ptr()]
    assert build.threads_for(0) == 0 and build.threads_for(1 << 20) == torch.get_num_threads()


def test_what_is_built_is_for_this_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another machine may share the cache on disk, and its processor may not have the same vector extensions."""
    sources: list[str] = []
    monkeypatch.setattr(build, "load_cpp_library", lambda source: sources.append(source) or 1 / 0)
    for processor in ("one", "another"):
        monkeypatch.setattr(build, "processor", lambda processor=processor: processor)
        build.load_kernel.__wrapped__("gemv")
    assert sources[0] != sources[1]


def test_the_processor_is_one_line() -> None:
    assert build.processor().startswith(platform.machine()) and "\n" not in build.processor()
