"""`paraxis generate`: generate text with a tensor-parallel model on the devices of this machine."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from ._devices import init_process_group
from ._errors import Debug, UsageError, report_errors
from ._images import check_images, inputs_of, load_processor
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
    images: list[str]
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
    image: Annotated[
        list[str] | None,
        typer.Option("--image", help="File of an image that the prompt is about; may be repeated. Needs Pillow."),
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

    paraxis generate org/model --image cat.png --prompt "What is this?" --chat
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
        if image:
            check_images(image, model, hub)
        task = Task(model, text, image or [], chat, stream, options, dtype, {**hub, "variant": variant})
        texts = launch(tp, run_rank, task)
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
    from ..distributed.exit import end_process_groups
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
        place: dict[str, Any] = {"trust_remote_code": trust}
        local = folder.joinpath("tokenizer.json").exists()
        if not local:
            place |= {"revision": hub.revision or "main", "subfolder": hub.subfolder}
        source = str(folder) if local else task.model
        tokenizer = AutoTokenizer.from_pretrained(source, **place)
        model = parallelize_model(
            str(folder), ctx, dtype=task.dtype, variant=hub.variant, trust_remote_code=trust
        ).eval()
        if task.images:
            inputs = inputs_of(load_processor(source, place), task.prompt, task.images, task.chat)
        elif task.chat:
            messages = [{"role": "user", "content": task.prompt}]
            inputs = tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
        else:
            inputs = tokenizer(task.prompt, return_tensors="pt")
        if not task.images:
            inputs = {name: inputs[name] for name in ("input_ids", "attention_mask") if name in inputs}
        inputs = {name: to_model(value, device, model.dtype) for name, value in inputs.items()}
        prints = task.stream and dist.get_rank() == 0
        streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True) if prints else None
        with torch.no_grad():
            tokens = model.generate(**inputs, streamer=streamer, **task.options)
        start = 0 if model.config.is_encoder_decoder else inputs["input_ids"].shape[1]
        return str(tokenizer.decode(tokens[0, start:], skip_special_tokens=True))
    finally:
        end_process_groups()


def to_model(value: Any, device: Any, dtype: Any) -> Any:
    """An input where the model is; pixels in its dtype."""
    if not hasattr(value, "is_floating_point"):
        return value
    return value.to(device, dtype) if value.is_floating_point() else value.to(device)
