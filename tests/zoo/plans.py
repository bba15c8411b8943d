"""``python -m zoo.plans``: our plans against the hand-written ones that transformers ships, layer by layer.

Their plan places the weights. For its communication we take the least that is possible with these placements: the
search finds the cheapest plan in which every matrix is placed as theirs says. So its cost is a lower bound.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

import torch

from paraxis import CaptureError, ParallelExecutionCtx, Plan, parallelize_model
from paraxis.passes import AnalyzeBase, PassPipeline, build_parallel_pass_pipeline
from paraxis.passes.solve import RESULT, Solved
from paraxis.placement import Shard
from paraxis.plan.offline import plan_offline, simulated_group
from paraxis.solver import Account, Unsatisfiable, account, search
from paraxis.solver.constraints import Constraint, Constraints
from zoo.cases import all_cases, find
from zoo.jobs import be_quiet, first_line, made_with


def their_plan(model: Any) -> dict[str, str]:
    """The hand-written plan of a model, by patterns of names; empty if it ships with none."""
    return dict(getattr(model, "_tp_plan", None) or {})


def style_of(names: list[str], plan: dict[str, str]) -> str | None:
    """The style of the parameter with these names, or of its module."""
    for name in names:
        generic = re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)
        for key in (generic, generic.rpartition(".")[0]):
            if key in plan:
                return plan[key]
    return None


def dim_of(style: str | None, ndim: int) -> int | None:
    """The dimension that a style shards; None if the parameter stays replicated."""
    if style is None or ndim == 0:
        return None
    if style.startswith(("colwise", "packed_colwise")):
        return max(ndim - 2, 0)
    if style.startswith(("rowwise", "packed_rowwise")):
        return ndim - 1 if ndim > 1 else None
    return {"embedding_rowwise": 0, "embedding_colwise": 1}.get(style)


def shipped() -> list[str]:
    """The types whose model ships with a plan that shards some of its parameters."""
    found = []
    for name, case in all_cases().items():
        if case.kind == "module":
            continue
        try:
            with torch.device("meta"):
                model = case.build(**case.overrides)
        except Exception as error:
            print(f"{name} cannot be built here: {first_line(error)}", file=sys.stderr)
            continue
        plan = their_plan(model)
        if any(dim_of(style_of([n], plan), p.ndim) is not None for n, p in model.named_parameters()):
            found.append(name)
    return found


def compare(name: str, world: int = 2) -> dict[str, Any]:
    """Both plans of one type: the layers that differ, the costs and the fractions on a rank."""
    case = find(name)
    model = case.make()
    theirs = their_plan(model)
    options: dict[str, Any] = {}
    if case.kind != "causal-lm":
        options["example_inputs"] = {k: v for k, v in case.inputs(model).items() if k != "labels"}
    try:
        with plan_offline(model, world, None, options) as planned:
            record = _compare_plans(planned.plan, planned.ctx.state.aliases, [planned.solved], theirs)
    except CaptureError:
        record = _compare_plans(*_plan_subgraphs(case.make(), world, options), theirs)
    torch._dynamo.reset()
    return {"name": name, **record}


class _Recorder(AnalyzeBase):
    """Records the solution of every graph."""

    def __init__(self) -> None:
        self.found: list[Solved] = []

    def run(self, graph_module: Any, ctx: Any, config: Any) -> Any:
        self.found.append(graph_module.meta[RESULT])
        return graph_module


def _plan_subgraphs(model: Any, world: int, options: dict[str, Any]) -> tuple[Plan, dict[str, list[str]], list[Solved]]:
    """The plan of a model with graph breaks, whose subgraphs are planned when it runs."""
    torch._dynamo.reset()
    recorder, passes = _Recorder(), list(build_parallel_pass_pipeline())
    with simulated_group(world) as group:
        ctx = ParallelExecutionCtx(group, torch.device("cpu"))
        pipeline = PassPipeline([passes[0], recorder, *passes[1:]])
        parallelize_model(model, ctx, pipeline=pipeline, show_progress=False, **options)
    assert ctx.plan is not None
    return ctx.plan, ctx.state.aliases, recorder.found


def _compare_plans(
    plan: Plan, aliases: dict[str, list[str]], solved: list[Solved], their: dict[str, str]
) -> dict[str, Any]:
    styles = {n: style_of(aliases.get(n, [n]), their) for n in plan.parameters}
    shapes = {n: p.global_shape for n, p in plan.parameters.items()}
    theirs = {n: dim_of(styles[n], len(shape)) for n, shape in shapes.items()}
    constraints = {
        n: Constraint(n, "replicated" if d is None else f"shard({d})") for n, d in theirs.items() if len(shapes[n]) > 1
    }
    dropped: list[str] = []
    cheapest = [_cheapest(each, aliases, constraints, dropped) for each in solved]
    accounts = [account(each.program, solution, each.model) for each, solution in zip(solved, cheapest)]
    differing: dict[str, tuple[str, str]] = {}
    for n, p in plan.parameters.items():
        ours = [d for d, _ in p.placement.layouts] if isinstance(p.placement, Shard) else []
        if len(p.global_shape) > 1 and ours != ([theirs[n]] if theirs[n] is not None else []):
            pattern = re.sub(r"(?<=\.)\d+(?=\.|$)", "*", n)
            differing[pattern] = (styles[n] or "not in the plan", f"shard({ours[0]})" if ours else "replicated")
    return {
        "differing": differing,
        "fraction": [_fraction(theirs, shapes, plan.world_size), plan.sharded_fraction],
        "cost": [sum(x.cost for x in cheapest), sum(x.solution.cost for x in solved)],
        "microseconds": [_micro(accounts), _micro([x.account for x in solved])],
        "optimal": all(x.solution.optimal for x in solved),
        "graphs": len(solved),
        "dropped": dropped,
        "replicated": [f"{n}: {why}" for n, why in plan.replicated if len(shapes[n]) > 1],
    }


def _cheapest(
    solved: Solved, aliases: dict[str, list[str]], constraints: dict[str, Constraint], dropped: list[str]
) -> Any:
    """The cheapest solution with every matrix placed as in theirs, without constraints that no operator can meet."""
    while True:
        permit = Constraints(list(constraints.values()), solved.program, aliases).permit
        try:
            return search(solved.program, solved.model, solved.keep_sharded, permit=permit)[0]
        except Unsatisfiable as problem:
            stuck = [n for v in problem.step.inputs if (n := solved.program.parameters.get(v)) in constraints]
            assert stuck, problem
            dropped += [str(constraints.pop(n)) for n in stuck]


def _fraction(dims: dict[str, int | None], shapes: dict[str, tuple[int, ...]], world: int) -> float:
    total = local = 0.0
    for n, shape in shapes.items():
        size, dim = torch.Size(shape).numel(), dims[n]
        total += size
        local += size if dim is None else size / shape[dim] * -(-shape[dim] // world)
    return local / total


def _micro(accounts: list[Account]) -> float:
    return round(sum(x.seconds for x in accounts) * 1e6, 2)


def problems(record: dict[str, Any]) -> list[str]:
    """What must not be: ours costs more, or has more on a rank."""
    theirs, ours = record["cost"]
    found = [] if ours <= theirs * (1 + 1e-9) else [f"costs {ours:.3e} against {theirs:.3e}"]
    theirs, ours = record["fraction"]
    return found + ([] if ours <= theirs + 1e-9 else [f"holds {ours:.4f} against {theirs:.4f}"])


def runs(name: str) -> bool:
    """Whether the unsharded model runs; if not, there is nothing to compare."""
    case = find(name)
    model = case.make()
    try:
        model(**case.inputs(model))
    except Exception:
        return False
    return True


def page(records: list[dict[str, Any]], world: int) -> str:
    """Markdown: a summary, then every type with what differs."""
    import transformers

    failed = [r for r in records if "error" in r]
    bad = [r for r in records if "error" not in r and problems(r)]
    lines = [
        "# Plans against the hand-written ones",
        "",
        f"Every type whose model ships with a tensor-parallel plan in transformers {transformers.__version__}, as",
        f"a tiny model on {world} ranks. For theirs, every matrix is placed as in their plan, with the least",
        "communication that is possible then. *Cost* is what the search minimizes: estimated time, and a price for",
        "replicated parameters that could be sharded. *Time* is the estimate without that price, in microseconds of",
        "one forward pass; where theirs is shorter, more is replicated. *Held* is the fraction of all parameters on a",
        "rank. Made by `make plans`.",
        "",
        made_with(),
        "",
        f"{len(records) - len(failed)} types; {sum(r.get('differing') == {} for r in records)} with the same plan; "
        f"ours costs or holds more in {len(bad)}. Not compared: {', '.join(r['name'] for r in failed) or 'none'}.",
        "",
        "| type | held: theirs | ours | cost: theirs | ours | time: theirs | ours | what differs (theirs → ours) |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for r in sorted(records, key=lambda r: r["name"]):
        if "error" in r:
            lines.append(f"| {r['name']} | | | | | | | not compared: {r['error']} |")
            continue
        notes = [f"`{p}`: {a} → {b}" for p, (a, b) in r["differing"].items()]
        notes += [f"no operator runs with their {x}" for x in r["dropped"]] + [f"**{x}**" for x in problems(r)]
        held, cost, time = r["fraction"], r["cost"], r["microseconds"]
        lines.append(
            f"| {r['name']} | {held[0]:.3f} | {held[1]:.3f} | {cost[0]:.2e} | {cost[1]:.2e} | {time[0]} | {time[1]} | "
            f"{'; '.join(notes) or 'nothing'} |"
        )
    return "\n".join(lines) + "\n"


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="types, separated by commas")
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--state", type=Path, help="file for results as they come; a second run resumes from it")
    parser.add_argument("--page", type=Path, help="where to write the table")
    options = parser.parse_args()
    be_quiet()
    records: dict[str, dict[str, Any]] = {}
    if options.state and options.state.is_file():
        records = {r["name"]: r for r in map(json.loads, options.state.read_text().splitlines())}
    names = options.only.split(",") if options.only else shipped()
    for name in names:
        if name in records:
            continue
        try:
            record = compare(name, options.tp)
        except Exception as error:
            torch._dynamo.reset()
            record = {"name": name, "error": first_line(error)}
            record["runs"] = runs(name)
        records[name] = record
        print(name, record.get("error") or problems(record) or record["differing"], flush=True)
        if options.state:
            options.state.parent.mkdir(parents=True, exist_ok=True)
            with options.state.open("a") as file:
                file.write(json.dumps(record) + "\n")
    if options.page:
        options.page.write_text(page(list(records.values()), options.tp))
    return int(any(r["runs"] if "error" in r else problems(r) for r in records.values()))


if __name__ == "__main__":
    sys.exit(main())
