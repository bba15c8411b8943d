"""Which parameters are quantized according to a configuration, and how they are split."""

from __future__ import annotations

import torch
from models.quantized import build

from paraxis.weights.quantized.format import Quantization, Rule
from paraxis.weights.quantized.fp8 import BlockFP8
from paraxis.weights.quantized.parameters import expected, full_precision, quantized_weight
from paraxis.weights.quantized.pieces import Composition, Piece
from paraxis.weights.quantized.stored import Stored

FORMAT = BlockFP8((16, 16))


def test_linear_layers_and_stacks_are_expected() -> None:
    model = build("moe")
    found = expected(model, Quantization("fp8", [Rule(FORMAT)]))
    assert "model.layers.0.self_attn.q_proj.weight" in found and "model.layers.0.mlp.experts.down_proj" in found
    assert not {
        "lm_head.weight",
        "model.embed_tokens.weight",
        "model.norm.weight",
        "model.layers.0.mlp.gate.weight",
    } & {*found}
    assert id(model.lm_head.weight) in full_precision(model)
    chosen = expected(model, Quantization("fp8", [Rule(FORMAT)], ["mlp"]))
    assert {name.split(".")[3] for name in chosen if ".layers." in name} == {"self_attn"}
    assert "lm_head.weight" in chosen  # the list says what is not quantized, and does not have it


def test_parts_of_a_stack_of_two_halves() -> None:
    """Two experts of two weights with 20 rows each: blocks of 16 rows begin anew in the second."""
    headers = {".weight": torch.empty(20, 32).to(torch.float8_e4m3fn), ".weight_scale_inv": torch.empty(2, 2)}
    stored = [Stored(key, FORMAT, {}, (20, 32), headers) for key in "abcd"]
    stack = [[Piece(stored[0], 0, 20), Piece(stored[1], 0, 20)], [Piece(stored[2], 0, 20), Piece(stored[3], 0, 20)]]
    found = quantized_weight(Composition(stack, True, False, 32), (2, 40, 32))
    assert {name: part.shape for name, part in found.parts.items()} == {"codes": (2, 40, 32), "scales": (2, 4, 2)}
    assert found.row_dim == 1 and found.column_dim == 2 and found.format == "fp8"
    other = quantized_weight(Composition(stack, True, True, 32), (2, 32, 40))
    assert other.parts["scales"].shape == (2, 4, 2) and other.row_dim == 2 and other.column_dim == 1
