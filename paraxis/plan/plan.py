"""The plan of a model as data: placements of parameters, parallel layers and collectives, the same on every rank."""

from __future__ import annotations

import json
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ..placement import Placement, Replicate, from_json, local_shape, to_json
from ..utils.names import numbered_pattern, pattern_of
from ..utils.sizes import size_text
from .work import MatmulPlan, TowerWork, towers_of, work_text

if TYPE_CHECKING:
    from rich.table import Table


V = TypeVar("V")


@dataclass(frozen=True)
class LayerPlan:
    """How one linear layer, embedding or cross-entropy loss runs.

    Attributes:
        name: The module.
        kind: ``linear``, ``embedding`` or ``cross_entropy``.
        axis: ``column``, ``row`` or ``vocab`` for a parallel layer, None for a replicated one.
        gather_output: Whether a collective makes its output replicated (see :attr:`collective`).
        input_is_parallel: Whether its input arrives sharded.
        sequence_parallel: Whether its input (column) or output (row, vocab) is sharded on the sequence.
        global_shape: Shape of the full weight.
        local_shape: Shape of this rank's shard.
    """

    name: str
    kind: str
    axis: str | None
    gather_output: bool
    input_is_parallel: bool
    sequence_parallel: bool
    global_shape: tuple[int, ...] = ()
    local_shape: tuple[int, ...] = ()

    @property
    def collective(self) -> str:
        """The collective on its output, or nothing."""
        if not self.gather_output or self.axis is None:
            return ""
        if self.axis == "column":
            return "all-gather"
        return "reduce-scatter" if self.sequence_parallel else "all-reduce"


@dataclass(frozen=True)
class ParameterPlan:
    """The placement of one parameter, its global shape, and the shape of this rank's shard."""

    placement: Placement
    global_shape: tuple[int, ...]
    local_shape: tuple[int, ...]


@dataclass(frozen=True)
class CollectivePlan:
    """One collective of the forward pass; ``module`` is the module that computed its input."""

    kind: str
    module: str
    shape: tuple[int | None, ...]
    dtype: str
    reason: str = ""


@dataclass(frozen=True)
class Memory:
    """Bytes on the rank that needs the most memory.

    Attributes:
        parameters: This rank's shards and replicated parameters.
        buffers: Buffers, which are replicated.
        cache: The KV cache (keys, values and states) of ``batch`` sequences after ``context`` tokens, with the room
            preallocated for appending; None if not requested or unknown.
        activations: Peak memory of intermediate tensors: in prefill of ``context`` tokens with the logits of the last
            position, or in a training step with the activations saved for backward, accumulating into existing
            gradients. None if not requested or unknown.
        gradients: Gradients of the trained parameters.
        optimizer: The state of AdamW, in the dtype of the parameters.
        batch, context: Sequences, and tokens per sequence, of KV cache and activations.
        cache_error: Why the KV cache is unknown, if it was requested.
        activations_error: Why the activations are unknown, if they were requested.
        seconds: Estimated seconds of a forward pass of ``batch`` × ``context`` tokens; None if unknown.
        communication: Estimated seconds of these in collectives.
        quantization: How the weights are quantized, if they are.
    """

    parameters: int
    buffers: int
    cache: int | None = None
    activations: int | None = None
    gradients: int = 0
    optimizer: int = 0
    batch: int = 1
    context: int = 0
    cache_error: str = ""
    activations_error: str = ""
    seconds: float | None = None
    communication: float | None = None
    quantization: str = ""

    @property
    def total(self) -> int:
        """The sum of all parts that are known."""
        known = self.parameters + self.buffers + self.gradients + self.optimizer
        return known + (self.cache or 0) + (self.activations or 0)

    def to_json(self) -> dict[str, Any]:
        """The fields and the total, JSON-serializable."""
        return {**asdict(self), "total": self.total}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Memory:
        """The inverse of :meth:`to_json`. Reads the field names of the previous version, too."""
        return cls(**{_FORMER_FIELDS.get(name, name): value for name, value in data.items() if name != "total"})

    @property
    def unknown(self) -> str:
        """The former name of :attr:`cache_error`."""
        warnings.warn("Memory.unknown is deprecated: use cache_error", DeprecationWarning, stacklevel=2)
        return self.cache_error

    @property
    def uncounted(self) -> str:
        """The former name of :attr:`activations_error`."""
        warnings.warn("Memory.uncounted is deprecated: use activations_error", DeprecationWarning, stacklevel=2)
        return self.activations_error

    def __str__(self) -> str:
        parts = [f"parameters {size_text(self.parameters)}", f"buffers {size_text(self.buffers)}"]
        if self.cache is not None:
            parts.append(f"KV cache {size_text(self.cache)}")
        elif self.cache_error:
            parts.append(f"KV cache unknown ({self.cache_error})")
        if self.gradients:
            parts += [f"gradients {size_text(self.gradients)}", f"AdamW {size_text(self.optimizer)}"]
        if self.activations is not None:
            parts.append(f"activations {size_text(self.activations)}")
        elif self.activations_error:
            parts.append(f"activations unknown ({self.activations_error})")
        without = " without activations" if self.activations is None else ""
        sizes = f" for {self.batch} × {self.context} tokens" if self.context else ""
        note = f"; {self.quantization}" if self.quantization else ""
        return f"{size_text(self.total)} per rank{without}{sizes}: {', '.join(parts)}{note}"


_FORMER_FIELDS = {"unknown": "cache_error", "uncounted": "activations_error"}
"""Fields of :class:`Memory` in the previous version, and their names now."""


class ReadOnlyDict(dict[str, V], Generic[V]):
    """A dictionary that is not changed after it was made."""

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("a plan is immutable: make another one with dataclasses.replace or paraxis.plan.PlanBuilder")

    __setitem__ = __delitem__ = clear = pop = popitem = setdefault = update = __ior__ = _refuse  # type: ignore[assignment]

    def __reduce__(self) -> tuple[Any, ...]:
        return ReadOnlyDict, (dict(self),)


@dataclass(frozen=True)
class Plan:
    """The tensor-parallel plan of a model. It is made once, by a :class:`PlanBuilder`, and never changed.

    Attributes:
        world_size: The number of ranks.
        layers: The layers, in execution order.
        parameters: The placement of every parameter, by name.
        collectives: The collectives of the forward pass, in order.
        replicated: Replicated parameters, with the reason.
        gathered: Operators that need an all-gather because they cannot run on shards, with the reason.
        unplanned: Parameters that the planned forward does not use. They are sharded to save memory, if their sizes
            allow it; a later call that uses them is solved with these placements.
        breaks: Graph breaks: code that the model could not be captured through as one graph. It runs as several graphs,
            with replicated tensors between them.
        cost: What the search minimized, in seconds under the cost model: estimated time, and a penalty for every
            replicated parameter.
        seconds: Estimated seconds per forward pass.
        communication: Estimated seconds of these in collectives.
        optimal: Whether the search was exhaustive, so that no plan has a lower cost.
        matmuls: The matmul work of the planned call, by module, and how much of it the ranks share.
        data_parallel: What data-parallel ranks hold, as text; empty without any. Neither compared nor saved.
        memory: Memory per rank; present if the plan comes from :func:`paraxis.plan_model`.
        timings: Seconds that :func:`paraxis.plan_model` took, by stage. Neither compared nor saved.
        pass_timings: Seconds of these in each pass, by its name. Neither compared nor saved.
    """

    world_size: int
    layers: Sequence[LayerPlan] = ()
    parameters: Mapping[str, ParameterPlan] = field(default_factory=dict)
    collectives: Sequence[CollectivePlan] = ()
    replicated: Sequence[tuple[str, str]] = ()
    gathered: Sequence[tuple[str, str]] = ()
    unplanned: Sequence[str] = ()
    breaks: Sequence[str] = ()
    cost: float = 0.0
    seconds: float = 0.0
    communication: float = 0.0
    optimal: bool = True
    matmuls: Sequence[MatmulPlan] = ()
    data_parallel: str = field(default="", compare=False)
    memory: Memory | None = field(default=None, compare=False)
    timings: Mapping[str, float] = field(default_factory=dict, compare=False)
    pass_timings: Mapping[str, float] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        for name in ("layers", "collectives", "replicated", "gathered", "unplanned", "breaks", "matmuls"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        for name in ("parameters", "timings", "pass_timings"):
            object.__setattr__(self, name, ReadOnlyDict(getattr(self, name)))

    @property
    def sharded_fraction(self) -> float:
        """The fraction of all parameter elements that one rank holds (the rank that holds the most)."""
        total = sum(_numel(p.global_shape) for p in self.parameters.values())
        most = max(
            sum(_numel(local_shape(p.placement, p.global_shape, rank)) for p in self.parameters.values())
            for rank in range(self.world_size)
        )
        return most / total if total else 1.0

    def count(self) -> dict[str, int]:
        """The number of collectives in the forward pass, by kind."""
        return dict(Counter(c.kind for c in self.collectives))

    @property
    def towers(self) -> list[TowerWork]:
        """The matmul work of the planned call by towers, such as the vision tower and the language model."""
        return towers_of(self.matmuls)

    @property
    def placements(self) -> dict[str, Placement]:
        """The placement of every parameter, by name."""
        return {name: parameter.placement for name, parameter in self.parameters.items()}

    # -- JSON --------------------------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """The plan, JSON-serializable. Local shapes are rank 0's, so that all ranks return the same."""
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
            "matmuls": [asdict(m) for m in self.matmuls],
            "memory": None if self.memory is None else self.memory.to_json(),
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Plan:
        """The inverse of :meth:`to_json`. Reads plans of the previous version, too."""
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
            matmuls=[MatmulPlan(**m) for m in data.get("matmuls", [])],
            memory=Memory.from_json(data["memory"]) if data.get("memory") else None,
        )

    def save(self, path: str) -> None:
        """Write the plan to a JSON file, for ``plan=`` and ``paraxis diff``."""
        with open(path, "w") as file:
            json.dump(self.to_json(), file, indent=1)

    @classmethod
    def load(cls, path: str) -> Plan:
        """Read a plan that :meth:`save` wrote."""
        with open(path) as file:
            return cls.from_json(json.load(file))

    # -- text --------------------------------------------------------------------------------------------------

    def table(self, pattern: str = "*") -> Table:
        """One row per kind of layer, and of other parameters, whose name matches a pattern, as in ``"*.down_proj"``.

        Repeated blocks are shown once, with their count. The notes below are those of the full plan.
        """
        # rich is imported where text is made: planning and running need none of it
        from ..utils.tables import WideTable

        rows: dict[tuple[str, tuple[str, ...]], list[str]] = {}
        for layer in self.layers:
            if not fnmatchcase(layer.name, pattern):
                continue
            alone = self.world_size == 1
            placed = ("replicated" if alone or not layer.axis else layer.axis,)
            arrives = ("sharded" if layer.input_is_parallel and not alone else "replicated",)
            cells = (layer.kind, *placed, *arrives, "" if alone else layer.collective)
            shapes = ("×".join(map(str, layer.global_shape)), "×".join(map(str, layer.local_shape)))
            rows.setdefault((pattern_of(layer.name), (*cells, *shapes)), []).append(layer.name)
        for name, parameter in self._other_parameters():
            if not fnmatchcase(name, pattern):
                continue
            dims = ", ".join(str(dim) for dim, _ in getattr(parameter.placement, "layouts", ()))
            cells = ("parameter", f"sharded ({dims})" if dims else "replicated", "", "")
            local = local_shape(parameter.placement, parameter.global_shape, 0)
            shapes = ("×".join(map(str, parameter.global_shape)), "×".join(map(str, local)))
            rows.setdefault((pattern_of(name), (*cells, *shapes)), []).append(name)
        ranks = "1 rank" if self.world_size == 1 else f"{self.world_size} ranks"
        title = f"Plan for {ranks}: {self.sharded_fraction:.1%} of the parameters per rank"
        table = WideTable(title=title, caption=self._caption(), caption_justify="left")
        for column in ("layer", "×", "kind", "parallel", "input", "collective", "shape", "local shape"):
            table.add_column(column, justify="right" if column == "×" else "left", overflow="fold")
        repeated = Counter(block for block, _ in rows)
        for (block, row), names in rows.items():
            others = [name for (other, _), each in rows.items() if other == block for name in each]
            table.add_row(block if repeated[block] == 1 else numbered_pattern(names, others), str(len(names)), *row)
        return table

    def _other_parameters(self) -> list[tuple[str, ParameterPlan]]:
        """The matrices and larger parameters that are no weight of a layer: of convolutions, experts, or plain ones."""
        layers = {(layer.name, layer.global_shape) for layer in self.layers}
        return [
            (name, parameter)
            for name, parameter in self.parameters.items()
            if len(parameter.global_shape) > 1 and (name.rpartition(".")[0], parameter.global_shape) not in layers
        ]

    def _caption(self) -> str:
        kinds = ", ".join(f"{n} {kind.replace('_', '-')}" for kind, n in self.count().items()) or "none"
        lines = [f"Collectives per forward pass: {kinds}."]
        groups = Counter(
            (c.kind.replace("_", "-"), pattern_of(c.module), "×".join(map(str, c.shape)), c.reason)
            for c in self.collectives
        )
        lines += [
            f"  {n} {kind} of {shape} after {where or 'the model'}" + (f": {why}" if why else "")
            for (kind, where, shape, why), n in groups.items()
        ]
        matrices = [
            (n, r) for n, r in self.replicated if n in self.parameters and len(self.parameters[n].global_shape) > 1
        ]
        lines += [f"Replicated: {name}: {reason}" for name, reason in _grouped(matrices)]
        lines += [f"Gathered: {name}: {reason}" for name, reason in _grouped(self.gathered)]
        work = work_text(self.matmuls) if self.world_size > 1 else ""
        lines += [work] if work else []
        if self.unplanned:
            some = ", ".join(dict.fromkeys(pattern_of(name) for name in self.unplanned[:64]))
            lines.append(f"Not used by the planned forward, sharded where possible to save memory: {some}")
        lines += [f"Graph break: {reason}" for reason in self.breaks]
        lines += [f"Data parallelism: {self.data_parallel}."] if self.data_parallel else []
        return "\n".join(lines)


def _grouped(items: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Notes with block numbers replaced by ``*``, each once."""
    return list(dict.fromkeys((pattern_of(name), reason) for name, reason in items))


def _numel(shape: Sequence[int]) -> int:
    total = 1
    for n in shape:
        total *= n
    return total


def is_replicated(placement: Placement) -> bool:
    """Whether every rank holds all of it."""
    return isinstance(placement, Replicate)
