"""One rank against the limits of its GPU: decode steps and a long prefill of an 8B-shaped model.

``python benchmarks/floors.py --ranks 8`` measures one rank of 8 with a fake process group, whose collectives cost
nothing: the figures contain everything but communication. The floor of a decode step is the time to read the weights
and the KV cache of the rank once at the memory's bandwidth; that of a prefill is its FLOPs at the rate of large GEMMs.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

BANDWIDTH = 4.3e12
"""Memory bandwidth of an H200, in bytes per second."""
ARITHMETIC = 790e12
"""FLOP/s of large bfloat16 GEMMs on it."""


def main() -> None:
    """Measure every mode and print its figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--modes", default="eager,reduce-overhead")
    parser.add_argument("--profile", type=Path, help="file for the profiles of decode steps and prefills")
    options = parser.parse_args()
    join(options.ranks)
    for mode in options.modes.split(","):
        print(json.dumps(measure(mode, options)), flush=True)


def join(ranks: int) -> None:
    """Initialize a process group: NCCL with one rank, or rank 0 of a fake group."""
    if ranks > 1:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    else:
        dist.init_process_group("nccl", rank=0, world_size=1, store=dist.HashStore())


def build(mode: str, layers: int) -> Any:
    """The parallel model with random weights, and its context."""
    from transformers import LlamaConfig

    from paraxis import ParallelExecutionCtx, parallelize_model

    config = LlamaConfig(
        architectures=["LlamaForCausalLM"],
        hidden_size=4096,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        intermediate_size=14336,
        vocab_size=128256,
        max_position_embeddings=8192,
    )
    ctx = ParallelExecutionCtx(tp_group=dist.group.WORLD, current_device=torch.device("cuda", 0))  # type: ignore[arg-type]
    compiled: dict[str, Any] = {} if mode == "eager" else {"compile": "inductor", "mode": mode}
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        model = parallelize_model(
            folder,
            ctx,
            skip_load_weights=True,
            weight_init_fn=lambda tensor: tensor,
            torch_dtype=torch.bfloat16,
            show_progress=False,
            **compiled,
        ).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.to_local().normal_(std=0.02)
    return model, ctx


def host_profile(function: Any) -> str:
    """Where the host spends its time."""
    import cProfile
    import io
    import pstats

    profiler, text = cProfile.Profile(), io.StringIO()
    profiler.runcall(function)
    pstats.Stats(profiler, stream=text).sort_stats("tottime").print_stats(40)
    return text.getvalue()


@torch.no_grad()
def measure(mode: str, options: Any) -> dict[str, Any]:
    """The figures of one compilation mode."""
    from transformers import StaticCache

    started = time.perf_counter()
    model, ctx = build(mode, options.layers)
    planned = time.perf_counter() - started
    length = options.context + 3 * options.tokens + 32
    length += -length % 64
    prompt = torch.randint(0, 128256, (1, options.context), device="cuda")

    def prefill() -> tuple[Any, torch.Tensor]:
        """A prefill into a new cache: the cache and the next token."""
        started = time.perf_counter()
        cache = StaticCache(config=model.config, max_cache_len=length)
        making.append(time.perf_counter() - started)
        logits = model(prompt, past_key_values=cache, logits_to_keep=1).logits
        return cache, logits[:, -1:].argmax(-1)

    def steps(cache: Any, token: torch.Tensor, count: int) -> torch.Tensor:
        """Greedy decode steps."""
        for _ in range(count):
            token = model(token, past_key_values=cache, logits_to_keep=1).logits[:, -1:].argmax(-1)
        return token

    making: list[float] = []
    started = time.perf_counter()
    cache, token = prefill()
    token = steps(cache, token, 8)
    torch.cuda.synchronize()
    first = time.perf_counter() - started
    compiled = ctx.compile_times
    prompts = []
    for _ in range(5):
        started = time.perf_counter()
        prefill()
        torch.cuda.synchronize()
        prompts.append(time.perf_counter() - started)
    started = time.perf_counter()
    token = steps(cache, token, options.tokens)
    host = time.perf_counter() - started
    torch.cuda.synchronize()
    decode = (time.perf_counter() - started) / options.tokens
    if options.profile:
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
            steps(cache, token, 5)
            torch.cuda.synchronize()
        text = found.key_averages().table(sort_by="cuda_time_total", row_limit=45, max_name_column_width=90)
        with profile(activities=[ProfilerActivity.CUDA]) as found:
            prefill()
            torch.cuda.synchronize()
        text += found.key_averages().table(sort_by="cuda_time_total", row_limit=25, max_name_column_width=90)
        text += host_profile(lambda: steps(cache, token, 50))
        text += host_profile(lambda: [prefill() for _ in range(5)])
        options.profile.with_name(f"{options.profile.name}-{options.ranks}-{mode}.txt").write_text(text)
    matrices = sum(p.to_local().numel() for n, p in model.named_parameters() if "embed_tokens" not in n)
    head = next(p.to_local().numel() for n, p in model.named_parameters() if "lm_head" in n)
    cached = sum(x.to_local().numel() if hasattr(x, "to_local") else x.numel() for x in (cache.layers[0].keys,))
    stream = (matrices + 2 * options.layers * cached) * 2 / BANDWIDTH
    heads = model.config.num_attention_heads // options.ranks
    causal = 2 * options.context**2 * heads * model.config.head_dim * options.layers  # two matmuls, half of each
    arithmetic = (2 * (matrices - head) * options.context + 2 * head + causal) / ARITHMETIC
    prompt_time = sorted(prompts)[len(prompts) // 2]
    return {
        "mode": mode,
        "ranks": options.ranks,
        "layers": options.layers,
        "plan_s": round(planned, 1),
        "first_s": round(first, 1),
        "decode_ms": round(decode * 1e3, 3),
        "decode_floor_ms": round(stream * 1e3, 3),
        "decode_ratio": round(decode / stream, 2),
        "host_ms": round(host / options.tokens * 1e3, 3),
        "prefill_ms": round(prompt_time * 1e3, 2),
        "prefill_floor_ms": round(arithmetic * 1e3, 2),
        "prefill_ratio": round(prompt_time / arithmetic, 2),
        "cache_ms": round(sorted(making)[len(making) // 2] * 1e3, 3),
        "recompiled": ctx.compile_times - compiled,
        "memory_gb": round(torch.cuda.max_memory_allocated() / 1e9, 1),
    }


if __name__ == "__main__":
    main()
