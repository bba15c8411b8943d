"""``python -m zoo.multimodal``: models that take images, videos or audio, by the plain call, against unsharded ones.

Each is saved, parallelized by ``parallelize_model(folder, ctx)`` without example inputs, and compared: the forward pass
with its modality and with text alone, gradients, and greedy generation.
"""

from __future__ import annotations

import argparse
import inspect
import os
import re
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

import torch
from models.compare import context, gradient_errors

from paraxis.plan.work import sharded_fraction
from ranks import RankPool
from zoo import check
from zoo.check import can_generate, differences, gradients
from zoo.jobs import Record, append, be_quiet, building, first_line, results_in, run_jobs, versions
from zoo.multimodal_cases import AT_FOUR, KNOWN, MODAL, TASKS, all_names, build, task_of
from zoo.multimodal_inputs import inputs_of
from zoo.workers import Limits, Task, run_all

OUTPUTS, GRADIENTS = 1e-4, 1e-3
"""The largest errors that count as right: absolute of outputs, relative of gradients."""
ENOUGH = 80
"""How many models of other tasks come before more ranks, where time may not suffice for all."""
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
    if record["gradients"] > GRADIENTS:
        record |= in_double(name, folder, inputs, model, unsharded)
    with torch.no_grad():
        record["text"] = text_alone(model, unsharded, inputs)
    if can_generate(unsharded):
        record["tokens"] = tokens(model, unsharded, inputs)
    record["breaks"] = list(ctx.plan.breaks)[:1]
    record["towers"] = {t.name: t.sharded_fraction for t in ctx.plan.towers if t.has_blocks}
    record["work"] = sharded_fraction(ctx.plan.matmuls)
    return record


def run(model: Any, inputs: dict[str, Any]) -> dict[str, torch.Tensor]:
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


def in_double(name: str, folder: str, inputs: dict[str, Any], model: Any, unsharded: Any) -> Record:
    """Whether gradients that differ in float32 differ by rounding only.

    That is so if all agree to 1e-6 in float64, and the unsharded model's float32 gradients are about as far from its
    float64 ones as ours are from them.
    """
    errors = gradient_errors(model, unsharded)
    single = {each: p.grad for each, p in unsharded.named_parameters()}
    precise, exact = pair(name, folder, context(), torch.float64)
    inputs = {k: v.double() if torch.is_tensor(v) and v.is_floating_point() else v for k, v in inputs.items()}
    result = gradients(
        precise, exact, run(precise, without_cache(model, inputs)), run(exact, without_cache(model, inputs))
    )
    rounding = {
        each: float((p.grad - single[each]).norm() / p.grad.norm().clamp(min=1e-30))
        for each, p in exact.named_parameters()
        if errors[each] > GRADIENTS and p.grad is not None and single[each] is not None
    }
    rounded = result["gradients"] < 1e-6 and all(rounding[each] > errors[each] / 3 for each in rounding)
    return {"double": result["gradients"], "rounding": max(rounding.values(), default=0.0), "rounded": rounded}


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
    }
    return done("ok" if right(worst) else "wrong", **worst)


def right(record: Record) -> bool:
    """Whether all that was compared agrees."""
    return (
        record["outputs"] < OUTPUTS
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


# -- the page --------------------------------------------------------------------------------------------------------


def page(records: dict[int, list[Record]]) -> str:
    """Markdown: a table per task, then what could not be built."""
    lines = [
        "# Multimodal models",
        "",
        "Tiny models with random weights, parallelized by `parallelize_model(folder, ctx)` without example inputs,",
        f"against the unsharded model: outputs within {OUTPUTS:g}, gradients within {GRADIENTS:g} (1e-6 in float64),",
        "greedy tokens exact, with inputs of the modality and with text alone. The inputs are not those that the plan",
        "was made with: other sizes, several images where a model takes them. *Fraction*: parameters on a rank.",
        "*Unplanned*: parameters that these inputs use and no dummy input does, sharded for memory only. *Shared*: the",
        "matmul work that is in operators of which every rank does a part, of the tower that shares least. Made by",
        "`make multimodal`.",
        "",
        f"{date.today().isoformat()}. {made_by(records)}",
        "",
    ]
    for world, found in sorted(records.items()):
        built = [r for r in found if r["status"] != "not built"]
        good = [r for r in built if r["status"] == "ok"]
        small = sum(r["fraction"] <= 1.1 / world for r in good)
        modal = [r for r in good if r["modality"]]
        first = sum(r["task"] in TASKS[:2] for r in modal)
        lines += [
            f"- **{world} ranks**: {len(good)} of {len(built)} models are right: with images, videos or audio {first} "
            f"of the first two tasks and {len(modal) - first} of the others. {small} have at most {1.1 / world:.2f} of "
            f"the parameters on a rank. Of {shared(good, 0.9)} of the {shared(good)} whose matmul work was counted, "
            "every tower does at least 90% of it sharded."
        ]
    lines += ["", "## By task", "", *by_task(records)]
    first = records[min(records)]
    others = {(r["name"], world): r for world, found in records.items() if world != min(records) for r in found}
    for task in TASKS:
        rows = [r for r in first if r["task"] == task and r["status"] != "not built"]
        if not rows:
            continue
        more = [world for world in sorted(records) if world != min(records)]
        lines += ["", f"## {title(task)}", ""]
        names = ["type", "class", "inputs", "fraction", "unplanned", "shared", "right", *(f"{w} ranks" for w in more)]
        names += ["generates", "graph"]
        lines += [f"| {' | '.join(names)} |", f"|{'---|' * len(names)}"]
        lines += [row(r, [others.get((r["name"], w)) for w in more]) for r in sorted(rows, key=lambda r: r["name"])]
    missing = sorted((r for r in first if r["status"] == "not built"), key=lambda r: r["name"])
    if missing:
        lines += ["", "## Not built", "", "| type | class | reason |", "|---|---|---|"]
        lines += [f"| {' | '.join(r['name'].split(':'))} | {cell(r['error'])} |" for r in missing]
    left = [name for name in names_at(min(records)) if name not in {r["name"] for r in first}]
    if left:
        lines += ["", "## Not run", "", f"{len(left)} types, for lack of time: {', '.join(left)}."]
    return "\n".join(lines) + "\n"


def by_task(records: dict[int, list[Record]]) -> list[str]:
    """A table of how many are right of each task."""
    worlds = sorted(records)
    heads = [f"{what}, {world} ranks" for world in worlds for what in ("right", "wrong", "not run")]
    lines = [f"| task | {' | '.join(heads)} | not built |", f"|{'---|' * (2 + len(heads))}"]
    totals: list[int] = [0] * (len(heads) + 1)
    for task in TASKS:
        counts = []
        for world in worlds:
            rows = [r for r in records[world] if r["task"] == task]
            run_ = {r["name"] for r in rows}
            right_ = sum(r["status"] == "ok" for r in rows)
            wrong = sum(r["status"] in ("wrong", "failed") for r in rows)
            counts += [right_, wrong, sum(task_of(n) == task and n not in run_ for n in names_at(world))]
        counts.append(sum(r["task"] == task and r["status"] == "not built" for r in records[worlds[0]]))
        totals = [total + count for total, count in zip(totals, counts, strict=True)]
        lines.append(f"| {title(task)} | {' | '.join(map(str, counts))} |")
    lines.append(f"| **all** | {' | '.join(f'**{n}**' for n in totals)} |")
    return lines


def shared(records: list[Record], least: float = 0.0) -> int:
    """How many models have no tower that shares less of its matmul work than this."""
    return sum(all(x >= least for x in r["towers"].values()) for r in records if "towers" in r)


def names_at(world: int) -> list[str]:
    """The models that run on this number of ranks: all on two, a selection on more."""
    return [name for name in all_names() if world == 2 or name.partition(":")[0] in AT_FOUR]


def row(record: Record, others: list[Record | None]) -> str:
    """The row of a model that was built."""
    kind, _, cls = record["name"].partition(":")
    right_ = [answer(record), *("" if other is None else answer(other) for other in others)]
    if "outputs" not in record:
        return f"| {kind} | {cls} | {record.get('modality', '')} | | | | {' | '.join(right_)} | | |"
    generated = {True: "yes", False: "NO"}.get(record.get("tokens"), "")  # type: ignore[call-overload]
    graph = "several" if record["breaks"] else "one"
    shared = min(record.get("towers", {}).values(), default=record.get("work"))
    cells = (kind, cls, record["modality"] or "text", f"{record['fraction']:.2f}", str(record["unplanned"]))
    cells += ("" if shared is None else f"{shared:.0%}",)
    return f"| {' | '.join((*cells, *right_, generated, graph))} |"


def answer(record: Record) -> str:
    """Whether a model is right, and why not."""
    if record["status"] == "ok":
        return "yes"
    if "outputs" not in record:
        return f"NO: {cell(reason(record['error']))}"
    wrong = f"outputs {record['outputs']:.0e}, gradients {record['gradients']:.0e}"
    why = f" ({KNOWN[record['name']]})" if record["name"] in KNOWN else ""
    return f"NO: {wrong}{', tokens' if record.get('tokens') is False else ''}{why}"


def reason(error: str) -> str:
    """The line of an error with traceback that says what it was."""
    if error.startswith("RankTimeout"):
        return "no result in time"
    lines = [line for line in error.splitlines() if re.match(r"[\w.]*(Error|Exception|Break): ", line)]
    return (lines or error.splitlines())[-1]


def title(task: str) -> str:
    """The name of a task."""
    return task.replace("_", " ").capitalize()


def cell(text: str) -> str:
    """Text for a table."""
    return text.replace("|", "/").replace("\n", " ")[:160]


def this_commit() -> str:
    """The commit of this working tree; empty where there is no repository."""
    return subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()


def made_by(records: dict[int, list[Record]]) -> str:
    """What the results were made with: versions, commits, and how many results are of which."""
    found: dict[str, list[Record]] = {}
    for record in (r for several in records.values() for r in several):
        found.setdefault(record.get("versions", versions()), []).append(record)
    return " ".join(
        f"{each}: {len(rows)} results, of commit {', '.join(dict.fromkeys(r['commit'] for r in rows))}."
        for each, rows in found.items()
    )


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
