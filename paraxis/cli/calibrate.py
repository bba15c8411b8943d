"""`paraxis calibrate`: measure collectives, matmuls and memory bandwidth of this machine, for the cost model."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from ._errors import Debug, check_output, report_errors
from ._launch import console, is_rank0, launch
from ._options import MAX_RANKS, JsonOption

SMALL, LARGE = 256, 1 << 22
"""Elements of the tensors that latency and bandwidth are measured with."""
REPEATS = 20


def command(
    tp: Annotated[int, typer.Option("--tp", min=2, max=MAX_RANKS, help="Number of ranks to measure with.")] = 2,
    out: Annotated[Path, typer.Option("--out", help="File to write, for --machine.")] = Path("machine.json"),
    as_json: JsonOption = False,
    debug: Debug = False,
) -> None:
    """Measure collectives, matmuls and memory bandwidth on this machine, and write them to a file.

    Pass the file to other commands as `--machine FILE`, or in Python as `machine="FILE"`.

    Example: paraxis calibrate --tp 4 --out machine.json
    """
    with report_errors(debug):
        check_output("--out", out)
        from ..solver import Link, Machine

        measured = launch(tp, measure)
        slowest: dict[str, Any] = {
            key: (min if key in ("flops", "memory") else max)(m[key] for m in measured)
            for key in measured[0]
            if key != "name"
        }
        links = {}
        for kind in ("all_reduce", "all_gather", "reduce_scatter"):
            links[kind] = link_of(kind, slowest[f"{kind} small"], slowest[f"{kind} large"], tp)
        machine = Machine(
            name=f"{tp} ranks, measured on {measured[0]['name']}",
            flops=slowest["flops"],
            memory=slowest["memory"],
            link=Link(links["all_reduce"].latency, links["all_reduce"].bandwidth),
            links=links,
        )
        if not is_rank0():
            return
        machine.save(out)
        if as_json:
            typer.echo(json.dumps(machine.to_json(), indent=1))
            return
        terminal = console()
        terminal.print(f"{machine.name}: {machine.flops / 1e9:.1f} GFLOP/s, memory {machine.memory / 1e9:.1f} GB/s")
        for kind, link in links.items():
            name, latency, bandwidth = kind.replace("_", "-"), link.latency * 1e6, link.bandwidth / 1e9
            terminal.print(f"  {name}: latency {latency:.1f} µs, bandwidth {bandwidth:.2f} GB/s")
        terminal.print(f"Wrote {out}.")


def link_of(kind: str, small: float, large: float, world: int) -> Any:
    """Latency and bandwidth of a collective, from its seconds for a small and a large tensor."""
    from ..solver.machine import Link, volume

    sent = volume(kind, world) * (LARGE - SMALL) * 4
    return Link(small, sent / max(large - small, 1e-9))


def measure() -> dict[str, Any]:
    """Measure on one rank: seconds per collective, FLOP/s and memory bandwidth."""
    import os
    import platform

    import torch
    import torch.distributed as dist

    from ..distributed.collectives import all_gather, all_reduce, reduce_scatter
    from ..distributed.exit import end_process_groups

    cuda = torch.cuda.is_available() and torch.cuda.device_count() >= int(os.environ["WORLD_SIZE"])
    dist.init_process_group("nccl" if cuda else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    group: Any = dist.group.WORLD
    world = dist.get_world_size()
    found: dict[str, Any] = {"name": torch.cuda.get_device_name(device) if cuda else platform.machine()}

    def timed(function: Callable[[], Any]) -> float:
        times = []
        for _ in range(REPEATS):
            dist.barrier()
            start = time.perf_counter()
            function()
            if cuda:
                torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        return statistics.median(times[REPEATS // 4 :])

    for size, count in (("small", SMALL), ("large", LARGE)):
        shard = torch.ones(count // world, device=device)
        full = torch.ones(shard.numel() * world, device=device)
        found[f"all_reduce {size}"] = timed(lambda x=full: all_reduce(x, group))  # type: ignore[misc]
        found[f"all_gather {size}"] = timed(lambda x=shard: all_gather(x, group))  # type: ignore[misc]
        found[f"reduce_scatter {size}"] = timed(lambda x=full: reduce_scatter(x, group))  # type: ignore[misc]
    side = 4096 if cuda else 512
    matrix = torch.randn(side, side, device=device, dtype=torch.bfloat16 if cuda else torch.float32)
    found["flops"] = 2 * side**3 / timed(lambda: matrix @ matrix)
    stream = torch.ones((1 << 28) if cuda else (1 << 24), device=device)
    found["memory"] = stream.numel() * 8 / timed(lambda: stream.mul_(1.0))  # reads and writes
    end_process_groups()
    return found
