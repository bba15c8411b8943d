"""How long it takes to plan large models from their configurations alone.

``python benchmarks/planning.py``: a Llama of 8B and one of 405B at 8 ranks, each in a process of its own, with the time
of the whole command, of every stage, and the memory. No weights, no process group, no GPU.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time

SHAPES = {
    "8B": {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "intermediate_size": 14336},
    "70B": {"hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64, "intermediate_size": 28672},
    "405B": {"hidden_size": 16384, "num_hidden_layers": 126, "num_attention_heads": 128, "intermediate_size": 53248},
}


def plan(shape: str, ranks: int, by_blocks: bool) -> None:
    from transformers import LlamaConfig

    from paraxis import plan_model

    started = time.perf_counter()
    config = LlamaConfig(num_key_value_heads=8, vocab_size=128256, dtype="bfloat16", **SHAPES[shape])
    found = plan_model(config, ranks, plan_by_blocks=by_blocks)
    print(
        json.dumps(
            {
                "stages": {name: round(seconds, 2) for name, seconds in found.timings.items()},
                "plan_s": round(time.perf_counter() - started, 2),
                "memory_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2),
                "per_rank": round(found.sharded_fraction, 4),
                "collectives": found.count(),
                "optimal": found.optimal,
            }
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", default="8B,405B")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--whole", action="store_true", help="plan all blocks instead of the first ones")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        plan(options.one, options.ranks, not options.whole)
        return
    for shape in options.shapes.split(","):
        command = [sys.executable, __file__, "--one", shape, "--ranks", str(options.ranks)]
        started = time.perf_counter()
        output = subprocess.run(
            [*command, *(["--whole"] if options.whole else [])], check=True, capture_output=True, text=True
        ).stdout
        seconds = time.perf_counter() - started
        print(json.dumps({"shape": shape, "command_s": round(seconds, 1), **json.loads(output.splitlines()[-1])}))


if __name__ == "__main__":
    main()
