"""``python -m zoo.multimodal``: models that take images, videos or audio, by the plain call, against unsharded ones.

Each is saved, parallelized by ``parallelize_model(folder, ctx)`` without example inputs, and compared: the forward pass
with its modality and with text alone, gradients, and greedy generation.
"""

from __future__ import annotations

import argparse
import inspect
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from models.compare import context

from ranks import RankPool
from zoo.check import can_generate, differences, gradients, run
from zoo.jobs import Record, be_quiet, building, first_line, made_with, run_jobs
from zoo.multimodal_cases import TASKS, all_names, build, inputs_of, task_of

OUTPUTS, GRADIENTS = 1e-4, 1e-3
"""The largest errors that count as right: absolute of outputs, relative of gradients."""
NEW = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}


def compare(name: str, folder: str, inputs: dict[str, Any]) -> Record:
    """One model on one rank."""
    be_quiet()
    torch._dynamo.reset()
    from paraxis import parallelize_model

    ctx = context()
    built = build(name)
    unsharded = type(built).from_pretrained(folder, dtype=torch.float32).eval()
    model = parallelize_model(folder, ctx, show_progress=False).eval()
    for each, parameter in built.named_parameters():  # loading loses requires_grad
        unsharded.get_parameter(each).requires_grad_(parameter.requires_grad)
    plan = ctx.plan
    unplanned = sum(plan.parameters[each].placement is not None for each in plan.unplanned)
    record: Record = {
        "fraction": plan.sharded_fraction,
        "unplanned": unplanned,
        "breaks": list(plan.breaks)[:1],
    }
    caches = {"use_cache": False} if "use_cache" in inspect.signature(type(built).forward).parameters else {}
    found, right = run(model, {**inputs, **caches}), run(unsharded, {**inputs, **caches})
    record["outputs"] = differences(found, right)
    record |= gradients(model, unsharded, found, right)
    with torch.no_grad():
        record["text"] = text_alone(model, unsharded, inputs)
    if can_generate(unsharded):
        record["tokens"] = tokens(model, unsharded, inputs)
    record["breaks"] = list(ctx.plan.breaks)[:1]
    return record


def text_alone(model: Any, unsharded: Any, inputs: dict[str, Any]) -> Any:
    """The error of a call with text alone; None if the unsharded model does not take one."""
    if "input_ids" not in inputs or not any(x.is_floating_point() for x in inputs.values()):
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
        expected = unsharded.generate(**inputs, **NEW)
    except Exception as error:
        return f"unsharded model: {first_line(error, 120)}"
    found = model.generate(**inputs, **NEW)
    return bool(torch.equal(found, expected))


def work(name: str, pool: RankPool, timeout: float) -> Record:
    """Build, save, parallelize and compare one model."""
    started = time.monotonic()
    record: Record = {"name": name, "task": task_of(name)}
    be_quiet()

    def done(status: str, **more: Any) -> Record:
        return {**record, "status": status, **more, "seconds": time.monotonic() - started}

    with tempfile.TemporaryDirectory(prefix="zoo-") as folder:
        try:
            with building:
                model = build(name)
                inputs, record["inputs"] = inputs_of(model)
                with torch.no_grad():
                    run(model, inputs)
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
    }
    return done("ok" if right(worst) else "wrong", **worst)


def right(record: Record) -> bool:
    """Whether all that was compared agrees."""
    return (
        record["outputs"] < OUTPUTS
        and record["gradients"] < GRADIENTS
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
        f"{head} {record['fraction']:.2f} unplanned {record['unplanned']} out {record['outputs']:.0e} text {text} "
        f"grad {record['gradients']:.0e} {record['worst'][:1]} tokens {record.get('tokens', '-')} {record['inputs']} "
        f"breaks {len(record['breaks'])}"
    )


def page(records: list[Record], world: int) -> str:
    """Markdown: a table per task, then what could not be built."""
    built = [r for r in records if r["status"] != "not built"]
    good = [r for r in built if r["status"] == "ok"]
    lines = [
        "# Multimodal models",
        "",
        f"Tiny models with random weights on {world} ranks, parallelized by `parallelize_model(folder, ctx)` without",
        f"example inputs, against the unsharded model: outputs within {OUTPUTS:g}, gradients within {GRADIENTS:g},",
        "greedy tokens exact, with the inputs of the modality and with text alone. *Fraction*: parameters on a rank.",
        "*Unplanned*: parameters that no dummy input uses, sharded for memory only. Made by `make multimodal`.",
        "",
        made_with(),
        "",
        f"{len(good)} of {len(built)} that can be built are right.",
    ]
    for task in TASKS:
        rows = [r for r in built if r["task"] == task]
        if not rows:
            continue
        lines += ["", f"## {task.replace('_', ' ').capitalize()}", ""]
        lines += [
            "| type | class | fraction | unplanned | right | generates | graph |",
            "|---|---|---|---|---|---|---|",
        ]
        lines += [row(r) for r in sorted(rows, key=lambda r: r["name"])]
    missing = sorted((r for r in records if r["status"] == "not built"), key=lambda r: r["name"])
    if missing:
        lines += ["", "## Not built", "", "| type | class | reason |", "|---|---|---|"]
        lines += [f"| {' | '.join(r['name'].split(':'))} | {cell(r['error'])} |" for r in missing]
    return "\n".join(lines) + "\n"


def row(record: Record) -> str:
    """The row of a model that was built."""
    kind, _, cls = record["name"].partition(":")
    if "outputs" not in record:
        return f"| {kind} | {cls} | | | NO: {cell(record['error'].splitlines()[-1])} | | |"
    answer = "yes" if record["status"] == "ok" else f"NO: outputs {record['outputs']:.0e}"
    generated = {True: "yes", False: "NO"}.get(record.get("tokens"), "")  # type: ignore[call-overload]
    graph = "several" if record["breaks"] else "one"
    return f"| {kind} | {cls} | {record['fraction']:.2f} | {record['unplanned']} | {answer} | {generated} | {graph} |"


def cell(text: str) -> str:
    """Text for a table."""
    return text.replace("|", "/").replace("\n", " ")[:160]


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="types or type:class, separated by commas")
    parser.add_argument("--tp", type=int, default=2, help="number of ranks")
    parser.add_argument("--jobs", type=int, default=1, help="models at a time, each on its own ranks")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds per model")
    parser.add_argument("--state", type=Path, help="file for results as they come; a second run resumes from it")
    parser.add_argument("--page", type=Path, help="where to write the table; with --only, of what the state has so far")
    options = parser.parse_args()
    only = options.only.split(",") if options.only else []
    names = [name for name in all_names() if not only or name in only or name.partition(":")[0] in only]

    def job(name: str, pool: RankPool) -> Record:
        return work(name, pool, options.timeout)

    records = run_jobs(names, options.tp, job, jobs=options.jobs, state=options.state, say=line, again=bool(only))
    if options.page:
        options.page.parent.mkdir(parents=True, exist_ok=True)
        options.page.write_text(page(records, options.tp))
    return 0 if all(r["status"] in ("ok", "not built") for r in records) else 1


if __name__ == "__main__":
    sys.exit(main())
