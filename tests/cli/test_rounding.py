"""Low precision: rounding passes, a wrong weight does not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from paraxis.cli._checks import Check, outputs
from paraxis.cli._rounding import compare_models

IDS = torch.randint(0, 96, (2, 12), generator=torch.Generator().manual_seed(0))


def model(dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, vocab_size=96,
        initializer_range=0.1, bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval().to(dtype)


def run(each: Any, dtype: torch.dtype) -> Any:
    return outputs(each, {"input_ids": IDS, "labels": IDS}, train=True, generate=4)


def rounded_differently(each: Any) -> Any:
    """Sums in another order, as on two ranks: every down projection is a sum of two halves."""
    for block in each.model.layers:
        layer = block.mlp.down_proj

        def forward(x: torch.Tensor, layer: Any = layer) -> torch.Tensor:
            half = x.shape[-1] // 2
            first, second = layer.weight[:, :half], layer.weight[:, half:]
            return x[..., :half] @ first.T + x[..., half:] @ second.T

        layer.forward = forward
    return each


def checks(ours: Any, dtype: torch.dtype) -> dict[str, Check]:
    found = compare_models(run(ours, dtype), model(dtype), run, dtype)
    return {check.name: check for check in found}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_passes(dtype: torch.dtype) -> None:
    found = checks(rounded_differently(model(dtype)), dtype)
    assert list(found) == ["logits (rounding)", "loss (abs)", "gradients (rounding)", "tokens (logit gap)"]
    assert all(check.passed for check in found.values()), found
    assert 0.3 < found["logits (rounding)"].error < 2


def test_a_wrong_weight_does_not_pass() -> None:
    """A single column of one matrix that is zero, as if a rank had missed it."""
    wrong = model(torch.bfloat16)
    wrong.model.layers[1].mlp.down_proj.weight.data[:, 7] = 0
    found = checks(wrong, torch.bfloat16)
    assert not found["logits (rounding)"].passed and not found["gradients (rounding)"].passed


def test_a_gradient_that_is_missing_or_not_a_number_does_not_pass() -> None:
    dtype = torch.bfloat16
    for value in (None, torch.tensor(float("nan"))):
        ours = run(model(dtype), dtype)
        ours.gradients["model.norm.weight"] = value if value is None else value.expand(32)
        found = {check.name: check for check in compare_models(ours, model(dtype), run, dtype)}
        assert not found["gradients (rounding)"].passed


def test_a_token_that_differs_by_more_than_rounding_does_not_pass() -> None:
    """The least likely token instead of the most likely one."""
    dtype = torch.bfloat16
    ours = run(model(dtype), dtype)
    logits = model(dtype)(input_ids=ours.tokens[:1, :6]).logits[0, -1]
    ours.tokens = ours.tokens.clone()
    ours.tokens[0, 6] = logits.argmin()
    found = {check.name: check for check in compare_models(ours, model(dtype), run, dtype)}["tokens (logit gap)"]
    assert not found.passed and found.detail.startswith("1 of")


def test_float32_is_compared_directly() -> None:
    names = list(checks(rounded_differently(model(torch.float32)), torch.float32))
    assert names == ["logits (max abs)", "loss (abs)", "gradients (relative)", "tokens (differing)"]
