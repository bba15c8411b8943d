"""The generation loop.

The first token comes from transformers' own prefill, into the growing cache that transformers has made. Its keys and
values move to a preallocated cache, and every further token is one decode step on the same tensors
(:mod:`.decode_state`). Host and device do not wait for each other: the host starts a step, and then looks at the tokens
and stop flags of the step before. If that was the last one, the step that was started for nothing is undone: its token,
its scores and its random draw.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from ...compat.generation import decode_implementations, decoder_output, prefill, time_is_up
from ...context import ParallelExecutionCtx
from .cache_sizes import MAX_FIRST, affordable_positions, capacity_for
from .choose_tokens import BAD_PROBABILITIES, choose_tokens
from .decode_state import DecodeState, StatePool, UnsupportedCache
from .decode_steps import FAILURES, PASSED_ON, DecodeSteps, StepFailed
from .late_look import LateLook
from .request import Request


class GenerationLoop:
    """One call of ``generate``.

    Args:
        model: The parallel model.
        ctx: Its context.
        pool: The tensors of earlier calls.
        request: What is asked for.
        pool_of_graphs: Gives the memory pool of CUDA graphs; None if steps are not captured.
    """

    def __init__(
        self,
        model: Any,
        ctx: ParallelExecutionCtx,
        pool: StatePool,
        request: Request,
        pool_of_graphs: Callable[[], Any] | None = None,
    ) -> None:
        self.pool_of_graphs = pool_of_graphs
        self.model, self.ctx, self.pool, self.request = model, ctx, pool, request
        ids = request.input_ids
        self.length = ids.shape[1]
        """The tokens of every sequence, with those that were not looked at yet."""
        self.offset = request.prompt_length - self.length
        """Positions in the cache beyond the tokens: those of the prompt, if the model gets its embeddings."""
        self.state: DecodeState
        self.look: LateLook
        self.generator = _generator_of(ids.device) if request.sample else None
        self.streamed = 0
        """Steps whose tokens the streamer has."""
        self.scores: list[torch.Tensor] = []
        self.logits: list[torch.Tensor] = []
        self.others = {k: v for k, v in request.inputs.items() if k == "logits_to_keep" and v is not None}

    def _first_limit(self) -> int:
        """The positions that the first cache has to hold: all of this call, unless these are many more than the
        prompt's."""
        likely = max(self.request.prompt_length + 1, MAX_FIRST)
        most = self.request.max_length
        return likely if most is None else min(most + self.offset, likely)

    def _take_state(self) -> DecodeState:
        """The tensors for the decode steps of this call, after its prefill."""
        ids, inputs, batch = self.request.input_ids, self.request.inputs, self.request.input_ids.shape[0]
        positions, mask = inputs.get("position_ids"), inputs.get("attention_mask")
        affordable = affordable_positions(
            self.request.cache, batch, self.ctx.world_size, self.pool.common_limit(self.ctx)
        )
        capacity = capacity_for(self._first_limit(), affordable)
        rows = 0 if positions is None else positions.shape[0]
        state = self.pool.take(batch, capacity, rows, mask is not None, affordable)
        state.start(ids)
        self.look = state.look
        return state

    # -- the way of a call -------------------------------------------------------------------------------------

    def run(self) -> Any:
        """Prefill and decode; what ``generate`` returns.

        Raises:
            StepFailed: The model does not run with a preallocated cache.
        """
        request = self.request
        logits = prefill(self.model, request.input_ids, request.generation_config, request.inputs).logits
        self.state = state = self._take_state()
        self._note(*choose_tokens(request, state, logits, request.input_ids, self.length + 1))
        del logits
        # Nobody should wait for the first token until the next step was started.
        ended = request.streamer is not None and self._look()
        filled = not ended and not self._is_last()
        if filled:
            with decode_implementations(self.model), self._own_comparison():
                self._fill()
                self._decode()
        while self.look.waiting:
            self._look()
        if request.streamer is not None:
            request.streamer.end()
        sequences = self.state.sequences[:, : self.length].clone()
        if not request.returns_fields:
            result: Any = sequences
        else:
            cache = self.state.write_back(request.cache, self._cached()) if filled else request.cache
            result = decoder_output(
                sequences=sequences,
                scores=tuple(self.scores) if request.scores else None,
                logits=tuple(self.logits) if request.logits else None,
                attentions=None,
                hidden_states=None,
                past_key_values=cache,
            )
        self.pool.give(self.state)
        return result

    def _fill(self) -> None:
        """Move the keys and values of the prefill to the preallocated cache."""
        inputs = self.request.inputs
        try:
            self.state.fill(
                self.request.cache,
                self.request.prompt_length,
                inputs.get("position_ids"),
                inputs.get("attention_mask"),
            )
        except PASSED_ON:
            raise
        except (*FAILURES, UnsupportedCache) as error:
            if self.state.has_run:
                raise
            raise StepFailed(str(error)) from error

    def _decode(self) -> None:
        """Decode steps until the end."""
        positions = [c.max_position_embeddings for c in self.request.length_criteria if c.max_position_embeddings]
        steps = self._steps()
        while True:
            if positions and self._cached() >= min(positions) and self._settle():
                return  # a step for nothing could fail: there are no positions for it
            if self._cached() >= self.state.capacity:
                self.state = self.state.grown(self._cached() + 1, self._cached())
            if steps.state is not self.state:
                steps = self._steps()
            before = None if self.generator is None else self.generator.get_state()
            self._note(*steps.run(self.length + 1))
            if self.look.waiting > 1 and self._look():
                self._undo(before)
                return
            if self._is_last():
                return

    # -- a step ------------------------------------------------------------------------------------------------

    def _steps(self) -> DecodeSteps:
        """What runs decode steps on the tensors of now."""
        return DecodeSteps(self.model, self.request, self.state, self.others, self.pool_of_graphs, self.generator)

    def _note(self, logits: torch.Tensor, scores: torch.Tensor) -> None:
        """Note the logits and the scores of a step, and let the host know of its tokens."""
        self.length += 1
        if self.request.scores:
            self.scores.append(scores)
        if self.request.logits:
            self.logits.append(logits)
        self.look.send(self.state.signals)

    def _cached(self) -> int:
        """Positions of the cache in use before the next step."""
        return self.length + self.offset - 1

    def _undo(self, before: torch.Tensor | None) -> None:
        """Undo the last step: all sequences had ended before it."""
        self.look.forget()
        self.length -= 1
        del self.scores[-1:], self.logits[-1:]
        if self.generator is not None and before is not None:
            self.generator.set_state(before)

    # -- the end -----------------------------------------------------------------------------------------------

    def _look(self) -> bool:
        """Look at the oldest step that was not looked at; whether all sequences have ended with it."""
        seen = self.look.receive()
        if seen.invalid:
            raise RuntimeError(BAD_PROBABILITIES)
        check = self.ctx.state.input_check
        if check is not None:
            check.compare_tokens(seen.tokens)
        if self.request.streamer is not None:
            self.request.streamer.put(seen.tokens)
            self.streamed += 1
        return seen.stopped

    def _settle(self) -> bool:
        """Look at all steps; whether all sequences have ended."""
        ended = False
        while self.look.waiting:
            ended = self._look()
        return ended

    def _is_last(self) -> bool:
        """Whether the step that was started last is the last one, whatever its tokens are."""
        request = self.request
        for criterion in request.length_criteria:  # it warns of a length that the model was not made for
            limit = criterion.max_position_embeddings
            if limit is not None and self.length == limit + 1:
                criterion(self.state.sequences[:, : self.length], None)
        if request.max_length is not None and self.length >= request.max_length:
            return True
        if not request.time_criteria:
            return False
        return any_rank(any(time_is_up(each) for each in request.time_criteria), self.ctx)

    @contextmanager
    def _own_comparison(self) -> Iterator[None]:
        """Inside, calls of the model are not compared between ranks: the loop compares the tokens of every step."""
        check = self.ctx.state.input_check
        if check is None or check.active:
            yield
            return
        with check.comparing_tokens():
            yield


def any_rank(here: bool, ctx: ParallelExecutionCtx) -> bool:
    """Whether it is so on any tensor-parallel rank: clocks differ. A collective."""
    if ctx.world_size == 1 or dist.get_backend(ctx.tp_group) == "fake":
        return here
    flag = torch.tensor(int(here), device=ctx.current_device)
    dist.all_reduce(flag, dist.ReduceOp.MAX, group=ctx.tp_group)
    return bool(flag.item())


def _generator_of(device: torch.device) -> torch.Generator:
    """What draws without a generator use on this device."""
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        return torch.cuda.default_generators[index]
    return torch.default_generator
