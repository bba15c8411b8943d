"""Proposing a rule for an operator without one: source to review."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from ...compat.torch import OpOverloadPacket, overload_of, schema_of
from ..base import Sample, draws
from ..table import Entry, Line
from .calls import schema_samples
from .check import WORLDS, sample_calls
from .exploration import candidates, confirm, report_on
from .run import Trial, same

SampleSource = Iterable[Sample] | Callable[[], Iterable[Sample]]
MAX_INLINE = 64
"""Integer tensors of at most this many elements are written out in the source."""


def propose(target: Any, samples: SampleSource | None = None) -> str:
    """Source that registers a rule for an operator, found by trial and error. Review it before use.

    Each sample call runs on shards under every combination of input placements, with and without local integers. What
    gives the unsharded result becomes a line of a table. A line stays if it is right for all samples, on 2, 3 and 4
    ranks, for even, uneven and packed splits and for copies.

    Without ``samples``, calls are generated from the schema of the operator. A line that holds for all of them may
    still be wrong for arguments that none of them has: pass samples that cover those.
    """
    target = overload_of(target)
    if isinstance(target, OpOverloadPacket):
        target = target.default
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        source = samples if samples is not None else (lambda: schema_samples(target))
        calls = [c for c in sample_calls(source) if c.target is target]
        again = [c for c in sample_calls(source) if c.target is target] if callable(source) else calls
        reason = _hopeless(target, calls)
        lines = [] if reason else _search(calls, again)
        if reason or not lines:
            if reason is None:
                reason = (
                    f"no line of a table is right for all {len(calls)} calls. If an argument decides, such as a dim, "
                    f"write the rule as a function"
                )
            return f"# {target}: {reason}.\n# Without a rule it runs replicated, on every rank.\n"
        report = report_on(lines, again, WORLDS)
    return _source(target, lines, samples, len(calls), report.sharded)


def _hopeless(target: Any, calls: Sequence[Sample]) -> str | None:
    """Why no rule can be found, if that is known beforehand."""
    if schema_of(target).is_mutable:
        return "it writes into its arguments"
    if not calls:
        return "no call could be generated from its schema; pass some: propose(target, samples=[sample(target, ...)])"
    for call in calls:
        trial = Trial.of(target, call.args, call.kwargs, 2)
        if draws(trial.call):
            return "it draws random numbers, so results cannot be compared"
        second = Trial.of(target, call.args, call.kwargs, 2)
        if not all(map(same, trial.results, second.results)):
            return "its results differ from call to call"
    return None


def _search(calls: Sequence[Sample], again: Sequence[Sample]) -> list[Line]:
    """The fewest lines that cover everything that is right for all calls. ``again``: the same calls, other values."""
    by_call = [set(candidates(call)) for call in calls]
    shapes = [_ndims(call) for call in calls]
    found: dict[Line, None] = {}
    for lines, ndims in zip(by_call, shapes):
        for line in lines:
            found[line] = found[_from_the_end(line, ndims)] = None
    right = confirm(confirm(list(found), calls, (2,)), again, WORLDS)
    covered = {line: _covers(line, by_call, shapes) for line in right}
    chosen: list[Line] = []
    left = set().union(*covered.values()) if covered else set()
    while left:
        # Those that cover the most, then those that count from the front.
        best = min(right, key=lambda x: (-len(covered[x] & left), -len(covered[x]), _negative(x), str(x)))
        chosen.append(best)
        left -= covered[best]
    return sorted(chosen, key=lambda x: ("P" in str(x), _negative(x), str(x)))


def _ndims(call: Sample) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The numbers of dimensions of the inputs and of the results."""
    trial = Trial.of(call.target, call.args, call.kwargs, 2)
    return tuple(t.ndim for t in trial.tensors), tuple(t.ndim for t in trial.results)


def _renumbered(entries: Sequence[Entry], ndims: Sequence[int], front: bool) -> tuple[Entry, ...] | None:
    """The entries with dimensions counted from the front or from the end; None if a tensor does not have one."""
    moved = []
    for entry, n in zip(entries, ndims):
        if entry.letter == "S":
            dim = entry.dim % n if -n <= entry.dim < n else None
            if dim is None:
                return None
            entry = replace(entry, dim=dim if front else dim - n)
        moved.append(entry)
    return tuple(moved)


def _from_the_end(line: Line, ndims: Any) -> Line:
    """The line with dimensions counted from the end."""
    inputs, outputs = _renumbered(line.inputs, ndims[0], False), _renumbered(line.outputs, ndims[1], False)
    return Line(inputs or (), outputs or (), line.local)


def _covers(line: Line, by_call: Sequence[set[Line]], shapes: Sequence[Any]) -> set[tuple[int, Line]]:
    """The candidates, with the number of their call, that a line covers."""
    found = set()
    for k, (lines, ndims) in enumerate(zip(by_call, shapes)):
        if (len(line.inputs), len(line.outputs)) == (len(ndims[0]), len(ndims[1])):
            inputs, outputs = _renumbered(line.inputs, ndims[0], True), _renumbered(line.outputs, ndims[1], True)
            if inputs is not None and outputs is not None and Line(inputs, outputs, line.local) in lines:
                found.add((k, Line(inputs, outputs, line.local)))
    return found


def _negative(line: Line) -> bool:
    return any(e.dim < 0 for e in (*line.inputs, *line.outputs))


# -- source --------------------------------------------------------------------------------------------------------


def _source(target: Any, lines: Sequence[Line], samples: SampleSource | None, calls: int, strategies: int) -> str:
    """The source that registers these lines."""
    op = f"torch.ops.{target}"
    imports = ["import torch", "", "from paraxis import register_rule"]
    head = ""
    if samples is None:
        imports += ["from paraxis.rules import table", "from paraxis.rules.validation import schema_samples"]
        shown = f"lambda: schema_samples({op})"
    elif callable(samples) and _importable(samples):
        imports += ["from paraxis.rules import table", f"from {samples.__module__} import {samples.__qualname__}"]
        shown = samples.__qualname__
    else:
        imports.append("from paraxis.rules import sample, table")
        listed = [_shown(op, call) for call in sample_calls(samples) if call.target is target]
        head = (
            "samples = [  # tensors of these shapes, with new values\n" + "".join(f"    {x},\n" for x in listed) + "]\n"
        )
        shown = "samples"
    note = (
        f"Found by trial and error, without knowledge of the operator: right for {strategies} sharded strategies of "
        f"{calls} calls, on {', '.join(map(str, WORLDS[:-1]))} and {WORLDS[-1]} ranks. Review it before use: does it "
        f"hold for arguments that these calls do not have?"
    )
    comment = "\n".join(f"# {line}" for line in textwrap.wrap(note, 110))
    body = "".join(f'        "{line}",\n' for line in lines)
    rule = f"register_rule({op}, samples={shown})(\n    table(\n{body}    )\n)\n"
    return "\n".join(imports) + "\n\n" + (head + "\n" if head else "") + comment + "\n" + rule


def _importable(function: Any) -> bool:
    module, name = getattr(function, "__module__", "__main__"), getattr(function, "__qualname__", "<lambda>")
    return module != "__main__" and name.isidentifier()


def _shown(op: str, call: Sample) -> str:
    values = [_value(x) for x in call.args] + [f"{name}={_value(x)}" for name, x in call.kwargs.items()]
    return f"sample({', '.join([op, *values])})"


def _value(x: Any) -> str:
    if isinstance(x, (list, tuple)):
        inner = ", ".join(map(_value, x))
        return f"[{inner}]" if isinstance(x, list) else f"({inner}{',' if len(x) == 1 else ''})"
    if not isinstance(x, torch.Tensor):
        return repr(x)
    shape, dtype = tuple(x.shape), str(x.dtype)
    if x.dtype == torch.bool:
        return f"torch.rand({shape}) > 0.5"
    if x.dtype.is_complex:
        return f"torch.randn({shape}, dtype={dtype})"
    low, high = (x.min().item(), x.max().item()) if x.numel() else (0, 1)
    if x.dtype.is_floating_point:
        return f"torch.empty({shape}, dtype={dtype}).uniform_({low:.3g}, {high:.3g})"
    if x.numel() <= MAX_INLINE:
        return f"torch.tensor({x.tolist()}, dtype={dtype})"
    return f"torch.randint({low}, {high + 1}, {shape}, dtype={dtype})"
