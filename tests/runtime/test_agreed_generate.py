"""``generate``: the same arguments and tokens on all ranks, or an error on all of them."""

from __future__ import annotations

import time
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from models.compare import parallel
from transformers import LogitsProcessor

from paraxis import CollectiveError, RankMismatchError
from paraxis.runtime import agreed_generate
from ranks import spawn_ranks

IDS = torch.arange(3, 13)[None]


class Draws(LogitsProcessor):
    """Prefers one token, and from some length on another one on every rank."""

    def __init__(self, length: int = 12) -> None:
        self.length = length

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.clone()
        scores[:, 5 + (dist.get_rank() if input_ids.shape[1] > self.length else 0)] = 1e4
        return scores


def message(function: Any, *args: Any, **kwargs: Any) -> str:
    try:
        function(*args, **kwargs)
    except RankMismatchError as error:
        return str(error)
    return ""


def generates(folder: str) -> tuple[Any, dict[str, str]]:
    model, _ = parallel(folder)
    rank = dist.get_rank()
    torch.manual_seed(rank)
    tokens = model.generate(IDS, max_new_tokens=6, do_sample=True)
    return tokens, {
        "inputs": message(model.generate, IDS + rank, max_new_tokens=4),
        "length": message(model.generate, IDS, max_new_tokens=4 + rank),
        "processor": message(model.generate, IDS, max_new_tokens=6, logits_processor=[Draws()]),
        "last token": message(model.generate, IDS, max_new_tokens=4, logits_processor=[Draws(length=12)]),
    }


def test_arguments_and_tokens_must_agree(ranks: Any, checkpoints: Any) -> None:
    results = ranks(2).run(generates, checkpoints("llama", num_hidden_layers=1))
    assert torch.equal(results[0][0], results[1][0]), "rank 0's random state decides"
    for _, found in results:
        assert "the values of inputs on rank 1 differ" in found["inputs"]
        assert "max_new_tokens differs: 4 on rank 0, 5 on rank 1" in found["length"]
        assert "The ranks sampled different tokens" in found["processor"]
        assert "output" in found["last token"] and "sampled different tokens" in found["last token"]


def stops_early(folder: str) -> None:
    """The second rank draws the end of the text, the first goes on."""
    model, _ = parallel(folder)
    model.generate(IDS, max_new_tokens=20, eos_token_id=6, logits_processor=[Draws()])


def test_a_rank_that_stops_early_is_noticed_by_all(checkpoints: Any) -> None:
    for outcome in spawn_ranks(2, stops_early, checkpoints("llama", num_hidden_layers=1), timeout=120):
        assert outcome.error == "RankMismatchError" and "rank 1 is in the end of generate" in outcome.message


def elsewhere(folder: str, target: str, mesh: bool) -> tuple[str, float]:
    from models.meshes import parallel_on_mesh

    options: dict[str, Any] = {"sync_timeout": 4}
    model = (parallel_on_mesh(folder, 1, 2, **options) if mesh else parallel(folder, **options))[0]
    started = time.monotonic()
    try:
        if dist.get_rank() == 0:
            model.generate(IDS, max_new_tokens=4)
        else:
            model.save_pretrained(target)
    except (CollectiveError, TimeoutError) as error:
        time.sleep(3)  # the other rank must not depend on the end of this one
        return str(error), time.monotonic() - started
    return "", 0.0


def test_ranks_in_different_calls_say_which(checkpoints: Any, tmp_path: Any) -> None:
    folder = checkpoints("llama", num_hidden_layers=1)
    for outcome in spawn_ranks(2, elsewhere, folder, str(tmp_path / "saved"), False, timeout=120):
        text, seconds = outcome.value
        assert "rank 0: generate" in text and "rank 1: save_pretrained" in text and "test_agreed_generate.py:" in text
        assert seconds < 15


def alone(folder: str) -> tuple[str, float]:
    """The second rank does not call generate."""
    model, _ = parallel(folder, sync_timeout=3)
    started = time.monotonic()
    if dist.get_rank() == 1:
        time.sleep(8)
        return "", 0.0
    try:
        model.generate(IDS, max_new_tokens=4)
    except TimeoutError as error:
        return str(error), time.monotonic() - started
    return "", 0.0


def test_a_rank_that_does_not_call_generate_is_waited_for_as_long_as_sync_timeout_says(checkpoints: Any) -> None:
    text, seconds = spawn_ranks(2, alone, checkpoints("llama", num_hidden_layers=1), timeout=120)[0].value
    assert "generate: rank 1 did not answer within 3 s" in text and 3 <= seconds < 7
    assert "rank 0: generate at test_agreed_generate.py:" in text and "rank 1: a forward, or code of its own" in text
    assert "sync_timeout" in text


def generates_without_unsharding(folder: str) -> bool:
    """Whether a call looks at no parameter where data-parallel ranks shard none: there may be thousands."""
    model, _ = parallel(folder)
    with patch.object(agreed_generate, "unsharded_for_inference", side_effect=AssertionError):
        return bool(model.generate(IDS, max_new_tokens=1, do_sample=False).shape[1] == IDS.shape[1] + 1)


def test_parameters_are_looked_at_only_if_data_parallel_ranks_shard_them(ranks: Any, checkpoints: Any) -> None:
    assert ranks(2).run(generates_without_unsharding, checkpoints("llama", num_hidden_layers=1)) == [True, True]
