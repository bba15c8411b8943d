"""What the ranks run on: how fast they compute, and how fast they communicate.

The numbers of a preset are what such a machine reaches in practice, to one or two digits: the plan depends on orders of
magnitude. ``paraxis calibrate`` measures this machine and writes the same numbers as JSON.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import Any

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


@dataclass(frozen=True)
class Link:
    """A connection: seconds until the first byte arrives, and bytes per second of one rank after that."""

    latency: float
    bandwidth: float


@dataclass(frozen=True)
class Machine:
    """Rates of one rank.

    Attributes:
        name: What it is called in reports.
        flops: Operations per second of large matmuls, in the dtype that models run in.
        memory: Bytes per second of memory bandwidth.
        link: Between ranks of one node.
        links: The same for one kind of collective, where it was measured separately.
        per_node: How many ranks a node has; 0 if there is one node only.
        between: Between nodes, for every rank of a node; needed with ``per_node``.
        capacity: Bytes of memory of a rank; 0 if unknown.
    """

    name: str
    flops: float
    memory: float
    link: Link
    links: Mapping[str, Link] = field(default_factory=dict)
    per_node: int = 0
    between: Link | None = None
    capacity: int = 0

    def collective(self, kind: str, size: float, world: int) -> float:
        """Seconds for a collective of ``world`` ranks on a full tensor of ``size`` bytes."""
        if world == 1:
            return 0.0  # nothing is sent
        link = self.links.get(kind, self.link)
        if self.between is None or not self.per_node or world <= self.per_node:
            return link.latency + volume(kind, world) * size / link.bandwidth
        nodes = -(-world // self.per_node)  # inside the nodes first, then between them
        inside = link.latency + volume(kind, self.per_node) * size / link.bandwidth
        outside = self.between.latency + volume(kind, nodes) * size / self.per_node / self.between.bandwidth
        return inside + outside

    def to_json(self) -> dict[str, Any]:
        """The machine as a JSON-serializable dictionary."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Machine:
        """The inverse of :meth:`to_json`."""
        known = dict(data)
        known["link"] = Link(**known["link"])
        known["links"] = {kind: Link(**link) for kind, link in (known.get("links") or {}).items()}
        if known.get("between"):
            known["between"] = Link(**known["between"])
        return cls(**known)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the machine to a file that :func:`machine_of` reads."""
        with open(path, "w") as file:
            json.dump(self.to_json(), file, indent=1)


@cache
def volume(kind: str, world: int) -> float:
    """What every rank sends in a collective, as a fraction of the full tensor."""
    if kind not in COLLECTIVES:
        raise ValueError(f"{kind!r} is not a collective with a known cost: use one of {', '.join(COLLECTIVES)}")
    others = (world - 1) / world
    return {"all_reduce": 2 * others, "all_to_all": others / world}.get(kind, others)


DEFAULT = Machine("one node", flops=1e14, memory=1e12, link=Link(2e-5, 1e11))
"""The order of magnitude of one node with a fast interconnect."""

PRESETS: dict[str, Machine] = {
    "default": DEFAULT,
    "h100": Machine("8×H100, NVLink", 7e14, 3e12, Link(1.2e-5, 3.7e11), capacity=80 * 10**9),
    "h200": Machine("8×H200, NVLink", 7.9e14, 4.3e12, Link(1.2e-5, 3.7e11), capacity=141 * 10**9),
    "a100": Machine("8×A100, NVLink", 2.5e14, 1.7e12, Link(1.5e-5, 2.3e11), capacity=80 * 10**9),
    "pcie": Machine("GPUs on PCIe", 1.5e14, 8e11, Link(3e-5, 2e10), capacity=48 * 10**9),
    "nodes": Machine(
        "nodes of 8×H100, InfiniBand",
        7e14,
        3e12,
        Link(1.2e-5, 3.7e11),
        per_node=8,
        between=Link(3e-5, 4e10),
        capacity=80 * 10**9,
    ),
    "cpu": Machine("processes on one CPU", 5e10, 1e10, Link(1e-4, 3e9)),
}


def machine_of(name: str | os.PathLike[str] | Machine | None) -> Machine:
    """A machine by the name of a preset, from a file that ``paraxis calibrate`` wrote, or itself; None: the default."""
    if name is None:
        return DEFAULT
    if isinstance(name, Machine):
        return name
    if str(name) in PRESETS:
        return PRESETS[str(name)]
    if not os.path.isfile(name):
        raise ValueError(
            f"machine={os.fspath(name)!r} is neither a preset ({', '.join(PRESETS)}) nor a file; `paraxis calibrate` "
            "measures this machine and writes one."
        )
    try:
        with open(name) as file:
            return Machine.from_json(json.load(file))
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"{os.fspath(name)!r} does not describe a machine ({error}); write it with `paraxis calibrate`."
        ) from error
