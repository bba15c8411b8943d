"""Measure one contender: ``python measure.py CONTENDER FOLDER PART`` on every rank; the first prints a line of JSON.

PART is ``generation`` or ``training``: each in processes of its own, for the memory of one not to count for the other.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import warnings
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from contenders import ALONE, CONTENDERS

PROMPT, TOKENS, ROUNDS = 512, 24, 3


def main(name: str, folder: str, part: str) -> None:
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
    if part == "training":
        result |= training(model, device)
    else:
        with torch.no_grad():
            result |= generation(model, device)
            result.setdefault("collectives", collectives(model, device))
    result[f"memory_{part}"] = memory.highest + mapped(model) / 2**20
    if alone or dist.get_rank() == 0:
        print("RESULT " + json.dumps(result), flush=True)
    if not alone:
        dist.barrier()


class Memory(threading.Thread):
    """The most anonymous memory that the process had, in MiB, looked at every few milliseconds.

    Not what is resident: of a mapped file the system counts pages that nobody asked for, as many as it likes.
    """

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.highest = 0.0

    def start(self) -> Memory:  # type: ignore[override]
        super().start()
        return self

    def run(self) -> None:
        while True:
            for line in Path("/proc/self/status").read_text().splitlines():
                if line.startswith("RssAnon"):
                    self.highest = max(self.highest, int(line.split()[1]) / 1024)
            time.sleep(0.005)


def mapped(model: Any) -> int:
    """Bytes of parameters that lie in mapped files instead."""
    files = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.endswith(".safetensors"):
            first, last = (int(part, 16) for part in line.split()[0].split("-"))
            files.append((first, last))
    locals_ = [p.to_local() if hasattr(p, "to_local") else p for p in model.parameters()]
    return sum(p.nbytes for p in locals_ if any(first <= p.data_ptr() < last for first, last in files))


def timed(device: torch.device, function: Any) -> tuple[float, Any]:
    started = time.perf_counter()
    value = function()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started, value


def generation(model: Any, device: torch.device) -> dict[str, Any]:
    """The first call, later prefills of the same prompt, and decoding with a growing cache."""
    from transformers import DynamicCache

    ids = torch.arange(PROMPT, device=device)[None] + 5

    def prefill() -> Any:
        cache = DynamicCache(config=model.config)
        logits = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        return cache, logits[:, -1:].argmax(-1)

    def step(cache: Any, token: torch.Tensor) -> torch.Tensor:
        return model(token, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1:].argmax(-1)

    first, (cache, token) = timed(device, prefill)
    for _ in range(3):
        token = step(cache, token)
    prefills, tokens, decoded = [], [], []
    for _ in range(ROUNDS):
        seconds, (cache, token) = timed(device, prefill)
        prefills.append(seconds)
        for _ in range(TOKENS):
            seconds, token = timed(device, lambda c=cache, t=token: step(c, t))
            tokens.append(seconds)
            decoded.append(int(token))
    return {"first": first, "prefill": min(prefills), "decode": median(tokens), "tokens": decoded[-TOKENS:]}


def collectives(model: Any, device: torch.device) -> int:
    """How many collectives a forward of one token has, as the profiler sees them."""
    from torch.profiler import ProfilerActivity, profile

    token = torch.ones(1, 1, dtype=torch.int64, device=device)
    model(token, use_cache=False)
    with profile(activities=[ProfilerActivity.CPU]) as found:
        model(token, use_cache=False)
    return sum(event.name.startswith("c10d::") for event in found.events())


def training(model: Any, device: torch.device) -> dict[str, Any]:
    """Forward and backward of 128 tokens."""
    ids = torch.arange(128, device=device)[None] + 5

    def step() -> None:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        model.zero_grad()

    step()
    return {"training": min(timed(device, step)[0] for _ in range(ROUNDS))}


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main(*sys.argv[1:])
