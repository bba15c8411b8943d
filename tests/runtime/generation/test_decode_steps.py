"""Decode steps that are captured and replayed choose the tokens of steps that call the model, and end when they must.

A fake stands in for the CUDA graph, which needs a GPU: see ``models/test_cuda.py`` for that.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from helpers.fake_step_graph import fake_step_graphs
from helpers.generating import Pushed, generation_loop, seeded, tokenizer_of_words
from models.compare import parallel, reference

from paraxis.runtime.generation import loop
from paraxis.tensor.sharded_tensor import ShardedTensor, materialize

IDS = torch.arange(40, 47)[None]
ROWS = torch.arange(90, 120).view(3, 10)
MASK = torch.ones_like(ROWS)
MASK[0, :4], MASK[2, :1] = 0, 0
PADDED: dict[str, Any] = {"inputs": ROWS * MASK, "attention_mask": MASK, "max_new_tokens": 9}
GREEDY: dict[str, Any] = {"inputs": IDS, "max_new_tokens": 9, "do_sample": False, "eos_token_id": None}
DRAWN: dict[str, Any] = {"inputs": IDS, "max_new_tokens": 9, "do_sample": True, "eos_token_id": None}
DRAWN |= {"temperature": 1.4, "top_k": 30, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.3}

Steps = tuple[int, int, int]
CAPTURED, KNOWN = (1, 6, 4), (0, 8, 2)
"""A call with 9 tokens: one prefill and eight steps. Two call the model before a capture, which calls it, too. A graph
that is there already stands for all of them, once the model was called to see that it does."""
ANOTHER = (1, 7, 3)
"""A graph of the same program with another choice of tokens."""


def ended(model: Any, which: slice) -> Any:
    """Rows that end at different steps: a token of each is a stop token."""
    free = model.generate(**PADDED, do_sample=False, eos_token_id=None)[:, ROWS.shape[1] :]
    stops = [int(free[0, 2]), int(free[1, 4]), int(free[2, 5])][which]
    return model.generate(**PADDED, do_sample=False, eos_token_id=stops, pad_token_id=0, min_new_tokens=2)


def fields(model: Any) -> Any:
    """Scores and logits, each in memory of its own."""
    options = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    result = model.generate(**DRAWN, **options)
    cache = result.past_key_values.layers[0].keys
    return [result.sequences, torch.stack(result.scores), torch.stack(result.logits), getattr(cache, "local", cache)]


def growing(model: Any) -> Any:
    """Beyond the capacity of the first cache."""
    with patch.object(loop, "MAX_FIRST", 8):
        return model.generate(**{**GREEDY, "max_new_tokens": 30})


def in_place(model: Any) -> Any:
    """With a weight that was scaled where it is, and then scaled back."""
    weight = model.lm_head.weight
    with torch.no_grad():
        weight.mul_(-1)
        found = model.generate(**GREEDY)
        weight.mul_(-1)
    return found


def move(weight: Any) -> None:
    """Give a parameter other memory with the same values."""
    if isinstance(weight, ShardedTensor):
        materialize(weight, weight.to_local().detach().clone())


def moved(model: Any) -> Any:
    """With a weight in other memory."""
    move(model.lm_head.weight)
    return model.generate(**GREEDY)


def stop_string(model: Any) -> Any:
    """Two calls. A string of two tokens ends the second one after four, of which it hears one step late."""
    free = model.generate(**GREEDY)[0, IDS.shape[1] :]
    tokenizer = tokenizer_of_words(model.config.vocab_size)
    return model.generate(**GREEDY, stop_strings=[f"w{free[2]} w{free[3]}"], tokenizer=tokenizer)


class Moves(Pushed):
    """A streamer that moves a weight after some tokens."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def put(self, value: torch.Tensor) -> None:
        super().put(value)
        if len(self.values) == 6:
            move(self.model.model.norm.weight)


def moved_meanwhile(model: Any) -> Any:
    return model.generate(**GREEDY, streamer=Moves(model))


def hooked(model: Any) -> Any:
    """A hook that counts how often a layer is called."""
    calls: list[Any] = []
    handle = model.model.layers[0].register_forward_hook(lambda *args: calls.append(1))
    found = model.generate(**GREEDY)
    handle.remove()
    return [found, torch.tensor(len(calls))]


def own_forward(model: Any) -> Any:
    """A forward that somebody has put around the model's own."""
    before = model.__dict__.get("forward")
    own = model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        outputs = own(*args, **kwargs)
        outputs.logits = -outputs.logits
        return outputs

    model.forward = forward
    found = model.generate(**GREEDY)
    del model.forward
    if before is not None:
        model.forward = before
    return found


CASES: dict[str, tuple[Callable[[Any], Any], Steps]] = {
    "greedy": (lambda m: m.generate(**GREEDY), CAPTURED),
    "another prompt": (lambda m: m.generate(**{**GREEDY, "inputs": IDS.repeat(1, 2)}), KNOWN),
    "scaled in place": (in_place, KNOWN),
    "drawn": (lambda m: m.generate(**DRAWN), ANOTHER),
    "drawn again": (fields, KNOWN),
    "another temperature": (lambda m: m.generate(**{**DRAWN, "temperature": 0.7}), ANOTHER),
    "drawn once more": (lambda m: m.generate(**DRAWN), KNOWN),
    "greedy again": (lambda m: m.generate(**GREEDY), KNOWN),
    "n-grams": (lambda m: m.generate(**GREEDY, no_repeat_ngram_size=2), ANOTHER),
    "other n-grams": (lambda m: m.generate(**GREEDY, no_repeat_ngram_size=1), KNOWN),
    "stop strings": (stop_string, (0, 12, 4)),
    "streamed": (lambda m: m.generate(**GREEDY, streamer=Pushed()), KNOWN),
    "moved": (moved, CAPTURED),
    "moved meanwhile": (moved_meanwhile, (1, 6, 5)),
    "hooked": (hooked, (0, 0, 9 * 6)),
    "after the hook": (lambda m: m.generate(**GREEDY), KNOWN),
    "own forward": (own_forward, (0, 0, 9)),
    "after it": (lambda m: m.generate(**GREEDY), KNOWN),
    "growing": (growing, (1, 27, 5)),
    "stop tokens": (lambda m: ended(m, slice(0, 2)), (2, 13, 7)),
    "other stop tokens": (lambda m: ended(m, slice(1, 3)), (0, 16, 4)),
}
"""Calls, one after the other: how many steps each captures and replays, and how often it calls the model or, with hooks
that run in Python, the parts of it."""


def in_turn(folder: str) -> list[Any]:
    """(name, whether it is what transformers returns, what was expected of steps, what happened) of every case."""
    (model, _), unsharded = parallel(folder, compile="inductor"), reference(folder)
    model.eval()
    found = []
    with generation_loop() as runs, fake_step_graphs(model, runs) as steps:
        for name, (case, expected) in CASES.items():
            right, result = (seeded(partial(case, m)) for m in (unsharded, model))
            found.append((name, equal(result, right), expected, steps.forget()))
    return found


def equal(found: Any, expected: Any) -> bool:
    """Whether results are the same, but for rounding of scores; of a cache, the heads of this rank."""
    if isinstance(found, (list, tuple)):
        return len(found) == len(expected) and all(map(equal, found, expected))
    if not isinstance(found, torch.Tensor) or not found.is_floating_point():
        return bool(found == expected) if not isinstance(found, torch.Tensor) else torch.equal(found, expected)
    expected = expected[:, : found.shape[1]] if found.dim() == 4 and found.shape != expected.shape else expected
    return found.shape == expected.shape and torch.allclose(found, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("count", [1, pytest.param(2, marks=pytest.mark.long)])
def test_captured_steps_generate_the_same(ranks: Any, checkpoints: Any, count: int) -> None:
    for found in ranks(count).run(in_turn, checkpoints("llama", num_hidden_layers=1), timeout=900):
        assert all(same for _, same, _, _ in found), found
        assert [steps for *_, steps in found] == [expected for *_, expected, _ in found], found
