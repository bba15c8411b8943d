"""The generation loop on CPU ranks, where it does not run by default, against transformers' own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

from paraxis.runtime.generation import cache_sizes, install, loop


@contextmanager
def generation_loop(capacity: int = 32) -> Iterator[list[Any]]:
    """Inside, models generate by the loop, with caches of at least this capacity; the loops that have run."""
    runs: list[Any] = []
    run = loop.GenerationLoop.run

    def noted(self: Any) -> Any:
        runs.append(self)
        return run(self)

    with (
        patch.object(install, "fast_generation", lambda *args: True),
        patch.object(cache_sizes, "FIRST_CAPACITY", capacity),
        patch.object(loop.GenerationLoop, "run", noted),
    ):
        yield runs


class Pushed:
    """A streamer that remembers."""

    def __init__(self) -> None:
        self.values: list[Any] = []

    def put(self, value: torch.Tensor) -> None:
        assert value.device.type == "cpu"
        self.values.append(value.tolist())

    def end(self) -> None:
        self.values.append("end")


def seeded(function: Any, seed: int = 3) -> tuple[Any, float]:
    """The result of a function with this seed, and what is drawn after it."""
    torch.manual_seed(seed)
    return function(), float(torch.rand(()))


def tokenizer_of_words(size: int) -> Any:
    """A tokenizer whose tokens are words: ``w0``, ``w1`` and so on."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"abcdef": 0, **{f"w{i}": i for i in range(1, size)}}  # transformers looks for strings behind "abcdef"
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w1"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w1")
