"""`paraxis bench`: load time, prefill, decode and training speed on the ranks of this machine, and unsharded."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer

from ._devices import AUTO, CPU, CUDA, DeviceOption, choose_device, init_process_group
from ._errors import Debug, renamed_option, report_errors
from ._evidence import ReportOption, check_report, write_report
from ._fits import RESERVED_PER_RANK, available_memory, check_fits, gpu_memory, itemsize, local_ranks, parameter_count
from ._launch import check_ranks, console, is_rank0, launch
from ._options import DtypeOption, JsonOption, LayersOption, Model, Ranks, check_dtype, check_model, quiet
from ._temporary import temporary_folder
from .verify import checkpoint


@dataclass(frozen=True)
class Task:
    """The workload to measure."""

    folder: str
    input_len: int
    output_len: int
    batch: int
    dtype: str
    compile: bool
    train: bool
    device: str = CPU


@dataclass
class Figures:
    """Measurements of one rank, or of the unsharded model: seconds and bytes.

    Attributes:
        load: Loading the model, planning included.
        plan: Planning.
        first_prefill: The first prefill, which compiles.
        prefill: A later prefill: the time to first token (TTFT).
        decode: A decode step: the time per output token.
        training_step: A forward and backward pass; None if not measured.
        parameters: Bytes of parameters.
        peak_memory: Peak memory: allocated on a GPU, resident on a CPU.
        collectives: Collectives per forward pass.
    """

    load: float
    plan: float
    first_prefill: float
    prefill: float
    decode: float
    training_step: float | None
    parameters: int
    peak_memory: int
    collectives: int


def command(
    model: Model,
    tp: Ranks = 2,
    input_len: Annotated[int, typer.Option("--input-len", min=1, help="Tokens per sequence to prefill.")] = 512,
    output_len: Annotated[int, typer.Option("--output-len", min=1, help="Tokens per sequence to decode.")] = 32,
    batch: Annotated[int, typer.Option("--batch", min=1, help="Sequences in a batch.")] = 1,
    device: DeviceOption = AUTO,
    dtype: DtypeOption = "auto",
    layers: LayersOption = None,
    compile: Annotated[bool, typer.Option("--compile", help="Compile with TorchInductor.")] = False,
    train: Annotated[bool, typer.Option("--train", help="Also measure a training step on the input.")] = False,
    baseline: Annotated[
        bool, typer.Option("--baseline/--no-baseline", help="Also measure the unsharded model on one device.")
    ] = True,
    report: ReportOption = None,
    as_json: JsonOption = False,
    debug: Debug = False,
    prompt: Annotated[int | None, typer.Option("--prompt", min=1, hidden=True)] = None,
    tokens: Annotated[int | None, typer.Option("--tokens", min=1, hidden=True)] = None,
    alone: Annotated[bool | None, typer.Option("--alone/--no-alone", hidden=True)] = None,
) -> None:
    """Measure a language model on ranks of this machine: load time, prefill, decode, memory.

    Uses the checkpoint's weights, or random weights if there are none. On CPUs every rank, and the unsharded model, has
    one thread.

    Example: paraxis bench org/model --tp 4 --input-len 2048 --compile
    """
    with report_errors(debug), temporary_folder("paraxis-bench-") as temporary:
        if prompt is not None:
            renamed_option("--prompt", "--input-len")
            input_len = prompt
        if tokens is not None:
            renamed_option("--tokens", "--output-len")
            output_len = tokens
        if alone is not None:
            renamed_option("--alone/--no-alone", "--baseline/--no-baseline")
            baseline = alone
        check_report(report)
        check_model(model)
        check_ranks(tp)
        check_dtype(dtype)
        chosen = choose_device(device, tp)
        quiet()
        check_memory(model, layers, tp, chosen, dtype, baseline)
        folder, weights = checkpoint(model, layers, temporary)
        task = Task(folder, input_len, output_len, batch, dtype, compile, train, chosen)
        parallel = launch(tp, run_rank, task)
        measure_baseline = baseline and is_rank0() and len(parallel) == tp
        unsharded = launch(1, run_unsharded, task)[0] if measure_baseline else None
        if is_rank0():
            if report is not None:
                backend = "nccl" if chosen == CUDA else "gloo"
                figures = {"model": model, "backend": backend, **figures_of(parallel, unsharded, task, weights, tp)}
                write_report(report, "Parallel model and unsharded model measured", figures)
            show(parallel, unsharded, task, weights, tp, as_json)


def check_memory(model: str, layers: int | None, tp: int, device: str, dtype: str, baseline: bool) -> None:
    """Raise before anything is built if the ranks of this machine do not fit into its memory, or that of a GPU."""
    size = itemsize(model, dtype)
    shards = 1 if device == CUDA else local_ranks(tp)

    def needed(parameters: int) -> dict[str, float]:
        # the ranks run first, then the unsharded model
        fraction = 1.0 if baseline else shards / tp
        return {
            "for the model": size * parameters * fraction,
            "for the processes": shards * RESERVED_PER_RANK,
        }

    where = "on a GPU" if device == CUDA else "on this machine"
    available = gpu_memory() if device == CUDA else available_memory()
    check_fits(lambda n: parameter_count(model, n), layers, needed, available, where)


def run_rank(task: Task) -> Figures:
    """Measure the parallel model on one rank."""
    import torch.distributed as dist

    from .. import ParallelExecutionCtx, parallelize_model
    from ..distributed.exit import end_process_groups

    quiet()
    device = init_process_group(task.device)
    try:
        assert dist.group.WORLD is not None
        ctx = ParallelExecutionCtx(tp_group=dist.group.WORLD, current_device=device)

        planning = 0.0

        def load() -> Any:
            nonlocal planning
            options: dict[str, Any] = {"compile": "inductor"} if task.compile else {}
            model = parallelize_model(task.folder, ctx, torch_dtype=task.dtype, show_progress=False, **options)
            # read now: later calls add to the timings
            planning = sum(seconds for stage, seconds in ctx.timings.items() if stage != "load")
            return model

        found = measure(load, device, task)
        assert ctx.plan is not None
        found.plan = planning
        found.collectives = len(ctx.plan.collectives)
        return found
    finally:
        end_process_groups()


def run_unsharded(task: Task) -> Figures:
    """Measure the unsharded model on one device."""
    import torch
    from transformers import AutoModelForCausalLM

    quiet()
    device = torch.device("cuda", 0) if task.device == CUDA else torch.device("cpu")
    return measure(lambda: AutoModelForCausalLM.from_pretrained(task.folder, dtype=task.dtype).to(device), device, task)


def measure(load: Callable[[], Any], device: Any, task: Task) -> Figures:
    """Time loading, prefill, decode and a training step; the first calls, which compile, count separately."""
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

    def next_token(ids: Any, cache: Any) -> Any:
        return model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1:].argmax(-1)

    load_time, model = timed(load)
    model.eval()
    if not model.can_generate():
        raise ValueError(f"{type(model).__name__} cannot generate; `paraxis bench` measures language models")
    vocabulary = model.config.get_text_config().vocab_size
    ids = torch.arange(task.batch * task.input_len, device=device).view(task.batch, -1) % (vocabulary - 1) + 1
    prefills, decodes = [], []
    with torch.no_grad():
        for repeat in range(3):
            cache = DynamicCache(config=model.config)
            seconds, token = timed(next_token, ids, cache)
            prefills.append(seconds)
            for _ in range(task.output_len if repeat else 3):
                seconds, token = timed(next_token, token, cache)
                decodes += [seconds] if repeat else []
    training_step = None
    if task.train:

        def step() -> None:
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
            model.zero_grad()

        step()
        training_step = min(timed(step)[0] for _ in range(2))
    shards = [p.to_local() if hasattr(p, "to_local") else p for p in model.parameters()]
    return Figures(
        load=load_time,
        plan=0.0,
        first_prefill=prefills[0],
        prefill=min(prefills[1:]),
        decode=median(decodes),
        training_step=training_step,
        parameters=sum(p.nbytes for p in shards),
        peak_memory=(
            torch.cuda.max_memory_allocated(device)
            if device.type == "cuda"
            else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        ),
        collectives=0,
    )


def figures_of(parallel: list[Figures], unsharded: Figures | None, task: Task, weights: str, tp: int) -> dict[str, Any]:
    """The slowest rank's times and the largest memory, and the unsharded model's, JSON-serializable."""
    return {
        "world_size": tp,
        "weights": weights,
        **{key: value for key, value in asdict(task).items() if key != "folder"},
        "parallel": {key: _largest([getattr(each, key) for each in parallel]) for key in asdict(parallel[0])},
        "unsharded": None if unsharded is None else asdict(unsharded),
    }


def show(parallel: list[Figures], unsharded: Figures | None, task: Task, weights: str, tp: int, as_json: bool) -> None:
    """Print the slowest rank's times and the largest memory, beside the unsharded model's."""
    from rich.table import Table

    from ..plan import size_text

    data = figures_of(parallel, unsharded, task, weights, tp)
    if as_json:
        typer.echo(json.dumps(data, indent=1))
        return
    worst = Figures(**data["parallel"])
    table = Table(title=f"Batch of {task.batch}, {task.input_len} tokens in, {task.output_len} out, {weights}")
    for column in ("", f"{tp} ranks", *(["unsharded", "speedup"] if unsharded is not None else [])):
        table.add_column(column)
    rows: list[tuple[str, str, Callable[[Any], str]]] = [
        ("load", "load", lambda x: f"{x:.1f} s"),
        ("  of that, planning", "plan", lambda x: f"{x:.1f} s"),
        ("first prefill (compiles)", "first_prefill", lambda x: f"{x:.2f} s"),
        ("prefill (TTFT)", "prefill", lambda x: f"{x * 1e3:.1f} ms"),
        ("decode (time per output token)", "decode", lambda x: f"{x * 1e3:.2f} ms"),
        ("training step", "training_step", lambda x: f"{x * 1e3:.0f} ms"),
        ("parameters per rank", "parameters", size_text),
        ("peak memory per rank", "peak_memory", size_text),
        ("collectives per forward", "collectives", str),
    ]
    for title, key, text in rows:
        ours, theirs = getattr(worst, key), None if unsharded is None else getattr(unsharded, key)
        if ours is None:
            continue
        speedup = f"{theirs / ours:.2f}×" if key in ("prefill", "decode", "training_step") and theirs else ""
        table.add_row(title, text(ours), *([text(theirs or 0), speedup] if unsharded is not None else []))
    console().print(table)


def _largest(values: list[Any]) -> Any:
    return None if values[0] is None else max(values)
