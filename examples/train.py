"""Train a small language model on text that every machine has, on data-parallel and tensor-parallel ranks.

    torchrun --nproc-per-node=4 examples/train.py --dp 2 --tp 2 --data-parallel shard --checkpoint run

The text is Python's own documentation and licence, and Debian's common licences where they are installed; tokens are
bytes. Nothing is downloaded. A run that was stopped, or killed, resumes from its last checkpoint with ``--resume``,
also on another mesh, with the same losses as an uninterrupted run: the seed of every batch depends on its step only,
and data-parallel ranks take their rows of it.
"""

from __future__ import annotations

import argparse
import csv
import math
import sys
import sysconfig
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

import paraxis


def options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks")
    parser.add_argument("--dp", type=int, default=1, help="data-parallel ranks")
    parser.add_argument("--data-parallel", choices=["replicate", "shard"], default="replicate")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=8, help="global batch size, in rows")
    parser.add_argument("--length", type=int, default=128, help="sequence length, in bytes")
    parser.add_argument("--accumulate", type=int, default=1, help="gradient accumulation steps")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--clip", type=float, default=1.0, help="maximum gradient norm")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compile", choices=["inductor"], help="compile each rank's program")
    parser.add_argument("--checkpoint", type=Path, help="directory of the checkpoint")
    parser.add_argument("--save-every", type=int, default=50, help="steps between checkpoints")
    parser.add_argument("--resume", action="store_true", help="resume from the checkpoint, if there is one")
    parser.add_argument("--export", type=Path, help="save the trained model here, as transformers does")
    parser.add_argument("--losses", type=Path, help="write the losses here: .csv, or .png with matplotlib")
    parser.add_argument("--sample", type=int, default=0, help="bytes to generate at the end")
    return parser.parse_args()


def text() -> bytes:
    """The text: the same on all ranks of a machine."""
    from pydoc_data.topics import topics

    parts = [topics[name] for name in sorted(topics)]
    licence = Path(sysconfig.get_path("stdlib"), "LICENSE.txt")
    for path in (licence, *sorted(Path("/usr/share/common-licenses").glob("*"))):
        if path.is_file() and not path.is_symlink():
            parts.append(path.read_text(errors="replace"))
    return "\n".join(parts).encode()


def rows(data: torch.Tensor, step: int, o: argparse.Namespace) -> torch.Tensor:
    """The global batch of a step, the same on every mesh."""
    generator = torch.Generator().manual_seed(o.seed * 1_000_003 + step)
    starts = torch.randint(len(data) - o.length, (o.batch,), generator=generator)
    return torch.stack([data[s : s + o.length] for s in starts.tolist()]).long()


def learning_rate(step: int, o: argparse.Namespace) -> float:
    """Linear warm-up, then a cosine decay."""
    warm = min(20, o.steps // 10 + 1)
    if step < warm:
        return float(o.lr * (step + 1) / warm)
    done = (step - warm) / max(1, o.steps - warm)
    return float(o.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * done))))


def build(ctx: paraxis.ParallelExecutionCtx, o: argparse.Namespace) -> Any:
    """The model: built on meta, planned, and initialized shard by shard, the same on every mesh."""
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=o.width,
        intermediate_size=3 * o.width,
        num_hidden_layers=o.layers,
        num_attention_heads=o.heads,
        num_key_value_heads=o.heads // 2,
        max_position_embeddings=max(o.length, 256),
        bos_token_id=None,
        eos_token_id=None,
        tie_word_embeddings=False,
    )
    with paraxis.MetaAwareMethodsPatcher():
        model = LlamaForCausalLM(config)
    return paraxis.parallelize_model(
        model,
        ctx,
        skip_load_weights=True,
        init_seed=o.seed,
        objective="training",
        compile=o.compile,
        data_parallel=o.data_parallel,
    ).train()


def train_step(model: Any, batch: torch.Tensor, ctx: paraxis.ParallelExecutionCtx, o: argparse.Namespace) -> float:
    """Compute the gradients of the global batch; returns its loss."""
    mine = batch.chunk(ctx.dp_size)[ctx.dp_rank].to(ctx.current_device)
    parts = mine.chunk(o.accumulate)
    total = torch.zeros((), device=ctx.current_device)
    for i, part in enumerate(parts):
        last = i == len(parts) - 1
        with nullcontext() if last else paraxis.no_sync(model):
            loss = model(input_ids=part, labels=part, use_cache=False).loss * len(part) / len(mine)
            loss.backward()
        total += loss.detach()
    if ctx.dp_size > 1:
        dist.all_reduce(total, group=ctx.groups.dp)
    return float(total) / ctx.dp_size


def write_losses(path: Path, losses: list[float]) -> None:
    """Write the losses as a plot or as a table."""
    if path.suffix == ".png":
        try:
            import matplotlib

            matplotlib.use("Agg")
            from matplotlib import pyplot
        except ImportError:
            path = path.with_suffix(".csv")
            print(f"matplotlib is not installed: losses go to {path}")
        else:
            figure, axes = pyplot.subplots(figsize=(6, 3.5), layout="constrained")
            axes.plot(losses)
            axes.set(xlabel="step", ylabel="loss per byte")
            figure.savefig(path, dpi=120)
            return
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["step", "loss"])
        writer.writerows(enumerate(losses))


def generate(model: Any, ctx: paraxis.ParallelExecutionCtx, count: int) -> str:
    """Text generated greedily after a fixed prompt."""
    prompt = torch.tensor([list(b"The ")], device=ctx.current_device)
    model.eval()
    tokens = model.generate(prompt, max_new_tokens=count, do_sample=False, pad_token_id=0)
    return bytes(tokens[0].tolist()).decode(errors="replace")


def main() -> None:
    """Train, resume, save and sample as the options say."""
    o = options()
    if o.batch % (o.dp * o.accumulate):
        sys.exit(f"--batch {o.batch} does not divide by --dp {o.dp} times --accumulate {o.accumulate}")
    ctx = paraxis.init(dp=o.dp, tp=o.tp)
    say = print if ctx.is_first else lambda *_, **__: None

    model = build(ctx, o)
    optimizer = torch.optim.AdamW(model.parameters(), lr=o.lr, betas=(0.9, 0.95), weight_decay=0.1)
    data = torch.frombuffer(bytearray(text()), dtype=torch.uint8)
    held = sum(p.to_local().numel() for p in model.parameters())
    count = sum(p.numel() for p in model.parameters())
    say(f"{count:,} parameters, {held:,} of them on this rank; {len(data):,} bytes of text; on {ctx.current_device}")
    if ctx.plan.data_parallel:
        say(ctx.plan.data_parallel)

    done, losses = 0, []
    if o.resume and o.checkpoint is not None and o.checkpoint.exists():
        extra = paraxis.load_state(o.checkpoint, model, optimizer)
        done, losses = extra["step"], extra["losses"]
        say(f"resumed after step {done}")

    started, fresh = time.perf_counter(), 0
    for step in range(done, o.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, o)
        losses.append(train_step(model, rows(data, step, o), ctx, o))
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), o.clip)
        optimizer.step()
        optimizer.zero_grad()
        fresh += 1
        if step == done:  # the first step compiles
            started, fresh = time.perf_counter(), 0
        if (step + 1) % 10 == 0 or step == done:
            speed = fresh * o.batch * o.length / (time.perf_counter() - started) if fresh else 0.0
            say(f"step {step + 1}: loss {losses[-1]:.6f}, norm {float(norm):.3f}, {speed:,.0f} tokens/s", flush=True)
        if o.checkpoint is not None and ((step + 1) % o.save_every == 0 or step + 1 == o.steps):
            paraxis.save_state(o.checkpoint, model, optimizer, step=step + 1, losses=losses)
            say(f"saved after step {step + 1}", flush=True)

    if o.losses is not None and ctx.is_first:
        write_losses(o.losses, losses)
    if o.sample:
        say(generate(model, ctx, o.sample))
    if o.export is not None:
        model.save_pretrained(o.export)


if __name__ == "__main__":
    main()
