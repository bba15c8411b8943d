"""Continuous batching on one device, side by side with transformers': ``python benchmarks/gpu_serving.py``.

Each contender runs in a process of its own, one after the other, on random weights that are initialized on the device,
and answers as many requests at once as a level says; prompts have 32 to 512 tokens. The first turn of a level compiles
and captures, and is not counted. On a CPU: ``--device cpu --dtype float32 --layers 2 --set hidden_size=64 ...``, as
with ``gpu_generate.py``, which has the shapes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import random
import subprocess
import sys
import time
from datetime import date
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

from gpu_generate import MARK, SHAPES, config_of, paraxis_model, transformers_model

CONTENDERS = ("paraxis", "transformers")
BLOCKS, PAGE = 640, 256
"""Blocks of the KV cache, and positions of a block: the same for both."""


def arguments() -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama8b", help=f"{', '.join(SHAPES)}, or the path of a config.json")
    parser.add_argument("--layers", type=int, help="use so many layers only")
    parser.add_argument(
        "--set", action="append", default=[], metavar="FIELD=VALUE", help="a field of the configuration"
    )
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--levels", default="1,8,32,128", help="requests at once")
    parser.add_argument("--longest", type=int, default=512, help="tokens of the longest prompt")
    parser.add_argument("--new", type=int, default=128, help="new tokens of each request")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--contenders", default=",".join(CONTENDERS))
    parser.add_argument("--timeout", type=float, default=270.0, help="seconds that a contender may take")
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--alone", help=argparse.SUPPRESS)  # the contender that this process is
    return parser.parse_args()


def percentile(values: list[float], part: float) -> float:
    """The value below which this part of the values is."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))] if ordered else float("nan")


def requests(options: argparse.Namespace, level: int) -> list[list[int]]:
    """The prompts of a level, the same for all contenders."""
    draw = random.Random(level)
    return [[draw.randrange(5, 1000) for _ in range(draw.randint(32, options.longest))] for _ in range(level)]


def alone(options: argparse.Namespace) -> None:
    """All levels of one contender; prints a line for each."""
    import torch
    from transformers import ContinuousBatchingConfig, GenerationConfig
    from transformers.utils import logging

    logging.set_verbosity_error()
    config = config_of(options)
    build = paraxis_model if options.alone == "paraxis" else transformers_model
    shared = SimpleNamespace(**vars(options), tp_of=1, quantization=None)
    model, _ = build(shared, config)  # type: ignore[arg-type]
    chosen = GenerationConfig(max_new_tokens=options.new, do_sample=False, eos_token_id=-1, pad_token_id=0)
    batching = ContinuousBatchingConfig(page_size=PAGE, num_blocks=BLOCKS)
    with torch.no_grad(), model.continuous_batching_context_manager(chosen, True, None, batching) as manager:
        for level in map(int, options.levels.split(",")):
            turns = [turn(manager, requests(options, level), options.new) for _ in range(1 + options.turns)]
            times = [each for _, found in turns[1:] for each in found]
            gaps = [b - a for each in times for a, b in itertools.pairwise(each)]
            seconds = median(each for each, _ in turns[1:])
            found = {
                "level": level,
                "contender": options.alone,
                "first_turn": turns[0][0],
                "tokens_per_second": level * options.new / seconds,
                "ttft": [percentile([each[0] for each in times if each], p) for p in (0.5, 0.95)],
                "itl": [percentile(gaps, p) for p in (0.5, 0.95, 0.99)],
            }
            print(MARK + json.dumps(found), flush=True)


def turn(manager: Any, prompts: list[list[int]], new: int) -> tuple[float, list[list[float]]]:
    """Answer these prompts: seconds, and those from the start to each token of each request."""
    began = time.perf_counter()
    names = manager.add_requests(prompts, max_new_tokens=new, record_timestamps=True)
    found: dict[str, Any] = {}
    while len(found) < len(prompts):
        result = manager.get_result(timeout=1)
        if result is not None and result.is_finished():
            if result.error is not None:
                raise RuntimeError(result.error)
            found[result.request_id] = result
    seconds = time.perf_counter() - began
    assert all(len(each.generated_tokens) == new for each in found.values())
    return seconds, [[t - began for t in found[name].timestamps or ()] for name in names]


def in_a_process(name: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """What a contender has measured until it ended, or until its time was up."""
    command = [sys.executable, __file__, *sys.argv[1:], "--alone", name]
    try:
        ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=options.timeout, check=False)
        output = ended.stdout
    except subprocess.TimeoutExpired as error:
        output = error.stdout.decode() if isinstance(error.stdout, bytes) else error.stdout or ""
        print(f"{name}: no end within {options.timeout:.0f} s", file=sys.stderr)
    lines = [line.removeprefix(MARK) for line in output.splitlines() if line.startswith(MARK)]
    return [json.loads(line) for line in lines]


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown, with each rate as a ratio to transformers' at the same level."""
    peer = {row["level"]: row["tokens_per_second"] for row in rows if row["contender"] == "transformers"}
    lines = [
        "| requests | contender | tokens/s | × transformers | TTFT p50, p95 (ms) | ITL p50, p95, p99 (ms) |",
        "|---:|---|---:|---:|---:|---:|",
    ]
    for row in sorted(rows, key=lambda row: row["level"]):
        ratio = row["tokens_per_second"] / peer[row["level"]] if row["level"] in peer else float("nan")
        ttft, itl = (", ".join(f"{1e3 * x:.1f}" for x in row[name]) for name in ("ttft", "itl"))
        rate = row["tokens_per_second"]
        lines.append(f"| {row['level']} | {row['contender']} | {rate:.0f} | {ratio:.2f} | {ttft} | {itl} |")
    return "\n".join(lines)


def main() -> None:
    """Measure, and print a table."""
    options = arguments()
    if options.alone:
        alone(options)
        return
    import torch
    import transformers

    rows = [row for name in options.contenders.split(",") for row in in_a_process(name, options)]
    where = torch.cuda.get_device_name() if options.device == "cuda" else platform.machine()
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    print(f"{options.shape}, {options.dtype}, {where}, {versions}, {date.today()}\n\n{table(rows)}")
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
