"""What the private names of torch are relied on for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

from paraxis.compat import torch as compat

aten = torch.ops.aten


def test_every_name_exists() -> None:
    assert all(hasattr(compat, name) for name in compat.__all__)


def test_names_of_operators() -> None:
    op = aten.add_.Tensor
    assert isinstance(op, compat.OpOverload) and isinstance(aten.add, compat.OpOverloadPacket)
    assert compat.operator_name(op) == "aten::add_" and compat.packet_name(op) == "add_"
    assert compat.overload_name(op) == "Tensor" and compat.overload_name(aten.relu.default) == "default"
    schema = compat.schema_of(op)
    assert schema.is_mutable and [a.name for a in schema.arguments] == ["self", "other", "alpha"]
    assert schema.arguments[0].alias_info.is_write and not compat.schema_of(aten.add.Tensor).is_mutable
    assert compat.schema_or_none(len) is None and compat.schema_or_none(op) is not None


def test_overload_of_a_custom_operator() -> None:
    @torch.library.custom_op("paraxis_compat_test::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    assert compat.overload_of(twice) is torch.ops.paraxis_compat_test.twice.default
    assert compat.overload_of(aten.add) is aten.add and compat.overload_of(len) is len


def captured_targets(function: Any, *args: Any) -> list[Any]:
    """What the graph that Dynamo captures calls."""
    found: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        found.extend(node.target for node in graph.graph.nodes if node.op == "call_function")
        return graph

    torch.compile(function, backend=backend, fullgraph=True)(*args)
    return found


def test_grad_mode_switches() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            y = x * 2
        return x + y

    switches = [compat.is_grad_mode_switch(t) for t in captured_targets(function, torch.ones(2, requires_grad=True))]
    assert switches == [True, False, True, False]
    assert not compat.is_grad_mode_switch(torch.is_grad_enabled) and not compat.is_grad_mode_switch("grad_enabled")


def test_higher_order_operators() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(torch.sin, x, use_reentrant=False)

    names = [compat.higher_order_name(t) for t in captured_targets(function, torch.ones(2, requires_grad=True))]
    assert "tag_activation_checkpoint" in names
    assert compat.higher_order_name(aten.add.Tensor) == compat.higher_order_name(len) == ""


def test_storages_and_parameters() -> None:
    x = torch.ones(4)
    assert compat.storage_key(x.untyped_storage()) == compat.storage_key(x[1:].untyped_storage())
    assert compat.storage_key(x.untyped_storage()) != compat.storage_key(x.clone().untyped_storage())
    assert compat.is_view(x[1:]) and not compat.is_view(x)

    class Sub(torch.Tensor):
        pass

    tensor = compat.make_subclass(Sub, x, True)
    assert type(tensor) is Sub and tensor.requires_grad and tensor.data_ptr() == x.data_ptr()
    assert not isinstance(tensor, nn.Parameter) and not compat.has_backward_hooks(tensor)
    compat.mark_as_parameter(tensor)
    tensor.register_hook(lambda grad: grad)
    assert isinstance(tensor, nn.Parameter) and compat.has_backward_hooks(tensor)


def test_calls_around_an_installed_call() -> None:
    layer, seen = nn.Linear(2, 2), []
    layer.register_forward_hook(lambda *_: seen.append("hook"))
    assert not compat.has_compiled_call(layer)
    compat.set_compiled_call(layer, lambda x: "installed")
    assert compat.has_compiled_call(layer) and layer(torch.ones(1, 2)) == "installed" and not seen
    assert compat.call_forward_and_hooks(layer, torch.ones(1, 2)).shape == (1, 2) and seen == ["hook"]
    assert compat.COMPILED_CALL in layer.__dict__


def test_backward_passes() -> None:
    x, seen = torch.ones(2, requires_grad=True), []

    def hook(_: torch.Tensor) -> None:
        compat.after_backward(lambda: seen.append("end"))
        seen.append(compat.current_graph_task())

    x.register_hook(hook)
    assert compat.current_graph_task() == -1
    for _ in range(2):
        (x * 2).sum().backward()
    assert seen[1] == seen[3] == "end" and -1 not in seen and seen[0] != seen[2]


@pytest.mark.parametrize(
    "context",
    [
        torch.enable_grad,
        lambda: torch.autocast("cpu", torch.bfloat16),
        lambda: FlopCounterMode(display=False),
        forward_ad.dual_level,
    ],
)
def test_aten_must_run_where_something_observes_it(context: Any) -> None:
    with torch.no_grad():
        assert not compat.must_use_aten()
        with context():
            assert compat.must_use_aten()
        seen: list[bool] = []
        torch.func.vmap(lambda x: seen.append(compat.must_use_aten()) or x)(torch.ones(2))  # type: ignore[func-returns-value]
        assert seen == [True]


def test_dispatch_modes() -> None:
    assert compat.dispatch_mode_depth() == 0 and compat.current_dispatch_modes() == []
    with FlopCounterMode(display=False) as mode:
        assert compat.dispatch_mode_depth() == len(compat.current_dispatch_modes()) == 1
        assert type(compat.current_dispatch_modes()[0]).__module__ == type(mode).__module__
        with compat.disable_dispatch_modes():
            assert compat.dispatch_mode_depth() == 0


def test_small_private_functions_are_there() -> None:
    assert [x.tolist() for x in compat.foreach_mul([torch.ones(1), torch.ones(2)], 1)] == [[1], [1, 1]]
    assert compat.legacy_reduction(False, True, emit_warning=False) == "sum"
    assert isinstance(compat.mkldnn_enabled(), bool)
    assert compat.pytree.tree_map(lambda x: x + 1, {"a": [1]}) == {"a": [2]}
    q = torch.ones(1, 2, 8, 16)
    assert isinstance(compat.fused_sdp_choice(q, q, q), int)
    with compat.FakeTensorMode():
        fake = torch.ones(2)
        assert isinstance(fake, compat.FakeTensor)
        with compat.unset_fake_temporarily():
            assert not isinstance(torch.ones(2), compat.FakeTensor)
    assert aten.add.Tensor not in compat.core_aten_decompositions()
