"""The local program through Inductor, and what is prepared for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from marks import long
from torch import nn
from zoo.cases import find

from paraxis import Config
from paraxis.tensor.sharded_tensor import ShardedTensor, wrap


def block() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))


def compiled() -> dict[str, Any]:
    """Values and gradients of a compiled block, and of the unsharded one."""
    from models.compare import context

    from paraxis import parallelize_model

    whole, x = block(), torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(1))
    ctx = context()
    model = parallelize_model(block(), ctx, example_inputs=x, compile="inductor")
    with torch.no_grad():
        plain = model(x)
    found, expected = model(x), whole(x)
    found.square().sum().backward()
    expected.square().sum().backward()
    gradients = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
    return {
        "plain": float((plain - expected).abs().max()),
        "values": float((found - expected).abs().max()),
        "gradients": max(float((gradients[n] - p.grad).norm() / p.grad.norm()) for n, p in whole.named_parameters()),  # type: ignore[operator,union-attr]
        "reduced": sum(c.kind == "all_reduce" for c in ctx.plan.collectives),  # type: ignore[union-attr]
    }


def test_a_block_and_its_gradients(ranks: Any) -> None:
    for found in ranks(2).run(compiled, timeout=300):
        assert found["plain"] < 1e-5 and found["values"] < 1e-5
        assert found["gradients"] < 1e-5
        assert found["reduced"] == 1


def replaced(compile: str | None) -> tuple[float, str]:
    """What a block says of a shard that moved, and of a layer that is not the planned one."""
    from models.compare import context

    from paraxis import parallelize_model
    from paraxis.tensor.sharded_tensor import materialize

    x = torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(1))
    model = parallelize_model(block(), context(), example_inputs=x, compile=compile)
    with torch.no_grad():
        expected = model(x)
        for parameter in model.parameters():
            materialize(parameter, parameter.to_local().clone())
        moved = float((model(x) - expected).abs().max())
        model[1] = nn.Linear(16, 64)
        try:
            model(x)
        except RuntimeError as error:
            return moved, str(error)
    return moved, ""


@pytest.mark.parametrize("compile", [None, "inductor"])
def test_other_parameters_are_noticed(compile: str | None, ranks: Any) -> None:
    for moved, message in ranks(2).run(replaced, compile, timeout=300):
        assert moved == 0 and "illegal path for recompilation" in message


def generated(folder: str) -> dict[str, Any]:
    """Tokens of a compiled model with a growing cache, two conversations that go on from one, and what was called."""
    from copy import deepcopy

    from models.compare import parallel, reference
    from torch.profiler import ProfilerActivity, profile
    from transformers import DynamicCache

    model, _ = parallel(folder, compile="inductor")
    whole = reference(folder)
    ids = torch.tensor([[5, 6, 7, 8]])
    tokens = [m.generate(ids, max_new_tokens=150, do_sample=False).tolist() for m in (model, whole)]
    beams = [m.generate(ids, max_new_tokens=12, do_sample=False, num_beams=3).tolist() for m in (model, whole)]
    answers = []
    with torch.no_grad():
        for m in (model, whole):
            cache = DynamicCache(config=m.config)
            m(ids, past_key_values=cache)
            both = [cache, deepcopy(cache)] if m is whole else [cache, _copy(cache, m.config)]
            answers.append([m(torch.tensor([[t]]), past_key_values=c).logits for c, t in zip(both, (9, 10))])
        answers += [[_relaid(m, ids, how) for how in (_tight, _rows_first, _tight)] for m in (model, whole)]
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            model(ids[:, :1], past_key_values=cache_of(model, ids))
    names = {event.name for event in seen.events()}
    return {
        "tokens": tokens[0] == tokens[1] and beams[0] == beams[1],
        "off": max(float((a - b).abs().max()) for k in (0, 2) for a, b in zip(answers[k], answers[k + 1], strict=True)),
        "in memory": "paraxis::host_all_reduce" in names and not any(n.startswith("c10d::") for n in names),
        "in place": not names.isdisjoint({"paraxis::append_rows", "paraxis::attend_appended"}),
    }


def _copy(cache: Any, config: Any) -> Any:
    """A second cache of the same tensors."""
    from transformers import DynamicCache

    other = DynamicCache(config=config)
    for i, layer in enumerate(cache.layers):
        other.update(layer.keys, layer.values, i)
    return other


def _relaid(model: Any, ids: torch.Tensor, how: Any) -> torch.Tensor:
    """The answer with a cache of which one tensor lies in memory in another way than the others."""
    cache = cache_of(model, ids)
    values = cache.layers[-1].values
    if isinstance(values, ShardedTensor):
        cache.layers[-1].values = wrap(how(values._local), values._spec, list(values.shape))
    return model(ids[:, :1], past_key_values=cache).logits  # type: ignore[no-any-return]


def _tight(x: torch.Tensor) -> torch.Tensor:
    return x.clone(memory_format=torch.contiguous_format)


def _rows_first(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def cache_of(model: Any, ids: torch.Tensor) -> Any:
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    model(ids, past_key_values=cache)
    return cache


@long
def test_generation(ranks: Any, tmp_path: Path) -> None:
    find("gpt2[n_positions=256]").make().save_pretrained(tmp_path)  # type: ignore[operator]
    for found in ranks(2).run(generated, str(tmp_path), timeout=600):
        assert found["tokens"] and found["off"] < 1e-4
        assert found["in memory"] and found["in place"]


def test_options_that_make_no_sense() -> None:
    with pytest.raises(ValueError, match="compile='triton'"):
        Config(compile="triton")
    with pytest.raises(ValueError, match="mode='reduce-overhead' needs compile='inductor'"):
        Config(mode="reduce-overhead")
