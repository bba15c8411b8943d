"""The operators that a model runs, by block, with where their arguments come from."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from models import tiny
from torch import nn

from paraxis.capture.operators_run import BEFORE, Made, State, is_cache, record, tensors_of, without_data

ATEN = torch.ops.aten


class Block(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.index, self.linear = index, nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(x)


class Model(nn.Module):
    def __init__(self, block: Any = Block, count: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block(i) for i in range(count))
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor, shift: Any = None) -> torch.Tensor:
        x = x * self.scale
        for block in self.blocks:
            x = block(x)
        return x.relu()


def run(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return record(model, "blocks", args or (torch.randn(2, 4),), kwargs)


def operators(found: Any, segment: int) -> list[Any]:
    return [operator for operator, _ in found.segments[segment]]


def sources(found: Any, segment: int) -> list[Any]:
    """Where the arguments of the operators of a segment come from."""
    return [x for _, (leaves, _) in found.segments[segment] for x in leaves]


def test_operators_are_noted_by_block_with_where_their_arguments_come_from() -> None:
    found = run(Model())
    assert sorted(found.segments) == [BEFORE, 0, 1, 2, 3]
    assert operators(found, BEFORE) == [ATEN.mul.Tensor]
    assert sources(found, BEFORE)[1] == State(-1, "scale")
    assert operators(found, 1) == [ATEN.t.default, ATEN.addmm.default, ATEN.add.Tensor]
    assert State(1, "linear.weight") in sources(found, 1) and State(1, "linear.bias") in sources(found, 1)
    assert Made(0, 2) in sources(found, 1), "the result of the block before"
    assert operators(found, 3) == [ATEN.relu.default] and found.results == Made(3, 0)


def test_arguments_are_told_apart_by_how_they_are_nested() -> None:
    class Sums(nn.Module):
        def __init__(self, dims: Any) -> None:
            super().__init__()
            self.dims = dims

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.sum(*self.dims)

    def noted(dims: Any) -> Any:
        model: Any = Model(lambda _: nn.Identity(), 2)
        model.blocks[0] = Sums(dims)
        return run(model, torch.randn(4, 4)).segments[0]

    assert noted([[1]]) == noted([[1]]) and noted([[0]]) != noted([[1]])
    assert noted([[0, 1]]) != noted([[0], True]), "a list, and a number that follows it"


def test_argument_is_known_by_its_name() -> None:
    found = run(Model(), torch.randn(2, 4), shift=torch.ones(1))
    assert sources(found, BEFORE)[0] == State(-1, ".0.0")


def test_parameter_of_several_blocks_belongs_to_none() -> None:
    model: Any = Model()
    model.blocks[1].linear.weight = model.blocks[2].linear.weight = model.blocks[0].linear.weight
    found = run(model)
    shared = State(-1, "shared 0 linear.weight")
    assert all(shared in sources(found, i) for i in range(3))


def test_tensor_shared_with_the_rest_of_the_model_belongs_to_no_block() -> None:
    model: Any = Model()
    model.blocks[0].linear.bias = model.scale
    owners = {x.block for x in sources(run(model), 0) if isinstance(x, State)}
    assert owners == {-1, 0}, "its weight is its own, its bias is not"


class WithNumber(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (2 if self.index < 2 else 3)


class WithConstant(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.tensor(2.0 if self.index < 2 else 3.0)


class WithConstantOnDevice(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.tensor([2.0 if self.index < 2 else 3.0], device=x.device)


class WithNewTensor(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * x.new_tensor(2.0 if self.index < 2 else 3.0)


class WithTensorAttribute(Block):
    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.factor = torch.tensor(2.0 if index < 2 else 3.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


@pytest.mark.parametrize("block", [WithNumber, WithConstant, WithConstantOnDevice, WithNewTensor, WithTensorAttribute])
def test_numbers_are_compared_however_they_come_in(block: type[Block]) -> None:
    def relative(found: Any, segment: int) -> str:
        return str(found.segments[segment]).replace(f"segment={segment}", "here").replace(f"segment={segment - 1}", "")

    found = run(Model(block, 4))
    assert relative(found, 2) == relative(found, 3) != relative(found, 1)


def test_tensor_of_unknown_origin_is_refused() -> None:
    class Large(Block):
        def __init__(self, index: int) -> None:
            super().__init__(index)
            self.table = torch.randn(100, 100)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.table[0, 0]

    with pytest.raises(RuntimeError, match=r"a tensor of size \(100, 100\) is no parameter"):
        run(Model(Large))


def test_blocks_out_of_order_are_refused() -> None:
    class Reversed(Model):
        def forward(self, x: torch.Tensor, shift: Any = None) -> torch.Tensor:
            for block in reversed(self.blocks):
                x = block(x)
            return x

    with pytest.raises(RuntimeError, match="do not run one after the other"):
        run(Reversed())


def test_forward_that_looks_at_data_is_refused() -> None:
    class Looking(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * x.sum().item()

    with pytest.raises(Exception, match="meta"):
        run(Model(Looking))


def test_forward_that_sets_attributes_of_a_block_is_refused_and_undone() -> None:
    class Counting(Block):
        calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return super().forward(x)

    model: Any = Model(Counting)
    with pytest.raises(RuntimeError, match=r"the forward of blocks.0 sets attributes"):
        run(model)
    assert all("calls" not in vars(block) for block in model.blocks)


def test_hooks_on_submodules_are_part_of_what_runs() -> None:
    model: Any = Model()
    model.blocks[1].linear.register_forward_hook(lambda module, args, output: output.sin())
    found = run(model)
    assert ATEN.sin.default in operators(found, 1) and ATEN.sin.default not in operators(found, 0)


def snapshot(value: Any) -> dict[str, Any]:
    return {name: (tensor, tensor._version, tensor.clone()) for name, tensor in tensors_of(value).items()}


def unchanged(value: Any, before: dict[str, Any]) -> bool:
    now = tensors_of(value)
    return now.keys() == before.keys() and all(
        tensor is before[name][0] and tensor._version == before[name][1] and torch.equal(tensor, before[name][2])
        for name, tensor in now.items()
    )


@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_model_and_cache_are_left_as_they_were(name: str, static: bool) -> None:
    from transformers import DynamicCache, StaticCache

    model = tiny.build(name, num_hidden_layers=4)
    cache: Any = StaticCache(config=model.config, max_cache_len=16) if static else DynamicCache(config=model.config)
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        model(ids, past_key_values=cache)
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    modules = {name: (dict(vars(m)), dict(m._modules)) for name, m in model.named_modules()}
    layers, before = [*cache.layers], snapshot(cache)
    attributes = [dict(vars(layer)) for layer in layers]
    enabled = gc.isenabled()
    found = record(model, "model.layers", (ids[:, :1],), {"past_key_values": cache})
    assert gc.isenabled() is enabled
    after = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    assert after.keys() == state.keys() and all(after[n] is state[n] for n in state)
    assert modules == {name: (dict(vars(m)), dict(m._modules)) for name, m in model.named_modules()}
    assert cache.layers == layers and unchanged(cache, before)
    assert [{n: id(v) for n, v in vars(layer).items()} for layer in layers] == [
        {n: id(v) for n, v in own.items()} for own in attributes
    ]
    assert len(found.layers) == 4 and len(found.segments) == 6
    keys = [State(i, "cache.keys") for i in range(4)]
    assert all(key in sources(found, i) for i, key in enumerate(keys))
    assert ("keys" in found.layers[2]) is not static, "a dynamic cache gets new tensors, a static one is written to"


def test_model_is_left_as_it_was_when_its_forward_fails() -> None:
    class Failing(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.index == 2:
                raise ValueError("on purpose")
            return super().forward(x)

    model = Model(Failing)
    state = dict(model.named_parameters())
    hooks = [len(block._forward_hooks) + len(block._forward_pre_hooks) for block in model.blocks]
    with pytest.raises(ValueError, match="on purpose"):
        run(model)
    assert all(p is state[name] and not p.is_meta for name, p in model.named_parameters())
    assert hooks == [0, 0, 0]
    assert [len(block._forward_hooks) + len(block._forward_pre_hooks) for block in model.blocks] == hooks


def test_arguments_without_data_have_the_structure_of_the_arguments() -> None:
    from transformers import DynamicCache

    config = tiny.config("llama")
    cache: Any = DynamicCache(config=config)
    x = torch.randn(2, 3)
    cache.update(torch.ones(1, 4, 3, 8), torch.ones(1, 4, 3, 8), 0)
    args = ({"x": x, "same": [x], "config": config}, cache, 3)
    mapped, copied, number = without_data(args)
    assert mapped["x"].is_meta and mapped["x"].shape == (2, 3) and mapped["same"][0] is mapped["x"]
    assert mapped["config"] is config and number == 3
    assert type(copied) is DynamicCache and copied is not cache and copied.layers[0] is not cache.layers[0]
    assert copied.layers[0].keys.is_meta and copied.layers[0].device == torch.device("meta")
    assert not cache.layers[0].keys.is_meta and cache.layers[0].device == torch.device("cpu")


def test_caches_are_objects_with_a_list_of_layers() -> None:
    from transformers import DynamicCache

    assert is_cache(DynamicCache(config=tiny.config("llama")))
    assert not is_cache(Model()) and not is_cache(torch.ones(1)) and not is_cache({"layers": []})
