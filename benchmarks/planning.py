"""Time and memory of planning large models from their configurations.

``python benchmarks/planning.py --out docs/results`` plans models of the shapes of Llama 8B, 70B and 405B and of
DeepSeek-V3 over 8 ranks, each in a process of its own: no weights, no process group, no GPU. Each is planned without
and with the memory of a prefill, several times; the fastest run counts, because the machine may be busy. The page has
the time of the process, imports included, of every stage, and the memory of the process.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import time
from datetime import date
from pathlib import Path
from typing import Any

LLAMA = {"num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "8B": (
        "llama",
        {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "intermediate_size": 14336, **LLAMA},
    ),
    "70B": (
        "llama",
        {"hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64, "intermediate_size": 28672, **LLAMA},
    ),
    "405B": (
        "llama",
        {
            "hidden_size": 16384,
            "num_hidden_layers": 126,
            "num_attention_heads": 128,
            "intermediate_size": 53248,
            **LLAMA,
        },
    ),
    "DeepSeek-V3": (
        "deepseek_v3",
        {
            "hidden_size": 7168,
            "num_hidden_layers": 61,
            "first_k_dense_replace": 3,
            "num_attention_heads": 128,
            "num_key_value_heads": 128,
            "q_lora_rank": 1536,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "intermediate_size": 18432,
            "moe_intermediate_size": 2048,
            "n_routed_experts": 256,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "n_group": 8,
            "topk_group": 4,
            "vocab_size": 129280,
            "max_position_embeddings": 4096,
        },
    ),
}
SECONDS = {"8B": 15.0}
"""Limits of the process by shape; `LONGEST` for others."""
LONGEST, MEMORY = 30.0, 2.0
"""Seconds, and GiB."""
CONTEXT = 4096
STAGES = ("build", "capture", "decompose", "search", "rewrite", "memory")


def plan(shape: str, ranks: int, by_blocks: bool, context: int | None) -> None:
    """Plan one model in this process, and print the figures."""
    from transformers import AutoConfig

    from paraxis import plan_model

    started = time.perf_counter()
    model_type, fields = SHAPES[shape]
    config = AutoConfig.for_model(model_type, dtype="bfloat16", **fields)
    found = plan_model(config, ranks, plan_by_blocks=by_blocks, context=context)
    assert found.memory is not None
    data = {
        "stages": {name: round(seconds, 2) for name, seconds in found.timings.items()},
        "plan_s": round(time.perf_counter() - started, 2),
        "memory_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2),
        "layers": fields["num_hidden_layers"],
        "parameters": sum(_numel(p.global_shape) for p in found.parameters.values()),
        "per_rank": round(found.sharded_fraction, 4),
        "rank_gb": round(found.memory.total / 1e9, 1),
        "activations_gb": None if found.memory.activations is None else round(found.memory.activations / 1e9, 2),
        "collectives": found.count(),
        "optimal": found.optimal,
    }
    print(json.dumps(data))


def _numel(shape: tuple[int, ...]) -> int:
    total = 1
    for n in shape:
        total *= n
    return total


def measure(shape: str, ranks: int, all_blocks: bool, context: int | None) -> dict[str, Any]:
    """Plan one model in a process of its own."""
    command = [sys.executable, __file__, "--one", shape, "--ranks", str(ranks)]
    command += ["--all-blocks"] if all_blocks else []
    command += ["--context", str(context)] if context else []
    started, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    seconds, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    busy = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    found = json.loads(output.splitlines()[-1])
    return {"shape": shape, "command_s": round(seconds, 1), "busy_s": round(busy, 1), **found}


def page(found: list[dict[str, Any]], ranks: int, repeats: int) -> str:
    """The results as Markdown."""
    import torch
    import transformers

    versions = f"torch {torch.__version__.partition('+')[0]}, transformers {transformers.__version__}"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    rows = []
    for each in found:
        limit = SECONDS.get(each["shape"], LONGEST)
        stages = [f"{each['stages'].get(name, 0.0):.1f} s" for name in STAGES]
        rows.append(
            f"| {each['shape']} | {each['layers']} | {each['context'] or ''} | {each['command_s']:.1f} s | "
            f"{limit:.0f} s | {each['busy_s']:.1f} s | {each['plan_s']:.1f} s | {' | '.join(stages)} | "
            f"{each['memory_gib']:.2f} GiB |"
        )
    plans = [
        f"- {each['shape']}: {each['parameters'] / 1e9:.0f} B parameters, {each['per_rank']:.1%} of them on each rank, "
        f"{', '.join(f'{n} {kind}' for kind, n in each['collectives'].items())}; with a prefill of {each['context']} "
        f"tokens {each['rank_gb']} GB, of which activations {each['activations_gb']} GB"
        f"{'' if each['optimal'] else '; not proven to be the cheapest'}."
        for each in found
        if each["context"]
    ]
    within_limits = all(
        each["command_s"] < SECONDS.get(each["shape"], LONGEST) and each["memory_gib"] < MEMORY for each in found
    )
    return "\n".join(
        [
            "# Planning from a configuration",
            "",
            f"`python benchmarks/planning.py --out docs/results`: models of these shapes over {ranks} ranks, each in a",
            "process of its own, without weights, process group or GPU. *Command* is the time of the process,",
            "imports included, *CPU* its CPU time; the stages are those of `plan_model`. With a number of *tokens*,",
            "the memory of a prefill of that length is counted, too: the model is captured once more, at that length.",
            f"The fastest of {repeats} runs; other processes may have been running on the machine.",
            "Repeated blocks are captured and solved once.",
            "",
            f"{date.today()}, {cores} CPU cores, {versions}, Python {platform.python_version()}.",
            "",
            f"| shape | layers | tokens | command | limit | CPU | plan | {' | '.join(STAGES)} | memory |",
            f"|---|---|---|---|---|---|---|{'---|' * len(STAGES)}---|",
            *rows,
            "",
            f"The limits ({MEMORY:.0f} GiB for the process) are {'met' if within_limits else '**not met**'}.",
            "",
            "The plans:",
            "",
            *plans,
            "",
            "Planning the first blocks gives the plan of all blocks, costs included (`tests/capture`).",
            "",
        ]
    )


def main() -> None:
    """Plan every shape, print the figures, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--all-blocks", action="store_true", help="plan every block instead of the first ones")
    parser.add_argument("--context", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help="write planning.md into this directory")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        plan(options.one, options.ranks, not options.all_blocks, options.context)
        return
    found = []
    for shape in options.shapes.split(","):
        for context in (None, CONTEXT):
            runs = [measure(shape, options.ranks, options.all_blocks, context) for _ in range(options.repeats)]
            found.append({**min(runs, key=lambda run: run["command_s"]), "context": context})
            print(json.dumps(found[-1]), flush=True)
    if options.out is not None:
        (options.out / "planning.md").write_text(page(found, options.ranks, options.repeats), encoding="utf-8")


if __name__ == "__main__":
    main()
