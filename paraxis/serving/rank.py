"""A rank of a service: it loads its part of the model and follows rank 0, which listens."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
import threading
import time
from typing import Any

import torch
import torch.distributed as dist

from ..api import parallelize_model
from ..context import ParallelExecutionCtx
from ..runtime.batching.channel import Channel
from ..runtime.batching.engine import Engine, make_runner
from ..runtime.batching.runner import Runner, longest_sequence
from ..runtime.continuous_batching import WAIT, cache_bytes
from ..weights.hub import resolve_checkpoint
from ..weights.pretrained_options import split_pretrained_options
from .options import ServeOptions
from .service import Service

logger = logging.getLogger("paraxis.serve")

FAILURE = 5.0
"""Seconds that clients have to read that the service has failed, before it ends."""


BACKLOG = 2048
"""Connections that wait to be accepted."""
ABORT = 2.0
"""Seconds that requests have to say that they were cancelled."""


def run_rank(options: ServeOptions, device: torch.device) -> None:
    """Serve until somebody ends the service; the process group is initialized. Ends the process if a rank fails."""
    set_up_log()
    listener = _listen(options) if dist.get_rank() == 0 else None
    ctx = ParallelExecutionCtx(tp_group=dist.group.WORLD, current_device=device)  # type: ignore[arg-type]
    model, tokenizer = load(options, ctx)
    engine = make_engine(model, ctx, options)
    if listener is not None:
        _lead(engine, model, tokenizer, options, listener)
    else:
        _follow(engine)


def set_up_log() -> None:
    """One line per request on stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logger.handlers, logger.propagate = [handler], False
    logger.setLevel(logging.INFO)


def load(options: ServeOptions, ctx: ParallelExecutionCtx) -> tuple[Any, Any]:
    """The model, and its tokenizer on rank 0. A collective."""
    from transformers import AutoTokenizer

    hub, _ = split_pretrained_options(options.hub)
    folder = resolve_checkpoint(options.model, group=dist.group.WORLD, options=hub)
    trust = hub.trust_remote_code
    place: dict[str, Any] = {"trust_remote_code": trust}
    local = folder.joinpath("tokenizer.json").exists()
    if not local:
        place |= {"revision": hub.revision or "main", "subfolder": hub.subfolder}
    tokenizer = AutoTokenizer.from_pretrained(str(folder) if local else options.model, **place)
    model = parallelize_model(
        str(folder),
        ctx,
        dtype=options.dtype,
        variant=hub.variant,
        trust_remote_code=trust,
        show_progress=False,
        **options.load,
    )
    return model.eval(), tokenizer


def make_engine(model: Any, ctx: ParallelExecutionCtx, options: ServeOptions) -> Engine:
    """The batch, with its KV cache; compiles what steps run. A collective."""
    longest = longest_sequence(model.config)
    most = None if longest is None else options.max_batch * -(-longest // options.block_size)
    memory = cache_bytes(ctx) if options.memory is None else options.memory
    runner: Runner = make_runner(model, ctx, memory, options.block_size, None, most)
    runner.warm_up()
    channel = Channel(ctx.tp_group, WAIT)
    return Engine(runner, channel, options.max_batch, options.step_tokens, options.prefix_sharing)


def _listen(options: ServeOptions) -> socket.socket:
    """The socket, before the model is loaded: a port that is taken is an error at once. Connections wait in it."""
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    found = socket.socket(family)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind((options.host, options.port))
    except OSError as error:
        raise OSError(error.errno, f"{options.host}:{options.port}: {error.strerror}") from error
    return found


def _follow(engine: Engine) -> None:
    """On the other ranks. Signals are for rank 0: it says when the service ends."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    try:
        engine.run()
    except Exception as error:
        logger.error("rank %d ends: %s: %s", dist.get_rank(), type(error).__name__, _line(error))
        _end(1)


def _lead(engine: Engine, model: Any, tokenizer: Any, options: ServeOptions, listener: socket.socket) -> None:
    """On rank 0: the batch in a thread, HTTP in this one."""
    import uvicorn

    from .app import make_app

    service = Service(engine, model, tokenizer, options)
    over = threading.Event()

    def run() -> None:
        try:
            engine.run()
        except BaseException as error:
            logger.error("the batch has failed: %s: %s", type(error).__name__, _line(error))
        finally:
            over.set()

    class Server(uvicorn.Server):
        def handle_exit(self, sig: int, frame: Any) -> None:
            """A signal: no new requests; the second one ends the service at once."""
            if service.draining:
                self.should_exit = self.force_exit = True
            service.draining = True

    config = uvicorn.Config(
        make_app(service),
        log_level="warning",
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=1,
        server_header=False,
        backlog=BACKLOG,
    )
    server = Server(config)
    thread = threading.Thread(target=run, name="batch", daemon=True)
    thread.start()

    async def serve() -> None:
        watcher = asyncio.ensure_future(watch(server, service, over))
        await server.serve([listener])
        watcher.cancel()

    listener.listen(BACKLOG)
    port = listener.getsockname()[1]
    shown = f"[{options.host}]" if ":" in options.host else options.host
    logger.info("%s: %d ranks, %d positions of KV cache", options.name, dist.get_world_size(), engine.capacity)
    logger.info("serving on http://%s:%d", shown, port)
    asyncio.run(serve())
    if engine.failure is not None:
        _end(1)
    engine.stop(abort=True)
    thread.join(30)
    if thread.is_alive() or engine.failure is not None:
        logger.error("the ranks did not end")
        _end(1)
    logger.info("all requests have ended")


async def watch(server: Any, service: Service, over: threading.Event) -> None:
    """End the server when the batch has failed or is over, or when all requests have ended after a signal.

    A batch that has failed is not over while it waits to tell the other ranks, which may be stuck in a collective.
    """
    until = None
    while not server.should_exit:
        await asyncio.sleep(0.05)
        now = time.monotonic()
        failed = service.failed or over.is_set()
        if until is None and (failed or service.draining):
            until = now + (FAILURE if failed else service.options.drain)
        if until is None:
            continue
        if now > until:
            service.engine.stop(abort=True)
        server.should_exit = not service.active or now > until + ABORT


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:500]


def _end(code: int) -> None:
    """End this process without waiting for ranks that are gone."""
    sys.stderr.flush()
    sys.stdout.flush()
    os._exit(code)
