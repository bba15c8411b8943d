"""`paraxis serve`: an OpenAI-compatible HTTP service of a tensor-parallel model, with continuous batching."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from ._devices import AUTO, DeviceOption, init_process_group
from ._errors import Debug, UsageError, report_errors
from ._launch import WORKER_ENVIRONMENT, check_ranks, is_launched
from ._options import (
    DtypeOption,
    Model,
    Ranks,
    RevisionOption,
    SubfolderOption,
    TrustOption,
    VariantOption,
    check_dtype,
    check_model,
    quiet,
)
from .generate import check_tokenizer

KEY = "PARAXIS_API_KEY"


def command(
    model: Model,
    tp: Ranks = 2,
    host: Annotated[
        str, typer.Option("--host", help="Address to listen on; 0.0.0.0 for all of this machine.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Port to listen on; 0 for a free one.")] = 8000,
    api_key: Annotated[
        str | None,
        typer.Option(
            "--api-key", envvar=KEY, show_envvar=True, help="Key that clients must send; others can see it in `ps`."
        ),
    ] = None,
    name: Annotated[
        str | None, typer.Option("--name", help="What clients call the model; default: the last part of its path.")
    ] = None,
    max_batch: Annotated[
        int, typer.Option("--max-batch", min=1, help="Requests that are computed at the same time.")
    ] = 64,
    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", min=1, help="Most new tokens of an answer; default: what fits.")
    ] = None,
    max_queue: Annotated[
        int, typer.Option("--max-queue", min=0, help="Requests that may wait; more get status 429.")
    ] = 256,
    step_tokens: Annotated[
        int, typer.Option("--step-tokens", min=16, help="Tokens of a step; longer prompts are computed in chunks.")
    ] = 1024,
    kv_cache: Annotated[
        float | None,
        typer.Option(
            "--kv-cache",
            min=0.001,
            help="GB of KV cache per rank; default: half of a machine's free memory, 80% of a GPU's.",
        ),
    ] = None,
    timeout: Annotated[
        float, typer.Option("--timeout", min=1.0, help="Seconds after which a request is cancelled.")
    ] = 600.0,
    drain: Annotated[
        float, typer.Option("--drain", min=0.0, help="Seconds that running requests have to end after SIGTERM.")
    ] = 30.0,
    max_body: Annotated[int, typer.Option("--max-body", min=1024, help="Largest body of a request, in bytes.")] = 4
    * 2**20,
    prefix_sharing: Annotated[
        bool, typer.Option("--prefix-sharing/--no-prefix-sharing", help="Compute a common prefix of prompts once.")
    ] = True,
    log_prompts: Annotated[bool, typer.Option("--log-prompts", help="Write prompts into the log.")] = False,
    device: DeviceOption = AUTO,
    dtype: DtypeOption = "auto",
    revision: RevisionOption = None,
    subfolder: SubfolderOption = None,
    variant: VariantOption = None,
    trust_remote_code: TrustOption = False,
    debug: Debug = False,
) -> None:
    """Serve a model over HTTP, sharded over the devices of this machine, or of several under torchrun.

    Example: paraxis serve org/model --tp 4 --port 8000

    curl localhost:8000/v1/completions -H 'Content-Type: application/json' -d '{"prompt": "Once upon a time"}'

    SIGTERM lets running requests end, and exits with 0.
    """
    with report_errors(debug):
        check_model(model, subfolder)
        check_ranks(tp)
        check_dtype(dtype)
        check_packages()
        if api_key is not None and not api_key.strip():
            raise UsageError(f"--api-key is empty: give a key, or leave out the option (and {KEY})")
        api_key = api_key.strip() if api_key else None  # a key from a file ends with a newline
        quiet()
        hub = {"revision": revision, "subfolder": subfolder, "trust_remote_code": trust_remote_code}
        check_tokenizer(model, {key: value for key, value in hub.items() if value is not None})
        from ..serving.launch import serve_ranks
        from ..serving.options import ServeOptions

        options = ServeOptions(
            model=model,
            name=name or Path(model.rstrip("/")).name,
            host=host,
            port=port,
            api_key=api_key,
            max_batch=max_batch,
            max_tokens=max_tokens,
            max_queue=max_queue,
            step_tokens=step_tokens,
            memory=None if kv_cache is None else int(kv_cache * 1e9),
            timeout=timeout,
            drain=drain,
            max_body=max_body,
            prefix_sharing=prefix_sharing,
            log_prompts=log_prompts,
            dtype=dtype,
            hub={key: value for key, value in {**hub, "variant": variant}.items() if value is not None},
        )
        if is_launched():
            launched = int(os.environ["WORLD_SIZE"])
            if launched != tp:
                raise UsageError(f"--tp {tp}, but the launcher started {launched} ranks: use --tp {launched}")
            run_rank(options, device, debug)
            return
        code = serve_ranks(tp, run_rank, (options, device, debug), WORKER_ENVIRONMENT)
        if code:
            raise typer.Exit(code)


def check_packages() -> None:
    """Raise before anything starts without the packages of the extra ``serve``."""
    missing = [package for package in ("fastapi", "uvicorn") if find_spec(package) is None]
    if missing:
        raise UsageError(f"paraxis serve needs {' and '.join(missing)}: pip install 'paraxis[serve]'")


def run_rank(options: Any, device: str, debug: bool) -> None:
    """One rank of the service."""
    from ..distributed.exit import end_process_groups
    from ..serving.rank import run_rank

    with report_errors(debug):
        quiet()
        found = init_process_group(device)
        run_rank(options, found)
        end_process_groups()
