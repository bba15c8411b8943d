"""Choosing tokens by the same operators on the same memory in every step, so that a CUDA graph can contain it.

Nothing here depends on how many tokens there are so far: a processor that looks at them gets all columns of the
sequences (those that are not written yet hold a token that has occurred), and a minimum length is compared on the
device. What one request brings as tensors (stop tokens, say) is copied to those of the request before, where requests
are alike otherwise.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch

from ...compat.generation import depends_on_scores_alone, is_repetition_penalty, minimum_length_of
from .choose_tokens import choose_tokens
from .decode_state import DecodeState
from .request import Request

_CONSTANTS = (int, float, bool, str, type(None))


def form_of(request: Request) -> Any:
    """What requests have in common that choose their tokens by the same operators; None if these are not always the
    same."""
    if request.stop_strings:
        return None
    forms = [_form_of_processor(each, request) for each in request.processors]
    if None in forms:
        return None
    ends = _form_of_tensor(request.stop_tokens), _form_of_tensor(request.pad_token)
    return request.sample, *ends, *forms


def _form_of_processor(processor: Any, request: Request) -> Any:
    values = vars(processor)
    tensors = tuple((name, _form_of_tensor(x)) for name, x in values.items() if isinstance(x, torch.Tensor))
    minimum = minimum_length_of(processor)
    if minimum is not None:
        return type(processor), minimum > 0, tensors
    if is_repetition_penalty(processor):
        if values.get("prompt_ignore_length") or not request.input_ids.shape[1]:
            return None  # a token that has not occurred would count
    elif not depends_on_scores_alone(processor):
        return None
    others = tuple((name, x) for name, x in values.items() if not isinstance(x, torch.Tensor))
    return (type(processor), others, tensors) if all(isinstance(x, _CONSTANTS) for _, x in others) else None


def _form_of_tensor(tensor: torch.Tensor | None) -> Any:
    return None if tensor is None else (tuple(tensor.shape), tensor.dtype, tensor.device)


class BelowLength:
    """A processor that applies to sequences below a length only, as one that does so whatever their length.

    Attributes:
        processor: It.
        column: The length of the sequences, on the device.
        length: The length below which it applies, on the device.
    """

    def __init__(self, processor: Any, column: torch.Tensor, length: int) -> None:
        self.processor, self.column = processor, column
        self.length = torch.full_like(column, length)

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """The processed scores."""
        return torch.where(self.column < self.length, self.processor(ids[:, :0], scores), scores)


class FixedChoice:
    """Chooses the tokens of requests of one form.

    Args:
        request: The first of them.
        state: The tensors of the steps.
    """

    def __init__(self, request: Request, state: DecodeState) -> None:
        self.form = form_of(request)
        self._column = state.column  # not the state: it has the graphs, which have this, and is large
        with torch.inference_mode(False):
            self._request = replace(
                request,
                inputs={},
                streamer=None,
                length_criteria=[],
                time_criteria=[],
                stop_tokens=_clone(request.stop_tokens),
                pad_token=_clone(request.pad_token),
                processors=[self._own(each) for each in request.processors],
            )

    def _own(self, processor: Any) -> Any:
        """A copy of a processor, with tensors of its own."""
        own = copy.copy(processor)
        for name, value in vars(processor).items():
            if isinstance(value, torch.Tensor):
                setattr(own, name, value.clone())
        minimum = minimum_length_of(processor)
        return own if minimum is None else BelowLength(own, self._column, minimum)

    def update(self, request: Request) -> None:
        """Take over the tensors of another request of this form."""
        for own, value in (
            (self._request.stop_tokens, request.stop_tokens),
            (self._request.pad_token, request.pad_token),
        ):
            if own is not None and value is not None:
                own.copy_(value)
        for own, processor in zip(self._request.processors, request.processors, strict=True):
            if isinstance(own, BelowLength):
                own.length.fill_(minimum_length_of(processor) or 0)
                own = own.processor
            for name, value in vars(processor).items():
                if isinstance(value, torch.Tensor):
                    getattr(own, name).copy_(value)

    def __call__(self, state: DecodeState, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Append the next tokens to that state: the logits and the scores that they were chosen by."""
        return choose_tokens(self._request, state, logits, state.sequences)


def _clone(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.clone()
