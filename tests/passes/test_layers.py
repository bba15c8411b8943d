"""Layers are recognised in the decomposed graph, in whatever form the model writes them."""

from __future__ import annotations

from paraxis.passes.layers import find_layers, is_gathered, uses
from paraxis.plan.offline import Planned


def test_every_form_of_a_layer_is_found_in_order(offline: Planned) -> None:
    layers = find_layers(offline.solved)
    assert [(layer.kind, layer.axis) for layer in layers] == [
        ("embedding", "vocab"),
        ("linear", "column"),
        ("linear", "row"),
        ("linear", "column"),
        ("cross_entropy", "vocab"),
    ]
    names = [offline.solved.parameters[x.weight].name if x.weight is not None else None for x in layers]
    assert names == ["embed.weight", "up.weight", "down", "head.weight", None]
    assert [layer.transposed for layer in layers] == [False, False, True, False, False]
    assert [layer.bias is not None for layer in layers] == [False, True, False, False, False]


def test_uses_lists_the_steps_of_a_value(offline: Planned) -> None:
    users = uses(offline.solved)
    up = find_layers(offline.solved)[1]
    (step, position), *others = users[up.step.outputs[0]]
    assert not others and step is not None and "gelu" in str(step.node.target) and position == 0


def test_output_is_gathered_if_somebody_needs_the_full_tensor(offline: Planned) -> None:
    solved, users = offline.solved, uses(offline.solved)
    embed, up, *_ = find_layers(solved)
    assert not is_gathered(up.step.outputs[0], solved.solution, users), "the row layer takes shards"
    assert is_gathered(embed.step.outputs[0], solved.solution, users), "the norm needs all features"
