"""GEMV kernels with quantized weights against their floors: ``python benchmarks/quantized_linear.py``.

For the linear layers of an 8B-shaped model, at one rank or at one of ``--tp-of 8``: each kernel is checked against
dequantize-then-matmul in float64, then timed in a CUDA graph over as many weights as do not fit the GPU's cache. The
floor is the time to read the packed bytes and scales once at 4.3 TB/s. ``--sweep`` times other tiles too.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

BANDWIDTH = 4.3e12
"""Memory bandwidth of an H200, in bytes per second."""
POOL = 400e6
"""Bytes of weights that are read in turn."""


class Layer(NamedTuple):
    """Linear layers that one kernel computes."""

    rows: tuple[int, ...]
    columns: int
    norm: bool = False
    gated: bool = False


def layers(ranks: int) -> dict[str, Layer]:
    """Those of a Llama of 8B parameters, of one of so many ranks."""
    return {
        "qkv": Layer((4096 // ranks, 1024 // ranks, 1024 // ranks), 4096, norm=True),
        "output": Layer((4096,), 4096 // ranks),
        "gate/up": Layer((14336 // ranks, 14336 // ranks), 4096, norm=True, gated=True),
        "down": Layer((4096,), 14336 // ranks),
    }


KINDS = ("bf16", "fp8", "fp8-row", "int8", "int4", "uint4", "mxfp4")


def quantized(kind: str, rows: int, columns: int, device: str) -> tuple[Any, Any]:
    """(parts, encoding) of a random weight."""
    import torch

    from paraxis.kernels.quantized import Encoding, Parts
    from paraxis.kernels.quantized.encoding import FP4, INT4, UINT4

    def scales(r: int, c: int, dtype: Any) -> Any:
        return (torch.rand(r, c, device=device) * 0.02 + 0.01).to(dtype)

    if kind in ("fp8", "fp8-row"):
        codes = torch.randn(rows, columns, device=device).to(torch.float8_e4m3fn)
        if kind == "fp8":
            return Parts(codes, scales(-(-rows // 128), -(-columns // 128), torch.float32)), Encoding((128, 128))
        return Parts(codes, scales(rows, 1, torch.float32)), Encoding((1, columns))
    if kind == "int8":
        codes = torch.randint(-127, 128, (rows, columns), dtype=torch.int8, device=device)
        return Parts(codes, scales(rows, 1, torch.float32)), Encoding((1, columns))
    codes = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8, device=device)
    if kind == "int4":
        return Parts(codes, scales(rows, columns // 128, torch.bfloat16)), Encoding((1, 128), INT4)
    if kind == "uint4":
        zeros = torch.randint(0, 16, (rows, columns // 128), dtype=torch.uint8, device=device)
        return Parts(codes, scales(rows, columns // 128, torch.float16), zeros), Encoding((1, 128), UINT4)
    exponents = torch.randint(115, 125, (rows, columns // 32), dtype=torch.uint8, device=device)
    return Parts(codes, exponents), Encoding((1, 32), FP4, exponents=True)


def time_of(calls: Sequence[Callable[[], Any]], repeats: int = 5) -> float:
    """Microseconds of one call, in a CUDA graph of all of them."""
    import torch

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls[:2]:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(repeats + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / len(calls))
    return median(times[2:])


def tiles(kind: str, layer: Layer) -> list[tuple[int, ...]]:
    """(rows, groups, warps, programs) to try."""
    packed = kind in ("int4", "uint4")
    found = []
    for warps in (4, 8):
        groups = warps * (8 if packed else 4)
        if groups * 128 > 2 * layer.columns or layer.columns > groups * 128 * 4:
            continue
        for rows in (2, 4) if layer.gated else (2, 4, 8):
            found += [(rows, groups, warps, 132 * each) for each in (1, 2, 3, 4, 6, 8) if each * warps <= 32]
    return found


def run(kind: str, name: str, layer: Layer, options: argparse.Namespace) -> None:
    """Check and time one layer in one format; print a line."""
    import torch

    from paraxis.kernels.quantized import dequantize
    from paraxis.kernels.triton import gemv, quantized_gemv

    torch.manual_seed(0)
    x = torch.randn(1, layer.columns, device="cuda", dtype=torch.bfloat16)
    residual = torch.randn_like(x) if layer.norm else None
    norm = torch.rand(layer.columns, device="cuda", dtype=torch.bfloat16) if layer.norm else None
    total = torch.empty_like(x) if layer.norm else None
    if kind == "bf16":
        make: Any = lambda n: torch.randn(n, layer.columns, device="cuda", dtype=torch.bfloat16) * 0.02  # noqa: E731
    else:
        make = lambda n: quantized(kind, n, layer.columns, "cuda")  # noqa: E731
    one = [make(n) for n in layer.rows]
    size = sum(w.numel() * 2 if kind == "bf16" else w[0].nbytes for w in one)
    copies = [one, *([make(n) for n in layer.rows] for _ in range(max(1, int(POOL / size))))]
    floor = size / BANDWIDTH * 1e6

    def call(weights: Any, tile: Any = None) -> Any:
        if kind == "bf16":
            return gemv.launch(x, residual, norm, 1e-5, weights, [], layer.gated, total)
        parts, encoding = [w[0] for w in weights], weights[0][1]
        chosen = None if tile is None else quantized_gemv.Sizes(*tile)
        return quantized_gemv.launch(x, residual, norm, 1e-5, parts, encoding, [], layer.gated, total, chosen)

    def expected() -> Any:
        row = x if residual is None else x + residual
        if norm is not None:
            row = (row.float() * torch.rsqrt(row.float().pow(2).mean() + 1e-5)).bfloat16() * norm
        out = []
        for w in one:
            weight = w.double() if kind == "bf16" else dequantize(w[0], w[1], layer.columns, torch.float64)
            out.append(row.double() @ weight.T)
        return torch.nn.functional.silu(out[0]) * out[1] if layer.gated else torch.cat(out, -1)

    exact = expected()
    swept = options.sweep and kind not in ("bf16", "mxfp4")
    chosen: list[Any] = [None, *(tiles(kind, layer) if swept else [])]
    if kind not in ("bf16", "mxfp4"):  # also few programs that hold the row in registers
        shape = layer.rows[0] if layer.gated else sum(layer.rows), layer.columns // (1 if "4" not in kind else 2)
        group = {"int4": 64, "uint4": 64}.get(kind, 128)
        chosen.append(tuple(quantized_gemv.resident_sizes(*shape, group, layer.gated, torch.device("cuda", 0))))
    found = []
    for tile in chosen:
        try:
            error = float((call(one, tile).double() - exact).norm() / exact.norm())
            if options.compile:
                continue
            took = time_of([partial(call, weights, tile) for weights in copies])
        except Exception as problem:
            print(f"{kind:8} {name:8} {tile}: {type(problem).__name__}: {str(problem)[:200]}", flush=True)
            continue
        found.append((took, tile, error))
    if options.compile or not found:
        return
    default = next((each for each in found if each[1] is None), found[0])
    best = sorted(found, key=lambda each: each[0])[:5]
    others = "  " + ", ".join(f"{tile}: {took:.2f}" for took, tile, _ in best)
    print(
        f"{kind:8} {name:8} {default[0]:7.2f} us  floor {floor:6.2f}  ratio {default[0] / floor:4.2f}  "
        f"error {max(e for _, _, e in found):.1e}{others}",
        flush=True,
    )


def prefill(rows: int, layer: Layer, name: str) -> None:
    """Time one layer on many rows: bfloat16, float8 on both sides, and a dequantized weight; print a line."""
    import torch

    from paraxis.kernels.quantized import Encoding
    from paraxis.kernels.triton import dequantize, scaled_linear

    x = torch.randn(rows, layer.columns, device="cuda", dtype=torch.bfloat16)
    count = sum(layer.rows)
    plain = [torch.randn(count, layer.columns, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    parts = [quantized("fp8", count, layer.columns, "cuda")[0] for _ in range(3)]
    encoding = Encoding((128, 128), activations="float8 128")
    times = {"bf16": time_of([partial(torch.nn.functional.linear, x, w) for w in plain])}
    if scaled_linear.fits(x, parts[0], encoding):
        times["float8"] = time_of([partial(scaled_linear.scaled_linear, x, p, None) for p in parts])
    times["rounding of the input"] = time_of([partial(scaled_linear.round_rows, x)] * 3)
    arguments = (encoding, layer.columns, torch.bfloat16)
    times["dequantizing"] = time_of([partial(dequantize.launch, p, *arguments) for p in parts])
    line = "  ".join(f"{what} {took:7.2f} us" for what, took in times.items())
    print(f"{rows} rows  {name:8} {line}", flush=True)


def main() -> None:
    """Compile in several processes, then check and time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--layers", default="qkv,output,gate/up,down")
    parser.add_argument("--tp-of", type=int, default=1)
    parser.add_argument("--sweep", action="store_true", help="other tiles too")
    parser.add_argument("--prefill", type=int, default=0, help="time layers on so many rows instead")
    parser.add_argument("--compile", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    kinds, names = options.kinds.split(","), options.layers.split(",")
    if options.prefill:
        sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
        for name in names:
            prefill(options.prefill, layers(options.tp_of)[name], name)
        return
    if not options.compile:  # Triton's cache on disk is filled by all at once
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[1])}
        jobs = [(kind, name) for kind in kinds for name in names]
        for start in range(0, len(jobs), 14):
            running = []
            for kind, name in jobs[start : start + 14]:
                command = [sys.executable, __file__, "--compile", "--kinds", kind, "--layers", name]
                command += ["--tp-of", str(options.tp_of), *(["--sweep"] if options.sweep else [])]
                running.append(subprocess.Popen(command, env=environment))
            for process in running:
                process.wait()
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    global POOL
    POOL = 1.0 if options.compile else POOL
    for kind in kinds:
        for name in names:
            run(kind, name, layers(options.tp_of)[name], options)


if __name__ == "__main__":
    main()
