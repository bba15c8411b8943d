"""A plan as one HTML file: pictures of its blocks, memory, layers, collectives, and the reason for each of them."""

from __future__ import annotations

import json
import os
from html import escape
from importlib.resources import files
from math import prod
from pathlib import Path
from typing import Any

import torch

from ..plan import Memory, Plan, pattern_of, size_text
from ..plan.make import Planned, plan_offline
from ..plan.memory import Sizes
from ..solver.machine import machine_of
from .drawing import svg
from .steps import Section, Step, in_words, sections_of, short, steps_of

SHARES = ("parameters", "buffers", "cache", "gradients", "optimizer", "activations")
MEANINGS = {
    "column": "Every rank computes its share of the outputs; nothing has to be exchanged for that.",
    "row": "Every rank has its share of the inputs and computes one term of a sum; the terms are added up afterwards.",
    "vocab": "Every rank holds a part of the vocabulary.",
    "collective": "Here the ranks all_gather_object data, and wait for one another.",
    "whole layer": "This layer is not split: every rank computes all of it.",
    "operators": "Computed by every rank on what it has.",
}


def report_plan(
    model: Any,
    tp_size: int,
    path: str | os.PathLike[str],
    *,
    title: str = "",
    torch_dtype: Any = None,
    batch: int = 1,
    context: int | None = None,
    train: bool = False,
    **kwargs: Any,
) -> Plan:
    """Plan a model, write the page of the plan to a file, and give the plan.

    Args:
        model: A Hub id, a directory with a ``config.json``, a transformers configuration, or a module.
        tp_size: The number of ranks.
        path: The file to write.
        title: What the page calls the model; by default its name or its class.
        torch_dtype, batch, context, train, kwargs: As for :func:`paraxis.plan_model`.
    """
    title = title or (os.fspath(model) if isinstance(model, (str, os.PathLike)) else type(model).__name__)
    with plan_offline(model, tp_size, torch_dtype, kwargs, Sizes(batch, context, train)) as planned:
        Path(path).write_text(report(planned, title), encoding="utf-8")
        return planned.plan


def report(planned: Planned, title: str) -> str:
    """The page. It needs nothing but itself."""
    sections = sections_of(steps_of(planned), planned)
    template = files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    data = {str(step.number): _details(step, planned) for section in sections for step in section.steps}
    values = {
        "TITLE": escape(title),
        "RANKS": str(planned.plan.world_size),
        "SUMMARY": _summary(planned),
        "PICTURES": "\n".join(map(_picture, sections)),
        "MEMORY": _memory(planned.plan),
        "LAYERS": _layers(planned.plan),
        "COLLECTIVES": _collectives(planned),
        "WHOLE": _notes(planned.plan),
        "DATA": json.dumps(data).replace("</", "<\\/"),
    }
    for key, value in values.items():
        template = template.replace(f"%%{key}%%", value)
    return template


# -- the parts of the page -----------------------------------------------------------------------------------------


def _summary(planned: Planned) -> str:
    plan = planned.plan
    total = sum(prod(p.global_shape) for p in plan.parameters.values())
    parts = [f"{n} {kind.replace('_', '-')}{'s' if n > 1 else ''}" for kind, n in plan.count().items()]
    kinds = " and ".join(filter(None, [", ".join(parts[:-1]), *parts[-1:]]))
    share = plan.communication / plan.seconds if plan.seconds else 0.0
    proven = "No plan is cheaper" if plan.optimal else "It is not proven that no plan is cheaper"
    memory = f" That is {size_text(plan.memory.parameters)} of weights." if plan.memory is not None else ""
    return (
        f"<p>The model has {number(total)} parameters. Split over {plan.world_size} ranks, each holds "
        f"<b>{plan.sharded_fraction:.1%}</b> of them.{memory} One pass through the model has "
        f"{kinds or 'no collectives'}, which are estimated to take {share:.0%} of its time. {proven}, going by the "
        f"costs of the machine that was assumed: {escape(machine_of(planned.config.machine).name)}.</p>"
    )


def _picture(section: Section) -> str:
    times = f' <span class="count">× {section.count}</span>' if section.count > 1 else ""
    return (
        f'<figure><figcaption>{escape(section.title)}{times}</figcaption><div class="scroll">'
        f"{svg(section)}</div></figure>"
    )


def _memory(plan: Plan) -> str:
    memory: Memory | None = plan.memory
    if memory is None:
        return "<p>Not known.</p>"
    shares = [(name, int(getattr(memory, name) or 0)) for name in SHARES]
    shares = [(name, value) for name, value in shares if value]
    total = sum(value for _, value in shares) or 1
    bars = "".join(
        f'<div class="share {name}" style="width:{value / total:.4%}" title="{name}: {size_text(value)}"></div>'
        for name, value in shares
    )
    rows = "".join(
        f'<tr><td><span class="dot {name}"></span>{name}</td><td class="n">{size_text(value)}</td>'
        f'<td class="n">{value / total:.1%}</td></tr>'
        for name, value in shares
    )
    sizes = f" For {memory.batch} × {memory.context} tokens." if memory.context else ""
    unknown = "".join(
        f" The {name} {'is' if name == 'cache' else 'are'} not known: {escape(why)}."
        for name, why in (("cache", memory.unknown), ("activations", memory.uncounted))
        if why
    )
    without = "" if memory.activations is not None or memory.uncounted else ", without activations"
    return (
        f'<div class="bar" role="img" aria-label="Memory of one rank">{bars}</div>'
        f'<table class="narrow"><tbody>{rows}<tr><th>one rank</th><th class="n">{size_text(total)}</th><th></th></tr>'
        f"</tbody></table><p>Of the fullest rank{without}.{sizes}{unknown}</p>"
    )


def _row(cells: list[str]) -> str:
    """A row of a table that can be searched; what is short is not broken."""
    found = "".join(f"<td{' class=short' if len(c) < 16 else ''}>{escape(c)}</td>" for c in cells)
    return f'<tr data-search="{escape(" ".join(cells).lower())}">{found}</tr>'


def _layers(plan: Plan) -> str:
    rows: dict[tuple[Any, ...], int] = {}
    local = {layer["name"]: tuple(layer["local_shape"]) for layer in plan.to_json()["layers"]}
    for layer in plan.layers:
        key = (
            pattern_of(layer.name),
            layer.kind,
            layer.axis or "whole",
            layer.gather_output,
            layer.input_is_parallel,
            layer.global_shape,
            local[layer.name],
        )
        rows[key] = rows.get(key, 0) + 1
    lines = []
    for (name, kind, axis, gathers, parallel, whole, mine), count in rows.items():
        cells = [name, str(count), kind, axis, "sharded" if parallel else "whole", "whole" if gathers else "sharded"]
        cells += ["×".join(map(str, whole)), "×".join(map(str, mine))]
        lines.append(_row(cells))
    head = "".join(f"<th>{t}</th>" for t in ("layer", "×", "kind", "axis", "input", "output", "whole", "on a rank"))
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"


def _collectives(planned: Planned) -> str:
    plan, machine = planned.plan, machine_of(planned.config.machine)
    rows: dict[tuple[Any, ...], int] = {}
    for c in plan.collectives:
        key = (c.kind, pattern_of(c.module), c.shape, c.dtype, c.reason)
        rows[key] = rows.get(key, 0) + 1
    lines = []
    for (kind, where, shape, dtype, reason), count in rows.items():
        moved = _bytes(shape, dtype)
        seconds = machine.collective(kind, moved, plan.world_size) if moved is not None else None
        cells = [kind.replace("_", "-"), where or "the model", str(count), "×".join(map(str, shape))]
        cells += [
            size_text(moved) if moved is not None else "",
            f"{seconds * 1e6:.1f} µs" if seconds is not None else "",
            reason,
        ]
        lines.append(_row(cells))
    if not lines:
        return "<p>None.</p>"
    head = "".join(f"<th>{t}</th>" for t in ("kind", "after", "×", "shape", "size", "each, estimated", "why"))
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"


def _notes(plan: Plan) -> str:
    def entries(items: list[tuple[str, str]]) -> str:
        unique = dict.fromkeys((pattern_of(name), reason) for name, reason in items)
        return "".join(
            f'<li data-search="{escape((n + " " + r).lower())}"><code>{escape(n)}</code>: {escape(r)}</li>'
            for n, r in unique
        )

    parts = []
    for title, items in (("On every rank whole", plan.replicated), ("Made whole for an operator", plan.gathered)):
        if items:
            parts.append(f"<h3>{title}</h3><ul>{entries(items)}</ul>")
    if plan.breaks:
        parts.append("<h3>Not one graph</h3><ul>" + "".join(f"<li>{escape(b)}</li>" for b in plan.breaks) + "</ul>")
    if plan.unplanned:
        names = dict.fromkeys(pattern_of(name) for name in plan.unplanned)
        parts.append(
            "<h3>Not used by the planned forward, split for memory where possible</h3><ul>"
            + "".join(f"<li><code>{escape(n)}</code></li>" for n in names)
            + "</ul>"
        )
    return "".join(parts) or "<p>Nothing.</p>"


# -- what a click on a step shows ----------------------------------------------------------------------------------


def _details(step: Step, planned: Planned) -> dict[str, Any]:
    machine, world = machine_of(planned.config.machine), planned.plan.world_size
    weights = []
    for name in _weights(step, planned):
        known = planned.plan.parameters[name]
        weights.append(
            [name, list(known.global_shape), list(known.local_shape), in_words(known.placement, known.global_shape)]
        )
    found: dict[str, Any] = {
        "title": step.title,
        "module": step.module or "the model",
        "kind": step.kind,
        "meaning": MEANINGS.get(step.kind, ""),
        "placement": step.placement,
        "whole": "×".join(step.whole),
        "local": "×".join(step.local),
        "dtype": step.dtype,
        "weights": weights,
        "operators": [short(node) for node in step.nodes][:40],
        "source": _source(step),
        "reason": step.reason,
    }
    if step.kind == "collective":
        moved = _bytes(step.whole, step.dtype)
        if moved is not None:
            kind = step.title.split()[0].replace("-", "_")
            found["moved"] = f"{size_text(moved)}, about {machine.collective(kind, moved, world) * 1e6:.1f} µs"
    return found


def _weights(step: Step, planned: Planned) -> list[str]:
    """The parameters that a step uses."""
    if step.kind == "collective":
        return []
    known = planned.plan.parameters
    if any(node.op == "call_module" for node in step.nodes):
        return [
            name
            for name in known
            if name.startswith(f"{step.module}.") and name.count(".") == step.module.count(".") + 1
        ]
    origin = {str(node.meta["origin"].target): p.name for node, p in planned.solved.parameters.items()}
    used = dict.fromkeys(
        origin[str(source.target)]
        for node in step.nodes
        for taken in node.all_input_nodes
        for source in (taken, *taken.all_input_nodes)
        if source.op == "placeholder" and str(source.target) in origin
    )
    return [name for name in used if name in known]


def _source(step: Step) -> list[str]:
    """The line of the model's code that the step comes from, and the code."""
    for node in step.nodes:
        lines = [line.strip() for line in (node.meta.get("stack_trace") or "").strip().splitlines()]
        places = [i for i, line in enumerate(lines) if line.startswith("File ")]
        if places and places[-1] + 1 < len(lines):
            return [lines[places[-1]].replace('File "', "").replace('"', ""), lines[places[-1] + 1]]
    return []


# -- numbers -------------------------------------------------------------------------------------------------------


def _bytes(shape: Any, dtype: str) -> int | None:
    sizes = [str(n) for n in shape]
    if not all(n.isdigit() for n in sizes):
        return None
    return prod(int(n) for n in sizes) * torch.empty(0, dtype=getattr(torch, dtype)).element_size()


def number(value: float) -> str:
    for unit in ("", " thousand", " million", " billion"):
        if value < 1000 or unit == " billion":
            return f"{value:.3g}{unit}" if unit else str(int(value))
        value /= 1000
    raise AssertionError
