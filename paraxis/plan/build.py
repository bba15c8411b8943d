"""Writing a plan down: from solved graphs to a :class:`Plan`, in terms of the model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import TypeVar

from ..capture.repeated_blocks import Repeated
from ..graph.local_program import Collective
from ..graph.nodes import captured_module_of
from ..passes.annotate import OWN, ParallelLayerAnnotatePass
from ..passes.layers import Layer, find_layers
from ..passes.solve import Solved
from ..placement import REPLICATE, Layout, Placement, Replicate, Shard, local_shape
from ..rules import rule_for
from ..solver import Step, Value
from ..tensor.apply_placements import stored
from .plan import CollectivePlan, LayerPlan, ParameterPlan, Plan
from .work import MatmulPlan, added

T = TypeVar("T")


class PlanBuilder:
    """Collects what was decided, graph by graph, and builds the plan. Shapes are rank 0's, the same on every rank."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.layers: list[LayerPlan] = []
        self.parameters: dict[str, ParameterPlan] = {}
        self.collectives: list[CollectivePlan] = []
        self.replicated: list[tuple[str, str]] = []
        self.gathered: list[tuple[str, str]] = []
        self.unplanned: list[str] = []
        self.breaks: list[str] = []
        self.matmuls: list[MatmulPlan] = []
        self.cost = self.seconds = self.communication = 0.0
        self.optimal = True

    @classmethod
    def of(cls, plan: Plan | None, world_size: int) -> PlanBuilder:
        """A builder that goes on from a plan, or an empty one."""
        builder = cls(world_size)
        if plan is not None:
            for name in ("layers", "collectives", "replicated", "gathered", "unplanned", "breaks", "matmuls"):
                getattr(builder, name).extend(getattr(plan, name))
            builder.parameters.update(plan.parameters)
            builder.cost, builder.seconds, builder.communication = plan.cost, plan.seconds, plan.communication
            builder.optimal = plan.optimal
        return builder

    def build(self) -> Plan:
        """The plan of all that was added."""
        return Plan(
            self.world_size,
            self.layers,
            self.parameters,
            self.collectives,
            self.replicated,
            self.gathered,
            self.unplanned,
            self.breaks,
            self.cost,
            self.seconds,
            self.communication,
            self.optimal,
            self.matmuls,
        )

    def add_parameter(self, name: str, placement: Placement, shape: Iterable[int], reason: str = "") -> None:
        """Place a parameter; ``reason``: why it is replicated."""
        shape = tuple(shape)
        self.parameters[name] = ParameterPlan(placement, shape, local_shape(placement, shape, 0))
        if reason:
            self.replicated.append((name, reason))

    def add_part(self, name: str, solved: Solved, collectives: Iterable[Collective]) -> None:
        """Add the graph of a module of a model that is planned part by part. A module counts once: the plan is that of
        one forward pass, and several calls run the same parts."""
        other = PlanBuilder(self.world_size)
        other.parameters.update(self.parameters)
        other.add_graph(solved, collectives, name)
        known = {m.module for m in self.matmuls} | {c.module for c in self.collectives}
        known |= {layer.name for layer in self.layers} | {module for module, _ in self.gathered}
        if not other.parameters.keys() - self.parameters.keys() and all(m.module in known for m in other.matmuls):
            return
        self.layers += [layer for layer in other.layers if layer.name not in known]
        self.collectives += [each for each in other.collectives if each.module not in known]
        self.gathered += [each for each in other.gathered if each[0] not in known]
        self.matmuls += [each for each in other.matmuls if each.module not in known]
        self.replicated += other.replicated
        self.parameters = other.parameters
        self.cost += other.cost
        self.seconds += other.seconds
        self.communication += other.communication
        self.optimal &= other.optimal

    def add_graph(self, solved: Solved, collectives: Iterable[Collective], root: str = "") -> None:
        """Add what was decided for the graph of a module: its parameters, layers and collectives."""
        self.cost += solved.solution.cost
        self.seconds += solved.account.seconds
        self.communication += solved.account.communication
        self.optimal &= solved.solution.optimal
        used = {p.name: Value(node) for node, p in solved.parameters.items()}
        read = {value for step in solved.program.steps if step.call is not None for value in step.inputs}
        for node, parameter in solved.parameters.items():
            name, shape = parameter.name, parameter.shape
            if name in self.parameters or Value(node) not in read:
                continue  # an earlier graph has placed it, or nobody reads what is computed with it
            placement = stored(solved.solution.parameters.get(Value(node), REPLICATE))
            reason = "" if isinstance(placement, Shard) else _reason(name, shape, used, solved)
            self.add_parameter(name, placement, shape, reason)
        self.collectives += [
            CollectivePlan(c.kind, joined(root, c.module), c.shape, c.dtype, c.reason) for c in collectives
        ]
        self.layers += [_layer_plan(layer, solved, root) for layer in find_layers(solved)]
        self.gathered += [(joined(root, module), why) for module, why in _gathered(solved)]
        work = [(joined(root, captured_module_of(s.node)), *work) for s, work in solved.account.work.items()]
        self.matmuls += added(work)

    def add_repeated(self, repeated: list[Repeated], solved: Solved, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Give every block that was left out the placements, layers, collectives and costs of the one it repeats."""
        reasons = dict(self.replicated)
        for each in repeated:
            for index in each.like:
                for name in parameters_of_block(each, each.like[index], shapes):
                    other = each.renamed(name, index)
                    if name in self.parameters and other in shapes and other not in self.parameters:
                        placement = self.parameters[name].placement
                        self.add_parameter(other, placement, shapes[other], reasons.get(name, ""))
                inside = steps_of_block(each, index, solved)
                talk = sum(solved.account.comm.get(s, 0.0) for s in inside)
                self.cost += sum(solved.solution.costs.get(s, 0.0) for s in inside)
                self.seconds += talk + sum(solved.account.compute.get(s, 0.0) for s in inside)
                self.communication += talk
            self.layers = _repeat(self.layers, each, lambda x: x.name, lambda x, name: replace(x, name=name))
            self.collectives = _repeat(
                self.collectives, each, lambda x: x.module, lambda x, name: replace(x, module=name)
            )
            self.gathered = _repeat(self.gathered, each, lambda x: x[0], lambda x, name: (name, x[1]))
            self.matmuls = _repeat(self.matmuls, each, lambda x: x.module, lambda x, name: replace(x, module=name))

    def add_call(
        self,
        solved: Solved,
        collectives: Iterable[Collective],
        repeated: list[Repeated],
        shapes: Mapping[str, tuple[int, ...]],
    ) -> None:
        """Add a call of the model: all of the first one; of a later one what only it uses.

        Layers, collectives and costs are those of one forward pass. A later call is there for parameters that no
        earlier one uses, so it adds the modules with these, and no costs.
        """
        if not self.parameters:
            self.add_graph(solved, collectives)
            self.add_repeated(repeated, solved, shapes)
            return
        other = PlanBuilder(self.world_size)
        other.parameters.update(self.parameters)
        other.add_graph(solved, collectives)
        other.add_repeated(repeated, solved, shapes)
        new = [name for name in other.parameters if name not in self.parameters]

        def is_new(module: str) -> bool:
            inside = f"{module}."
            return any(n.startswith(inside) for n in new) and not any(n.startswith(inside) for n in self.parameters)

        self.layers += [layer for layer in other.layers if is_new(layer.name)]
        self.collectives += [each for each in other.collectives if is_new(each.module)]
        self.gathered += [each for each in other.gathered if is_new(each[0])]
        self.matmuls += [each for each in other.matmuls if is_new(each.module)]
        self.replicated += other.replicated
        self.optimal &= other.optimal
        self.parameters.update({name: other.parameters[name] for name in new})

    def add_unused(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Place the parameters that no planned graph uses: sharded for memory, where their sizes allow it."""
        for name, shape in shapes.items():
            if name in self.parameters:
                continue
            placement = shard_for_memory(shape, self.world_size)
            small = "not used by a graph that was planned, and too small to shard"
            self.add_parameter(name, placement, shape, "" if isinstance(placement, Shard) else small)
            self.unplanned.append(name)


def joined(outer: str, inner: str) -> str:
    """The name in the model of a module that a module of it contains."""
    return ".".join(filter(None, (outer, inner)))


def steps_of_block(each: Repeated, index: int, solved: Solved) -> list[Step]:
    """The steps of the planned block that the left-out block ``index`` repeats."""
    return [s for s in solved.program.steps if each.renamed(f"{captured_module_of(s.node)}.", index)]


def estimated_times(solved: Solved, repeated: list[Repeated]) -> tuple[float, float]:
    """Estimated seconds of a solved program with the blocks that were left out, and those of them in collectives."""
    account = solved.account
    compute, talk = sum(account.compute.values()), account.communication
    for each in repeated:
        for index in each.like:
            inside = steps_of_block(each, index, solved)
            compute += sum(account.compute.get(s, 0.0) for s in inside)
            talk += sum(account.comm.get(s, 0.0) for s in inside)
    return compute + talk, talk


def parameters_of_block(each: Repeated, index: int, names: Iterable[str]) -> list[str]:
    """The names of what is in one of the blocks."""
    return [name for name in names if name.startswith(f"{each.path}.{index}.")]


def repeat_counts(repeated: list[Repeated], names: Iterable[str]) -> dict[str, int]:
    """How many parameters of the model those of the planned blocks stand for, themselves included."""
    counts: Counter[str] = Counter()
    for each in repeated:
        for index in each.like:
            counts.update(parameters_of_block(each, each.like[index], names))
    return {name: count + 1 for name, count in counts.items()}


def shard_for_memory(shape: tuple[int, ...], world: int) -> Placement:
    """A matrix sharded on a dimension that divides, or else on a long one; a vector replicated."""
    if len(shape) < 2 or world == 1:
        return REPLICATE
    divisible = [d for d, n in enumerate(shape) if n and n % world == 0]
    dims = divisible or [d for d, n in enumerate(shape) if n > world]
    return Shard.of(dims[0], Layout.even(shape[dims[0]], world)) if dims else REPLICATE


def _repeat(items: list[T], each: Repeated, name_of: Callable[[T], str], renamed: Callable[[T, str], T]) -> list[T]:
    """The items with those of the left-out blocks, in the order of the program."""

    def of(index: int) -> list[T]:
        return [x for x in items if f"{name_of(x)}.".startswith(f"{each.path}.{index}.")]

    more = [
        renamed(x, each.renamed(f"{name_of(x)}.", index).removesuffix("."))
        for index in each.like
        for x in of(each.like[index])
    ]
    last = max((i for i, x in enumerate(items) if name_of(x).startswith(f"{each.path}.")), default=len(items) - 1)
    return [*items[: last + 1], *more, *items[last + 1 :]]


def _layer_plan(layer: Layer, solved: Solved, graph: str) -> LayerPlan:
    found = layer.step.node.meta.get(OWN, {})
    fields = {name: found.get(name) for name in ParallelLayerAnnotatePass.FIELDS}
    if layer.weight is None:
        call = layer.step.call
        assert call is not None
        shape = tuple(n if isinstance(n, int) else -1 for n in call.inputs[0].shape)
        placement = layer.strategy.inputs[0]
        name = joined(graph, captured_module_of(layer.step.node)) or layer.kind
    else:
        parameter = solved.parameters[layer.weight]
        shape, name = parameter.shape, parameter.name.rpartition(".")[0]
        if parameter.meta is not None and parameter.meta.is_tied:
            # The weight has several owners; this is the one that uses it.
            name = joined(graph, captured_module_of(layer.step.node)) or name
        placement = solved.solution.parameters[Value(layer.weight)]
    return LayerPlan(
        name=name,
        kind=layer.kind,
        axis=fields["axis"],
        gather_output=bool(fields["gather_output"]),
        input_is_parallel=bool(fields["input_is_parallel"]),
        sequence_parallel=bool(fields["sequence_parallel"]),
        global_shape=shape,
        local_shape=local_shape(placement, shape, 0),
    )


def _reason(name: str, shape: tuple[int, ...], used: dict[str, Value], solved: Solved) -> str:
    """Why a parameter is replicated."""
    if len(shape) < 2:
        return "a vector, used with replicated activations: sharding it saves little and would cost a collective"
    value = used[name]
    users = [step for step in solved.program.steps if value in step.inputs and step.call is not None]
    for step in users:
        if step.call is not None and rule_for(step.call.target) is None:
            return f"no rule for {step.call.target} on a sharded tensor"
    for dim, size in enumerate(shape):
        structure = solved.candidates.structures(value, dim, size)[0]
        if all(n == unit for n, unit in structure) and solved.program.world > 1:
            units = " + ".join(str(n) for n, _ in structure)
            return f"dimension {dim} is used in units of {units}, which cannot be split"
    return "every way to shard it costs more"


def _gathered(solved: Solved) -> list[tuple[str, str]]:
    """Where a sharded tensor is all-gathered because nothing is known of the operator."""
    notes = []
    produced = {
        value: placement
        for step, strategy in solved.solution.strategies.items()
        for value, placement in zip(step.outputs, strategy.outputs, strict=True)
    }
    for step in solved.solution.strategies:
        if step.call is None or (rule_for(step.call.target) is not None and not step.impure):
            continue
        taken = [produced.get(v, REPLICATE) for v in step.inputs]
        if any(not isinstance(p, Replicate) for p in taken):
            why = "writes into memory that others see" if step.impure else "no rule"
            text = f"{step.call.target} on a sharded tensor: {why}, computed replicated"
            notes.append((captured_module_of(step.node), text))
    return notes
