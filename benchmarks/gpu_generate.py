"""What ``model.generate(ids, max_new_tokens=n)`` gives, side by side: ``python benchmarks/gpu_generate.py``.

Every contender runs in a process of its own, one after the other, on random weights that are initialized on the
device. The floor of a token is the time to read the weights and the KV cache once at the memory's bandwidth; that of a
prefill is its arithmetic at the rate of large GEMMs. ``--tp-of 8`` measures one rank of 8 with a fake process group,
whose collectives cost nothing. On a CPU: ``--device cpu --dtype float32 --layers 2 --set hidden_size=64 --set ...``.

With ``--together`` the processes of all contenders, also of several shapes (``--shape llama8b,gpt2-xl``), prepare at
the same time: imports, weights, compilation, the calls before the timed ones. Then they take turns: while one is timed,
the others wait. The figures of a first call are left out then.
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
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

BANDWIDTH = 4.3e12
"""Memory bandwidth of an H200, in bytes per second."""
ARITHMETIC = 790e12
"""FLOP/s of large bfloat16 GEMMs on it."""
MARK = "RESULT "
"""Begins the line with the figures in what a contender prints."""
READY = "READY"
"""What a contender prints when it waits for its turn."""

SHAPES: dict[str, dict[str, Any]] = {
    "llama8b": {
        "model_type": "llama",
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
    },
    "qwen3-8b": {
        "model_type": "qwen3",
        "hidden_size": 4096,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 12288,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": False,
    },
    "gemma2-9b": {
        "model_type": "gemma2",
        "hidden_size": 3584,
        "num_hidden_layers": 42,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 256,
        "intermediate_size": 14336,
        "vocab_size": 256000,
        "max_position_embeddings": 8192,
        "sliding_window": 4096,
        "tie_word_embeddings": True,
    },
    "qwen3-moe-30b-a3b": {
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": False,
    },
    "gpt2-xl": {
        "model_type": "gpt2",
        "n_embd": 1600,
        "n_layer": 48,
        "n_head": 25,
        "n_positions": 1024,
        "vocab_size": 50257,
        "tie_word_embeddings": True,
    },
}


QUANTIZATION: dict[str, dict[str, Any]] = {
    "fp8": {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"},
    "int4": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {
                    "num_bits": 4,
                    "type": "int",
                    "symmetric": True,
                    "strategy": "group",
                    "group_size": 128,
                },
            }
        },
    },
}
"""What a quantized checkpoint of the shape would have in its configuration."""
BYTES_OF_WEIGHT = {"fp8": 1 + 4 / 128**2, "int4": 0.5 + 2 / 128}
"""Of a quantized linear layer, with its scales."""


# -- arguments -----------------------------------------------------------------------------------------------------


def arguments() -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--shape", default="llama8b", help=f"{', '.join(SHAPES)}, or the path of a config.json; several with --together"
    )
    parser.add_argument("--layers", type=int, help="use so many layers only")
    parser.add_argument(
        "--set", action="append", default=[], metavar="FIELD=VALUE", help="a field of the configuration"
    )
    parser.add_argument("--tp-of", type=int, default=1, help="measure one rank of so many, with a fake process group")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--quantization", choices=sorted(QUANTIZATION), help="random quantized weights, for Paraxis")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--contenders", default="eager,static,paraxis,paraxis-eager", help=", ".join(CONTENDERS))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--lengths", type=int, default=0, help="also count compilations of so many prompt lengths")
    parser.add_argument("--again", action="store_true", help="start each contender twice, with the caches of the first")
    parser.add_argument(
        "--together", action="store_true", help="prepare all contenders at once; they are timed in turn"
    )
    parser.add_argument("--profile", type=Path, help="folder for the kernels of a prefill and of decode steps")
    parser.add_argument("--timeout", type=float, default=560.0, help="seconds that a contender may take")
    parser.add_argument("--json", type=Path, help="file for the figures; those of other runs in it stay")
    parser.add_argument("--markdown", type=Path, help="file for the table")
    parser.add_argument("--alone", help=argparse.SUPPRESS)  # the contender that this process is
    parser.add_argument("--started", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--first-only", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--waits", action="store_true", help=argparse.SUPPRESS)  # for its turn, before it is timed
    return parser.parse_args()


def config_of(options: argparse.Namespace) -> Any:
    """The configuration of the shape, without stop tokens: all sequences get as long as they may."""
    from transformers import AutoConfig

    fields = SHAPES.get(options.shape)
    if fields is None:
        fields = json.loads(Path(options.shape).read_text())
    fields = {**fields, "bos_token_id": 1, "eos_token_id": None, "pad_token_id": None}
    layers = "n_layer" if "n_layer" in fields else "num_hidden_layers"
    if options.layers is not None:
        fields[layers] = options.layers
        fields.pop("layer_types", None)
    for assignment in options.set:
        name, _, value = assignment.partition("=")
        fields[name] = json.loads(value)
    fields.pop("architectures", None)
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    config.eos_token_id = config.pad_token_id = None
    return config


# -- contenders ----------------------------------------------------------------------------------------------------


def transformers_model(options: argparse.Namespace, config: Any) -> tuple[Any, Any]:
    """The model as transformers builds it, on one device."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device(options.device):
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, options.dtype))
    return initialized(model.eval()), None


def paraxis_model(options: argparse.Namespace, config: Any, **extra: Any) -> tuple[Any, Any]:
    """The parallel model on one rank, or on one of several with a fake process group."""
    import torch
    import torch.distributed as dist
    from transformers import AutoModelForCausalLM

    from paraxis import ParallelExecutionCtx, parallelize_model
    from paraxis.weights import materialize

    device = torch.device(options.device, 0) if options.device == "cuda" else torch.device(options.device)
    if options.tp_of > 1:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", rank=0, world_size=options.tp_of, store=FakeStore())
    else:
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo", rank=0, world_size=1, store=dist.HashStore()
        )
    ctx = ParallelExecutionCtx(tp_group=dist.group.WORLD, current_device=device)  # type: ignore[arg-type]
    with torch.device("meta"):
        config.architectures = [type(AutoModelForCausalLM.from_config(config)).__name__]
    if options.quantization:
        config.quantization_config = QUANTIZATION[options.quantization]
        materialize.initialize_quantized = random_codes
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        model = parallelize_model(
            folder,
            ctx,
            skip_load_weights=True,
            weight_init_fn=lambda tensor: tensor,
            dtype=getattr(torch, options.dtype),
            show_progress=False,
            **extra,
        )
    return initialized(model.eval()), ctx


def random_codes(params: dict[str, Any], init_fn: Any, seed: int, rank: int, device: Any) -> None:
    """Make quantized parameters of random codes on the device: quantizing random numbers takes minutes."""
    import torch

    from paraxis.placement import local_shape
    from paraxis.weights.load import _finish

    for parameter in params.values():
        meta = parameter.spec
        weight, found = meta.quantized, {}
        where = weight.placements(meta.placement)
        for name, part in weight.parts.items():
            shape = tuple(local_shape(where[name], part.shape, rank))
            if name == "scales":  # so that values are about 0.02
                size = 0.0125 if part.dtype.itemsize > 1 and not weight.encoding.packed else 0.005
                found[name] = torch.full(shape, size, dtype=torch.float32, device=device).to(part.dtype)
            elif part.dtype.is_floating_point:
                found[name] = torch.randn(shape, dtype=torch.bfloat16, device=device).to(part.dtype)
            else:
                found[name] = torch.randint(0, 256, shape, dtype=torch.uint8, device=device).view(part.dtype)
        shard = weight.assemble(found, meta.placement, rank, meta.dtype)
        _finish(parameter, meta, shard, rank, None)


def initialized(model: Any) -> Any:
    """A model with small random weights."""
    import torch

    with torch.no_grad():
        for parameter in model.parameters():
            local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            if hasattr(local, "encoding"):
                continue
            local.normal_(std=0.02)
    model.generation_config.eos_token_id = model.generation_config.pad_token_id = None
    return model


CONTENDERS: dict[str, tuple[str, Callable[..., tuple[Any, Any]], dict[str, Any], dict[str, Any]]] = {
    "eager": ("transformers, eager", transformers_model, {}, {}),
    "static": ("transformers, static cache, compiled", transformers_model, {}, {"cache_implementation": "static"}),
    "paraxis": ("Paraxis, no options", paraxis_model, {}, {}),
    "paraxis-eager": ("Paraxis, compile=None", paraxis_model, {"compile": None}, {}),
    "paraxis-inductor": (
        "Paraxis, inductor + reduce-overhead",
        paraxis_model,
        {"compile": "inductor", "mode": "reduce-overhead"},
        {},
    ),
    "paraxis-static": (
        "Paraxis, inductor + reduce-overhead + static",
        paraxis_model,
        {"compile": "inductor", "mode": "reduce-overhead"},
        {"cache_implementation": "static"},
    ),
}
"""By name: the title, what makes the model, options for that, and options for ``generate``."""


# -- one contender, in its process -----------------------------------------------------------------------------------


class FirstToken:
    """A streamer that notes when the first token came. The prompt comes first."""

    def __init__(self) -> None:
        self.puts, self.time = 0, 0.0

    def put(self, value: Any) -> None:
        self.puts += 1
        if self.puts == 2:
            self.time = time.time()

    def end(self) -> None: ...


def alone(options: argparse.Namespace) -> dict[str, Any]:
    """The figures of this process's contender."""
    import torch

    _, make, extra, generate_options = CONTENDERS[options.alone]
    torch.manual_seed(0)
    config = config_of(options)
    began = time.time()
    model, ctx = make(options, config, **extra)
    synchronize(options)
    result: dict[str, Any] = {"model_s": time.time() - began, "import_s": began - options.started}

    def timed(count: int, length: int | None = None, **more: Any) -> float:
        """The seconds of one call with a new prompt."""
        ids = torch.randint(0, config.vocab_size, (options.batch, length or options.prompt), device=options.device)
        synchronize(options)
        started = time.perf_counter()
        out = model.generate(ids, max_new_tokens=count, **generate_options, **more)
        synchronize(options)
        assert out.shape[1] == ids.shape[1] + count, f"{out.shape[1] - ids.shape[1]} tokens instead of {count}"
        return time.perf_counter() - started

    first = FirstToken()
    streamed = {"streamer": first} if options.batch == 1 else {}
    result["first_call_s"] = timed(options.new, **streamed)
    result["first_token_s"] = (first.time or time.time()) - options.started
    if options.first_only:
        return result
    compiled = ctx.compile_times if ctx is not None else 0
    for _ in range(2):
        timed(1), timed(options.new)
    if options.waits:
        del result["first_call_s"], result["first_token_s"]
        wait_for_turn()
        timed(1), timed(options.new)
    prefill = [timed(1) for _ in range(options.repeats)]
    total = [timed(options.new) for _ in range(options.repeats)]
    result["ttft_ms"] = median(prefill) * 1e3
    result["token_ms"] = (median(total) - median(prefill)) / max(options.new - 1, 1) * 1e3
    if torch.cuda.is_available():
        result["memory_gb"] = torch.cuda.max_memory_allocated() / 1e9
    if ctx is not None:
        result["recompiled"] = ctx.compile_times - compiled
        if ctx.state.early_launches is not None:
            result["early_launches"] = [ctx.state.early_launches.taken, ctx.state.early_launches.wasted]
    if options.profile is not None:
        options.profile.mkdir(parents=True, exist_ok=True)
        name = f"{Path(options.shape).stem}-{options.alone}-{options.tp_of}-{options.batch}"
        for count in (1, 9):
            (options.profile / f"{name}-{count}.txt").write_text(kernels_of(lambda count=count: timed(count)))
    if options.lengths and ctx is not None:
        compiled = ctx.compile_times
        lengths = sorted({1 + round(i * 2999 / max(options.lengths - 1, 1)) for i in range(options.lengths)})
        for length in [*lengths[::2], *lengths[1::2]]:
            timed(options.new, length)
        result["recompiled_by_lengths"] = ctx.compile_times - compiled
        compiled = ctx.compile_times
        timed(500)
        result["recompiled_by_500_tokens"] = ctx.compile_times - compiled
    return result


def wait_for_turn() -> None:
    """Tell the process that started this one that it is ready, and wait until it may use the device alone."""
    print(READY, flush=True)
    sys.stdin.readline()


def kernels_of(call: Callable[[], Any]) -> str:
    """The kernels of a call on the device, with how often each ran and for how long, in microseconds."""
    from torch.profiler import ProfilerActivity, profile

    call()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        seconds = call()
    kernels = [event for event in profiler.events() if event.device_type.name == "CUDA"]
    by_name: dict[str, list[float]] = {}
    for event in kernels:
        by_name.setdefault(event.name, []).append(event.time_range.elapsed_us())
    busy = sum(map(sum, by_name.values()))
    ranges = [event.time_range for event in kernels]
    span = max(each.end for each in ranges) - min(each.start for each in ranges)
    lines = [
        f"{seconds * 1e6:.0f} us; {span:.0f} us from first to last of {len(kernels)} kernels, busy for {busy:.0f} us"
    ]
    for name, times in sorted(by_name.items(), key=lambda each: -sum(each[1])):
        lines.append(f"{sum(times):10.0f} {len(times):6d} {sum(times) / len(times):9.1f}  {name[:150]}")
    return "\n".join(lines) + "\n"


def synchronize(options: argparse.Namespace) -> None:
    """Wait for the device."""
    import torch

    if options.device == "cuda":
        torch.cuda.synchronize()


# -- floors --------------------------------------------------------------------------------------------------------


def floors(options: argparse.Namespace) -> dict[str, float]:
    """The least time of a token and of a prefill on one rank, in ms, and the parameters of the model."""
    import torch
    from transformers import AutoModelForCausalLM

    config = config_of(options)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    head = model.get_output_embeddings().weight
    experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None) or 1
    chosen = getattr(config, "num_experts_per_tok", None) or experts
    looked_up = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)} - {id(head)}
    read = computed = total = 0.0
    for parameter in model.parameters():
        total += parameter.numel()
        if id(parameter) in looked_up:
            continue
        is_expert = experts > 1 and parameter.dim() == 3 and parameter.shape[0] == experts
        read += parameter.numel() * (min(experts, chosen * options.batch) / experts if is_expert else 1)
        if parameter is not head and parameter.dim() > 1:
            computed += parameter.numel() * (chosen / experts if is_expert else 1)
    if options.quantization:
        linear = sum(m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear)) - head.numel()
        item = torch.empty((), dtype=getattr(torch, options.dtype)).itemsize
        read -= linear * (1 - BYTES_OF_WEIGHT[options.quantization] / item)
    layers, heads = config.num_hidden_layers, config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    ranks, item = options.tp_of, torch.empty((), dtype=getattr(torch, options.dtype)).itemsize
    length = options.prompt + options.new / 2
    cache = 2 * layers * -(-kv_heads // ranks) * size * length * options.batch
    tokens = options.prompt * options.batch
    causal = 2 * options.prompt * tokens * heads * size * layers  # two matmuls, half of each
    flops = (2 * computed * tokens + 2 * head.numel() * options.batch + causal) / ranks
    return {
        "token_ms": (read / ranks + cache) * item / BANDWIDTH * 1e3,
        "ttft_ms": max(flops / ARITHMETIC, read / ranks * item / BANDWIDTH) * 1e3,
        "parameters": total,
    }


# -- all of them ---------------------------------------------------------------------------------------------------


def main() -> int:
    """Run every contender; print the table and write the files."""
    options = arguments()
    if options.alone:
        try:
            found = alone(options)
        except BaseException as error:
            traceback.print_exc()
            found = {"error": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:300]}
        print(MARK + json.dumps(found), flush=True)
        return 1 if "error" in found else 0
    if options.together:
        return together(options)
    floor = floors(options)
    gc.collect()
    results = {}
    for name in options.contenders.split(","):
        if (options.tp_of > 1 or options.quantization) and CONTENDERS[name][1] is transformers_model:
            continue  # it has no ranks, and no random quantized weights
        print(f"{CONTENDERS[name][0]} ...", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory() as caches:
            results[name] = in_a_process(name, options, caches)
            if options.again and "error" not in results[name]:
                again = in_a_process(name, options, caches, "--first-only")
                results[name]["first_token_again_s"] = again.get("first_token_s")
    write(options, [{"options": described(options), "floor": floor, "results": results}])
    return 0


def write(options: argparse.Namespace, tables: list[dict[str, Any]]) -> None:
    """Print the tables, and write the files that were asked for."""
    text = "\n".join(map(page, tables))
    print(text)
    if options.json is not None:
        runs = json.loads(options.json.read_text()) if options.json.is_file() else []
        options.json.write_text(json.dumps([*runs, *tables], indent=1))
    if options.markdown is not None:
        options.markdown.write_text(text)


def together(options: argparse.Namespace) -> int:
    """All contenders of all shapes: they prepare at the same time and are timed in turn."""
    runs = []
    deadline = time.monotonic() + options.timeout
    with tempfile.TemporaryDirectory() as caches, tempfile.TemporaryDirectory() as logs:
        for shape in options.shape.split(","):
            for name in options.contenders.split(","):
                if options.tp_of > 1 and CONTENDERS[name][1] is transformers_model:
                    continue
                command, environment = started_by(name, str(Path(caches) / f"{Path(shape).stem}-{name}"))
                log = Path(logs) / f"{len(runs)}.txt"
                with log.open("w") as errors:
                    process = subprocess.Popen(
                        [*command, "--shape", shape, "--waits"],
                        env=environment,
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        stderr=errors,
                        text=True,
                    )
                runs.append((shape, name, process, log))
        watch = threading.Timer(options.timeout, lambda: [process.kill() for _, _, process, _ in runs])
        watch.daemon = True
        watch.start()
        lines = [until(READY, process) for _, _, process, _ in runs]  # all are ready, or have failed
        results: dict[str, dict[str, Any]] = {}
        for (shape, name, process, log), printed in zip(runs, lines, strict=True):
            if process.poll() is None:
                with suppress(OSError):
                    process.stdin.write("go\n")  # type: ignore[union-attr]
                    process.stdin.flush()  # type: ignore[union-attr]
                printed += until(MARK, process)
                process.wait()
            found = next((json.loads(x[len(MARK) :]) for x in printed if x.startswith(MARK)), None)
            late = " (out of time)" if time.monotonic() > deadline else ""
            results.setdefault(shape, {})[name] = found or {"error": f"ended with {process.returncode}{late}"}
            if found is None or "error" in found:
                print(f"{shape} {name}: {log.read_text()[-3000:]}", file=sys.stderr)
        watch.cancel()
    tables = []
    for shape, found in results.items():
        own = argparse.Namespace(**{**vars(options), "shape": shape})
        tables.append({"options": described(own), "floor": floors(own), "results": found})
    write(options, tables)
    return 0


def until(mark: str, process: subprocess.Popen[str]) -> list[str]:
    """What a process prints up to a line that begins so, or to its end."""
    lines = []
    assert process.stdout is not None
    for line in process.stdout:
        lines.append(line)
        if line.startswith((mark, MARK)):
            break
    return lines


def started_by(name: str, caches: str) -> tuple[list[str], dict[str, str]]:
    """The command that runs a contender alone, and its environment. ``caches`` is the folder of what it compiles."""
    command = [sys.executable, __file__, *sys.argv[1:], "--alone", name, "--started", str(time.time())]
    folders = {key: str(Path(caches) / key.lower()) for key in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")}
    root = str(Path(__file__).resolve().parents[1])
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    return command, {**os.environ, **folders, "PARAXIS_CACHE": str(Path(caches) / "paraxis"), "PYTHONPATH": path}


def in_a_process(name: str, options: argparse.Namespace, caches: str, *more: str) -> dict[str, Any]:
    """The figures of a contender, or its error."""
    command, environment = started_by(name, caches)
    try:
        done = subprocess.run(
            [*command, *more], env=environment, capture_output=True, text=True, timeout=options.timeout, check=False
        )
    except subprocess.TimeoutExpired:
        return {"error": f"more than {options.timeout:g} s"}
    lines = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    if not lines:
        return {"error": f"ended with {done.returncode}: {done.stderr[-300:]}"}
    found: dict[str, Any] = json.loads(lines[-1][len(MARK) :])
    if "error" in found:
        print(done.stderr[-3000:], file=sys.stderr)
    return found


def described(options: argparse.Namespace) -> dict[str, Any]:
    """What was measured, on what."""
    import torch
    import transformers

    device = torch.cuda.get_device_name() if options.device == "cuda" else f"{os.cpu_count()} CPU cores"
    names = ("shape", "layers", "set", "tp_of", "batch", "prompt", "new", "dtype", "quantization")
    return {
        **{name: getattr(options, name) for name in names},
        "device": device,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "date": date.today().isoformat(),
    }


COLUMNS = {
    "first_token_s": "start to first token, s",
    "first_token_again_s": "the second time, s",
    "first_call_s": "first call, s",
    "ttft_ms": "TTFT, ms",
    "token_ms": "per output token, ms",
    "memory_gb": "memory, GB",
    "recompiled": "compiled later",
    "recompiled_by_lengths": "by other lengths",
    "recompiled_by_500_tokens": "by 500 tokens",
}


def page(found: dict[str, Any]) -> str:
    """The figures as a Markdown table: times with their ratio to the floor, and to the best of transformers."""
    options, floor, results = found["options"], found["floor"], found["results"]
    shown = {key: title for key, title in COLUMNS.items() if any(key in each for each in results.values())}
    layers = f", {options['layers']} layers" if options["layers"] else ""
    lines = [
        f"**{options['shape']}**{layers}: {floor['parameters'] / 1e9:.2f}B parameters, one rank of {options['tp_of']}, "
        f"batch {options['batch']}, prompt {options['prompt']}, {options['new']} new tokens, {options['dtype']}"
        f"{' with weights in ' + options['quantization'] if options['quantization'] else ''}; "
        f"{options['device']}, torch {options['torch']}, transformers {options['transformers']}, {options['date']}. "
        "Ratios are to the floor and, behind the bar, to the faster one of transformers.",
        "",
        "| contender | " + " | ".join(shown.values()) + " |",
        "|" + "---|" * (len(shown) + 1),
        f"| floor | {' | '.join(f'{floor[key]:.2f}' if key in floor else '' for key in shown)} |",
    ]
    best = {
        key: min((results[name][key] for name in ("eager", "static") if key in results.get(name, {})), default=None)
        for key in ("ttft_ms", "token_ms")
    }
    for name, result in results.items():
        if "error" in result:
            lines.append(f"| {CONTENDERS[name][0]} | {result['error']} |" + " |" * (len(shown) - 1))
            continue
        cells = []
        for key in shown:
            value = result.get(key)
            text = "" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)
            if key in floor and value:
                text += f" ({value / floor[key]:.2f}×" + (f" \\| {value / best[key]:.2f}×)" if best[key] else ")")
            cells.append(text)
        lines.append(f"| {CONTENDERS[name][0]} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    sys.exit(main())
