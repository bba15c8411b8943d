"""The HTML report of a plan: diagrams of its blocks, memory, layers, and collectives with their reasons."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from math import prod
from pathlib import Path
from typing import Any

import torch

from ..plan import Memory, Plan, pattern_of, size_text
from ..plan.memory import Sizes
from ..plan.offline import Planned, plan_offline
from ..plan.work import work_text
from ..solver.machine import machine_of
from .drawing import svg
from .steps import Section, Step, operator_name, placement_text, sections_of, steps_of

MEMORY_PARTS = {
    "parameters": "parameters",
    "buffers": "buffers",
    "cache": "KV cache",
    "gradients": "gradients",
    "optimizer": "optimizer state",
    "activations": "activations",
}
"""Fields of :class:`Memory`, and their names on the page."""
MEANINGS = {
    "column": "Column-parallel: every rank computes a shard of the outputs, without communication.",
    "row": "Row-parallel: every rank multiplies a shard of the inputs; an all-reduce adds the partial outputs.",
    "vocab": "Vocab-parallel: every rank holds a shard of the vocabulary.",
    "collective": "The ranks communicate here, and wait for one another.",
    "replicated layer": "Replicated: every rank computes the full layer.",
    "operators": "Every rank runs these operators on its own tensors.",
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
    """Plan a model, write its HTML report to a file, and return the plan.

    Args:
        model: A Hub id, a directory with a ``config.json``, a transformers configuration, or a module.
        tp_size: The number of ranks.
        path: The file to write.
        title: The heading; by default the name or class of the model.
        torch_dtype, batch, context, train, kwargs: As for :func:`paraxis.plan_model`.
    """
    title = title or (os.fspath(model) if isinstance(model, (str, os.PathLike)) else type(model).__name__)
    with plan_offline(model, tp_size, torch_dtype, kwargs, Sizes(batch, context, train)) as planned:
        Path(path).write_text(report(planned, title), encoding="utf-8")
        return planned.plan


def report(planned: Planned, title: str) -> str:
    """The HTML report: one file without external resources."""
    sections = sections_of(steps_of(planned), planned)
    template = files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    data = {str(step.number): _details(step, planned) for section in sections for step in section.steps}
    values = {
        "TITLE": escape(title),
        "RANKS": str(planned.plan.world_size),
        "SUMMARY": _summary(planned),
        "DIAGRAMS": "\n".join(map(_diagram, sections)),
        "MEMORY": _memory(planned.plan),
        "LAYERS": _layers(planned.plan),
        "COLLECTIVES": _collectives(planned),
        "REPLICATED": _notes(planned.plan),
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
    machine = escape(machine_of(planned.config.machine).name)
    optimal = "This plan is optimal" if plan.optimal else "This plan may not be optimal"
    memory = f" ({size_text(plan.memory.parameters)})" if plan.memory is not None else ""
    return (
        f"<p>The model has {count_text(total)} parameters. With {plan.world_size} ranks, each holds "
        f"<b>{plan.sharded_fraction:.1%}</b> of them{memory}. A forward pass has {kinds or 'no collectives'}; "
        f"they take an estimated {share:.0%} of its time. {optimal} under the cost model for {machine}.</p>"
        f"{_work(plan)}"
    )


def _work(plan: Plan) -> str:
    """How much of the matmul work the ranks share, for models with several towers and those that replicate work."""
    if plan.world_size == 1 or not work_text(plan.matmuls):
        return ""
    rows = "".join(
        f'<tr><td>{escape(t.name or "the model")}</td><td class="n">{count_text(t.flops)}</td>'
        f'<td class="n">{t.sharded_fraction:.1%}</td><td class="n">{t.local_fraction:.1%}</td></tr>'
        for t in plan.towers
    )
    head = "<tr><th>matmul work of</th><th>FLOPs</th><th>shared by the ranks</th><th>done by one</th></tr>"
    return f'<table class="narrow"><thead>{head}</thead><tbody>{rows}</tbody></table>'


def _diagram(section: Section) -> str:
    times = f' <span class="count">× {section.count}</span>' if section.count > 1 else ""
    return (
        f'<figure><figcaption>{escape(section.title)}{times}</figcaption><div class="scroll">'
        f"{svg(section)}</div></figure>"
    )


def _memory(plan: Plan) -> str:
    memory: Memory | None = plan.memory
    if memory is None:
        return "<p>Unknown.</p>"
    parts = [(field, name, int(getattr(memory, field) or 0)) for field, name in MEMORY_PARTS.items()]
    parts = [part for part in parts if part[2]]
    total = sum(value for _, _, value in parts) or 1
    bars = "".join(
        f'<div class="share {field}" style="width:{value / total:.4%}" title="{name}: {size_text(value)}"></div>'
        for field, name, value in parts
    )
    rows = "".join(
        f'<tr><td><span class="dot {field}"></span>{name}</td><td class="n">{size_text(value)}</td>'
        f'<td class="n">{value / total:.1%}</td></tr>'
        for field, name, value in parts
    )
    sizes = f" For {memory.batch} × {memory.context} tokens." if memory.context else ""
    errors = "".join(
        f" {name} unknown: {escape(why)}."
        for name, why in (("KV cache", memory.cache_error), ("Activations", memory.activations_error))
        if why
    )
    without = "" if memory.activations is not None or memory.activations_error else ", without activations"
    return (
        f'<div class="bar" role="img" aria-label="Memory per rank">{bars}</div>'
        f'<table class="narrow"><tbody>{rows}<tr><th>total</th><th class="n">{size_text(total)}</th><th></th></tr>'
        f"</tbody></table><p>On the rank that needs the most{without}.{sizes}{errors}</p>"
    )


def _row(cells: list[str]) -> str:
    """A row of a searchable table; short cells do not wrap."""
    columns = "".join(f"<td{' class=short' if len(c) < 16 else ''}>{escape(c)}</td>" for c in cells)
    return f'<tr data-search="{escape(" ".join(cells).lower())}">{columns}</tr>'


def _layers(plan: Plan) -> str:
    rows: dict[tuple[Any, ...], int] = {}
    local = {layer["name"]: tuple(layer["local_shape"]) for layer in plan.to_json()["layers"]}
    for layer in plan.layers:
        key = (
            pattern_of(layer.name),
            layer.kind,
            layer.axis or "replicated",
            layer.input_is_parallel,
            layer.collective,
            layer.global_shape,
            local[layer.name],
        )
        rows[key] = rows.get(key, 0) + 1
    lines = []
    for (name, kind, axis, parallel, collective, full, shard), count in rows.items():
        cells = [name, str(count), kind, axis, "sharded" if parallel else "replicated", collective]
        cells += ["×".join(map(str, full)), "×".join(map(str, shard))]
        lines.append(_row(cells))
    titles = ("layer", "×", "kind", "parallel", "input", "collective", "shape", "local shape")
    head = "".join(f"<th>{t}</th>" for t in titles)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"


def _collectives(planned: Planned) -> str:
    plan, machine = planned.plan, machine_of(planned.config.machine)
    rows: dict[tuple[Any, ...], int] = {}
    for c in plan.collectives:
        key = (c.kind, pattern_of(c.module), c.shape, c.dtype, c.reason)
        rows[key] = rows.get(key, 0) + 1
    lines = []
    for (kind, where, shape, dtype, reason), count in rows.items():
        size = _bytes(shape, dtype)
        seconds = machine.collective(kind, size, plan.world_size) if size is not None else None
        cells = [kind.replace("_", "-"), where or "the model", str(count), "×".join(map(str, shape))]
        cells += [
            size_text(size) if size is not None else "",
            f"{seconds * 1e6:.1f} µs" if seconds is not None else "",
            reason,
        ]
        lines.append(_row(cells))
    if not lines:
        return "<p>None.</p>"
    head = "".join(f"<th>{t}</th>" for t in ("kind", "after", "×", "shape", "size", "estimated time", "reason"))
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"


def _notes(plan: Plan) -> str:
    def entries(items: Sequence[tuple[str, str]]) -> str:
        unique = dict.fromkeys((pattern_of(name), reason) for name, reason in items)
        return "".join(
            f'<li data-search="{escape((n + " " + r).lower())}"><code>{escape(n)}</code>: {escape(r)}</li>'
            for n, r in unique
        )

    parts = []
    for title, items in (("Replicated parameters", plan.replicated), ("Gathered for an operator", plan.gathered)):
        if items:
            parts.append(f"<h3>{title}</h3><ul>{entries(items)}</ul>")
    if plan.breaks:
        parts.append("<h3>Graph breaks</h3><ul>" + "".join(f"<li>{escape(b)}</li>" for b in plan.breaks) + "</ul>")
    if plan.unplanned:
        names = dict.fromkeys(pattern_of(name) for name in plan.unplanned)
        parts.append(
            "<h3>Not used by the planned forward, sharded where possible to save memory</h3><ul>"
            + "".join(f"<li><code>{escape(n)}</code></li>" for n in names)
            + "</ul>"
        )
    return "".join(parts) or "<p>Nothing.</p>"


# -- the details of a step -----------------------------------------------------------------------------------------


def _details(step: Step, planned: Planned) -> dict[str, Any]:
    machine, world = machine_of(planned.config.machine), planned.plan.world_size
    weights = []
    for name in _weights(step, planned):
        parameter = planned.plan.parameters[name]
        text = placement_text(parameter.placement, parameter.global_shape)
        weights.append([name, list(parameter.global_shape), list(parameter.local_shape), text])
    found: dict[str, Any] = {
        "title": step.title,
        "module": step.module or "the model",
        "kind": step.kind,
        "meaning": MEANINGS.get(step.kind, ""),
        "placement": step.placement,
        "global": "×".join(step.global_shape),
        "local": "×".join(step.local_shape),
        "dtype": step.dtype,
        "weights": weights,
        "operators": [operator_name(node) for node in step.nodes][:40],
        "source": _source(step),
        "reason": step.reason,
    }
    if step.kind == "collective":
        size = _bytes(step.global_shape, step.dtype)
        if size is not None:
            kind = step.title.split()[0].replace("-", "_")
            found["size"] = f"{size_text(size)}, about {machine.collective(kind, size, world) * 1e6:.1f} µs"
    return found


def _weights(step: Step, planned: Planned) -> list[str]:
    """The parameters that a step uses."""
    if step.kind == "collective":
        return []
    parameters = planned.plan.parameters
    if any(node.op == "call_module" for node in step.nodes):
        return [
            name
            for name in parameters
            if name.startswith(f"{step.module}.") and name.count(".") == step.module.count(".") + 1
        ]
    origin = {str(node.meta["origin"].target): p.name for node, p in planned.solved.parameters.items()}
    used = dict.fromkeys(
        origin[str(source.target)]
        for node in step.nodes
        for read in node.all_input_nodes
        for source in (read, *read.all_input_nodes)
        if source.op == "placeholder" and str(source.target) in origin
    )
    return [name for name in used if name in parameters]


def _source(step: Step) -> list[str]:
    """The place in the model's code that the step comes from, and that line of code."""
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


def count_text(value: float) -> str:
    """A large number for readers: ``8.03 billion``."""
    for unit in ("", " thousand", " million", " billion"):
        if value < 1000 or unit == " billion":
            return f"{value:.3g}{unit}" if unit else str(int(value))
        value /= 1000
    raise AssertionError
