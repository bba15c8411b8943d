"""Private and version-dependent APIs of transformers' ``generate``.

Seen on transformers 5.17, 5.18 and 5.22. Every import of transformers is inside of a function.
"""

from __future__ import annotations

import functools
import inspect
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

Loop = Callable[..., Any]

_loops: weakref.WeakKeyDictionary[nn.Module, Loop] = weakref.WeakKeyDictionary()

# -- settings ------------------------------------------------------------------------------------------------------


def load_generation_settings(model: Any, folder: Any, chosen: Any = None) -> None:
    """Give a model that can generate the settings that a directory has for it, or those that were ``chosen``.

    ``from_pretrained`` asks the model's own class to do so, which may have settings of another kind than the usual
    ones. Without a file of settings they come from the configuration. Code in the directory is not run.
    """
    adjust = getattr(model, "adjust_generation_fn", None)
    if adjust is None or not model.can_generate():
        return
    arguments = {
        "generation_config": chosen,
        "pretrained_model_name_or_path": folder,
        "local_files_only": True,
        "revision": "main",
        "subfolder": "",
    }
    names = [name for name, p in inspect.signature(adjust).parameters.items() if p.kind is not p.VAR_KEYWORD]
    adjust(**{name: arguments.get(name, _UNSET.get(name)) for name in names})


_UNSET = {"from_auto_class": False, "from_pipeline": None, "force_download": False, "trust_remote_code": False}
"""Other arguments of ``adjust_generation_fn``, as ``from_pretrained`` passes them by default; the rest are None."""

# -- the sampling loop ---------------------------------------------------------------------------------------------

_HOOKS = (
    "_sample",
    "_prefill",
    "_optimize_model_for_decode",
    "_update_model_kwargs_for_generation",
    "prepare_inputs_for_generation",
)
"""The methods of ``GenerationMixin`` that another loop replaces or relies on."""


def has_plain_loop(model: Any) -> bool:
    """Whether a model generates by transformers' own loop, with none of its parts overridden by the class or on the
    object."""
    try:
        from transformers.generation.utils import GenerationMixin
    except ImportError:
        return False
    if not isinstance(model, GenerationMixin):
        return False
    return all(
        hasattr(GenerationMixin, name)
        and getattr(type(model), name) is getattr(GenerationMixin, name)
        and name not in model.__dict__
        for name in _HOOKS
    )


def install_sampling_loop(model: nn.Module, loop: Loop) -> None:
    """Let ``generate`` of this object run ``loop(model, plain, input_ids, **options)`` to sample or decode greedily.

    ``plain`` is transformers' own loop, as a function of the same arguments. ``generate`` looks the loop up in the
    class of the model, so it is replaced there; models without a loop of their own run transformers'. ``loop`` lives as
    long as the model, and must not refer to it.
    """
    from transformers.generation.utils import GenerationMixin

    plain: Any = GenerationMixin._sample
    _loops[model] = loop
    if hasattr(plain, "dispatches"):
        return

    @functools.wraps(plain)
    def _sample(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = _loops.get(self)
        if found is None:
            return plain(self, *args, **kwargs)
        return found(self, functools.partial(plain, self), *args, **kwargs)

    _sample.dispatches = True  # type: ignore[attr-defined]
    GenerationMixin._sample = _sample  # type: ignore[method-assign]


def prefill(model: Any, input_ids: torch.Tensor, generation_config: Any, model_kwargs: dict[str, Any]) -> Any:
    """The outputs of transformers' prefill."""
    return model._prefill(input_ids, generation_config, model_kwargs, is_first_iteration=True)


@contextmanager
def decode_implementations(model: Any) -> Iterator[None]:
    """Inside, the model computes mixtures of experts (MoE) in the way that transformers chooses for decode steps."""
    with model._optimize_model_for_decode():
        yield


def pad_token_of(generation_config: Any) -> torch.Tensor | None:
    """The padding token of this call, as a tensor on the device of the inputs."""
    found: torch.Tensor | None = generation_config._pad_token_tensor
    return found


def compiles_fully(model: Any) -> bool:
    """Whether transformers says that the model is one graph with a preallocated KV cache."""
    return bool(getattr(model, "_can_compile_fullgraph", False))


def decoder_output(**fields: Any) -> Any:
    """What ``generate`` returns with ``return_dict_in_generate``."""
    from transformers.generation.utils import GenerateDecoderOnlyOutput

    return GenerateDecoderOnlyOutput(**fields)


UNUSED_BY_SAMPLING = ("tokenizer", "assistant_tokenizer")
"""What ``generate`` passes on to any of its loops. The stopping criteria that need a tokenizer have it already."""


# -- processors and stopping criteria ------------------------------------------------------------------------------

_PROCESSORS = (
    "MinLengthLogitsProcessor",
    "MinNewTokensLengthLogitsProcessor",
    "TemperatureLogitsWarper",
    "RepetitionPenaltyLogitsProcessor",
    "EncoderRepetitionPenaltyLogitsProcessor",
    "TopPLogitsWarper",
    "TopKLogitsWarper",
    "TopHLogitsWarper",
    "MinPLogitsWarper",
    "TypicalLogitsWarper",
    "EpsilonLogitsWarper",
    "EtaLogitsWarper",
    "NoRepeatNGramLogitsProcessor",
    "EncoderNoRepeatNGramLogitsProcessor",
    "SequenceBiasLogitsProcessor",
    "NoBadWordsLogitsProcessor",
    "ForcedBOSTokenLogitsProcessor",
    "ForcedEOSTokenLogitsProcessor",
    "InfNanRemoveLogitsProcessor",
    "ExponentialDecayLengthPenalty",
    "LogitNormalization",
    "SuppressTokensAtBeginLogitsProcessor",
    "SuppressTokensLogitsProcessor",
)
"""Processors that are functions of the tokens so far and the scores: one call more changes nothing."""

_OF_SCORES = (
    "TemperatureLogitsWarper",
    "TopPLogitsWarper",
    "TopKLogitsWarper",
    "MinPLogitsWarper",
    "TypicalLogitsWarper",
    "EpsilonLogitsWarper",
    "EtaLogitsWarper",
    "InfNanRemoveLogitsProcessor",
    "LogitNormalization",
    "SuppressTokensLogitsProcessor",
)
"""Those that look at the scores alone, with operators of fixed shapes."""


@functools.cache
def _classes(names: tuple[str, ...]) -> frozenset[type]:
    from transformers.generation import logits_process

    return frozenset(getattr(logits_process, name) for name in names if hasattr(logits_process, name))


def are_pure(processors: Iterable[Any]) -> bool:
    """Whether all processors are functions of the tokens so far and the scores, without state and without the user's
    code."""
    return {type(each) for each in processors} <= _classes(_PROCESSORS)


def depends_on_scores_alone(processor: Any) -> bool:
    """Whether a processor computes the same, by the same kernels, whatever the tokens so far."""
    return type(processor) in _classes(_OF_SCORES)


def minimum_length_of(processor: Any) -> int | None:
    """The length below which a processor forbids stop tokens, which is all it does; None for other processors."""
    name = type(processor).__name__
    if type(processor) not in _classes(("MinLengthLogitsProcessor", "MinNewTokensLengthLogitsProcessor")):
        return None
    if name == "MinLengthLogitsProcessor":
        return int(processor.min_length)
    return int(processor.prompt_length_to_skip + processor.min_new_tokens)


def is_repetition_penalty(processor: Any) -> bool:
    """Whether a processor changes the score of every token that has occurred, no matter how often or where."""
    return type(processor) in _classes(("RepetitionPenaltyLogitsProcessor",))


def time_is_up(criterion: Any) -> bool:
    """What a ``MaxTimeCriteria`` says, without a tensor on the device."""
    return bool(time.time() - criterion.initial_timestamp > criterion.max_time)


def split_criteria(criteria: Iterable[Any]) -> dict[str, list[Any]] | None:
    """Stopping criteria by their kind: ``length``, ``time``, ``eos`` and ``strings``; None if there are others."""
    from transformers.generation import stopping_criteria as module

    kinds: dict[type, str] = {
        module.MaxLengthCriteria: "length",
        module.MaxTimeCriteria: "time",
        module.EosTokenCriteria: "eos",
        module.StopStringCriteria: "strings",
    }
    found: dict[str, list[Any]] = {kind: [] for kind in kinds.values()}
    for each in criteria:
        if type(each) not in kinds:
            return None
        found[kinds[type(each)]].append(each)
    return found


# -- caches --------------------------------------------------------------------------------------------------------


@functools.cache
def _cache_classes() -> tuple[type, type]:
    from transformers.cache_utils import Cache, StaticCache, StaticLayer

    class PreallocatedLayer(StaticLayer):
        """Keys and values of one layer, and how many positions are in use: one counter for all layers, which whoever
        runs the decode steps increments.

        A layer with a sliding window has all positions, too: the mask hides those before the window.
        """

        _layer_type = None

        def __init__(self, keys: torch.Tensor, values: torch.Tensor, length: torch.Tensor, is_sliding: bool) -> None:
            super().__init__(max_cache_len=keys.shape[2])
            self.keys, self.values, self.cumulative_length = keys, values, length
            self.dtype, self.device = keys.dtype, keys.device
            self.batch_size, self.num_heads = keys.shape[:2]
            self.k_head_dim, self.v_head_dim = keys.shape[-1], values.shape[-1]
            self.is_sliding, self.is_initialized = is_sliding, True

        def update(
            self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
        ) -> tuple[torch.Tensor, torch.Tensor]:
            position = self.cumulative_length.view(1)
            self.keys.index_copy_(2, position, key_states)
            self.values.index_copy_(2, position, value_states)
            return self.keys, self.values

    class PreallocatedCache(StaticCache):
        """A KV cache of a fixed size for decode steps."""

        def __init__(self, layers: list[Any]) -> None:
            Cache.__init__(self, layers=layers)

    return PreallocatedLayer, PreallocatedCache


def preallocated_cache(states: Iterable[tuple[torch.Tensor, torch.Tensor, bool]], length: torch.Tensor) -> Any:
    """A KV cache for decode steps: (keys, values, whether the layer has a sliding window) of every layer.

    ``length`` is how many positions are in use. Steps write behind them, and leave ``length`` to the caller.
    """
    layer, cache = _cache_classes()
    return cache([layer(keys, values, length, is_sliding) for keys, values, is_sliding in states])


def is_new_dynamic_cache(cache: Any) -> bool:
    """Whether ``generate`` has made this cache itself: empty, growing, of full attention or sliding windows only."""
    from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

    if type(cache) is not DynamicCache or getattr(cache, "_is_user_defined", False) or cache.offloading:
        return False
    if not cache.layers or not {type(layer) for layer in cache.layers} <= {DynamicLayer, DynamicSlidingWindowLayer}:
        return False
    if any(getattr(layer, "record_past", False) for layer in cache.layers):  # for an assistant model
        return False
    return not any(layer.is_initialized for layer in cache.layers)


def has_plain_layers(config: Any) -> bool:
    """Whether every layer has a KV cache of its own, for full attention or a sliding window of the configuration."""
    decoder = config.get_text_config(decoder=True)
    if getattr(config, "is_encoder_decoder", False) or getattr(decoder, "num_kv_shared_layers", None):
        return False
    kinds = getattr(decoder, "layer_types", None)
    if kinds is None:
        return getattr(decoder, "attention_chunk_size", None) is None
    return set(kinds) <= {"full_attention", "sliding_attention"}


def take_states(cache: Any) -> list[tuple[torch.Tensor, torch.Tensor, int | None]]:
    """(keys, values, window) of every layer of a dynamic cache, which is empty afterwards: others may refer to it."""
    found = [(layer.keys, layer.values, getattr(layer, "sliding_window", None)) for layer in cache.layers]
    clear_dynamic_cache(cache)
    return found


def clear_dynamic_cache(cache: Any) -> None:
    """Make a dynamic cache empty."""
    for layer in cache.layers:
        layer.keys = layer.values = None
        layer.is_initialized = False
        if hasattr(layer, "cumulative_length"):
            layer.cumulative_length = 0


def fill_dynamic_cache(cache: Any, states: Iterable[tuple[torch.Tensor, torch.Tensor]], length: int) -> None:
    """Give the layers of a dynamic cache these keys and values of ``length`` positions; those with a sliding window
    get the last ones only."""
    for layer, (keys, values) in zip(cache.layers, states, strict=True):
        layer.dtype, layer.device = keys.dtype, keys.device
        layer.keys, layer.values, layer.is_initialized = keys, values, True
        if hasattr(layer, "cumulative_length"):
            layer.cumulative_length = length
