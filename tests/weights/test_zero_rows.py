"""Rows that are zero whatever the checkpoint has in them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from models.compare import parallel
from torch import nn
from transformers import LlamaConfig, LlamaModel, initialization
from zoo.multimodal_cases import build
from zoo.multimodal_inputs import inputs_of

from paraxis.placement import REPLICATE, Layout, Replicate, Shard
from paraxis.plan.offline import simulated_group
from paraxis.tensor.sharded_tensor import materialize
from paraxis.weights.meta_init import attach_parameter_meta
from paraxis.weights.zero_rows import mark_zero_rows, zero_rows

SMALL = {"vocab_size": 12, "hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1}


class Zeroing(LlamaModel):
    """Writes into the rows of a child's weight, which no mark protects, and into all of what is marked."""

    def is_custom_code(self) -> bool:  # of which loaded modules are left alone
        return False

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, LlamaModel):
            initialization.normal_(module.embed_tokens.weight)
            initialization.zeros_(module.embed_tokens.weight[3])
            initialization.zeros_(module.embed_tokens.weight[-2:])
            initialization.zeros_(module.norm.weight)
            if type(module.embed_tokens.weight) is not nn.Parameter:  # what cannot be followed ends the look at it
                raise ValueError


def marked(model: nn.Module) -> dict[str, Any]:
    """The rows of every parameter that are marked."""
    parameters = attach_parameter_meta(model, torch.device("cpu"))
    mark_zero_rows(model)
    return {name: p.spec.zero_rows for name, p in parameters.items() if p.spec.zero_rows}  # type: ignore[attr-defined]


def test_rows_are_found_in_the_code_of_the_class() -> None:
    model = Zeroing(LlamaConfig(**SMALL, pad_token_id=0))
    before = torch.random.get_rng_state()
    assert marked(model) == {"embed_tokens.weight": ((3, 4), (10, 12))}
    assert torch.equal(torch.random.get_rng_state(), before)
    assert not any("_is_hf_initialized" in p.__dict__ for p in model.parameters())
    # the padding row of a usual model is protected with the weight that it is in
    assert marked(LlamaModel(LlamaConfig(**SMALL, pad_token_id=0))) == {}
    assert marked(nn.Embedding(4, 4, padding_idx=1)) == {}


def test_rows_of_shards_are_set_to_zero() -> None:
    for placement in (REPLICATE, Shard.of(0, Layout.even(12, 2)), Shard.of(1, Layout.even(8, 2))):
        full = torch.ones(12, 8)
        full[3], full[-2:] = 0, 0
        for rank in range(2):
            model = Zeroing(LlamaConfig(**SMALL))
            with simulated_group(2, rank=rank) as group:
                attach_parameter_meta(model, torch.device("cpu"), group)
                mark_zero_rows(model)
                parameter: Any = model.embed_tokens.weight
                parameter.spec.placement = placement
                local = full if isinstance(placement, Replicate) else full.chunk(2, placement.layouts[0][0])[rank]
                materialize(parameter, torch.ones_like(local))
                zero_rows([parameter], rank)
                assert torch.equal(parameter.local, local)


def logits_of_padding(folder: str, inputs: dict[str, Any], padding: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What the model computes, and the row of the padding token."""
    model, _ = parallel(folder)
    with torch.no_grad():
        logits = model(**inputs).logits
    row = next(p for n, p in model.named_parameters() if n.endswith("embed_tokens.weight"))
    return logits, row.full_tensor()[padding]


def test_padding_row_is_zero_where_from_pretrained_zeroes_it(ranks: Any, tmp_path: Path) -> None:
    model = build("kosmos-2:Kosmos2ForConditionalGeneration")
    table = model.text_model.model.embed_tokens
    with torch.no_grad():
        table.weight[table.padding_idx] = 0.5
    model.save_pretrained(tmp_path)
    inputs = inputs_of(model)
    inputs["input_ids"][:, -2] = table.padding_idx
    plain = type(model).from_pretrained(tmp_path).eval()
    with torch.no_grad():
        right = plain(**inputs).logits
        assert (right - model.eval()(**inputs).logits).abs().max() > 1e-4, "transformers has changed: nothing is zeroed"
    for logits, row in ranks(2).run(logits_of_padding, str(tmp_path), inputs, table.padding_idx):
        assert (logits - right).abs().max() < 1e-4 and not row.any()
