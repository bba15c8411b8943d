"""Running the decode steps of one ``generate``: as captured steps where possible, as calls of the model elsewhere."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from ...errors import CaptureError, CollectiveError, RankMismatchError
from ..program_runs import observing
from . import step_graph
from .choose_tokens import choose_tokens
from .decode_state import DecodeState
from .fixed_choice import FixedChoice, form_of
from .request import Request
from .step_graph import MAX_GRAPHS, Attributes, StepGraph, StepObserver, changes_seen, is_one_program

logger = logging.getLogger("paraxis")

FAILURES = (CaptureError, RuntimeError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError)
"""What a model raises that does not run with a preallocated cache."""
PASSED_ON = (RankMismatchError, CollectiveError, torch.OutOfMemoryError)
"""What has nothing to do with the cache."""

Chosen = tuple[torch.Tensor, torch.Tensor]


class StepFailed(RuntimeError):
    """The first decode step of a new kind failed. Another loop can start again, but for tokens that were streamed."""


class DecodeSteps:
    """The decode steps of one call on one state.

    Args:
        model: The parallel model.
        request: What is asked for.
        state: The tensors of the steps.
        others: Arguments of the forward that do not change from step to step.
        pool_of_graphs: Gives the memory pool of CUDA graphs; None if steps are not captured.
        generator: What draws the tokens; None without sampling.
    """

    def __init__(
        self,
        model: Any,
        request: Request,
        state: DecodeState,
        others: dict[str, Any],
        pool_of_graphs: Callable[[], Any] | None,
        generator: torch.Generator | None,
    ) -> None:
        self.model, self.request, self.state, self.generator = model, request, state, generator
        self._inputs = state.inputs(others)
        self._pool_of_graphs = pool_of_graphs
        self._form = form_of(request)
        self._graph: StepGraph | None = None
        """The graph that stands for the steps now."""
        self._seen: Any = None
        self._missed = False
        """Whether a step was not the one of any graph."""
        state.captured.repeats = False  # guards are looked at before a capture, too

    def run(self, length: int) -> Chosen:
        """A step: the logits and scores of its tokens, for the caller to keep.

        Args:
            length: How many tokens a sequence has with the next one.

        Raises:
            StepFailed: The model does not run with a preallocated cache.
        """
        if self._graph is not None:
            if self._seen == changes_seen():
                return self._replay(self._graph, length)
            self._graph = None
        captured = self.state.captured
        if self._pool_of_graphs is None or captured.abandoned or not is_one_program(self.model):
            return self._choose(self._forward(), length)
        if captured.repeats and self._capture(self._pool_of_graphs()):
            assert self._graph is not None
            return self._replay(self._graph, length)
        return self._observed(length)

    def _replay(self, graph: StepGraph, length: int) -> Chosen:
        results = graph.replay()
        if graph.choice is None:
            return self._choose(results, length)
        logits, scores = results
        keeps_logits, keeps_scores = self.request.logits, self.request.scores
        return logits.clone() if keeps_logits else logits, scores.clone() if keeps_scores else scores

    def _choose(self, logits: torch.Tensor, length: int) -> Chosen:
        return choose_tokens(self.request, self.state, logits, self.state.sequences[:, : length - 1], length)

    # -- calls of the model ------------------------------------------------------------------------------------

    def _call(self) -> Any:
        """What the model returns for the tensors of a step."""
        try:
            outputs = self.model(**self._inputs, return_dict=True)
        except PASSED_ON:
            raise
        except FAILURES as error:
            if self.state.has_run:
                raise
            raise StepFailed(str(error)) from error
        self.state.has_run = True
        return outputs

    def _forward(self) -> torch.Tensor:
        """The logits of a step."""
        logits: torch.Tensor = self._call().logits
        self.state.advance()
        return logits

    def _observed(self, length: int) -> Chosen:
        """A step that calls the model, and notes whether it is like the step before; or the replay of a graph that this
        call turns out to be."""
        captured = self.state.captured
        observer = StepObserver(graph for graph in captured.graphs if self._takes(graph))
        # Looking at all attributes takes longer than a step: for nothing, if this one is the replay of a graph.
        attributes = Attributes(self.model, self.state.cache) if self._missed or not observer.graphs else None
        with observing(observer):
            outputs = self._call()
        if observer.found is not None:
            graph = observer.found
            captured.graphs.sort(key=lambda each: each is not graph)  # the last used first
            if graph.choice is not None:
                graph.choice.update(self.request)
            self._use(graph)
            return self._replay(graph, length)
        logits: torch.Tensor = outputs.logits
        del outputs
        self.state.advance()
        if attributes is None:
            captured.restart(observer)
        else:
            captured.note(observer, attributes.unchanged())
        self._missed = True
        return self._choose(logits, length)

    def _takes(self, graph: StepGraph) -> bool:
        """Whether a graph chooses tokens in the way that is asked for."""
        form = self._form_here()
        return graph.choice is None if form is None else graph.choice is not None and graph.choice.form == form

    def _form_here(self) -> Any:
        return None if self._form in self.state.captured.refused else self._form

    def _use(self, graph: StepGraph) -> None:
        self._graph, self._seen = graph, changes_seen()

    # -- capture -----------------------------------------------------------------------------------------------

    def _capture(self, pool: Any) -> bool:
        """Capture a step, which does not run it; whether that could be done."""
        captured, drawn = self.state.captured, None
        captured.repeats = False
        if self.generator is not None:
            drawn = self.generator.get_state()
        form = self._form_here()
        observer = StepObserver()
        try:
            choice = FixedChoice(self.request, self.state) if form is not None else None

            def step() -> Any:
                logits = self._forward()
                return logits if choice is None else choice(self.state, logits)

            with observing(observer):
                found = step_graph.CapturedStep(step, pool)
            if not observer.is_again(captured.last):
                return False
        except PASSED_ON:
            raise
        except (*FAILURES, StepFailed) as error:
            if self.generator is not None and drawn is not None:
                self.generator.set_state(drawn)
            captured.refuse(form)
            logger.info("a decode step was not captured as a CUDA graph: %s", error)
            return False
        graph = StepGraph(observer.runs[0], observer.program_results, found, choice)
        captured.graphs = [graph, *captured.graphs][:MAX_GRAPHS]
        self._use(graph)
        return True
