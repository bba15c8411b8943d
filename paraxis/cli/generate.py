"""`paraxis generate`: generate text with a tensor-parallel model on the devices of this machine."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from ._devices import init_process_group
from ._errors import Debug, UsageError, report_errors
from ._launch import check_ranks, is_rank0, launch
from ._options import (
    DtypeOption,
    Model,
    Ranks,
    RevisionOption,
    SubfolderOption,
    TrustOption,
    VariantOption,
    check_dtype,
    check_model,
    quiet,
)


@dataclass(frozen=True)
class Task:
    """What to generate, the same on every rank."""

    model: str
    prompt: str
    chat: bool
    stream: bool
    options: dict[str, Any]
    dtype: str
    hub: dict[str, Any]


def command(
    model: Model,
    tp: Ranks = 2,
    prompt: Annotated[
        str | None, typer.Option("--prompt", "-p", help="Text to continue; read from standard input if missing.")
    ] = None,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", min=1, help="Largest number of tokens to generate.")
    ] = 64,
    sample: Annotated[bool, typer.Option("--sample", help="Sample tokens instead of greedy decoding.")] = False,
    temperature: Annotated[
        float, typer.Option("--temperature", min=0.01, help="Sampling temperature, with --sample.")
    ] = 1.0,
    chat: Annotated[bool, typer.Option("--chat", help="Apply the model's chat template to the prompt.")] = False,
    stream: Annotated[bool, typer.Option("--stream/--no-stream", help="Print text as it is generated.")] = True,
    dtype: DtypeOption = "auto",
    revision: RevisionOption = None,
    subfolder: SubfolderOption = None,
    variant: VariantOption = None,
    trust_remote_code: TrustOption = False,
    debug: Debug = False,
) -> None:
    """Generate text with a model sharded over the devices of this machine.

    Example: paraxis generate org/model --tp 4 --prompt "The quick brown fox"

    echo "Why is the sky blue?" | paraxis generate org/model --tp 8 --chat --sample
    """
    with report_errors(debug):
        check_model(model, subfolder)
        check_ranks(tp)
        text = prompt if prompt is not None else sys.stdin.read().rstrip("\n")
        if not text:
            raise UsageError("the prompt is empty: use --prompt, or pipe text into standard input")
        if not math.isfinite(temperature):
            raise UsageError(f"--temperature {temperature} is not a finite number: use for example 0.7")
        options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": sample}
        if sample:
            options["temperature"] = temperature
        check_dtype(dtype)
        quiet()
        hub = {"revision": revision, "subfolder": subfolder, "trust_remote_code": trust_remote_code}
        hub = {name: value for name, value in hub.items() if value is not None}
        check_tokenizer(model, hub)
        texts = launch(tp, run_rank, Task(model, text, chat, stream, options, dtype, {**hub, "variant": variant}))
        if not stream and is_rank0():
            typer.echo(texts[0])


def check_tokenizer(model: str, options: dict[str, Any]) -> None:
    """Raise before ranks start if transformers cannot load the model's tokenizer."""
    from transformers import AutoTokenizer

    try:
        AutoTokenizer.from_pretrained(model, **options)
    except (ValueError, ImportError, TypeError, KeyError) as error:
        raise ValueError(
            f"transformers cannot load a tokenizer for {model!r}: put its tokenizer.json next to the weights, or call "
            f"the model from Python with token ids. transformers says: {' '.join(str(error).split())}"
        ) from error


def run_rank(task: Task) -> str:
    """Load the model and generate, on one rank; rank 0 prints the stream. Returns the text."""
    import torch
    import torch.distributed as dist
    from transformers import AutoTokenizer, TextStreamer

    from .. import ParallelExecutionCtx, parallelize_model
    from ..weights.hub import resolve_checkpoint
    from ..weights.pretrained_options import split_pretrained_options

    quiet()
    device = init_process_group()
    try:
        assert dist.group.WORLD is not None
        ctx = ParallelExecutionCtx(tp_group=dist.group.WORLD, current_device=device)
        hub, _ = split_pretrained_options(task.hub)
        folder = resolve_checkpoint(task.model, group=dist.group.WORLD, options=hub)
        trust = hub.trust_remote_code  # never None: transformers would ask on the terminal
        if folder.joinpath("tokenizer.json").exists():
            tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust)
        else:
            place = {"revision": hub.revision or "main", "subfolder": hub.subfolder}
            tokenizer = AutoTokenizer.from_pretrained(task.model, trust_remote_code=trust, **place)
        model = parallelize_model(
            str(folder), ctx, dtype=task.dtype, variant=hub.variant, trust_remote_code=trust
        ).eval()
        if task.chat:
            messages = [{"role": "user", "content": task.prompt}]
            inputs = tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
        else:
            inputs = tokenizer(task.prompt, return_tensors="pt")
        inputs = {k: v.to(device) for k, v in inputs.items() if k in ("input_ids", "attention_mask")}
        prints = task.stream and dist.get_rank() == 0
        streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True) if prints else None
        with torch.no_grad():
            tokens = model.generate(**inputs, streamer=streamer, **task.options)
        return str(tokenizer.decode(tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
    finally:
        dist.destroy_process_group()
