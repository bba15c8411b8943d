"""Continuous batching of a parallel model: ``generate_batch``, and managers that are used like transformers' own.

The loop and the paged KV cache are ours (:mod:`paraxis.runtime.batching`).
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ..compat.continuous_batching import (
    CACHED_MANAGER,
    generation_output,
    new_batching_config,
    page_size_of,
    processors_of,
    stop_tokens_of,
)
from ..config import Config
from ..context import ParallelExecutionCtx
from ..data_parallel.shard import shards_parameters
from ..distributed.consensus import all_gather_object
from ..distributed.liveness import machine_id
from ..utils.memory import available_memory
from .batching.channel import Channel
from .batching.engine import Engine, make_runner
from .batching.request import CANCELLED, Choice, Request
from .batching.runner import check_model, longest_sequence

logger = logging.getLogger("paraxis")

SHARE = 0.5
"""Of the free memory of a machine, what the caches of all its ranks may take together by default."""
MAX_REQUESTS, MAX_TOKENS = 256, 2048
"""Requests, and tokens of a step, by default."""
WAIT = 30 * 60.0
"""Seconds that a rank waits for the first one's next message: it sends one every few seconds."""


class BatchingManager:
    """Requests to a parallel model that are computed together. All ranks make one, and call the same methods.

    The first rank takes the requests, of all ranks that add them; every rank gets all results.

    Args:
        model: A parallel model.
        ctx: Its context.
        generation_config: How tokens are chosen.
        config: Sizes, as for transformers' continuous batching.
    """

    def __init__(self, model: Any, ctx: ParallelExecutionCtx, generation_config: Any, config: Any) -> None:
        check_model(model)
        refuse_options(config)
        self.model, self.ctx, self.generation_config = model.eval(), ctx, generation_config
        self.continuous_batching_config = config
        self.channel = Channel(ctx.tp_group, WAIT)
        self.is_tp_driver = self.channel.is_first
        self.num_return_sequences = getattr(generation_config, "num_return_sequences", None) or 1
        self.warmed_up = False
        self.fatal_error: BaseException | None = None
        self.engine: Engine | None = None
        self._results: queue.Queue[Any] = queue.Queue()
        self._handlers: dict[str, tuple[Callable[[Any], None], asyncio.AbstractEventLoop]] = {}
        self._requests: dict[str, list[Request]] = {}
        self._lock = threading.Lock()
        self._count = 0
        self._thread: threading.Thread | None = None
        self._runner: Any = None

    # -- life --------------------------------------------------------------------------------------------------

    def warmup(self) -> None:
        """Compile, and allocate the KV cache. A collective."""
        if self._runner is None:
            config = self.continuous_batching_config
            size = page_size_of(config)
            longest = longest_sequence(self.model.config)
            requests = config.max_requests_per_batch or MAX_REQUESTS
            most = None if longest is None else requests * -(-longest // size)
            memory = cache_bytes(self.ctx, config.max_memory_percent)
            self._runner = make_runner(self.model, self.ctx, memory, size, config.num_blocks, most)
        self.warmed_up = True

    def start(self) -> None:
        """Start the loop in a thread. A collective, if :meth:`warmup` was not called."""
        if self.is_running():
            logger.warning("the batch runs already")
            return
        self.warmup()
        config = self.continuous_batching_config
        self.fatal_error = None
        self.engine = Engine(
            self._runner,
            self.channel,
            config.max_requests_per_batch or MAX_REQUESTS,
            config.max_batch_tokens or MAX_TOKENS,
            sharing=config.allow_block_sharing,
            seed=config.seed,
            prefill_first=config.scheduler_type == "prefill_first",
            on_event=self._deliver,
        )
        self._thread = threading.Thread(target=self._run, args=(self.engine,), daemon=True)
        self._thread.start()

    def _run(self, engine: Engine) -> None:
        try:
            engine.run()
        except Exception as error:
            self.fatal_error = error
            logger.error("the batch has failed: %s: %s", type(error).__name__, error)

    def is_running(self) -> bool:
        """Whether the loop runs."""
        return self._thread is not None and self._thread.is_alive()

    def stop(
        self,
        block: bool = True,
        timeout: float | None = None,
        keep_for_next_session: bool = False,
        hard_stop: bool = False,
    ) -> None:
        """End the loop when all requests have ended; at once with ``hard_stop``. The first rank decides when."""
        if self.engine is not None and self.is_tp_driver:
            self.engine.stop(abort=hard_stop)
        if block:
            self.join(time.perf_counter(), timeout if self.is_tp_driver else None)
        if not keep_for_next_session:
            self._runner = None
        else:
            setattr(self.model, CACHED_MANAGER, self)

    def join(self, stop_trigger_time: float, timeout: float | None = None) -> None:
        """Wait for the loop to end."""
        if self._thread is not None:
            self._thread.join(timeout)
            if self._thread.is_alive():
                logger.warning("the batch did not end within %s s", timeout)
            else:
                self._thread = None

    def destroy(self) -> None:
        """End the loop, and give up what it has."""
        if self.is_running():
            self.stop(block=True)
        self._runner = None
        self.channel.close()

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Not possible: end the loop instead."""
        raise NotImplementedError("the batch of a parallel model cannot be paused: stop it, and start another one")
        yield

    # -- requests ----------------------------------------------------------------------------------------------

    def add_request(
        self,
        input_ids: list[int],
        request_id: str | None = None,
        max_new_tokens: int | None = None,
        streaming: bool = False,
        record_timestamps: bool = False,
        eos_token_id: int | list[int] | None = None,
        **logit_processor_kwargs: Any,
    ) -> str | None:
        """Add a request, as with transformers' manager; its id. On other ranks than the first this does nothing."""
        if not self.is_tp_driver:
            return None
        if self.engine is None or not self.is_running():
            raise RuntimeError("the batch does not run: call start()")
        with self._lock:
            if request_id is None:
                request_id = f"req_{self._count}"
                self._count += 1
        config = self.generation_config
        if logit_processor_kwargs:
            config = type(config).from_dict({**config.to_dict(), **logit_processor_kwargs})
        prompt = [int(token) for token in input_ids]
        if not prompt:
            raise ValueError(f"request {request_id} has no tokens")
        limit = config.max_new_tokens if max_new_tokens is None else max_new_tokens
        stop = stop_tokens_of(eos_token_id, config.eos_token_id, self.model.config.eos_token_id)
        wants_logprobs = self.continuous_batching_config.return_logprobs
        names = [request_id, *(f"{request_id}__child#{i}" for i in range(self.num_return_sequences - 1))]
        requests = []
        for name in names:
            choice = Choice(
                processors_of(self.model, config, prompt, self.ctx.current_device),
                bool(config.do_sample),
                logprobs=0 if wants_logprobs else None,
                processed=True,
            )
            stamps: list[float] | None = [] if record_timestamps else None
            requests.append(
                Request(
                    name,
                    prompt,
                    self._limited(len(prompt), limit),
                    stop,
                    choice,
                    on_change=self._changed,
                    details=(request_id, streaming, stamps),
                )
            )
        self._requests[request_id] = requests
        for request in requests:
            self.engine.add(request)
        return request_id

    def add_requests(
        self,
        inputs: list[list[int]],
        max_new_tokens: int | None = None,
        streaming: bool = False,
        record_timestamps: bool = False,
        **logit_processor_kwargs: Any,
    ) -> list[str]:
        """Add requests; their ids, which are the same on all ranks if all add the same ones."""
        with self._lock:
            names = [f"req_{i}" for i in range(self._count, self._count + len(inputs))]
            self._count += len(inputs)
        for name, prompt in zip(names, inputs, strict=True):
            self.add_request(prompt, name, max_new_tokens, streaming, record_timestamps, None, **logit_processor_kwargs)
        return names

    def cancel_request(self, request_id: str) -> None:
        """Cancel a request by its id. On other ranks than the first this does nothing."""
        if self.engine is not None:
            for request in self._requests.get(request_id, ()):
                self.engine.cancel(request)

    def _limited(self, prompt: int, limit: int | None) -> int:
        """How many tokens a request gets at most, within what the model and the KV cache hold."""
        assert self.engine is not None
        room = self.engine.capacity - prompt
        return max(1, room if limit is None else min(limit, room))

    # -- results -----------------------------------------------------------------------------------------------

    def _changed(self, request: Request) -> None:
        """On the first rank, in the thread of the loop."""
        request_id, streaming, stamps = request.details
        if stamps is not None and len(stamps) < len(request.tokens):
            stamps.append(time.perf_counter())
        if not streaming and not request.ended:
            return
        if request.ended and all(each.ended for each in self._requests.get(request_id, ())):
            self._requests.pop(request_id, None)
        if request.ended == CANCELLED:
            with self._lock:
                self._handlers.pop(request.name, None)
            return
        assert self.engine is not None
        found = generation_output(
            request.name,
            request.prompt,
            list(request.tokens),
            [each.chosen for each in request.logprobs],
            bool(request.ended),
            request.error,
            ((request.arrived, request.started, request.finished), None if stamps is None else list(stamps)),
        )
        if not self.channel.alone:
            self.engine.events.append(found)
        self._deliver(found)

    def _deliver(self, found: Any) -> None:
        with self._lock:
            handler = self._handlers.get(found.request_id)
            if handler is not None and found.is_finished():
                self._handlers.pop(found.request_id)
        if handler is None:
            self._results.put(found)
        else:
            callback, loop = handler
            loop.call_soon_threadsafe(callback, found)

    def register_result_handler(self, request_id: str, callback: Callable[[Any], None]) -> None:
        """Call this, in the event loop that runs now, with the results of a request."""
        with self._lock:
            self._handlers[request_id] = callback, asyncio.get_running_loop()

    def get_result(self, request_id: str | None = None, timeout: float | None = None) -> Any:
        """The next result; None after the timeout, or if there will be none."""
        try:
            if not self.is_running():
                result = self._results.get_nowait()
            else:
                result = self._results.get(timeout=timeout)
        except queue.Empty:
            return None
        if request_id is not None and result.request_id != request_id:
            self._results.put(result)
            return None
        return result

    def __iter__(self) -> Iterator[Any]:
        """Results as they come, while the loop runs."""
        while self.is_running() or not self._results.empty():
            result = self.get_result(timeout=0.1)
            if result is not None:
                yield result

    def request_id_iter(self, request_id: str) -> Iterator[Any]:
        """The results of one request, until its last."""
        while self.is_running() or not self._results.empty():
            result = self.get_result(request_id, timeout=0.1)
            if result is not None:
                yield result
                if result.is_finished():
                    return


def parallel_batching(model: Any, ctx: ParallelExecutionCtx, config: Config) -> Callable[..., BatchingManager]:
    """``init_continuous_batching`` of a parallel model. A collective."""
    sharded = shards_parameters(ctx, config)

    def init_continuous_batching(
        generation_config: Any = None, continuous_batching_config: Any = None, workload_hints: Any = None
    ) -> BatchingManager:
        if sharded:
            raise NotImplementedError(
                "data-parallel ranks that shard parameters gather them together in every step, and cannot run batches "
                "of their own: use data_parallel='replicate'"
            )
        cached = vars(model).get(CACHED_MANAGER)
        if isinstance(cached, BatchingManager):
            return cached
        chosen = generation_config if generation_config is not None else model.generation_config
        config = continuous_batching_config
        if config is None:
            config = getattr(chosen, "continuous_batching_config", None) or new_batching_config()
        return BatchingManager(model, ctx, chosen, config)

    return init_continuous_batching


def destroy_batch(model: Any) -> None:
    """``destroy_cached_continuous_batching_manager``: give up the manager that was made with ``persistent_manager``."""
    cached = vars(model).pop(CACHED_MANAGER, None)
    if cached is not None:
        cached.destroy()


def refuse_options(config: Any) -> None:
    """Raise for options of transformers' configuration that mean something else here."""
    problems = []
    if config.cpu_offload_space:
        problems.append("cpu_offload_space: requests that do not fit are computed again")
    if config.scheduler_type not in ("fifo", "prefill_first"):
        problems.append(f"scheduler_type={config.scheduler_type!r}: use 'fifo' or 'prefill_first'")
    if problems:
        raise ValueError(f"the batch of a parallel model has no {'; no '.join(problems)}")


def cache_bytes(ctx: ParallelExecutionCtx, share: float | None = None) -> int:
    """The bytes that the cache of a rank may take: the same on all ranks. A collective.

    On a CPU, the ranks of a machine share its memory; ``share`` is of what is free there.
    """
    if ctx.current_device.type == "cuda":
        import torch

        free = torch.cuda.mem_get_info(ctx.current_device)[0]
        here, part = f"{machine_id()}/{ctx.rank}", 0.8 if share is None else share
    else:
        here, free, part = machine_id(), available_memory(), SHARE if share is None else share
    answers = all_gather_object(ctx.world_group, [here, free], "sizing the KV cache")
    ranks = {where: sum(other == where for other, _ in answers) for where, _ in answers}
    return int(min(part * free / ranks[where] for where, free in answers))
