"""A training step of one rank against its FLOPs: an 8B-shaped model in bfloat16 with AdamW, on a GPU.

``python benchmarks/training.py --ranks 8`` measures one rank of 8 with a fake process group, whose collectives cost
nothing, as ``floors.py`` does. The floor of the time is the FLOPs of the matmuls, forward and backward, at the rate of
large GEMMs; that of the memory the bytes of parameters, gradients and AdamW's two states.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import torch
from floors import ARITHMETIC, build, join


def main() -> None:
    """Measure every mode and print its figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--modes", default="eager,default", help="eager, or a mode of Inductor")
    options = parser.parse_args()
    join(options.ranks)
    for mode in options.modes.split(","):
        print(json.dumps(measure(mode, options)), flush=True)


def measure(mode: str, options: Any) -> dict[str, Any]:
    """The figures of one compilation mode."""
    model, ctx = build(mode, options.layers)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    ids = torch.randint(0, 128256, (options.batch, options.context), device="cuda")

    def step() -> tuple[float, float]:
        """Seconds of forward and backward, and of the step with the optimizer."""
        torch.cuda.synchronize()
        started = time.perf_counter()
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        torch.cuda.synchronize()
        passed = time.perf_counter() - started
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        return passed, time.perf_counter() - started

    started = time.perf_counter()
    step()
    first = time.perf_counter() - started
    step()
    torch.cuda.reset_peak_memory_stats()
    compiled = ctx.compile_times
    passes, steps = zip(*[step() for _ in range(options.steps)])
    held = sum(p.to_local().nbytes for p in model.parameters())
    tokens = options.batch * options.context
    matrices = sum(p.to_local().numel() for n, p in model.named_parameters() if "embed_tokens" not in n)
    heads = model.config.num_attention_heads // options.ranks
    causal = 2 * options.context * tokens * heads * model.config.head_dim * options.layers
    floor = 3 * (2 * matrices * tokens + causal) / ARITHMETIC
    both = sorted(passes)[len(passes) // 2]
    return {
        "mode": mode,
        "ranks": options.ranks,
        "layers": options.layers,
        "tokens": tokens,
        "first_s": round(first, 1),
        "forward_backward_ms": round(both * 1e3, 1),
        "floor_ms": round(floor * 1e3, 1),
        "ratio": round(both / floor, 2),
        "step_ms": round(sorted(steps)[len(steps) // 2] * 1e3, 1),
        "recompiled": ctx.compile_times - compiled,
        "state_gb": round(4 * held / 1e9, 1),  # parameters, gradients, two states
        "memory_gb": round(torch.cuda.max_memory_allocated() / 1e9, 1),
    }


if __name__ == "__main__":
    main()
