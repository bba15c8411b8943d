"""What a parallel model does differently from a plain one outside its forward.

It is still the user's class; a few methods of this one object are replaced where the plain method would be wrong or
would fail on sharded parameters.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import nn

from ..compat.torch import has_compiled_call
from ..context import ParallelExecutionCtx
from ..distributed.activity import collective_call
from ..distributed.consensus import on_all_ranks
from ..integrations.accelerate import adapt_accelerator
from ..integrations.peft import has_adapters, save_adapters
from ..integrations.trainer_mixin import adapt_trainer
from ..tensor.pickling import refuse_pickling
from ..tensor.sharded_tensor import ShardedTensor
from ..tensor.wrappers import refuse_wrappers
from ..weights.compare_parameters import check_before_saving, remember
from ..weights.quantized.save import is_quantized
from ..weights.save import save_checkpoint
from .agreed_generate import agreed_generate
from .compiled_call import CompiledCall
from .continuous_batching import destroy_batch, parallel_batching
from .conversion import install_conversion
from .generation.install import install_generation_loop
from .redirect_forward import compiled_call_of, model_copier, redirect_forward, shallow_state
from .submodule_call import already_compiled, has_forward, install_submodule_call


def install_model_methods(model: Any, ctx: ParallelExecutionCtx, call: CompiledCall) -> None:
    """Adapt the methods of a model whose parameters are sharded; ``call`` is its program."""
    if _state_as_dtensors not in model._state_dict_hooks.values():  # a copy has it already
        model.register_state_dict_post_hook(_state_as_dtensors)
    remember(model, ctx)
    refuse_wrappers(model)
    refuse_pickling(model)
    adapt_training_libraries(model, ctx)
    install_conversion(model)
    model.__deepcopy__ = model_copier(model, call, install_model_methods)
    model.__reduce_ex__ = lambda protocol: (_shallow_copy, (type(model), shallow_state(model), call))
    redirect_forward(model, call)
    for name, part in model.named_modules():  # a model that this one wraps generates by calling itself
        if name and hasattr(type(part), "generate") and not has_compiled_call(part):
            redirect_forward(
                part, compiled_call_of(part, ctx, call.config, f"{call.name}.{name}" if call.name else name)
            )
            part.get_compiled_call = lambda compile_config=None, part=part: part.__call__
    for name, part in model.named_modules():  # each may be called alone
        if name and has_forward(part) and any(True for _ in part.parameters()):
            path = f"{call.name}.{name}" if call.name else name
            install_submodule_call(part, partial(CompiledCall, part, ctx, call.config, path))
    install_generation_loop(model, ctx, call.config)
    if hasattr(model, "generate") and dist.get_world_size(ctx.world_group) > 1:
        model.generate = agreed_generate(model.generate, model, ctx, call.config)
    model.compile = already_compiled
    if hasattr(model, "init_continuous_batching"):
        model.init_continuous_batching = parallel_batching(model, ctx, call.config)
        model.destroy_cached_continuous_batching_manager = partial(destroy_batch, model)
    if hasattr(model, "get_compiled_call"):  # what generate decodes with: it is compiled already
        model.get_compiled_call = lambda compile_config=None: model.__call__
    if hasattr(model, "resize_token_embeddings"):
        model.resize_token_embeddings = partial(_keep_token_embeddings, model)
    several = dist.get_world_size(ctx.world_group) > 1
    if hasattr(model, "save_pretrained") and (several or any(is_quantized(p) for p in model.parameters())):
        model.save_pretrained = _saver(model, ctx)


def _shallow_copy(cls: type[nn.Module], state: dict[str, Any], call: CompiledCall) -> nn.Module:
    """``copy.copy(model)``: a model with the same parameters and modules, and attributes and a program of its own."""
    twin = cls.__new__(cls)
    twin.__dict__.update(state)
    install_model_methods(twin, call.ctx, compiled_call_of(twin, call.ctx, call.config, call.name))
    return twin


def adapt_training_libraries(model: nn.Module, ctx: ParallelExecutionCtx) -> None:
    """Let ``Accelerator`` and ``Trainer`` recognize parallel models, where transformers has loaded accelerate."""
    if ctx.world_size > 1 and "accelerate" in sys.modules:
        adapt_accelerator()
        if "transformers" in sys.modules:
            adapt_trainer()


def _state_as_dtensors(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """``state_dict()`` gives DTensors, which checkpointing tools know."""
    for name, value in state.items():
        if isinstance(value, ShardedTensor):
            state[name] = value.to_dtensor()


def _keep_token_embeddings(
    model: Any, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
) -> nn.Module:
    """``resize_token_embeddings``: refused before anything changes, unless the size stays. The plan is for this one."""
    embeddings: nn.Module = model.get_input_embeddings()
    now = int(embeddings.weight.shape[0])  # type: ignore[union-attr,index,arg-type]
    wanted = now if new_num_tokens is None else new_num_tokens
    if pad_to_multiple_of is not None:
        wanted = -(-wanted // pad_to_multiple_of) * pad_to_multiple_of
    if wanted != now:
        raise RuntimeError(
            f"{type(model).__name__} is parallel, and its {now} token embeddings are sharded by a plan: they cannot "
            f"become {wanted}. Resize before: model = AutoModelForCausalLM.from_pretrained(...); "
            f"model.resize_token_embeddings({wanted}); then parallelize_model(model, ctx), or save_pretrained and "
            "parallelize the directory."
        )
    return embeddings


def _saver(model: nn.Module, ctx: ParallelExecutionCtx) -> Callable[..., Any]:
    """``save_pretrained`` from all ranks. A collective."""

    @collective_call("save_pretrained")
    def save_pretrained(save_directory: Any, **kwargs: Any) -> None:
        check_before_saving(model)
        if kwargs.get("state_dict") is not None:  # somebody has gathered what is to be saved
            with on_all_ranks(ctx.world_group, f"saving to {str(save_directory)!r}"):
                if ctx.is_first:
                    type(model).save_pretrained(model, save_directory, **kwargs)  # type: ignore[attr-defined]
            return
        plain = {k: kwargs.pop(k) for k in ("max_shard_size", "save_original_format") if k in kwargs}
        for name in ("is_main_process", "safe_serialization", "state_dict"):  # the first rank writes, safetensors only
            kwargs.pop(name, None)
        if str(getattr(kwargs.get("save_function"), "__module__", "")).startswith("accelerate."):
            kwargs.pop("save_function")  # accelerate's own writes on the first rank, too
        if has_adapters(model):
            save_adapters(model, ctx, save_directory, **plain, **kwargs)
            return
        refused = [name for name, value in kwargs.items() if value not in (None, False)]
        if refused:
            raise ValueError(
                f"a parallel model saves itself without {', '.join(refused)}: save it to a directory, and load that "
                "with plain transformers for anything else"
            )
        save_checkpoint(model, ctx, save_directory, **plain)

    return save_pretrained
