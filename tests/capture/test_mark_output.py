"""Marking the results that the caller reads."""

from __future__ import annotations

import torch
from capture.capturing import aten_of
from helpers.graphs import targets
from transformers.modeling_outputs import CausalLMOutput

from paraxis.capture import mark_output, mark_output_op
from paraxis.capture.mark_output import has_loss, mark_results
from paraxis.placement import Layout, Shard
from paraxis.rules import rule_for


def test_returned_tensors_are_marked() -> None:
    class Cache:
        def __init__(self, tensor: torch.Tensor) -> None:
            self.tensor = tensor

    inner = torch.ones(2)
    marked = mark_output({"a": torch.ones(2), "b": (torch.ones(2), [torch.ones(2)], None, 3), "c": Cache(inner)})
    assert torch.equal(marked["a"], torch.ones(2)) and marked["b"][2:] == (None, 3)
    assert marked["c"].tensor is inner, "only plain containers are entered"
    graph = aten_of(lambda w, x: {"y": x @ w, "z": (x + 1, x)}, torch.ones(4, 4))
    assert targets(graph).count(mark_output_op) == 3


def test_marking_changes_no_value_and_no_input() -> None:
    x = torch.randn(3)
    assert torch.equal(mark_output(x), x) and mark_output(x) is not x
    assert mark_output("text") == "text" and mark_output(None) is None


def output(**fields: torch.Tensor) -> CausalLMOutput:
    return CausalLMOutput(**fields)


def test_logits_beside_a_loss_are_marked_only_without_gradients() -> None:
    logits = torch.ones(2)
    assert has_loss(output(loss=torch.tensor(1.0), logits=logits)) and not has_loss(output(logits=logits))
    assert not has_loss({"loss": torch.tensor(1.0)}) and not has_loss(output(loss=torch.ones(2)))
    assert mark_results(output(loss=torch.tensor(1.0), logits=logits))["logits"] is logits
    assert mark_results(output(logits=logits))["logits"] is not logits
    with torch.no_grad():
        assert mark_results(output(loss=torch.tensor(1.0), logits=logits))["logits"] is not logits


def test_no_strategy_shards_a_marked_result() -> None:
    """The solver therefore gathers it."""
    rule = rule_for(mark_output_op)
    assert rule is not None and not list(rule(None, [Shard.of(0, Layout.even(4, 2))]))  # type: ignore[arg-type]
