"""Layers of the local program are made once per parameter, with their collectives off."""

from __future__ import annotations

from passes.small import planned

from paraxis.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelCrossEntropyLoss,
    VocabParallelEmbedding,
)
from paraxis.passes.layers import find_layers
from paraxis.passes.local_layers import make_layer
from paraxis.plan.offline import Planned


def make_all(offline: Planned) -> list[tuple[str, object] | None]:
    """What every layer of the graph becomes."""
    solved = offline.solved
    return [
        make_layer(layer, solved.solution.strategies[layer.step], solved, offline.ctx) for layer in find_layers(solved)
    ]


def test_each_axis_has_its_parallel_layer(offline: Planned) -> None:
    made = [x for x in make_all(offline) if x is not None]
    assert [(path, type(layer)) for path, layer in made] == [
        ("embed", VocabParallelEmbedding),
        ("up", ColumnParallelLinear),
        ("layer", RowParallelLinear),
        ("head", ColumnParallelLinear),
        ("loss", VocabParallelCrossEntropyLoss),
    ]
    up, down = made[1][1], made[2][1]
    assert not up.gather_output and not up.copy_input and not down.reduce_output and down.input_is_parallel  # type: ignore[attr-defined]
    assert down.transposed and not up.transposed  # type: ignore[attr-defined]


def test_layers_are_made_once(offline: Planned) -> None:
    first, second = make_all(offline), make_all(offline)
    assert all(a is not None and b is not None and a[1] is b[1] for a, b in zip(first, second, strict=True))


def test_replicated_layer_stays_an_operator() -> None:
    with planned(constraints={"up": "replicated", "down": "replicated"}) as offline:
        kinds = {path for path, _ in filter(None, make_all(offline))}  # type: ignore[misc]
        assert "up" not in kinds and "layer" not in kinds and "embed" in kinds
