"""What one call of ``generate`` asks for, and whether the generation loop does it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from ...compat.generation import (
    UNUSED_BY_SAMPLING,
    are_pure,
    compiles_fully,
    has_plain_layers,
    has_plain_loop,
    is_new_dynamic_cache,
    pad_token_of,
    split_criteria,
)
from ...compat.transformers import attention_implementation

ATTENTION = (None, "sdpa", "eager")
"""The implementations of attention whose masks say which positions of a preallocated KV cache are in use."""
INPUTS = {"attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep", "inputs_embeds"}
"""The arguments of a forward that the loop knows how to go on with."""


@dataclass
class Request:
    """One call of ``generate``.

    Attributes:
        input_ids: The prompts; without columns, where the model gets their embeddings.
        generation_config: Of this call, with all defaults filled in.
        max_length: The length at which all sequences end; None if only other criteria end them.
        length_criteria: What warns of a length that the model was not made for.
        time_criteria: What says that the time is up.
        stop_strings: Criteria that look for strings at the end of the sequences, on the device.
        stop_tokens: Tokens that end a sequence.
        pad_token: What a sequence that has ended goes on with; None if nothing ends one before the others.
        processors: What changes the scores, in this order.
        sample: Whether tokens are drawn; otherwise each is the one with the highest score.
        streamer: What gets every token.
        returns_fields: Whether the result has fields: the sequences, the cache, and those that follow.
        scores: Whether the processed scores of every step are returned.
        logits: Whether the logits of every step are returned.
        inputs: The other arguments of the forward, by name.
    """

    input_ids: torch.Tensor
    generation_config: Any
    max_length: int | None
    inputs: dict[str, Any]
    length_criteria: list[Any] = field(default_factory=list)
    time_criteria: list[Any] = field(default_factory=list)
    stop_strings: list[Any] = field(default_factory=list)
    stop_tokens: torch.Tensor | None = None
    pad_token: torch.Tensor | None = None
    processors: list[Any] = field(default_factory=list)
    sample: bool = False
    streamer: Any = None
    returns_fields: bool = False
    scores: bool = False
    logits: bool = False

    @property
    def cache(self) -> Any:
        """The KV cache that transformers has made for this call."""
        return self.inputs["past_key_values"]

    @property
    def prompt_length(self) -> int:
        """The positions of the prompt."""
        embeddings = self.inputs.get("inputs_embeds")
        return int(self.input_ids.shape[1] if embeddings is None else embeddings.shape[1])


def request_of(
    model: Any,
    input_ids: torch.Tensor,
    processors: Iterable[Any],
    criteria: Iterable[Any],
    generation_config: Any,
    synced_gpus: bool,
    streamer: Any,
    inputs: dict[str, Any],
) -> Request | None:
    """What this call asks for; None if the loop does not do that, so that transformers' own loop has to run."""
    inputs = {name: value for name, value in inputs.items() if name not in UNUSED_BY_SAMPLING}
    kinds = split_criteria(criteria)
    if kinds is None or not are_pure(processors) or synced_gpus or not is_supported(model):
        return None
    if not _is_plain_mode(generation_config) or not _are_plain_inputs(model, input_ids, inputs):
        return None
    lengths = [each.max_length for each in kinds["length"]]
    tokens = [each.eos_token_id for each in kinds["eos"]]
    pad_token = pad_token_of(generation_config)
    if tokens and pad_token is None:
        return None
    fields = bool(generation_config.return_dict_in_generate)
    device = input_ids.device
    return Request(
        input_ids=input_ids,
        generation_config=generation_config,
        max_length=min(lengths) if lengths else None,
        inputs=_without_full_mask(inputs),
        length_criteria=kinds["length"],
        time_criteria=kinds["time"],
        stop_strings=kinds["strings"],
        stop_tokens=torch.cat([each.view(-1).to(device) for each in tokens]) if tokens else None,
        pad_token=pad_token.to(device) if tokens and pad_token is not None else None,
        processors=list(processors),
        sample=bool(generation_config.do_sample),
        streamer=streamer,
        returns_fields=fields,
        scores=fields and bool(generation_config.output_scores),
        logits=fields and bool(generation_config.output_logits),
    )


def is_supported(model: Any) -> bool:
    """Whether the loop runs models like this one: decoders with one KV cache per layer, whose forward is one graph with
    preallocated ones."""
    config = getattr(model, "config", None)
    return (
        config is not None
        and has_plain_loop(model)
        and has_plain_layers(config)
        and compiles_fully(model)
        and attention_implementation(config.get_text_config(decoder=True)) in ATTENTION
    )


def _is_plain_mode(generation_config: Any) -> bool:
    """Whether nothing special is asked of the cache, the prefill or the outputs."""
    return (
        generation_config.cache_implementation is None
        and generation_config.prefill_chunk_size is None
        and generation_config.use_cache is not False
        and not generation_config.is_assistant
        and not generation_config.output_attentions
        and not generation_config.output_hidden_states
    )


def _are_plain_inputs(model: Any, input_ids: torch.Tensor, inputs: dict[str, Any]) -> bool:
    """Whether the forward gets tokens, positions and a mask of two dimensions, and a cache that this call has made."""
    if input_ids.dim() != 2 or input_ids.device != model.device:
        return False
    if {name for name, value in inputs.items() if value is not None} - INPUTS:
        return False
    shape = input_ids.shape if inputs.get("inputs_embeds") is None else inputs["inputs_embeds"].shape[:2]
    mask, positions = inputs.get("attention_mask"), inputs.get("position_ids")
    if mask is not None and (not isinstance(mask, torch.Tensor) or mask.shape != shape):
        return False
    if positions is not None and (positions.dim() != 2 or positions.shape[1] != shape[1]):
        return False
    return is_new_dynamic_cache(inputs.get("past_key_values"))


def _without_full_mask(inputs: dict[str, Any]) -> dict[str, Any]:
    """The inputs without a mask that hides nothing (transformers before 5.18 passes one): attention is faster so."""
    mask = inputs.get("attention_mask")
    if mask is not None and bool((mask == 1).all()):
        return {**inputs, "attention_mask": None}
    return dict(inputs)
