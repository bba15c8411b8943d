"""Masks of decoders that are not causal: those of the eager model, with and without padding."""

from __future__ import annotations

import gc
from functools import wraps
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from models import tiny
from models.compare import max_difference, parallel, reference

from paraxis.compat import attention_masks
from paraxis.compat.attention_masks import _without_padding, note_full_attention

CAUSAL = torch.ones(1, 1, 4, 4, dtype=torch.bool).tril()


def build(full: bool) -> Any:
    """A decoder whose attention modules say that they are causal, or that they are not."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    fields = {**tiny.LLAMA, "head_dim": 8, "num_hidden_layers": 1, "initializer_range": 0.1}
    config = AutoConfig.for_model("gemma", **fields, use_bidirectional_attention=full)
    return AutoModelForCausalLM.from_config(config).eval()


def errors(folder: str) -> dict[str, float]:
    """The error of the logits per kind of call."""
    model, _ = parallel(folder)
    unsharded = reference(folder)
    ids = torch.randint(3, 100, (2, 6), generator=torch.Generator().manual_seed(1))
    ones, positions = torch.ones_like(ids), torch.arange(6)[None]
    padded = torch.cat([torch.zeros_like(ids[:, :2]), ones[:, 2:]], 1)
    calls: dict[str, dict[str, Any]] = {
        "no mask": {},
        "ones": {"attention_mask": ones},
        "padding": {"attention_mask": padded},
        "packed": {"position_ids": positions % 3, "use_cache": False},
        "in a row": {"position_ids": positions, "use_cache": False},
    }
    with torch.no_grad():
        return {
            name: max_difference(model(ids, **call).logits, unsharded(ids, **call).logits)
            for name, call in calls.items()
        }


def test_a_decoder_that_is_not_causal_has_the_masks_of_the_eager_model(ranks: Any, tmp_path: Any) -> None:
    build(full=True).save_pretrained(tmp_path)
    (found,) = ranks(1).run(errors, str(tmp_path))
    assert max(found.values()) < 1e-5, found


def test_configurations_are_those_of_modules_that_are_not_causal() -> None:
    causal, full = build(full=False), build(full=True)
    note_full_attention(causal)
    note_full_attention(full)
    assert id(full.config) in attention_masks._full and id(causal.config) not in attention_masks._full
    key = id(full.config)
    del full
    gc.collect()
    assert key not in attention_masks._full


def test_masks_without_padding_are_left_out() -> None:
    ones = torch.ones(2, 4, dtype=torch.long)
    assert _without_padding(CAUSAL, None) is None
    found = _without_padding(CAUSAL, None, attention_mask=ones)
    assert found is not None and bool(found.all())
    padding = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]])
    assert _without_padding(CAUSAL, None, attention_mask=padding).equal(CAUSAL)  # type: ignore[union-attr]
    positions = torch.tensor([[0, 1, 0, 1]])
    assert _without_padding(CAUSAL, None, position_ids=positions).equal(CAUSAL)  # type: ignore[union-attr]
    assert _without_padding(CAUSAL, None, position_ids=positions, past_key_values=object()) is None


@pytest.mark.parametrize(
    "kwargs",
    [{"allow_is_causal_skip": False}, {"block_sequence_ids": CAUSAL}, {"attention_mask": CAUSAL}],
    ids=["always", "blocks", "own"],
)
def test_other_masks_stay(kwargs: dict[str, Any]) -> None:
    assert _without_padding(CAUSAL, None, **kwargs) is CAUSAL
    assert _without_padding(CAUSAL, 4) is CAUSAL and _without_padding(CAUSAL[..., :2], None).equal(CAUSAL[..., :2])  # type: ignore[union-attr]
    assert _without_padding(CAUSAL, 5) is None


def test_a_class_that_says_what_its_attention_is_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    def decorated(function: Any) -> Any:
        return wraps(function)(lambda *args: function(*args))

    class Caller:
        @decorated
        @decorated
        def forward(self, x: Any) -> Any:
            return x(is_causal=True)

    model = build(full=True)
    kind = type(next(m for m in model.modules() if hasattr(m, "is_causal")))
    namespace = vars(attention_masks.sys.modules[kind.__module__])
    monkeypatch.setitem(namespace, "Caller", Caller)
    note_full_attention(model)
    assert id(model.config) not in attention_masks._full
    note_full_attention(torch.nn.Linear(1, 1))
    assert attention_masks._is_told(SimpleNamespace, set()) is False
