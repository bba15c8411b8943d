"""Loading a checkpoint, compared with transformers' tensor parallelism: time, memory, bytes read.

``python benchmarks/loading.py --out docs/results``: checkpoints of over 2 GB with random weights, at 2 and 4 ranks.
Every rank imports everything first; then, between two barriers, the model is loaded. Measured on each rank: the peak
growth of anonymous memory (sampled every 5 ms; mapped files do not count), and the bytes requested from safetensors.
The worst rank is shown. On a machine with a GPU (``--device cuda``) the ranks share it.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from contenders import paraxis, transformers_tp

MIB = 2**20


def with_plan_cache(folder: str, device: torch.device) -> Any:
    """Paraxis with its defaults: the first start makes a plan and caches it."""
    return paraxis(folder, device, cache_plans=True)


CONTENDERS = {"transformers TP": transformers_tp, "paraxis, planning": paraxis, "paraxis": with_plan_cache}


def save(shape: str, layers: int, folder: str) -> None:
    """Save a checkpoint in files of 1 GB: a dense model, or an MoE model with experts stored one by one."""
    from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig

    common = {"num_attention_heads": 16, "num_key_value_heads": 8, "vocab_size": 32000, "num_hidden_layers": layers}
    configs = {
        "llama": lambda: LlamaConfig(hidden_size=2048, intermediate_size=5632, **common),
        "mixtral": lambda: MixtralConfig(hidden_size=1024, intermediate_size=3584, num_local_experts=8, **common),
    }
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(configs[shape]()).save_pretrained(folder, max_shard_size="1GB")


# -- on every rank ---------------------------------------------------------------------------------------------------


class Reads:
    """Counts the bytes requested from safetensors, by replacing ``safe_open``."""

    def __init__(self) -> None:
        self.bytes = 0

    def install(self, module: Any) -> None:
        """Replace a module's ``safe_open``."""
        original = module.safe_open
        module.safe_open = lambda *args, **kwargs: _File(original(*args, **kwargs), self)

    def count(self, tensor: torch.Tensor) -> torch.Tensor:
        """Add a tensor's bytes."""
        self.bytes += tensor.nbytes
        return tensor


class _File:
    def __init__(self, file: Any, reads: Reads) -> None:
        self._file, self._reads = file, reads

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> _File:
        self._file.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._file.__exit__(*error)

    def get_tensor(self, key: str) -> torch.Tensor:
        """As in safetensors, counted."""
        return self._reads.count(self._file.get_tensor(key))

    def get_slice(self, key: str) -> _Slice:
        """As in safetensors, counted."""
        return _Slice(self._file.get_slice(key), self._reads)


class _Slice:
    def __init__(self, stored: Any, reads: Reads) -> None:
        self._stored, self._reads = stored, reads

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stored, name)

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self._reads.count(self._stored[index])


class Memory:
    """The peak of a line of ``/proc/self/status`` while it runs, in MiB."""

    def __init__(self, line: str = "RssAnon") -> None:
        self.line, self.highest, self._done = line, 0.0, threading.Event()

    def now(self) -> float:
        """The current value."""
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(self.line):
                return int(line.split()[1]) / 1024
        return 0.0

    def _watch(self) -> None:
        while not self._done.wait(0.005):
            self.highest = max(self.highest, self.now())

    def __enter__(self) -> Memory:
        self.before = self.highest = self.now()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self._done.set()
        self._thread.join()
        self.highest = max(self.highest, self.now())


def measure(contender: str, folder: str, kind: str) -> None:
    """On one rank: load the model; rank 0 prints the figures as a line of JSON."""
    warnings.filterwarnings("ignore")
    import transformers.modeling_utils
    from transformers import AutoModelForCausalLM, LlamaForCausalLM, MixtralForCausalLM  # noqa: F401
    from transformers.utils import logging

    import paraxis.api
    import paraxis.weights.weight_map

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    device = torch.device(kind, 0) if kind == "cuda" else torch.device("cpu")
    torch.ones(1, device=device)  # starts CUDA, whose host memory is not the loader's
    reads = Reads()
    reads.install(transformers.modeling_utils)
    reads.install(paraxis.weights.weight_map)
    gc.collect()
    dist.barrier()
    started = time.perf_counter()
    with Memory() as memory:
        model = CONTENDERS[contender](folder, device)
        for parameter in model.parameters():  # reads what is only mapped so far
            _local(parameter).sum()
        dist.barrier()
    seconds = time.perf_counter() - started
    mine = {
        "seconds": seconds,
        "reading": getattr(model, "known", {}).get("reading", seconds),
        "shard": sum(_local(p).nbytes for p in model.parameters()) / MIB,
        "grown": memory.highest - memory.before,
        "read": reads.bytes / MIB,
    }
    of_all_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_all_ranks, mine)
    if dist.get_rank() == 0:
        print("RESULT " + json.dumps({key: max(r[key] for r in of_all_ranks) for key in mine}), flush=True)
    dist.barrier()


def _local(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter


# -- all of them -----------------------------------------------------------------------------------------------------


def one(contender: str, folder: str, ranks: int, device: str) -> dict[str, Any]:
    """The figures of one run of a contender on its ranks, or its error."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    done = subprocess.run(
        [*command, __file__, "--one", contender, "--folder", folder, "--device", device],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    for line in done.stdout.splitlines():
        if line.startswith("RESULT "):
            return dict(json.loads(line[7:]))
    errors = [line for line in done.stderr.splitlines() if "Error" in line]
    return {"error": errors[0] if errors else f"exit code {done.returncode}"}


def main() -> None:
    """Measure all contenders on all shapes; print rows, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", default="llama:10,mixtral:6", help="shape:layers, separated by commas")
    parser.add_argument("--tp", default="2,4", help="numbers of ranks")
    parser.add_argument("--contenders", default="/".join(CONTENDERS), help="separated by slashes")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--rounds", type=int, default=3, help="the fastest counts")
    parser.add_argument("--out", type=Path, help="where to write loading.md")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        measure(options.one, options.folder, options.device)
        return
    lines = [
        "|  | ranks | contender | call, s | reading, s | shard, MiB | memory grew by, MiB | read, MiB | |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for shape, layers in (item.split(":") for item in options.shapes.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            save(shape, int(layers), folder)
            size = sum(f.stat().st_size for f in Path(folder).glob("*.safetensors"))
            os.environ["PARAXIS_CACHE"] = f"{folder}/cache"
            for ranks in options.tp.split(","):
                for contender in options.contenders.split("/"):
                    if CONTENDERS[contender] is with_plan_cache:
                        one(contender, folder, int(ranks), options.device)  # fills the cache
                    rounds = [one(contender, folder, int(ranks), options.device) for _ in range(options.rounds)]
                    lines.append(_line(f"{shape}, {size / 1e9:.1f} GB", ranks, contender, rounds))
                    print(lines[-1], flush=True)
    if options.out:
        (options.out / "loading.md").write_text(page("\n".join(lines), options.device))


def _line(shape: str, ranks: str, contender: str, rounds: list[dict[str, Any]]) -> str:
    fine = [r for r in rounds if "error" not in r]
    if not fine:
        return f"| {shape} | {ranks} | {contender} | | | | | | {rounds[0]['error']} |"
    best = min(fine, key=lambda r: r["seconds"])
    grown = max(r["grown"] for r in fine)
    return (
        f"| {shape} | {ranks} | {contender} | {best['seconds']:.2f} | {min(r['reading'] for r in fine):.2f} "
        f"| {best['shard']:.0f} | {grown:.0f} ({(grown - 100) / best['shard']:.2f} × shard + 100) "
        f"| {best['read']:.0f} ({best['read'] / best['shard']:.2f} × shard) | |"
    )


def page(table: str, device: str) -> str:
    """The table with its explanation, as Markdown."""
    import transformers

    where = torch.cuda.get_device_name() if device == "cuda" else f"{os.cpu_count()} CPU cores"
    return "\n".join(
        [
            "# Loading",
            "",
            f"{date.today().isoformat()}, {where}, torch {torch.__version__}, transformers {transformers.__version__}, "
            f"Python {platform.python_version()}, one thread per rank, float32, files in the page cache. Made by",
            "`python benchmarks/loading.py --out docs/results`, which says how it is measured. *Call* is",
            '`parallelize_model` or `from_pretrained(tp_plan="auto")`; *reading* is the part of it that reads weights.',
            "*Planning* is the first start of a model on so many ranks: the plan is made and cached;",
            "later starts find it in the cache. Memory: the peak growth of a rank's anonymous memory.",
            "The fastest of three runs, and the most memory of them, on the worst rank.",
            "",
            table,
            "",
        ]
    )


if __name__ == "__main__":
    main()
