"""`paraxis generate`: text from a model that is split over the devices of this machine."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from ._errors import Debug, UsageError, told
from ._launch import check_ranks, is_first, join, launch
from ._planning import Model, Ranks, check_dtype, check_model, quiet


@dataclass(frozen=True)
class Task:
    """What every rank is to do."""

    model: str
    prompt: str
    chat: bool
    stream: bool
    options: dict[str, Any]
    dtype: str


def command(
    model: Model,
    tp: Ranks = 2,
    prompt: Annotated[
        str | None, typer.Option("--prompt", "-p", help="The text to go on from; from standard input if not given.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="How many tokens to add at most.")] = 64,
    sample: Annotated[bool, typer.Option("--sample", help="Draw tokens instead of taking the likeliest.")] = False,
    temperature: Annotated[float, typer.Option(min=0.01, help="For --sample.")] = 1.0,
    chat: Annotated[bool, typer.Option("--chat", help="Put the prompt into the model's chat template.")] = False,
    stream: Annotated[bool, typer.Option(help="Show the text while it is generated.")] = True,
    dtype: Annotated[str, typer.Option(help="Of the weights; 'auto' for what the checkpoint says.")] = "auto",
    debug: Debug = False,
) -> None:
    """Generate text with a model that is split over the devices of this machine.

    Example: paraxis generate org/model --tp 4 --prompt "The quick brown fox"

    echo "Why is the sky blue?" | paraxis generate org/model --tp 8 --chat --sample
    """
    with told(debug):
        check_model(model)
        check_ranks(tp)
        text = prompt if prompt is not None else sys.stdin.read().rstrip("\n")
        if not text:
            raise UsageError("there is no prompt: give --prompt, or a text on standard input")
        if not math.isfinite(temperature):
            raise UsageError(f"--temperature {temperature}: give a number, as in 0.7")
        options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": sample}
        if sample:
            options["temperature"] = temperature
        check_dtype(dtype)
        quiet()
        check_tokenizer(model)
        texts = launch(tp, run_rank, Task(model, text, chat, stream, options, dtype))
        if not stream and is_first():
            typer.echo(texts[0])


def check_tokenizer(model: str) -> None:
    """That the model has one, known before ranks are started."""
    from transformers import AutoTokenizer

    try:
        AutoTokenizer.from_pretrained(model)
    except (ValueError, ImportError, TypeError, KeyError) as error:
        raise ValueError(
            f"{model!r} has no tokenizer that transformers can make, and text is no tokens without it: put "
            f"its tokenizer.json beside the weights, or use the model from Python with token ids. transformers says: "
            f"{' '.join(str(error).split())}"
        ) from error


def run_rank(task: Task) -> str:
    """What each rank does; the first one shows the text."""
    import torch
    import torch.distributed as dist
    from transformers import AutoTokenizer, TextStreamer

    from .. import ParallelExecutionCtx, parallelize_model
    from ..weights.hub import resolve_checkpoint

    quiet()
    device = join()
    try:
        assert dist.group.WORLD is not None
        ctx = ParallelExecutionCtx(tp_group=dist.group.WORLD, current_device=device)
        folder = resolve_checkpoint(task.model, group=dist.group.WORLD)
        tokenizer = AutoTokenizer.from_pretrained(
            task.model if not folder.joinpath("tokenizer.json").exists() else folder
        )
        model = parallelize_model(str(folder), ctx, torch_dtype=task.dtype).eval()
        first = dist.get_rank() == 0
        if task.chat:
            turn = [{"role": "user", "content": task.prompt}]
            inputs = tokenizer.apply_chat_template(
                turn, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
        else:
            inputs = tokenizer(task.prompt, return_tensors="pt")
        inputs = {k: v.to(device) for k, v in inputs.items() if k in ("input_ids", "attention_mask")}
        streamer = (
            TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True) if first and task.stream else None
        )
        with torch.no_grad():
            tokens = model.generate(**inputs, streamer=streamer, **task.options)
        return str(tokenizer.decode(tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
    finally:
        dist.destroy_process_group()
