"""The generation loop returns what transformers' loop does: tokens, scores, stops, streams, caches, random states."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
from helpers.generating import Pushed, generation_loop, seeded, tokenizer_of_words
from models.compare import parallel, reference

from paraxis.runtime.generation import decode_state, loop

IDS = torch.arange(40, 47)[None]
ROWS = torch.arange(90, 120).view(3, 10)
MASK = torch.ones_like(ROWS)
MASK[0, :4], MASK[2, :1] = 0, 0
PADDED: dict[str, Any] = {"inputs": ROWS * MASK, "attention_mask": MASK}
NEW: dict[str, Any] = {"max_new_tokens": 9, "do_sample": False}
DRAWN: dict[str, Any] = {"max_new_tokens": 9, "do_sample": True}


def stop_tokens(model: Any, **options: Any) -> torch.Tensor:
    """Rows that end at different steps: a token of each is a stop token."""
    free = model.generate(**PADDED, **NEW, eos_token_id=None)[:, ROWS.shape[1] :]
    stops = [int(free[0, 2]), int(free[1, 4]), int(free[2, 5])]
    return model.generate(**PADDED, **NEW, eos_token_id=stops, pad_token_id=0, **options)


def fields(result: Any) -> list[Any]:
    """The parts of a result with fields."""
    found = [result.sequences.tolist(), type(result).__name__, result.attentions, result.hidden_states]
    cache = result.past_key_values
    lengths = [cache.get_seq_length(i) for i in range(len(cache.layers))]
    found += [type(cache).__name__, lengths, [layer.keys.shape[2] for layer in cache.layers]]
    return [*found, result.scores and torch.stack(result.scores), result.logits and torch.stack(result.logits)]


def equal(found: Any, expected: Any) -> bool:
    """Whether results are the same, but for rounding of scores."""
    if isinstance(found, (list, tuple)):
        return len(found) == len(expected) and all(map(equal, found, expected))
    if not isinstance(found, torch.Tensor):
        return bool(found == expected)
    if not found.is_floating_point():
        return torch.equal(found, expected)
    return found.shape == expected.shape and torch.allclose(found, expected, atol=1e-4, rtol=0)


def streamed(model: Any) -> list[Any]:
    """What a streamer gets, of a sequence that stops before its maximum."""
    free = model.generate(IDS, **NEW, eos_token_id=None)
    streamer = Pushed()
    model.generate(IDS, **NEW, eos_token_id=int(free[0, -4]), pad_token_id=0, streamer=streamer)
    return streamer.values


def in_chunks(model: Any) -> torch.Tensor:
    """Generation beyond the capacity of the first cache."""
    with patch.object(loop, "MAX_FIRST", 8):
        return model.generate(**PADDED, max_new_tokens=30, do_sample=False, eos_token_id=None)


def conversation(model: Any) -> Any:
    """A second turn with the returned cache of the first, while a third call is made."""
    first = model.generate(IDS, **NEW, return_dict_in_generate=True, eos_token_id=None)
    model.generate(IDS + 5, **NEW, eos_token_id=None)
    more = torch.cat([first.sequences, IDS[:, :3]], 1)
    return model.generate(more, past_key_values=first.past_key_values, **NEW)


def embedded(model: Any) -> torch.Tensor:
    """A prompt of embeddings."""
    embeddings = model.get_input_embeddings()(ROWS)
    return model.generate(inputs_embeds=embeddings, attention_mask=torch.ones_like(ROWS), **NEW)


def own_static_cache(model: Any) -> torch.Tensor:
    from transformers import StaticCache

    return model.generate(IDS, past_key_values=StaticCache(config=model.config, max_cache_len=40), **NEW)


def own_processor(model: Any) -> torch.Tensor:
    """A processor of the user, which the loop cannot know."""
    from transformers import LogitsProcessor

    class Forbids(LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            return scores.index_fill(1, input_ids[0], -1e4)

    return model.generate(IDS, **NEW, logits_processor=[Forbids()])


def stop_strings(model: Any, **options: Any) -> torch.Tensor:
    """Rows that end with one of two strings, each of two tokens."""
    free = model.generate(**PADDED, **NEW, eos_token_id=None)[:, ROWS.shape[1] :]
    strings = [f"w{free[0, 2]} w{free[0, 3]}", f"w{free[1, 4]} w{free[1, 5]}"]
    options |= {"stop_strings": strings, "tokenizer": tokenizer_of_words(model.config.vocab_size)}
    return model.generate(**PADDED, **NEW, eos_token_id=None, **options)


WAYS = {"temperature": 1.4, "top_k": 30, "top_p": 0.9, "min_p": 0.01, "typical_p": 0.95, "repetition_penalty": 1.2}
CASES: dict[str, Callable[[Any], Any]] = {
    "greedy": lambda m: m.generate(IDS, **NEW),
    "padded": lambda m: m.generate(**PADDED, **NEW, eos_token_id=None),
    "longer": lambda m: m.generate(ROWS.view(1, -1)[:, :20], **NEW),
    "one token": lambda m: m.generate(IDS, max_new_tokens=1, do_sample=False),
    "sampled": lambda m: m.generate(IDS, **DRAWN, **WAYS),
    "sampled with stops": lambda m: m.generate(**PADDED, **DRAWN, eos_token_id=list(range(2, 60)), pad_token_id=0),
    "several sequences": lambda m: m.generate(IDS, **DRAWN, num_return_sequences=3),
    "other processors": lambda m: m.generate(
        IDS, **NEW, no_repeat_ngram_size=2, min_new_tokens=4, suppress_tokens=[7], forced_eos_token_id=9
    ),
    "stop tokens": stop_tokens,
    "stop strings": stop_strings,
    "scores": lambda m: fields(
        m.generate(
            IDS,
            **DRAWN,
            top_k=9,
            return_dict_in_generate=True,
            output_scores=True,
            output_logits=True,
            eos_token_id=None,
        )
    ),
    "stopped scores": lambda m: fields(
        stop_tokens(m, return_dict_in_generate=True, output_scores=True, repetition_penalty=1.0)
    ),
    "streamed": streamed,
    "no time": lambda m: m.generate(IDS, **NEW, max_time=0.0),
    "growing": in_chunks,
    "embeddings": embedded,
    "conversation": conversation,
}
LEFT: dict[str, Callable[[Any], Any]] = {
    "own static cache": own_static_cache,
    "own processor": own_processor,
    "beams": lambda m: m.generate(IDS, **NEW, num_beams=2),
    "dynamic": lambda m: m.generate(IDS, **NEW, cache_implementation="dynamic"),
    "hidden states": lambda m: (
        m.generate(IDS, **NEW, return_dict_in_generate=True, output_hidden_states=True).sequences
    ),
}
"""What transformers' own loop does."""


def differing(folder: str, names: list[str]) -> dict[str, Any]:
    """The cases whose results differ from the unsharded model's, and how many loops each has run."""
    (model, _), unsharded = parallel(folder), reference(folder)
    model.eval()
    differ, counts = [], {}
    for name in names:
        case = (CASES | LEFT)[name]
        expected = seeded(lambda case=case: case(unsharded))
        with generation_loop() as runs:
            found = seeded(lambda case=case: case(model))
        counts[name] = len(runs)
        if not equal(found, expected):
            differ.append((name, found, expected))
    return {"differ": differ, "runs": counts}


SHORT = ["greedy", "padded", "one token", "sampled", "sampled with stops", "other processors", "stop tokens", "scores"]
SHORT += ["stopped scores", "streamed", "no time", "stop strings"]
"""Those that need no program of their own: every other case is long."""


@pytest.mark.parametrize("names", [SHORT, pytest.param([*CASES], marks=pytest.mark.long)], ids=["short", "all"])
def test_results_equal_transformers(ranks: Any, checkpoints: Any, names: list[str]) -> None:
    folder = checkpoints("llama", num_hidden_layers=1)
    for found in ranks(2).run(differing, folder, names, timeout=500):
        assert not found["differ"]
        assert all(found["runs"].values()), found["runs"]


@pytest.mark.long
def test_other_calls_run_transformers_own_loop(ranks: Any, checkpoints: Any) -> None:
    (found,) = ranks(1).run(differing, checkpoints("llama", num_hidden_layers=1), [*LEFT], timeout=500)
    assert not found["differ"]
    assert not any(found["runs"].values()), found["runs"]


@pytest.mark.long
@pytest.mark.parametrize("name", ["gpt2", "gemma2", "mixtral", "bloom", "gptj"])
def test_other_architectures_generate_the_same(ranks: Any, checkpoints: Any, name: str) -> None:
    """Learned positions, sliding windows that are shorter than the sequence, experts, ALiBi."""
    (found,) = ranks(1).run(differing, checkpoints(name), ["greedy", "padded", "sampled with stops"], timeout=500)
    assert not found["differ"]
    assert all(found["runs"].values()), found["runs"]


def without_a_preallocated_cache(folder: str) -> dict[str, Any]:
    """A sampled generation while steps on a preallocated cache fail, and a second one."""
    (model, _), unsharded = parallel(folder), reference(folder)
    model.eval()
    expected = [seeded(lambda: unsharded.generate(IDS, **DRAWN), seed) for seed in (3, 4)]
    streamers = [Pushed(), Pushed()]
    with generation_loop() as runs, patch.object(decode_state, "preallocated_cache", lambda *args: 1 / 0):
        found = [
            seeded(lambda streamer=streamer: model.generate(IDS, **DRAWN, streamer=streamer), seed)
            for seed, streamer in zip((3, 4), streamers, strict=True)
        ]
    tokens = [[token for put in s.values[1:-1] for token in put] for s in streamers]
    return {"same": equal(found, expected), "runs": len(runs), "streamed": tokens, "expected": [f[0] for f in found]}


def test_a_model_that_cannot_do_it_generates_by_transformers_loop(ranks: Any, checkpoints: Any) -> None:
    (found,) = ranks(1).run(without_a_preallocated_cache, checkpoints("llama", num_hidden_layers=1))
    assert found["same"] and found["runs"] == 1, "the loop is tried once"
    for tokens, streamed_tokens in zip(found["expected"], found["streamed"], strict=True):
        assert tokens[0, IDS.shape[1] :].tolist() == streamed_tokens, "no token was streamed twice"


def compilations(folder: str, compile: str | None) -> dict[str, Any]:
    """How often prompts of many lengths compile after the first call, and a long generation after them; whether tokens
    are the unsharded model's. Caches have a 32nd of their size, and so have the lengths: from 1 to 96."""
    (model, ctx), unsharded = parallel(folder, compile=compile), reference(folder)
    model.eval()
    lengths = [16, *torch.randperm(96, generator=torch.Generator().manual_seed(1)).add(1).tolist()[:20], 1, 96, 1, 2]
    counts, same = [], []

    def generate(length: int, new: int) -> None:
        ids = torch.arange(length)[None] % 90 + 3
        options = {"max_new_tokens": new, "do_sample": False, "eos_token_id": None}
        same.append(torch.equal(model.generate(ids, **options), unsharded.generate(ids, **options)))
        counts.append(ctx.compile_times)

    with generation_loop() if compile else nullcontext([]) as runs:
        for length in lengths:
            generate(length, 3)
        generate(20, 70)
    return {"same": all(same), "later": counts[-2] - counts[0], "long": counts[-1] - counts[-2], "runs": len(runs)}


@pytest.mark.parametrize("compile", ["inductor", pytest.param(None, marks=pytest.mark.long)])
def test_prompts_of_all_lengths_compile_three_times_at_most(ranks: Any, checkpoints: Any, compile: str | None) -> None:
    (found,) = ranks(1).run(compilations, checkpoints("llama", num_hidden_layers=1), compile, timeout=500)
    assert found["same"]
    assert found["later"] <= 3 and found["long"] == 0, found
    assert found["runs"] == (26 if compile else 0)
