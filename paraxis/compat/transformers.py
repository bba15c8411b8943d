"""Private and version-dependent APIs of transformers.

transformers takes seconds to import, so every import is inside of a function. Seen on transformers 5.17, 5.22 and 5.23
unless an entry says otherwise.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

__all__ = [
    "always_mask_padding",
    "attention_implementation",
    "checkpoint_conversions",
    "class_from_code",
    "collector_as_global",
    "conversion_tables_are_built",
    "dtype_by_name",
    "grouped_mm_fallback",
    "has_adapters_loaded",
    "implementations",
    "init_weights_of",
    "initialize_weights_slot",
    "initializers",
    "install_output_hooks",
    "is_output_hook",
    "keys_to_ignore_on_load",
    "keys_to_ignore_on_save",
    "logger_methods",
    "merges_parallel_plans",
    "parallel_styles",
    "protected_from_initialization",
    "revert_weight_conversion",
    "set_attention_implementation",
    "set_experts_implementation",
    "supports_attention_interface",
    "trainer_class",
    "use_cpu_ranks",
]

# -- capturing -----------------------------------------------------------------------------------------------------


def install_output_hooks(model: nn.Module) -> None:
    """Install the hooks that collect hidden states and attentions.

    transformers does so lazily in the first forward, under a lock that Dynamo cannot trace.
    """
    if not hasattr(model, "base_model_prefix"):
        return
    try:
        from transformers.utils.output_capturing import maybe_install_capturing_hooks
    except ImportError:  # a version that collects these outputs in another way
        return
    _nest_collectors()
    if not getattr(model, "_output_capturing_hooks_installed", False):
        # A part of it that collected something before has its hooks, and would collect everything twice.
        for module in model.modules():
            for key in [key for key, hook in module._forward_hooks.items() if is_output_hook(hook)]:
                del module._forward_hooks[key]
    maybe_install_capturing_hooks(model)


def _nest_collectors() -> None:
    """Let a model that collects outputs call another one that does, while Dynamo traces.

    When the inner one is done, transformers' collector forgets the outer one and that it is traced (seen in 5.17 to
    5.22), and the outer one's hooks break the graph.
    """
    collector = getattr(sys.modules["transformers.utils.output_capturing"], "_active_collector", None)
    kind = type(collector)
    if not hasattr(collector, "compiling") or not hasattr(collector, "context_var") or hasattr(kind, "nests"):
        return

    class Nesting(kind):  # type: ignore[misc, valid-type]
        nests = True
        context_var: Any
        global_var: Any
        compiling: bool

        def set(self, value: Any) -> Any:
            if not torch.compiler.is_compiling():
                return self.context_var.set(value)
            before = (self.global_var, self.compiling)
            self.global_var, self.compiling = value, True
            return before

        def reset(self, token: Any) -> None:
            if isinstance(token, tuple):
                self.global_var, self.compiling = token
            else:
                self.context_var.reset(token)

    assert collector is not None
    collector.__class__ = Nesting


def is_output_hook(hook: Any) -> bool:
    """Whether a hook of a module is one that :func:`install_output_hooks` has installed."""
    return getattr(hook, "__module__", None) == "transformers.utils.output_capturing"


@contextmanager
def collector_as_global() -> Iterator[None]:
    """While a submodule is called by itself, put what collects hidden states and attentions into a global.

    The model around it has set a context variable, which Dynamo cannot read. Its hooks read the global if
    ``compiling`` is set.
    """
    capturing = sys.modules.get("transformers.utils.output_capturing")
    collector = getattr(capturing, "_active_collector", None)
    if getattr(collector, "compiling", True):  # transformers is not used, collects in another way, or has done so
        yield
        return
    assert collector is not None
    collector.global_var, collector.compiling = collector.context_var.get(), True
    try:
        yield
    finally:
        collector.global_var, collector.compiling = None, False


def logger_methods() -> list[Callable[..., Any]]:
    """The methods of loggers that models call in ``forward``; transformers adds the ``_once`` ones when imported."""
    import transformers.utils.logging  # noqa: F401

    names = ("debug", "info", "warning", "warning_once", "warning_advice", "info_once", "error")
    return [getattr(logging.Logger, name) for name in names if hasattr(logging.Logger, name)]


def always_mask_padding(applies: Callable[[], bool]) -> None:
    """Where ``applies()``, assume that some token is padding.

    A mask of ones changes nothing, and looking at its values breaks the graph. transformers does so to leave out the
    mask of FlexAttention. Seen on 5.22.
    """
    masking = sys.modules.get("transformers.masking_utils")
    look = getattr(masking, "fast_all", None)
    if masking is None or look is None or hasattr(look, "_looks"):
        return

    def fast_all(tensor: torch.Tensor) -> Any:
        return False if applies() else look(tensor)

    fast_all._looks = look  # type: ignore[attr-defined]
    masking.fast_all = fast_all  # type: ignore[attr-defined]


# -- building ------------------------------------------------------------------------------------------------------


def initialize_weights_slot() -> tuple[type, str]:
    """The class and the method through which a model that is built initializes each of its modules."""
    from transformers import PreTrainedModel

    return PreTrainedModel, "_initialize_weights"


def init_weights_of(model: Any) -> Callable[[nn.Module], None] | None:
    """The model's own initialization of one module; None for models that are not of transformers."""
    return getattr(model, "_init_weights", None)


_LOADED = "_is_hf_initialized"
"""The mark of a tensor that came from the checkpoint: the functions of ``transformers.initialization`` skip it."""


@contextmanager
def protected_from_initialization(model: nn.Module) -> Iterator[None]:
    """Inside, the initialization of the model's class takes all parameters and buffers for loaded."""
    tensors = [t for t in (*model.parameters(), *model.buffers()) if _LOADED not in t.__dict__]
    for tensor in tensors:
        setattr(tensor, _LOADED, True)
    try:
        yield
    finally:
        for tensor in tensors:
            tensor.__dict__.pop(_LOADED, None)


def initializers(model: Any) -> Iterator[tuple[nn.Module, Callable[[nn.Module], None]]]:
    """Every module with what ``from_pretrained`` initializes it by after loading, in its order: children first, by the
    innermost model that they are in. Modules of code that comes with a checkpoint are left alone once they are loaded.
    """
    if not hasattr(model, "_init_weights") or getattr(model, "is_custom_code", lambda: False)():
        return

    def walk(module: Any, initialize: Callable[[nn.Module], None]) -> Iterator[Any]:
        for child in module.children():
            yield from walk(child, child._init_weights if hasattr(child, "initialize_weights") else initialize)
        yield module, initialize

    yield from walk(model, model._init_weights)


def dtype_by_name(model: Any, dtype: torch.dtype, names: Iterable[str]) -> dict[str, torch.dtype]:
    """The parameters and buffers for which the model's class demands another dtype than ``dtype``."""
    from transformers.core_model_loading import build_glob_alternation

    demanded = model._get_dtype_plan(dtype)
    if not demanded:
        return {}
    pattern, globs, _ = build_glob_alternation(list(demanded))
    matches = {name: pattern.search(name) for name in names}
    return {
        name: demanded[globs[match.lastgroup]]
        for name, match in matches.items()
        if match is not None and match.lastgroup is not None
    }


def attention_implementation(config: Any) -> str | None:
    """The attention that a configuration asks for: ``sdpa``, ``eager``, ...; None if it says nothing."""
    return getattr(config, "_attn_implementation", None)


def implementations(config: Any) -> list[str | None]:
    """The implementations of attention and experts that a configuration asks for; ``to_dict`` leaves them out."""
    return [attention_implementation(config), getattr(config, "_experts_implementation", None)]


def set_attention_implementation(config: Any, implementation: str) -> None:
    """Let models of this configuration compute attention in this way."""
    config._attn_implementation = implementation


def set_experts_implementation(config: Any, implementation: str) -> None:
    """Let models of this configuration compute mixtures of experts (MoE) in this way."""
    config._experts_implementation = implementation


def class_from_code(reference: str, folder: Any, **options: Any) -> type:
    """The class that ``auto_map`` names, ``file.Class``, from the code in a folder, which is run. It can generate.

    Nothing is asked: the caller has decided to run the code.
    """
    from transformers.dynamic_module_utils import get_class_from_dynamic_module
    from transformers.models.auto.auto_factory import add_generation_mixin_to_remote_model

    found: type = add_generation_mixin_to_remote_model(get_class_from_dynamic_module(reference, folder, **options))
    return found


# -- checkpoints ---------------------------------------------------------------------------------------------------


def checkpoint_conversions(model: nn.Module) -> tuple[list[Any], list[Any]]:
    """What transformers does to the names and tensors of checkpoints of this model: (renamings, conversions)."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming

    found = list(get_model_conversion_mapping(model))
    renamings = [t for t in found if isinstance(t, WeightRenaming)]
    return renamings, [t for t in found if isinstance(t, WeightConverter)]


def revert_weight_conversion(model: Any, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of a model in the form that its checkpoints store."""
    from transformers.core_model_loading import revert_weight_conversion

    return dict(revert_weight_conversion(model, state))


def keys_to_ignore_on_save(model: Any) -> Iterable[str]:
    """The names that the model's class leaves out of its checkpoints."""
    return getattr(model, "_keys_to_ignore_on_save", None) or ()


def keys_to_ignore_on_load(model: Any) -> Iterable[str]:
    """Patterns of the names that a checkpoint of the model's class may lack."""
    return getattr(model, "_keys_to_ignore_on_load_missing", None) or ()


def conversion_tables_are_built() -> bool:
    """Whether transformers has built its tables of conversions in this process; also True if that is unknown."""
    tables = sys.modules.get("transformers.conversion_mapping")
    return getattr(tables, "_checkpoint_conversion_mapping_cache", False) is not None


# -- other features ------------------------------------------------------------------------------------------------


def supports_attention_interface(model: Any) -> bool:
    """Whether the model computes attention through transformers' attention interface."""
    return bool(getattr(model, "_supports_attention_backend", False))


def has_adapters_loaded(model: Any) -> bool:
    """Whether adapters were added to a model by transformers' own PEFT methods."""
    return bool(getattr(model, "_hf_peft_config_loaded", False))


def parallel_styles() -> set[str]:
    """The names of the tensor-parallel styles that the installed transformers has."""
    from transformers.integrations.tensor_parallel import ALL_PARALLEL_STYLES

    return set(ALL_PARALLEL_STYLES.keys())


def merges_parallel_plans() -> bool:
    """Whether transformers merges a user's plan with the one it ships; before 5.18 the user's replaced it."""
    from transformers.distributed import tensor_parallel

    return hasattr(tensor_parallel, "resolve_parallel_plans")


def grouped_mm_fallback() -> Any:
    """The operator that mixture-of-experts (MoE) layers call where torch has no grouped GEMM; None if unknown."""
    try:
        import transformers.integrations.moe  # noqa: F401 -- defines the operator
    except ImportError:
        return None
    operator = getattr(torch.ops.transformers, "grouped_mm_fallback", None)
    return None if operator is None else operator.default


# -- training ------------------------------------------------------------------------------------------------------


def trainer_class() -> Any:
    """``transformers.Trainer``, or None without accelerate, which it needs."""
    if find_spec("transformers") is None or find_spec("accelerate") is None:
        return None
    from transformers import Trainer

    return Trainer


def use_cpu_ranks(arguments: Any) -> None:
    """Let training arguments of ranks on CPUs see the other ranks.

    Without ``use_cpu=True`` and without an accelerator, each rank takes itself for the only one and writes all files.
    """
    if arguments.world_size == 1 and not torch.accelerator.is_available():
        arguments.use_cpu = True
        arguments.__dict__.pop("_setup_devices", None)  # cached; the next access sets up the ranks
        _ = arguments.device


@contextmanager
def batched_experts(model: nn.Module) -> Iterator[None]:
    """Run MoE experts as one batched matmul: routing by values is not possible on the meta device."""
    name, found = "_experts_implementation", {}
    for module in model.modules():
        config = getattr(module, "config", None)
        if isinstance(getattr(config, name, None), str):
            found[id(config)] = (config, getattr(config, name))
    try:
        for config, _ in found.values():
            setattr(config, name, "batched_mm")
        yield
    finally:
        for config, before in found.values():
            setattr(config, name, before)
