"""Data-parallel wrappers of torch refuse a parallel model when they are constructed, and leave it usable."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models.compare import batch, parallel, reference
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DataParallel, DistributedDataParallel

from paraxis.errors import WrapperError
from paraxis.tensor.wrappers import RefusingRegistry, refuse_wrappers

WRAPPERS: dict[str, Callable[[nn.Module], Any]] = {
    "DistributedDataParallel": DistributedDataParallel,
    "DataParallel": DataParallel,
    "FullyShardedDataParallel": FullyShardedDataParallel,
    "fully_shard": fully_shard,
}


class Around(nn.Module):
    """Another module that contains the parallel one."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model


def wraps(folder: str) -> tuple[dict[str, str], float]:
    """The error of each wrapper around the model, a layer of it and a copy; then how far the logits are off."""
    model, _ = parallel(folder)
    targets = {"model": model, "layer": model.model.layers[0], "copy": copy.deepcopy(model), "around": Around(model)}
    errors = {}
    for name, wrapper in WRAPPERS.items():
        for target, module in targets.items():
            if (name, target) == ("fully_shard", "around"):
                continue  # it looks at the registry of the outer module only
            try:
                wrapper(module)
                errors[f"{name} {target}"] = "no error"
            except WrapperError as error:
                errors[f"{name} {target}"] = str(error)
    assert get_model_state_dict(model).keys() == model.state_dict().keys()
    plain = DistributedDataParallel(nn.Linear(2, 2))  # other modules are wrapped as before
    fully_shard(nn.Linear(2, 2), mesh=torch.distributed.init_device_mesh("cpu", (2,)))
    plain(torch.zeros(1, 2)).sum().backward()
    ids, _ = batch(256)
    with torch.no_grad():
        return errors, float((model(input_ids=ids).logits - reference(folder)(input_ids=ids).logits).abs().max())


def test_wrappers_refuse_a_parallel_model(ranks: Any, checkpoints: Any) -> None:
    for errors, difference in ranks(2).run(wraps, checkpoints("llama", num_hidden_layers=1)):
        assert len(errors) == 4 * len(WRAPPERS) - 1
        for case, error in errors.items():
            wrapper = case.split()[0]
            assert error.startswith(f"{wrapper} cannot wrap"), f"{case}: {error}"
            assert "data_parallel='replicate'" in error and "ParallelExecutionCtx(mesh=mesh" in error, case
        assert difference < 1e-4


def test_a_module_without_sharded_parameters_is_wrapped() -> None:
    model = nn.Linear(2, 2)
    refuse_wrappers(nn.ReLU())
    assert DataParallel(model).module is model


def test_the_registry_refuses_fully_shard_only() -> None:
    registry = copy.deepcopy(RefusingRegistry(checkpoint=1))
    assert "checkpoint" in registry and "replicate" not in registry
    with pytest.raises(WrapperError, match="fully_shard cannot wrap"):
        assert "fully_shard" in registry
