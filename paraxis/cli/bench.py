"""`paraxis bench`: how fast a model is over the ranks of this machine, and alone."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer

from ._errors import Debug, told
from ._launch import check_ranks, console, is_first, join, launch
from ._planning import JsonOption, Model, Ranks, check_dtype, check_model, quiet
from .verify import checkpoint


@dataclass(frozen=True)
class Task:
    """What is measured."""

    folder: str
    prompt: int
    tokens: int
    batch: int
    dtype: str
    compiled: bool
    train: bool


@dataclass
class Figures:
    """What one of the ranks, or the model alone, took. Seconds, and bytes."""

    load: float
    plan: float
    first: float
    prompt: float
    token: float
    training: float | None
    parameters: int
    memory: int
    collectives: int


def command(
    model: Model,
    tp: Ranks = 2,
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of the prompt.")] = 512,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens to decode after it.")] = 32,
    batch: Annotated[int, typer.Option(min=1, help="Sequences at a time.")] = 1,
    dtype: Annotated[str, typer.Option(help="Of the weights; 'auto' for what the checkpoint says.")] = "auto",
    layers: Annotated[
        int | None, typer.Option(min=1, help="Only so many layers, with random weights: for models that do not fit.")
    ] = None,
    compiled: Annotated[bool, typer.Option("--compile", help="Run the local programs through Inductor.")] = False,
    train: Annotated[bool, typer.Option("--train", help="Measure a training step on the prompt, too.")] = False,
    alone: Annotated[bool, typer.Option(help="Measure the unsharded model on one device, too.")] = True,
    as_json: JsonOption = False,
    debug: Debug = False,
) -> None:
    """Measure a language model over ranks of this machine: loading, a prompt, and tokens after it.

    Weights are those of the checkpoint, or random where there are none. Every rank has one thread on a CPU, and so has
    the model alone.

    Example: paraxis bench org/model --tp 4 --prompt 2048 --compile
    """
    with told(debug), tempfile.TemporaryDirectory(prefix="paraxis-bench-") as made:
        check_model(model)
        check_ranks(tp)
        check_dtype(dtype)
        quiet()
        folder, what = checkpoint(model, layers, made)
        task = Task(folder, prompt, tokens, batch, dtype, compiled, train)
        split = launch(tp, run_rank, task)
        single = launch(1, run_alone, task)[0] if alone and is_first() and len(split) == tp else None
        if is_first():
            show(split, single, task, what, tp, as_json)


def run_rank(task: Task) -> Figures:
    """What each rank does."""
    import torch.distributed as dist

    from .. import ParallelExecutionCtx, parallelize_model

    quiet()
    device = join()
    try:
        assert dist.group.WORLD is not None
        ctx = ParallelExecutionCtx(tp_group=dist.group.WORLD, current_device=device)

        planning = 0.0

        def bring_up() -> Any:
            nonlocal planning
            options: dict[str, Any] = {"compile": "inductor"} if task.compiled else {}
            model = parallelize_model(task.folder, ctx, torch_dtype=task.dtype, show_progress=False, **options)
            planning = sum(
                seconds for stage, seconds in ctx.timings.items() if stage != "load"
            )  # later calls add to it
            return model

        found = measure(bring_up, device, task)
        assert ctx.plan is not None
        found.plan = planning
        found.collectives = len(ctx.plan.collectives)
        return found
    finally:
        dist.destroy_process_group()


def run_alone(task: Task) -> Figures:
    """The unsharded model."""
    import torch
    from transformers import AutoModelForCausalLM

    quiet()
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    return measure(lambda: AutoModelForCausalLM.from_pretrained(task.folder, dtype=task.dtype).to(device), device, task)


def measure(bring_up: Any, device: Any, task: Task) -> Figures:
    """Time everything that a user waits for; the first prompt and tokens, which compile, apart from later ones."""
    import resource
    from statistics import median
    from time import perf_counter

    import torch
    from transformers import DynamicCache

    torch.set_num_threads(1)

    def timed(function: Any, *args: Any) -> tuple[float, Any]:
        started = perf_counter()
        result = function(*args)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return perf_counter() - started, result

    def read(ids: Any, cache: Any) -> Any:
        return model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1:].argmax(-1)

    load, model = timed(bring_up)
    model.eval()
    if not model.can_generate():
        raise ValueError(f"{type(model).__name__} does not generate tokens; this command measures those that do")
    vocabulary = model.config.get_text_config().vocab_size
    ids = torch.arange(task.batch * task.prompt, device=device).view(task.batch, -1) % (vocabulary - 1) + 1
    prompts, times = [], []
    with torch.no_grad():
        for turn in range(3):
            cache = DynamicCache(config=model.config)
            seconds, token = timed(read, ids, cache)
            prompts.append(seconds)
            for _ in range(task.tokens if turn else 3):
                seconds, token = timed(read, token, cache)
                times += [seconds] if turn else []
    training = None
    if task.train:

        def step() -> None:
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
            model.zero_grad()

        step()
        training = min(timed(step)[0] for _ in range(2))
    local = [p.to_local() if hasattr(p, "to_local") else p for p in model.parameters()]
    peak = (
        torch.cuda.max_memory_allocated(device)
        if device.type == "cuda"
        else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    )
    return Figures(
        load, 0.0, prompts[0], min(prompts[1:]), median(times), training, sum(p.nbytes for p in local), peak, 0
    )


def show(split: list[Figures], single: Figures | None, task: Task, what: str, tp: int, as_json: bool) -> None:
    """The slowest rank, and the most memory of any, beside the model alone."""
    from rich.table import Table

    from ..plan import size_text

    worst = Figures(**{key: _most([getattr(each, key) for each in split]) for key in asdict(split[0])})
    if as_json:
        data = {
            "world_size": tp,
            "weights": what,
            **{key: value for key, value in asdict(task).items() if key != "folder"},
            "parallel": asdict(worst),
            "alone": None if single is None else asdict(single),
        }
        typer.echo(json.dumps(data, indent=1))
        return
    table = Table(title=f"{task.batch} × {task.prompt} tokens and {task.tokens} after them, {what}")
    for column in ("", f"{tp} ranks", *(["alone", "times as fast"] if single is not None else [])):
        table.add_column(column)
    rows: list[tuple[str, str, Callable[[Any], str]]] = [
        ("load", "load", lambda x: f"{x:.1f} s"),
        ("of which planning", "plan", lambda x: f"{x:.1f} s"),
        ("first prompt", "first", lambda x: f"{x:.2f} s"),
        ("prompt", "prompt", lambda x: f"{x * 1e3:.1f} ms"),
        ("token", "token", lambda x: f"{x * 1e3:.2f} ms"),
        ("training step", "training", lambda x: f"{x * 1e3:.0f} ms"),
        ("parameters", "parameters", size_text),
        ("most memory", "memory", size_text),
        ("collectives in a pass", "collectives", str),
    ]
    for title, key, text in rows:
        ours, theirs = getattr(worst, key), None if single is None else getattr(single, key)
        if ours is None:
            continue
        ratio = f"{theirs / ours:.2f}" if key in ("prompt", "token", "training") and theirs else ""
        table.add_row(title, text(ours), *([text(theirs or 0), ratio] if single is not None else []))
    console().print(table)


def _most(values: list[Any]) -> Any:
    return None if values[0] is None else max(values)
