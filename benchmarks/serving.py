"""Continuous batching side by side with transformers', and a service under load: ``python benchmarks/serving.py``.

Contenders are loaded at the same time, and take turns: while one works, the others wait. A turn is ``generate_batch``
of as many requests as the level says, with prompts of 32 to 512 tokens. ``--load`` starts ``paraxis serve`` instead,
and lets clients ask for minutes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import platform
import random
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

CONTENDERS = ("paraxis", "transformers", "transformers-tp")
ALONE = {"transformers"}
"""Contenders of one process, which has all cores."""
BLOCKS, PAGE, STEP = 64, 256, 1024
"""Sizes that transformers' cache is bounded by: at its defaults its ranks are killed for memory."""


# -- contenders ----------------------------------------------------------------------------------------------------


def work(name: str, rank: int, world: int, port: int, threads: int, folder: str, pipe: Any) -> None:
    """A rank of a contender: it loads, and then takes a turn for each message until there is None."""
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    import torch
    import torch.distributed as dist
    from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig
    from transformers.utils import logging

    logging.set_verbosity_error()
    torch.set_num_threads(threads)
    try:
        if name not in ALONE:
            dist.init_process_group("gloo")
        if name == "paraxis":
            from paraxis import ParallelExecutionCtx, parallelize_model

            ctx = ParallelExecutionCtx(tp_group=dist.group.WORLD, current_device=torch.device("cpu"))
            model = parallelize_model(folder, ctx, show_progress=False).eval()
        elif name == "transformers":
            model = AutoModelForCausalLM.from_pretrained(folder).eval()
        else:
            model = AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto").eval()
        pipe.send("loaded")
        while (message := pipe.recv()) is not None:
            prompts, new = message
            options = GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0)
            config = ContinuousBatchingConfig(page_size=PAGE, num_blocks=BLOCKS, max_batch_tokens=STEP)
            with model.continuous_batching_context_manager(options, True, None, config) as manager:
                began = time.perf_counter()
                names = manager.add_requests(prompts, max_new_tokens=new, record_timestamps=True)
                found: dict[str, Any] = {}
                while len(found) < len(prompts):
                    result = manager.get_result(timeout=1)
                    if result is not None and result.is_finished():
                        assert result.error is None, result.error
                        found[result.request_id] = result
                seconds = time.perf_counter() - began
                results = [found[each] for each in names]
                pipe.send((seconds, [([t - began for t in r.timestamps or ()], r.generated_tokens) for r in results]))
    except BaseException as error:
        pipe.send(f"{type(error).__name__}: {error}")
        raise


class Contender:
    """The processes of a contender."""

    def __init__(self, name: str, tp: int, folder: str) -> None:
        context = multiprocessing.get_context("spawn")
        world = 1 if name in ALONE else tp
        self.name, self.pipes, self.processes = name, [], []
        port = free_port()
        for rank in range(world):
            mine, its = context.Pipe()
            threads = max(1, (os.cpu_count() or 1) // world)
            process = context.Process(target=work, args=(name, rank, world, port, threads, folder, its), daemon=True)
            process.start()
            self.pipes.append(mine)
            self.processes.append(process)
        self.answers()

    def answers(self) -> list[Any]:
        """What the ranks say."""
        found = [pipe.recv() for pipe in self.pipes]
        problems = [each for each in found if isinstance(each, str) and each != "loaded"]
        if problems:
            raise RuntimeError(f"{self.name}: {problems[0]}")
        return found

    def turn(self, prompts: list[list[int]], new: int) -> tuple[float, Any]:
        """Answer these prompts; seconds, and (times, tokens) of each."""
        for pipe in self.pipes:
            pipe.send((prompts, new))
        found: tuple[float, Any] = self.answers()[0]
        return found

    def end(self) -> None:
        """Its processes end."""
        for process in self.processes:
            process.kill()
            process.join()


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def percentile(values: list[float], part: float) -> float:
    """The value below which this part of the values is."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))] if ordered else float("nan")


def throughput(arguments: argparse.Namespace, folder: str) -> dict[str, Any]:
    """All levels of all contenders, in turns."""
    draw = random.Random(0)
    contenders, errors = [], {}
    for name in arguments.contenders.split(","):
        try:
            contenders.append(Contender(name, arguments.tp, folder))
        except Exception as error:
            errors[name] = str(error)[:300]
            print(f"{name}: {errors[name]}", file=sys.stderr)
    rows = []
    try:
        for level in map(int, arguments.levels.split(",")):
            prompts = [
                [draw.randrange(5, 30000) for _ in range(draw.randrange(32, arguments.longest + 1))]
                for _ in range(level)
            ]
            turns: dict[str, list[Any]] = {c.name: [] for c in contenders}
            for contender in contenders:
                contender.turn(prompts[:3], 3)  # compiles
            for turn in range(arguments.turns):
                for contender in contenders:
                    result = contender.turn(prompts, arguments.new)
                    turns[contender.name].append(result)
                    print(level, turn, contender.name, f"{result[0]:.2f} s", file=sys.stderr, flush=True)
            right = next(iter(turns.values()))[0][1]
            for name, results in turns.items():
                times = [each for _, found in results for each, _ in found]
                rows.append(
                    {
                        "level": level,
                        "name": name,
                        "tokens_per_second": level * arguments.new / median(seconds for seconds, _ in results),
                        "ttft": [percentile([each[0] for each in times], p) for p in (0.5, 0.95)],
                        "itl": [
                            percentile([b - a for each in times for a, b in itertools.pairwise(each)], p)
                            for p in (0.5, 0.95, 0.99)
                        ],
                        "same": all([t for _, t in f] == [t for _, t in right] for _, f in results),
                    }
                )
    finally:
        for contender in contenders:
            contender.end()
    return {"rows": rows, "errors": errors}


# -- a service under load ------------------------------------------------------------------------------------------


def load(arguments: argparse.Namespace, folder: str) -> dict[str, Any]:
    """Clients that ask ``paraxis serve`` for minutes; every answer is compared with ``generate`` of the model."""
    import torch
    from transformers import AutoModelForCausalLM

    draw = random.Random(1)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    prompts = [[draw.randrange(5, 30000) for _ in range(draw.randrange(8, 65))] for _ in range(arguments.prompts)]
    right = {}
    for prompt in prompts:
        found = model.generate(torch.tensor([prompt]), max_new_tokens=arguments.new, do_sample=False, eos_token_id=-1)
        right[tuple(prompt)] = found[0, len(prompt) :].tolist()
    del model
    port = free_port()
    command = [sys.executable, "-c", "from paraxis.cli import main; main()", "serve", folder, "--tp", str(arguments.tp)]
    sizes = ["--max-batch", "32", "--max-queue", str(arguments.queue), "--kv-cache", "0.3", "--port", str(port)]
    service = subprocess.Popen([*command, *sizes], stderr=subprocess.PIPE, text=True)
    ready, log = threading.Event(), []

    def read() -> None:
        for line in service.stderr or ():
            log.append(line)
            if "serving on" in line:
                ready.set()
        ready.set()

    threading.Thread(target=read, daemon=True).start()
    ready.wait()
    began, until = time.monotonic(), time.monotonic() + arguments.seconds
    statuses: Counter[Any] = Counter()
    times: list[float] = []
    memory: list[tuple[float, int]] = []
    lock = threading.Lock()

    def client(number: int) -> None:
        own = random.Random(number)
        while time.monotonic() < until:
            prompt = own.choice(prompts)
            body = {"prompt": prompt, "max_tokens": arguments.new, "temperature": 0, "ignore_eos": True, "logprobs": 0}
            request = urllib.request.Request(
                f"http://127.0.0.1:{port}/v1/completions",
                json.dumps(body).encode(),
                {"Content-Type": "application/json"},
            )
            asked, status = time.monotonic(), "?"
            try:
                with urllib.request.urlopen(request, timeout=600) as answer:
                    choice = json.load(answer)["choices"][0]
                    expected = " ".join(f"w{token}" for token in right[tuple(prompt)])
                    status = "equal" if choice["text"] == expected else "other text"
            except urllib.error.HTTPError as error:
                status = str(error.code)
                if error.code == 429:
                    time.sleep(min(2.0, float(error.headers["Retry-After"])))
            except OSError as error:
                status = type(error).__name__
            with lock:
                statuses[status] += 1
                times.append(time.monotonic() - asked)

    threads = [threading.Thread(target=client, args=(i,), daemon=True) for i in range(arguments.clients)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads) and time.monotonic() < until + 600:
        memory.append((time.monotonic() - began, resident(service.pid)))
        time.sleep(5)
    page = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60).read().decode()
    service.terminate()
    code = service.wait(120)
    values = dict(line.rsplit(" ", 1) for line in page.splitlines() if not line.startswith("#"))
    after = [size for at, size in memory if at > min(60.0, arguments.seconds / 2)]
    return {
        "clients": arguments.clients,
        "seconds": arguments.seconds,
        "statuses": dict(statuses),
        "exit": code,
        "latency": [percentile(times, p) for p in (0.5, 0.95)],
        "tokens": float(values["paraxis_generated_tokens_total"]),
        "shared": float(values["paraxis_shared_tokens_total"]),
        "growth": (after[-1] - after[0]) / 2**20 if len(after) > 1 else float("nan"),
    }


def resident(pid: int) -> int:
    """Bytes of memory of a process and its children."""
    total = 0
    children = Path(f"/proc/{pid}/task/{pid}/children")
    for each in [str(pid), *(children.read_text().split() if children.exists() else ())]:
        try:
            total += int(Path(f"/proc/{each}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        except OSError:
            pass
    return total


def save(shape: str, folder: str) -> None:
    """The checkpoint, with a tokenizer of one token per word."""
    import shapes
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    shapes.save(shape, folder)
    table = {**{f"w{i}": i for i in range(32000)}, "unknown": 32000}
    words = Tokenizer(models.WordLevel(table, unk_token="unknown"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="unknown").save_pretrained(folder)


# -- the page ------------------------------------------------------------------------------------------------------


def page(arguments: argparse.Namespace, found: dict[str, Any]) -> str:
    """docs/results/serving.md."""
    cores = os.cpu_count()
    lines = [
        "# Serving",
        "",
        f"Written by `make serving` on {date.today()}: {cores} CPU cores ({platform.machine()}), {arguments.tp} ranks "
        f"over gloo, {arguments.shape} of about 200 million parameters with random weights in float32. Nothing was "
        "measured on a GPU.",
        "",
    ]
    if "rows" in found:
        lines += [
            "## Continuous batching",
            "",
            f"`generate_batch` of as many requests at once, prompts of 32 to {arguments.longest} tokens, "
            f"{arguments.new} new tokens each; median of {arguments.turns} turns, in which the contenders alternate. "
            "*transformers* is one process on all cores, *transformers-tp* its tensor parallelism on as many ranks; "
            "both with a bounded cache. TTFT counts from the moment at which all requests arrive, ITL is the time "
            "between two tokens of a request.",
            "",
            "| requests | contender | tokens/s | TTFT p50, p95 (s) | ITL p50, p95, p99 (ms) | same tokens |",
            "|---:|---|---:|---:|---:|---|",
        ]
        for row in found["rows"]:
            ttft = ", ".join(f"{x:.2f}" for x in row["ttft"])
            itl = ", ".join(f"{1000 * x:.0f}" for x in row["itl"])
            same = "yes" if row["same"] else "no"
            lines.append(
                f"| {row['level']} | {row['name']} | {row['tokens_per_second']:.1f} | {ttft} | {itl} | {same} |"
            )
        lines += [f"\n{name} did not run: {error}" for name, error in found["errors"].items()]
        lines.append("")
    for run in found.get("loads", ()):
        statuses = ", ".join(f"{count} {status}" for status, count in sorted(run["statuses"].items()))
        lines += [
            f"## {run['clients']} clients at once",
            "",
            f"Each asks `paraxis serve` again as soon as it has an answer, for {run['seconds']:.0f} s; 32 at a time. "
            f"Responses by status, those with 200 compared with `generate` of the unsharded model: {statuses}. "
            f"{run['tokens']:.0f} tokens, {run['tokens'] / run['seconds']:.1f} per second; {run['shared']:.0f} tokens "
            f"of prompts were in the KV cache already. Latency p50 {run['latency'][0]:.1f} s, p95 "
            f"{run['latency'][1]:.1f} s. Memory of all processes grew by {run['growth']:.0f} MiB after a minute "
            f"(or half of the run). After SIGTERM the service exited with {run['exit']}.",
            "",
        ]
    return "\n".join(lines)


def main() -> None:
    """Measure, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shape", default="llama")
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--levels", default="1,8,32")
    parser.add_argument("--longest", type=int, default=512)
    parser.add_argument("--new", type=int, default=32)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--contenders", default=",".join(CONTENDERS))
    parser.add_argument("--load", action="store_true", help="clients against a service, instead of contenders")
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--queue", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--state", type=Path, default=Path("build/serving.json"), help="figures of earlier parts")
    parser.add_argument("--page", type=Path, default=None)
    arguments = parser.parse_args()
    found = json.loads(arguments.state.read_text()) if arguments.state.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        save(arguments.shape, folder)
        if arguments.load:
            loads = [run for run in found.get("loads", ()) if run["clients"] != arguments.clients]
            found["loads"] = [*loads, load(arguments, folder)]
        else:
            found |= throughput(arguments, folder)
    arguments.state.parent.mkdir(parents=True, exist_ok=True)
    arguments.state.write_text(json.dumps(found))
    if arguments.page is not None:
        arguments.page.write_text(page(arguments, found))
    print(page(arguments, found))


if __name__ == "__main__":
    main()
