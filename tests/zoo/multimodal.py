"""``python -m zoo.multimodal``: models that take images, videos or audio, by the plain call, against unsharded ones.

Each is saved, parallelized by ``parallelize_model(folder, ctx)`` without example inputs, and compared: the forward pass
with its modality and with text alone, gradients, and greedy generation.
"""

from __future__ import annotations

import argparse
import inspect
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from models.compare import context, gradient_errors, max_difference

from paraxis.plan.work import sharded_fraction
from ranks import RankPool
from zoo import check
from zoo.check import can_generate, differences, gradients, heaviest, pattern
from zoo.jobs import Record, append, be_quiet, building, first_line, results_in, run_jobs, versions
from zoo.multimodal_cases import MODAL, TASKS, all_names, build, task_of
from zoo.multimodal_inputs import inputs_of
from zoo.multimodal_page import GRADIENTS, LEAST, OUTPUTS, names_at, page
from zoo.workers import Limits, Task, run_all

ENOUGH = 80
"""How many models of other tasks come before more ranks, where time may not suffice for all."""
Outputs = dict[str, torch.Tensor]
NEW = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}


def compare(name: str, folder: str, inputs: dict[str, Any]) -> Record:
    """One model on one rank."""
    be_quiet()
    torch._dynamo.reset()
    ctx, started = context(), time.monotonic()
    model, unsharded = pair(name, folder, ctx)
    plan = ctx.plan
    record: Record = {
        "planning": time.monotonic() - started,
        "fraction": plan.sharded_fraction,
        "breaks": list(plan.breaks)[:1],
    }
    found, right = run(model, without_cache(model, inputs)), run(unsharded, without_cache(model, inputs))
    record["outputs"] = differences(found, right)
    record |= gradients(model, unsharded, found, right)
    used = {each for each, p in unsharded.named_parameters() if p.grad is not None}
    record["unplanned"] = len(used & set(plan.unplanned))
    if record["outputs"] > OUTPUTS or record["gradients"] > GRADIENTS:
        record |= in_double(name, folder, inputs, model, unsharded, found, right)
    with torch.no_grad():
        record["text"] = text_alone(model, unsharded, inputs)
    if can_generate(unsharded):
        record["tokens"] = tokens(model, unsharded, inputs)
    record["breaks"] = list(ctx.plan.breaks)[:1]
    record["towers"] = {t.name: t.sharded_fraction for t in ctx.plan.towers if t.has_blocks}
    record["work"] = sharded_fraction(ctx.plan.matmuls)
    if record["fraction"] > 1.1 / plan.world_size:
        record["excess"] = excess(ctx.plan)
    record["unshared"] = {t: unshared(ctx.plan, t) for t, share in record["towers"].items() if share < LEAST}
    return record


def excess(plan: Any) -> list[tuple[str, float, float, str]]:
    """The parameters of which a rank holds more than its share: name, fraction held, excess of the model, reason."""
    reasons = {pattern(name): why for name, why in plan.replicated}
    return [(name, held, more, reasons.get(name, "uneven shards")) for name, held, more in heaviest(plan)]


def unshared(plan: Any, tower: str) -> list[tuple[str, float, str]]:
    """The modules of a tower whose matmul work every rank does in full: name, fraction of the tower's work, reason."""
    inside = [m for m in plan.matmuls if f"{m.module}.".startswith(f"{tower}.")]
    total = sum(m.flops for m in inside)
    reasons = {pattern(module): why for module, why in plan.gathered}
    reasons |= {pattern(name.rpartition(".")[0]): why for name, why in plan.replicated if name.endswith("weight")}
    found: dict[str, float] = {}
    for m in inside:
        if m.sharded < m.flops:
            found[pattern(m.module)] = found.get(pattern(m.module), 0.0) + (m.flops - m.sharded) / total
    ordered = sorted(found.items(), key=lambda item: -item[1])[:4]
    return [(name, part, reasons.get(name, "on replicated activations: sharding costs more")) for name, part in ordered]


def run(model: Any, inputs: dict[str, Any]) -> Outputs:
    """What the model returns, with the same random numbers in every call: some models draw noise."""
    torch.manual_seed(0)
    return check.run(model, inputs)


def pair(name: str, folder: str, ctx: Any, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """(parallel model, unsharded model)"""
    from paraxis import parallelize_model

    built = build(name)
    unsharded = type(built).from_pretrained(folder, dtype=dtype).eval()
    options = {} if dtype == torch.float32 else {"torch_dtype": dtype}
    model = parallelize_model(folder, ctx, show_progress=False, **options).eval()
    for each, parameter in built.named_parameters():  # loading loses requires_grad
        unsharded.get_parameter(each).requires_grad_(parameter.requires_grad)
    return model, unsharded


def without_cache(model: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """The inputs of a training step."""
    return (
        {**inputs, "use_cache": False} if "use_cache" in inspect.signature(type(model).forward).parameters else inputs
    )


def in_double(
    name: str, folder: str, inputs: dict[str, Any], model: Any, unsharded: Any, found: Outputs, right: Outputs
) -> Record:
    """Whether outputs or gradients that differ in float32 differ by rounding only.

    That is so if all agree in float64, outputs to 1e-9 and gradients to 1e-6, and the unsharded model's float32 ones
    are about as far from its float64 ones as ours are from them.
    """
    errors = gradient_errors(model, unsharded)
    single = {each: p.grad for each, p in unsharded.named_parameters()}
    precise, exact = pair(name, folder, context(), torch.float64)
    inputs = {k: v.double() if torch.is_tensor(v) and v.is_floating_point() else v for k, v in inputs.items()}
    ours, theirs = run(precise, without_cache(model, inputs)), run(exact, without_cache(model, inputs))
    outputs = differences(ours, theirs)
    result = gradients(precise, exact, ours, theirs)
    rounding = {
        each: float((p.grad - single[each]).norm() / p.grad.norm().clamp(min=1e-30))
        for each, p in exact.named_parameters()
        if errors[each] > GRADIENTS and p.grad is not None and single[each] is not None
    }
    exceeding = {each: max_difference(found[each], right[each]) for each in right if right[each].numel()}
    exceeding = {each: error for each, error in exceeding.items() if not error < OUTPUTS}
    return {
        "double": result["gradients"],
        "double_outputs": outputs,
        "rounding": max(rounding.values(), default=0.0),
        "rounded": result["gradients"] < 1e-6 and all(rounding[each] > errors[each] / 3 for each in rounding),
        "rounded_outputs": outputs < 1e-9
        and all(max_difference(right[each], theirs[each]) > error / 3 for each, error in exceeding.items()),
    }


def text_alone(model: Any, unsharded: Any, inputs: dict[str, Any]) -> Any:
    """The error of a call with text alone; None if the unsharded model does not take one."""
    if "input_ids" not in inputs or not inputs.keys() & MODAL:
        return None
    text = {"input_ids": inputs["input_ids"].clamp(max=200)}
    if "decoder_input_ids" in inputs:
        text["decoder_input_ids"] = inputs["decoder_input_ids"]
    try:
        right = run(unsharded, text)
    except Exception:  # it needs more than text
        return None
    return differences(run(model, text), right)


def tokens(model: Any, unsharded: Any, inputs: dict[str, Any]) -> Any:
    """Whether greedy decoding gives the same tokens; the reason if the unsharded model cannot generate."""
    inputs = {name: value for name, value in inputs.items() if name != "decoder_input_ids"}
    try:
        torch.manual_seed(0)  # some models begin with noise
        expected = unsharded.generate(**inputs, **NEW)
    except Exception as error:
        return f"unsharded model: {first_line(error, 120)}"
    torch.manual_seed(0)
    found = model.generate(**inputs, **NEW)
    expected, found = (getattr(each, "sequences", each) for each in (expected, found))
    return bool(torch.equal(found, expected))


def work(name: str, pool: RankPool, timeout: float, commit: str) -> Record:
    """Build, save, parallelize and compare one model."""
    started = time.monotonic()
    record: Record = {"name": name, "task": task_of(name), "commit": commit, "versions": versions()}
    be_quiet()

    def done(status: str, **more: Any) -> Record:
        return {**record, "status": status, **more, "seconds": time.monotonic() - started}

    with tempfile.TemporaryDirectory(prefix="zoo-") as folder:
        try:
            with building:
                model = build(name)
                inputs = inputs_of(model)
                record["modality"] = ", ".join(sorted(inputs.keys() & MODAL))
                model.save_pretrained(folder)
        except Exception as error:
            return done("not built", error=first_line(error))
        try:
            results = pool.run(compare, name, folder, inputs, timeout=timeout)
        except Exception as error:
            return done("failed", error=f"{type(error).__name__}: {str(error)[-600:]}")
    worst = {
        **results[0],
        "outputs": max(r["outputs"] for r in results),
        "gradients": max(r["gradients"] for r in results),
        "double": max(r.get("double", 0.0) for r in results),
        "rounded_outputs": all(r.get("rounded_outputs", True) for r in results),
    }
    return done("ok" if right(worst) else "wrong", **worst)


def right(record: Record) -> bool:
    """Whether all that was compared agrees."""
    return (
        (record["outputs"] < OUTPUTS or record.get("rounded_outputs", False))
        and (record["gradients"] < GRADIENTS or record.get("rounded", False))
        and (record.get("text") or 0.0) < OUTPUTS
        and record.get("tokens", True) is not False
    )


def line(record: Record) -> str:
    """What is printed of a result."""
    head = f"{record['name']:60} {record['status']:9} {record['seconds']:5.1f}s"
    if "outputs" not in record:
        return f"{head} {record['error'].splitlines()[-1][:160]}"
    text = "-" if record.get("text") is None else f"{record['text']:.0e}"
    return (
        f"{head} planning {record['planning']:.1f} {record['fraction']:.2f} unplanned {record['unplanned']} "
        f"out {record['outputs']:.0e} text {text} grad {record['gradients']:.0e} {record['worst'][:1]} "
        f"tokens {record.get('tokens', '-')} {record['modality']} breaks {len(record['breaks'])}"
    )


def this_commit() -> str:
    """The commit of this working tree; empty where there is no repository."""
    return subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()


def tasks(worlds: list[int], state: Path | None, last: set[str]) -> list[Task]:
    """The jobs that have no result yet, those first that say most: one per type, then more ranks, then the rest.

    Those in ``last`` come after all others.
    """
    done = {(name, world) for world in worlds for name in results_in(state, world)}
    vision = TASKS[:2]
    found: list[tuple[int, Task]] = []
    for world in worlds:
        rest = 0
        for name in names_at(world):
            if (name, world) in done:
                continue
            first = task_of(name) in vision
            rest += not first and name not in last
            group = (0 if first else 1 if rest <= ENOUGH else 4) if world == min(worlds) else 2 if first else 3
            found.append((group + (5 if name in last and world == min(worlds) else 0), Task(name, world)))
    return [task for _, task in sorted(found, key=lambda item: item[0])]


def right_on(page: Path | None) -> set[str]:
    """The models that a page says are right."""
    lines = page.read_text().splitlines() if page else []
    rows = [row for row in ([cell.strip() for cell in line.split("|")] for line in lines) if len(row) > 8]
    return {f"{row[1]}:{row[2]}" for row in rows if row[7] == "yes"}


def at_once(worlds: list[int], only: list[str], options: argparse.Namespace) -> bool:
    """Run all that has no result yet, several at a time; whether all of it has run."""
    todo = tasks(worlds, options.state, right_on(options.last))
    if only:
        todo = [Task(n, w) for w in worlds for n in all_names() if n in only or n.partition(":")[0] in only]
    started = time.monotonic()

    def note(record: Record) -> None:
        append(options.state, record)
        print(f"{time.monotonic() - started:5.0f}s {record['world']} ranks {line(record)}", flush=True)

    limits = Limits(options.workers, max(options.cores, *worlds), options.timeout, options.total)
    return run_all(todo, "zoo.multimodal:work", limits, note, {"timeout": options.timeout, "commit": options.commit})


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="types or type:class, separated by commas")
    parser.add_argument("--tp", default="2,4", help="numbers of ranks, separated by commas; at 4, a selection")
    parser.add_argument("--jobs", type=int, default=1, help="models at a time, each on its own ranks")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds per model")
    parser.add_argument("--state", type=Path, help="file for results as they come; a second run resumes from it")
    parser.add_argument("--so-far", action="store_true", help="run nothing: only write the page of what the state has")
    parser.add_argument("--page", type=Path, help="where to write the table; with --only, of what the state has so far")
    parser.add_argument("--workers", type=int, help="models at a time in processes of their own, most valuable first")
    parser.add_argument("--cores", type=int, default=os.cpu_count(), help="with --workers: ranks at a time")
    parser.add_argument("--total", type=float, default=float("inf"), help="with --workers: seconds for everything")
    parser.add_argument("--last", type=Path, help="with --workers: what this page has as right comes last")
    parser.add_argument("--commit", default=this_commit(), help="what results say they are of")
    options = parser.parse_args()
    only = options.only.split(",") if options.only else []

    def job(name: str, pool: RankPool) -> Record:
        return work(name, pool, options.timeout, options.commit)

    worlds = list(map(int, options.tp.split(",")))
    if options.workers:
        return 0 if at_once(worlds, only, options) else 1
    records: dict[int, list[Record]] = {}
    for world in worlds:
        names = [name for name in all_names() if name in only or name.partition(":")[0] in only]
        if not only:
            names = names_at(world)
        if options.so_far:
            names = [name for name in names if name in results_in(options.state, world)]
        records[world] = run_jobs(names, world, job, jobs=options.jobs, state=options.state, say=line, again=bool(only))
    if options.page:
        options.page.parent.mkdir(parents=True, exist_ok=True)
        options.page.write_text(page(records))
    return 0 if all(r["status"] in ("ok", "not built") for found in records.values() for r in found) else 1


if __name__ == "__main__":
    sys.exit(main())
