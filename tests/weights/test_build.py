"""Building models on the meta device: classes, dtypes and the metadata of parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from models.compare import context, parallel
from torch import nn
from transformers import LlamaConfig
from weights.tiny_models import save, tiny_config, tiny_model
from zoo.cases import find

from paraxis.tensor.sharded_tensor import ShardedTensor
from paraxis.weights.build import attach, build_model, build_on_meta


def dtypes(folder: str, dtype: torch.dtype) -> dict[str, torch.dtype]:
    model, _ = parallel(folder, torch_dtype=dtype)
    return {name: tensor.dtype for name, tensor in (*model.named_parameters(), *model.named_buffers())}


def test_dtypes_are_those_of_transformers(ranks: Any, tmp_path: Path) -> None:
    """Some modules have more precision than the rest: the bias of a router, a buffer."""
    name, dtype, precise = "deepseek_v3[first_k_dense_replace=1]", torch.bfloat16, "correction_bias"
    model: Any = find(name).make()
    model.save_pretrained(tmp_path)
    plain = type(model).from_pretrained(tmp_path, dtype=dtype)
    expected = {n: t.dtype for n, t in (*plain.named_parameters(), *plain.named_buffers())}
    found = ranks(2).run(dtypes, str(tmp_path), dtype)[0]
    assert found == expected
    assert {t for n, t in found.items() if n.endswith(precise)} == {torch.float32} and dtype in found.values()


@pytest.mark.parametrize("dtype", [torch.float16, "float16", "torch.float16"])
def test_a_directory_in_any_dtype(tmp_path: Path, dtype: Any) -> None:
    save(tiny_model("LlamaForCausalLM"), tmp_path)
    before = torch.get_default_dtype()
    model = build_model(tmp_path, (), dtype, {"num_hidden_layers": 1})
    assert torch.get_default_dtype() == before and not model.training
    assert {p.dtype for p in model.parameters()} == {torch.float16} and all(p.is_meta for p in model.parameters())
    assert model.config.num_hidden_layers == 1  # type: ignore[union-attr]


def test_an_unknown_dtype_is_an_error(tmp_path: Path) -> None:
    save(tiny_model("LlamaForCausalLM"), tmp_path)
    with pytest.raises(ValueError, match="dtype='float12' is not a dtype"):
        build_model(tmp_path, (), "float12", {})


def test_a_configuration_names_its_class_or_is_a_language_model() -> None:
    config = tiny_config("LlamaForCausalLM")
    assert isinstance(config, LlamaConfig)
    assert type(build_on_meta(config, None, {})).__name__ == "LlamaForCausalLM"
    config.architectures = ["LlamaModel"]
    assert type(build_on_meta(config, None, {})).__name__ == "LlamaModel"


def attached() -> None:
    ctx = context()
    model = nn.Linear(4, 4)
    attach(model, ctx, torch.float64)
    assert set(ctx.param_cache) == {"weight", "bias"} and ctx.plan is None
    assert all(isinstance(p, ShardedTensor) and p.dtype == torch.float64 for p in model.parameters())


def test_attaching_replaces_the_parameters(ranks: Any) -> None:
    ranks(2).run(attached)


def twice() -> str:
    from paraxis import parallelize_model

    model = parallelize_model(nn.Linear(4, 4), context(), example_inputs=torch.ones(1, 4), show_progress=False)
    with pytest.raises(RuntimeError) as error:
        attach(model, context())
    return str(error.value)


def test_a_model_is_parallelized_once(ranks: Any) -> None:
    assert all("already parallel" in message for message in ranks(2).run(twice))
