"""The plan: what was decided for a model, as plain data, the same for every rank."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from ..placement import Placement, Replicate, from_json, local_shape, to_json

if TYPE_CHECKING:
    from rich.table import Table


@dataclass
class LayerPlan:
    """How one Linear, Embedding or CrossEntropy is run."""

    name: str
    kind: str
    axis: str | None
    gather_output: bool
    input_is_parallel: bool
    sequence_parallel: bool
    global_shape: tuple[int, ...] = ()
    local_shape: tuple[int, ...] = ()


@dataclass
class ParameterPlan:
    """Where one parameter lives."""

    placement: Placement
    global_shape: tuple[int, ...]
    local_shape: tuple[int, ...]


@dataclass
class CollectivePlan:
    """One collective of the forward program; ``module`` is where the tensor was made that it brings together."""

    kind: str
    module: str
    shape: tuple[int | None, ...]
    dtype: str
    reason: str = ""


@dataclass(frozen=True)
class Memory:
    """Bytes on the fullest rank.

    Attributes:
        parameters: The rank's part of all parameters.
        buffers: What every rank holds whole.
        cache: Keys, values and states that a generation of ``batch`` sequences keeps after ``context`` tokens, with the
            room it has to grow; None where that was not asked for or is not known.
        activations: The most that intermediate tensors take at a time: of a prompt of ``context`` tokens with the
            logits of its last position, or of a training step, with what it keeps for the backward pass, that adds to
            gradients that are there. None where that was not asked for or is not known.
        gradients: Of what is trained.
        optimizer: The state of AdamW, in the parameters' dtype.
        batch, context: What cache and activations are for.
        unknown: Why the cache is not known, if it was asked for.
        uncounted: Why the activations are not known, if they were asked for.
    """

    parameters: int
    buffers: int
    cache: int | None = None
    activations: int | None = None
    gradients: int = 0
    optimizer: int = 0
    batch: int = 1
    context: int = 0
    unknown: str = ""
    uncounted: str = ""

    @property
    def total(self) -> int:
        """All of it that is known."""
        known = self.parameters + self.buffers + self.gradients + self.optimizer
        return known + (self.cache or 0) + (self.activations or 0)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "total": self.total}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Memory:
        return cls(**{name: value for name, value in data.items() if name != "total"})

    def __str__(self) -> str:
        parts = [f"parameters {size_text(self.parameters)}", f"buffers {size_text(self.buffers)}"]
        if self.cache is not None:
            parts.append(f"cache {size_text(self.cache)}")
        elif self.unknown:
            parts.append(f"cache not known ({self.unknown})")
        if self.gradients:
            parts += [f"gradients {size_text(self.gradients)}", f"AdamW {size_text(self.optimizer)}"]
        if self.activations is not None:
            parts.append(f"activations {size_text(self.activations)}")
        elif self.uncounted:
            parts.append(f"activations not known ({self.uncounted})")
        without = " without activations" if self.activations is None else ""
        sizes = f" for {self.batch} × {self.context} tokens" if self.context else ""
        return f"{size_text(self.total)} per rank{without}{sizes}: {', '.join(parts)}"


def size_text(size: float) -> str:
    for unit in ("bytes", "kB", "MB", "GB"):
        if size < 1000 or unit == "GB":
            return f"{size:.3g} {unit}" if unit != "bytes" else f"{size:.0f} {unit}"
        size /= 1000
    raise AssertionError


@dataclass
class Plan:
    """The solved plan of a model.

    Attributes:
        world_size: The number of ranks.
        layers: The layers in the order of the program.
        parameters: By name.
        collectives: Those of the forward program, in order.
        replicated: What stays whole, with the reason.
        gathered: Operators for which a sharded tensor had to be made whole, with the reason.
        unplanned: Parameters that the planned forward does not use. They are split too, for memory, wherever their
            sizes allow it; a later call that uses them is solved with what was chosen here.
        breaks: Where the model could not be captured as one graph. There it runs as several, with whole tensors
            between them.
        cost: What the search minimized, in seconds under the cost model: time, and a price for every parameter that
            stays whole.
        seconds: The time alone.
        communication: The part of it that is spent on collectives.
        optimal: Whether the search was exhaustive.
        data_parallel: What data-parallel ranks keep, in words; empty without any. Not compared nor saved.
        memory: What it takes of a rank's memory; known where it was made by :func:`paraxis.plan_model`.
        timings: Seconds that :func:`paraxis.plan_model` took, by stage. Not part of what is compared or saved.
    """

    world_size: int
    layers: list[LayerPlan] = field(default_factory=list)
    parameters: dict[str, ParameterPlan] = field(default_factory=dict)
    collectives: list[CollectivePlan] = field(default_factory=list)
    replicated: list[tuple[str, str]] = field(default_factory=list)
    gathered: list[tuple[str, str]] = field(default_factory=list)
    unplanned: list[str] = field(default_factory=list)
    breaks: list[str] = field(default_factory=list)
    cost: float = 0.0
    seconds: float = 0.0
    communication: float = 0.0
    optimal: bool = True
    data_parallel: str = field(default="", compare=False)
    memory: Memory | None = field(default=None, compare=False)
    timings: dict[str, float] = field(default_factory=dict, compare=False)

    @property
    def sharded_fraction(self) -> float:
        """Parameter elements of one rank (the fullest) over all of them."""
        total = sum(_numel(p.global_shape) for p in self.parameters.values())
        most = max(
            sum(_numel(local_shape(p.placement, p.global_shape, rank)) for p in self.parameters.values())
            for rank in range(self.world_size)
        )
        return most / total if total else 1.0

    def count(self) -> dict[str, int]:
        """How many collectives of each kind the forward has."""
        return dict(Counter(c.kind for c in self.collectives))

    def add_parameter(self, name: str, placement: Placement, shape: Sequence[int], rank: int) -> None:
        shape = tuple(shape)
        self.parameters[name] = ParameterPlan(placement, shape, local_shape(placement, shape, rank))

    # -- plain data --------------------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """Plain data; local shapes are those of the first rank, so that all ranks give the same."""
        parameters = {
            name: {
                "placement": to_json(p.placement),
                "global_shape": list(p.global_shape),
                "local_shape": list(local_shape(p.placement, p.global_shape, 0)),
            }
            for name, p in self.parameters.items()
        }
        layers = []
        for layer in self.layers:
            data = asdict(layer)
            known = self.parameters.get(f"{layer.name}.weight")
            if known is not None:
                data["local_shape"] = local_shape(known.placement, known.global_shape, 0)
            layers.append({**data, "global_shape": list(layer.global_shape), "local_shape": list(data["local_shape"])})
        return {
            "world_size": self.world_size,
            "layers": layers,
            "parameters": parameters,
            "sharded_fraction": self.sharded_fraction,
            "collectives": [{**asdict(c), "shape": list(c.shape)} for c in self.collectives],
            "replicated": [{"name": n, "reason": r} for n, r in self.replicated],
            "gathered": [{"name": n, "reason": r} for n, r in self.gathered],
            "unplanned": list(self.unplanned),
            "breaks": list(self.breaks),
            "cost": self.cost,
            "seconds": self.seconds,
            "communication": self.communication,
            "optimal": self.optimal,
            "memory": None if self.memory is None else self.memory.to_json(),
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Plan:
        """The inverse of :meth:`to_json`."""
        shapes = ("global_shape", "local_shape")
        layers = [LayerPlan(**{**x, **{k: tuple(x[k]) for k in shapes}}) for x in data["layers"]]
        parameters = {
            name: ParameterPlan(from_json(p["placement"]), tuple(p["global_shape"]), tuple(p["local_shape"]))
            for name, p in data["parameters"].items()
        }
        return cls(
            world_size=data["world_size"],
            layers=layers,
            parameters=parameters,
            collectives=[CollectivePlan(**{**c, "shape": tuple(c["shape"])}) for c in data["collectives"]],
            replicated=[(x["name"], x["reason"]) for x in data["replicated"]],
            gathered=[(x["name"], x["reason"]) for x in data["gathered"]],
            unplanned=list(data.get("unplanned", [])),
            breaks=list(data.get("breaks", [])),
            cost=data["cost"],
            seconds=data.get("seconds", 0.0),
            communication=data.get("communication", 0.0),
            optimal=data["optimal"],
            memory=Memory.from_json(data["memory"]) if data.get("memory") else None,
        )

    def save(self, path: str) -> None:
        with open(path, "w") as file:
            json.dump(self.to_json(), file, indent=1)

    @classmethod
    def load(cls, path: str) -> Plan:
        with open(path) as file:
            return cls.from_json(json.load(file))

    # -- text --------------------------------------------------------------------------------------------------

    def table(self) -> Table:
        """One row per kind of layer: repeated blocks are shown once, with their count."""
        from rich.table import Table

        rows: dict[tuple[Any, ...], list[str]] = {}
        for layer in self.layers:
            key = (pattern_of(layer.name), layer.kind, layer.axis, layer.gather_output, layer.input_is_parallel)
            rows.setdefault((*key, layer.global_shape, layer.local_shape), []).append(layer.name)
        ranks = "1 rank" if self.world_size == 1 else f"{self.world_size} ranks"
        title = f"Plan for {ranks}: {self.sharded_fraction:.1%} of the parameters on each"
        table = Table(title=title, caption=self._caption(), caption_justify="left")
        for column in ("layer", "×", "kind", "axis", "gathers", "input", "whole", "local"):
            table.add_column(column, justify="right" if column == "×" else "left")
        for (pattern, kind, axis, gather, parallel, whole, local), names in rows.items():
            table.add_row(
                pattern,
                str(len(names)),
                kind,
                axis or "whole",
                "yes" if gather else "",
                "sharded" if parallel else "whole",
                "×".join(map(str, whole)),
                "×".join(map(str, local)),
            )
        return table

    def _caption(self) -> str:
        kinds = ", ".join(f"{n} {kind}" for kind, n in self.count().items()) or "none"
        lines = [f"Collectives in one forward: {kinds}."]
        places = Counter(
            (c.kind, pattern_of(c.module), "×".join(map(str, c.shape)), c.reason) for c in self.collectives
        )
        lines += [
            f"  {n} {kind} of {shape} after {where or 'the model'}" + (f": {why}" if why else "")
            for (kind, where, shape, why), n in places.items()
        ]
        matrices = [
            (n, r) for n, r in self.replicated if n in self.parameters and len(self.parameters[n].global_shape) > 1
        ]
        lines += [f"Whole: {name}: {reason}" for name, reason in _grouped(matrices)]
        lines += [f"Gathered: {name}: {reason}" for name, reason in _grouped(self.gathered)]
        if self.unplanned:
            some = ", ".join(dict.fromkeys(pattern_of(name) for name in self.unplanned[:64]))
            lines.append(f"Not used by the planned forward, split for memory where possible: {some}")
        lines += [f"Not one graph: {reason}" for reason in self.breaks]
        lines += [f"Beside them: {self.data_parallel}."] if self.data_parallel else []
        return "\n".join(lines)


def _grouped(items: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Equal notes on repeated blocks once."""
    return list(dict.fromkeys((pattern_of(name), reason) for name, reason in items))


def pattern_of(name: str) -> str:
    """A name with its numbers left open: what repeated blocks have in common."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def block_of(name: str) -> str:
    """The outermost numbered module of a name; empty if there is none."""
    parts = name.split(".")
    numbered = [i for i, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[: numbered[0] + 1]) if numbered else ""


def _numel(shape: Sequence[int]) -> int:
    total = 1
    for n in shape:
        total *= n
    return total


def is_replicated(placement: Placement) -> bool:
    """Whether every rank holds all of it."""
    return isinstance(placement, Replicate)
