"""Small models and planned parameters that the tests of this folder share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from paraxis.placement import REPLICATE, Layout, Placement, Shard
from paraxis.weights.meta_init import MetaAwareMethodsPatcher, attach_parameter_meta, tied_names
from paraxis.weights.weight_map import match_parameters

transformers.logging.set_verbosity_error()

SIZES: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {"num_key_value_heads": 2, "intermediate_size": 64},
    "GPT2LMHeadModel": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "BloomForCausalLM": {"n_layer": 2, "n_head": 4},
    "FalconForCausalLM": {},
    "OPTForCausalLM": {"ffn_dim": 64, "max_position_embeddings": 64, "word_embed_proj_dim": 32},
    "Gemma2ForCausalLM": {"num_key_value_heads": 2, "intermediate_size": 64, "head_dim": 8},
    "MambaForCausalLM": {"state_size": 4},
    "MixtralForCausalLM": {"num_key_value_heads": 2, "intermediate_size": 64, "num_local_experts": 4},
    "GPTNeoForCausalLM": {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]},
}


def tiny_config(name: str, **overrides: Any) -> Any:
    sizes = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    return getattr(transformers, name).config_class(**{**sizes, **SIZES[name], **overrides})


def tiny_model(name: str, **overrides: Any) -> Any:
    torch.manual_seed(0)
    return getattr(transformers, name)(tiny_config(name, **overrides))


def save(model: Any, folder: Path, files: int = 1) -> Path:
    """Save ``model`` in about so many files."""
    size = sum(p.nbytes for p in model.parameters())
    model.save_pretrained(folder, max_shard_size=max(size // files, 1) if files > 1 else "50GB")
    return folder


@contextmanager
def fake_rank(rank: int, world: int) -> Iterator[dist.ProcessGroup]:
    """Be one rank of a group whose other ranks do not exist: enough for all that needs no communication."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        assert dist.group.WORLD is not None
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def place(params: Mapping[str, nn.Parameter], world: int) -> None:
    """A placement for every parameter: of all kinds, by its number."""
    for number, param in enumerate(params.values()):
        meta = param.meta_info  # type: ignore[attr-defined]
        meta.placement = some_placement(tuple(param.shape), world, number)


def some_placement(shape: tuple[int, ...], world: int, number: int) -> Placement:
    if not shape or number % 6 == 0:
        return REPLICATE
    dim = number % len(shape)
    if number % 6 == 5:
        return _blocks(shape, world, dim)
    if number % 6 == 4 and shape[dim] % 4 == 0:  # packed, and small enough to repeat
        return Shard.of(dim, Layout.concat([(1, Layout.even(1, world)), (3, Layout.even(3, world))]))
    if number % 6 == 3 and shape[dim] % 8 == 0:  # packed from unequal segments
        half = shape[dim] // 2
        parts = [(half, Layout.even(half, world)), (half // 2, Layout.even(half // 2, world))] * 2
        return Shard.of(dim, Layout.concat(parts[:2] + [parts[1]]))
    return Shard.of(dim, Layout.even(shape[dim], world))


def _blocks(shape: tuple[int, ...], world: int, dim: int) -> Placement:
    """Two by two blocks on four ranks; rows or columns on another number of them."""
    if world != 4 or len(shape) < 2 or shape[0] % 2 or shape[1] % 2:
        return Shard.of(dim, Layout.even(shape[dim], world))
    rows = [[(r // 2 * shape[0] // 2, (r // 2 + 1) * shape[0] // 2)] for r in range(4)]
    columns = [[(r % 2 * shape[1] // 2, (r % 2 + 1) * shape[1] // 2)] for r in range(4)]
    return Shard.of({0: Layout.of(shape[0], rows), 1: Layout.of(shape[1], columns)})


def planned(
    name: str, world: int, group: dist.ProcessGroup | None, **overrides: Any
) -> tuple[Any, dict[str, nn.Parameter]]:
    """A model without weights whose parameters have placements."""
    with MetaAwareMethodsPatcher():
        model = getattr(transformers, name)(tiny_config(name, **overrides))
    params = attach_parameter_meta(model, torch.device("cpu"), group)
    place(params, world)
    return model, params


def model_on_meta(name: str, **overrides: Any) -> Any:
    """A tiny model without memory for its parameters."""
    with MetaAwareMethodsPatcher():
        return getattr(transformers, name)(tiny_config(name, **overrides))


def matched(model: Any, weight_map: dict[str, str]) -> tuple[dict[str, nn.Parameter], dict[str, str]]:
    """The parameters of a model, and the keys of a checkpoint that they match."""
    params = attach_parameter_meta(model, torch.device("cpu"))
    return params, match_parameters(params, tied_names(model), weight_map, model.base_model_prefix, model)
