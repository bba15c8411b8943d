"""A parallel model is used as the unsharded one: sampling, training, dropout, hidden states."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from models.compare import batch, context, gradient_errors, max_difference, parallel, parameter_errors, reference
from models.tiny import build
from torch import nn

from paraxis import parallelize_model


@pytest.fixture
def checkpoint(checkpoints: Any) -> str:
    return checkpoints("llama-tied")


def sample_with_different_seeds(folder: str) -> Any:
    """(tokens of this rank, tokens of the unsharded model with the first rank's seed)"""
    model, _ = parallel(folder)
    ids, _ = batch(model.config.vocab_size)
    torch.manual_seed(10 + dist.get_rank())
    tokens = model.generate(ids, max_new_tokens=8, do_sample=True)
    unsharded = reference(folder)
    torch.manual_seed(10)
    return tokens, unsharded.generate(ids, max_new_tokens=8, do_sample=True)


def test_all_ranks_sample_the_first_ranks_tokens(checkpoint: str, ranks: Any) -> None:
    (first, expected), (second, _) = ranks(2).run(sample_with_different_seeds, checkpoint)
    assert torch.equal(first, second) and torch.equal(first, expected)


def train_against_unsharded(folder: str) -> dict[str, Any]:
    """Three steps of AdamW with accumulated and clipped gradients."""
    model, _ = parallel(folder)
    unsharded = reference(folder)
    ids, labels = batch(256)
    losses = []
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, unsharded)]
    for _ in range(3):
        for m, optimizer in zip((model, unsharded), optimizers, strict=True):
            m.train()
            for row in range(2):
                loss = m(input_ids=ids[row : row + 1], labels=labels[row : row + 1]).loss
                loss.backward()
                losses.append(loss.item())
            nn.utils.clip_grad_norm_(m.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return {"losses": losses, "parameters": parameter_errors(model, unsharded)}


@pytest.mark.long
def test_training_follows_the_unsharded_model(checkpoint: str, ranks: Any) -> None:
    for found in ranks(2).run(train_against_unsharded, checkpoint):
        losses = torch.tensor(found["losses"]).view(3, 2, 2)  # step, model, row
        assert (losses[:, 0] - losses[:, 1]).abs().max() < 1e-4
        assert losses[-1, 0].mean() < losses[0, 0].mean()
        assert max(found["parameters"].values()) < 1e-3


def train_with_dropout(folder: str) -> list[Any]:
    """Two losses and a replicated gradient, of ranks with different seeds."""
    torch.manual_seed(dist.get_rank())
    model, _ = parallel(folder, resid_pdrop=0.3, embd_pdrop=0.3, attn_pdrop=0.3)
    model.train()
    ids, labels = batch(256)
    losses = [model(input_ids=ids, labels=labels).loss for _ in range(2)]
    losses[0].backward()
    return [*(x.detach() for x in losses), model.transformer.ln_f.weight.grad.to_local()]


def test_dropout_masks_agree_between_ranks(ranks: Any, checkpoints: Any) -> None:
    first, second = ranks(2).run(train_with_dropout, checkpoints("gpt2"))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert first[0] != first[1], "dropout does nothing"


def checkpoint_activations(folder: str) -> dict[str, float]:
    """Gradient errors of a model with activation checkpointing."""
    model, _ = parallel(folder)
    unsharded = reference(folder)
    ids, labels = batch(256)
    model.train()
    model.gradient_checkpointing_enable()
    model(input_ids=ids, labels=labels, use_cache=False).loss.backward()
    unsharded(input_ids=ids, labels=labels).loss.backward()
    return gradient_errors(model, unsharded)


def test_activation_checkpointing_keeps_gradients(checkpoint: str, ranks: Any) -> None:
    for errors in ranks(2).run(checkpoint_activations, checkpoint):
        assert max(errors.values()) < 1e-3


def return_internals(name: str, layers: int) -> dict[str, Any]:
    """Attentions and hidden states of a call."""
    model, unsharded = (build(name, num_hidden_layers=layers, attn_implementation="eager") for _ in range(2))
    parallelize_model(model, context())
    ids, _ = batch(256)
    options: dict[str, Any] = {"output_attentions": True, "output_hidden_states": True}
    with torch.no_grad():
        ours, theirs = model(input_ids=ids, **options), unsharded(input_ids=ids, **options)
    pairs = [
        *zip(ours.attentions, theirs.attentions, strict=True),
        *zip(ours.hidden_states, theirs.hidden_states, strict=True),
    ]
    return {
        "differences": [max_difference(a, b) for a, b in pairs],
        "types": {type(a).__name__ for a, _ in pairs},
    }


@pytest.mark.parametrize("layers", [2, 5])  # of a deep model, planning captures only the first blocks
def test_attentions_and_hidden_states_are_full_tensors(ranks: Any, layers: int) -> None:
    for found in ranks(2).run(return_internals, "llama", layers):
        assert len(found["differences"]) == 2 * layers + 1
        assert max(found["differences"]) < 1e-4 and found["types"] == {"Tensor"}
