"""Paged attention as an operator, and as an attention implementation of transformers."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from models.tiny import build

from paraxis.compat.paged_attention import (
    PAGED,
    PAGED_ATTENTION,
    Scoring,
    attend_causal,
    paged_step,
    register_paged_attention,
)
from paraxis.compat.transformers import set_attention_implementation


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2"])
def test_without_a_step_a_model_computes_what_it_always_does(name: str) -> None:
    """Causal attention of one sequence: grouped queries, a window with capped scores, learned positions."""
    register_paged_attention()
    model, ids = build(name), torch.tensor([list(range(3, 20))])
    set_attention_implementation(model.config, "eager")
    with torch.no_grad():
        right = model(ids).logits
        set_attention_implementation(model.config, PAGED)
        found = model(ids, position_ids=torch.arange(17)[None], use_cache=False).logits
    torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-4)


def test_what_the_operator_cannot_compute_is_refused() -> None:
    from transformers import AttentionInterface

    register_paged_attention()
    attend = AttentionInterface()[PAGED]
    module, q = torch.nn.Module(), torch.randn(1, 2, 3, 8)
    for options, problem in (
        ({"is_causal": False}, "attends to later tokens"),
        ({"position_bias": q}, "adds a bias"),
        ({"key": q[:, :, :2]}, "keys of other tokens"),
    ):
        arguments: dict[str, Any] = {"key": q, "value": q, "attention_mask": None, **options}
        with pytest.raises(NotImplementedError, match=problem):
            attend(module, q, **arguments)
    with pytest.raises(NotImplementedError, match="a mask of its own"):
        attend(module, q, q, q, torch.ones(3, 3))


def test_a_step_gets_the_calls_of_the_operator() -> None:
    class Step:
        heads: Any = None

        def attend(self, query: Any, key: Any, value: Any, *rest: Any) -> torch.Tensor:
            self.heads = list(rest[-1])
            return torch.ones_like(query)

    q, step = torch.randn(1, 2, 3, 8), Step()
    with paged_step(step):
        out = PAGED_ATTENTION(q, q, q, None, 1.0, 0, 0.0, [4, 5])
        with pytest.raises(RuntimeError, match="a step of a batch already"), paged_step(step):
            pass
    assert out.shape == q.shape and bool((out == 1).all()) and step.heads == [4, 5]


def test_threads_run_steps_of_their_own() -> None:
    """Two models of one process may have a batch each."""

    class Step:
        def __init__(self, value: float) -> None:
            self.value = value

        def attend(self, query: Any, *_: Any) -> torch.Tensor:
            return torch.full_like(query, self.value)

    q, both = torch.randn(1, 2, 3, 8), threading.Barrier(2)

    def run(value: float) -> float:
        with paged_step(Step(value)):
            both.wait(30)
            found = float(PAGED_ATTENTION(q, q, q, None, 1.0, 0, 0.0, [])[0, 0, 0, 0])
            both.wait(30)
        return found

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(run, (1.0, 2.0))) == [1.0, 2.0]


def test_chunks_attend_to_what_is_before_them() -> None:
    torch.manual_seed(0)
    q, k = torch.randn(9, 4, 8), torch.randn(9, 2, 8)
    for window, softcap in ((0, 0.0), (4, 0.0), (0, 3.0)):
        right = attend_causal(q, k, k, 0, Scoring(0.3, window, softcap))
        found = attend_causal(q[5:], k, k, 5, Scoring(0.3, window, softcap))
        torch.testing.assert_close(found, right[5:])
