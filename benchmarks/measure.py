"""One contender, on every rank: ``python measure.py CONTENDER FOLDER PART``, started by `turns`.

PART is ``generation`` or ``training``: separate processes, so that the memory of one does not count for the other.
Memory is sampled while the model loads and in its first turns, which are not timed: sampling takes time.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from contenders import ALONE, CONTENDERS
from turns import Player

PROMPT, PROMPTS, TOKENS = 512, 2, 24
WATCHED = 4
"""Turns in which memory is sampled: the peak is reached after a few."""


def main(name: str, folder: str, part: str) -> None:
    """Measure, and report an error to the caller."""
    player = Player(name, part)
    try:
        play(player, name, folder, part)
    except Exception as error:
        player.say({"error": f"{type(error).__name__}: {error}"})
        raise


def play(player: Player, name: str, folder: str, part: str) -> None:
    """Load the model, then measure whenever it is this contender's turn."""
    warnings.filterwarnings("ignore")
    from transformers import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    alone = name in ALONE
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    torch.set_num_threads(1)
    if not alone:
        dist.init_process_group("gloo")
    memory = Memory().start()
    started = time.perf_counter()
    model = CONTENDERS[name](folder, device).eval()
    result: dict[str, Any] = {"contender": name, "load": time.perf_counter() - started}
    result |= getattr(model, "known", {})
    turn = Training(model, device) if part == "training" else Generation(model, device)
    first = turn()
    result["first"] = first["training"] if part == "training" else first["prefill"][0]
    for _ in range(WATCHED - 1):
        turn()
    if part == "generation":
        result.setdefault("collectives", collectives(model, device))
    result[f"memory_{part}"] = memory.stop() + mapped(model) / 2**20
    while player.answer(result):
        if not alone:
            dist.barrier()  # ranks do not wake up at the same time
        result = turn()
    if not alone:
        dist.barrier()


class Memory(threading.Thread):
    """The peak anonymous memory of the process, in MiB, sampled every few milliseconds.

    Not the resident memory: of a mapped file, that contains pages that were read ahead.
    """

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.highest = 0.0
        self.over = threading.Event()

    def start(self) -> Memory:  # type: ignore[override]
        """Start sampling."""
        super().start()
        return self

    def stop(self) -> float:
        """Stop sampling; returns the peak."""
        self.over.set()
        self.join()
        return self.highest

    def run(self) -> None:
        """Sample until stopped."""
        while not self.over.is_set():
            for line in Path("/proc/self/status").read_text().splitlines():
                if line.startswith("RssAnon"):
                    self.highest = max(self.highest, int(line.split()[1]) / 1024)
            time.sleep(0.005)


def mapped(model: Any) -> int:
    """Bytes of parameters in mapped files, which are not anonymous memory."""
    files = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.endswith(".safetensors"):
            first, last = (int(part, 16) for part in line.split()[0].split("-"))
            files.append((first, last))
    locals_ = [p.to_local() if hasattr(p, "to_local") else p for p in model.parameters()]
    return sum(p.nbytes for p in locals_ if any(first <= p.data_ptr() < last for first, last in files))


def timed(device: torch.device, function: Any) -> tuple[float, Any]:
    """Seconds that a function takes, and its result."""
    started = time.perf_counter()
    value = function()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started, value


class Generation:
    """Prefill and decode steps with a dynamic cache."""

    def __init__(self, model: Any, device: torch.device) -> None:
        self.model, self.device = model, device
        self.ids = torch.arange(PROMPT, device=device)[None] + 5

    @torch.no_grad()
    def __call__(self) -> dict[str, Any]:
        from transformers import DynamicCache

        prefills: list[float] = []
        for _ in range(PROMPTS):
            cache = DynamicCache(config=self.model.config)
            took, token = timed(self.device, lambda c=cache: self.next_token(self.ids, c))
            prefills.append(took)
        seconds, tokens = [], []
        for _ in range(TOKENS):
            took, token = timed(self.device, lambda t=token: self.next_token(t, cache))
            seconds.append(took)
            tokens.append(int(token))
        return {"prefill": prefills, "decode": seconds, "tokens": tokens}

    def next_token(self, ids: torch.Tensor, cache: Any) -> torch.Tensor:
        """A greedy forward pass."""
        logits = self.model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        return logits[:, -1:].argmax(-1)


class Training:
    """Forward and backward of 128 tokens."""

    def __init__(self, model: Any, device: torch.device) -> None:
        self.model, self.device = model, device
        self.ids = torch.arange(128, device=device)[None] + 5

    def __call__(self) -> dict[str, Any]:
        return {"training": timed(self.device, self.step)[0]}

    def step(self) -> None:
        """One forward and backward pass."""
        self.model(input_ids=self.ids, labels=self.ids, use_cache=False).loss.backward()
        self.model.zero_grad()


@torch.no_grad()
def collectives(model: Any, device: torch.device) -> int:
    """The number of collectives in a forward of one token, as the profiler sees them."""
    from torch.profiler import ProfilerActivity, profile

    token = torch.ones(1, 1, dtype=torch.int64, device=device)
    model(token, use_cache=False)
    with profile(activities=[ProfilerActivity.CPU]) as found:
        model(token, use_cache=False)
    return sum(event.name.startswith("c10d::") for event in found.events())


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main(*sys.argv[1:])
