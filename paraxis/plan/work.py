"""The matmul work of a plan, by module: how much of it the ranks share, tower by tower."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class MatmulPlan:
    """The matmuls, convolutions and attention that a module computes by itself, without its submodules.

    Attributes:
        module: The module.
        flops: FLOPs of the full operators, of the planned call.
        sharded: Those of them in operators of which every rank does a part.
        local: FLOPs of the rank that does most.
    """

    module: str
    flops: int
    sharded: int
    local: int


@dataclass(frozen=True)
class TowerWork:
    """The matmul work of a part of the model: its blocks, or what is beside them.

    Attributes:
        name: The module that contains it.
        flops: FLOPs of the full operators.
        sharded_fraction: The fraction of these in operators of which every rank does a part.
        local_fraction: The fraction that one rank does.
        has_blocks: Whether it has repeated blocks.
    """

    name: str
    flops: int
    sharded_fraction: float
    local_fraction: float
    has_blocks: bool


def added(work: Iterable[tuple[str, float, float]]) -> list[MatmulPlan]:
    """The work of every module, from (module, FLOPs, the fraction of them that one rank does) of every operator."""
    found: dict[str, list[float]] = {}
    for module, flops, fraction in work:
        if flops:
            total = found.setdefault(module, [0, 0, 0])
            total[0] += flops
            total[1] += flops if fraction < 1.0 else 0
            total[2] += flops * fraction
    return [MatmulPlan(name, *map(round, total)) for name, total in found.items()]


def towers_of(work: Sequence[MatmulPlan]) -> list[TowerWork]:
    """The work by towers, in the order of the program.

    A tower is what is around a list of blocks (``model.vision_tower.encoder`` of
    ``model.vision_tower.encoder.layers.0.mlp.fc1``). What is in none is counted with the tower that it is in, or by its
    outermost module below one that contains a tower.
    """
    names = dict.fromkeys(tower for m in work if (tower := _around_blocks(m.module)) is not None)
    outer = [n for n in names if not any(n != other and _inside(n, other) for other in names)]
    found: dict[str, list[MatmulPlan]] = {}
    for each in work:
        tower = next((n for n in outer if _inside(each.module, n)), None)
        found.setdefault(_beside(each.module, outer) if tower is None else tower, []).append(each)
    return [_sum(name, several, name in outer) for name, several in found.items()]


def sharded_fraction(work: Iterable[MatmulPlan], module: str = "") -> float:
    """The fraction of the matmul work inside of a module that is in operators of which every rank does a part.

    1.0 where there is no such work.
    """
    inside = [m for m in work if _inside(m.module, module)]
    total = sum(m.flops for m in inside)
    return sum(m.sharded for m in inside) / total if total else 1.0


def work_text(work: Sequence[MatmulPlan]) -> str:
    """A sentence on models with several towers and on those that replicate work; empty for others."""
    towers = towers_of(work)
    if sum(t.has_blocks for t in towers) < 2 and all(t.sharded_fraction == 1.0 for t in towers):
        return ""
    total = sum(t.flops for t in towers)
    parts = ", ".join(
        f"{t.name or 'the model'} {t.sharded_fraction:.0%} ({t.flops / max(total, 1):.0%} of all)" for t in towers
    )
    return f"Matmul work that the ranks share: {sharded_fraction(work):.1%}: {parts}."


def _around_blocks(module: str) -> str | None:
    """The module around the outermost list of blocks that a module is in."""
    parts = module.split(".")
    first = next((i for i, part in enumerate(parts) if part.isdigit()), None)
    return None if first is None else ".".join(parts[: max(first - 1, 0)])


def _beside(module: str, towers: Sequence[str]) -> str:
    """The outermost module around this one that contains no tower."""
    parts = module.split(".")
    for count in range(1, len(parts) + 1):
        name = ".".join(parts[:count])
        if not any(_inside(tower, name) for tower in towers):
            return name
    return module


def _inside(module: str, outer: str) -> bool:
    return not outer or module == outer or module.startswith(f"{outer}.")


def _sum(name: str, several: Sequence[MatmulPlan], has_blocks: bool) -> TowerWork:
    total = sum(m.flops for m in several)
    sharded, local = sum(m.sharded for m in several), sum(m.local for m in several)
    return TowerWork(name, total, sharded / max(total, 1), local / max(total, 1), has_blocks)
