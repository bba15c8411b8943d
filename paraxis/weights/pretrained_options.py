"""The arguments of ``from_pretrained``: those that ``parallelize_model`` takes, and an answer to each of the others."""

from __future__ import annotations

import difflib
import inspect
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch


@dataclass(frozen=True)
class PretrainedOptions:
    """What ``from_pretrained`` takes too, with the same effect.

    Attributes:
        revision: Branch, tag or commit on the Hub.
        cache_dir: Where downloads are cached.
        local_files_only: Never go to the network.
        token: Token for the Hub; by default that of ``hf auth login`` or ``HF_TOKEN``. True requires one.
        force_download: Download again what is in the cache.
        subfolder: The folder of the model in the repository or directory.
        variant: Weights of this variant: ``model.VARIANT.safetensors``.
        dtype: Dtype of the parameters; ``"auto"``, as by default, is that of the configuration or else the checkpoint.
        config: A configuration to use instead of the one in the folder, or where to load it from.
        attn_implementation: ``"sdpa"``, ``"eager"``, ...
        experts_implementation: ``"eager"``, ``"grouped_mm"``, ...: of mixtures of experts (MoE).
        generation_config: Instead of the one in the folder.
        quantization_config: Quantize a plain checkpoint while it is loaded: each rank its own slices.
        trust_remote_code: Run the code that comes with the model (``auto_map`` in its configuration). Never implied.
        code_revision: Revision of that code, where it is in another repository.
    """

    revision: str | None = None
    cache_dir: str | os.PathLike[str] | None = None
    local_files_only: bool = False
    token: str | bool | None = None
    force_download: bool = False
    subfolder: str = ""
    variant: str | None = None
    dtype: torch.dtype | str | None = None
    config: Any = None
    attn_implementation: Any = None
    experts_implementation: Any = None
    generation_config: Any = None
    quantization_config: Any = None
    trust_remote_code: bool = False
    code_revision: str | None = None

    def __post_init__(self) -> None:
        parts = self.subfolder.replace("\\", "/").split("/")
        if os.path.isabs(self.subfolder) or ".." in parts:
            raise ValueError(
                f"subfolder={self.subfolder!r} leads out of the model's folder: give a folder inside of it"
            )


WITHOUT_EFFECT = frozenset(
    [
        "low_cpu_mem_usage",
        "weights_only",
        "mirror",
        "_fast_init",
        "offload_state_dict",
        "resume_download",
        "disable_mmap",
        "_from_auto",
        "_from_pipeline",
        "_commit_hash",
        "adapter_name",
        "tqdm_class",
    ]
)
"""Arguments that change nothing in transformers 5 either, or nothing for safetensors that are read shard by shard."""

_LOADED = "each rank loads its shards of the weights onto the device of the context"
ANSWERS = {
    "device_map": f"device_map is not needed: {_LOADED}",
    "max_memory": f"max_memory is not needed: {_LOADED}; memory_limit= limits the bytes of parameters per rank",
    "offload_folder": f"offload_folder is not supported: {_LOADED}; use more ranks for a model that does not fit",
    "offload_buffers": f"offload_buffers is not supported: {_LOADED}",
    "tp_plan": "tp_plan is not needed: the plan is searched; constrain it with constraints=, or pass one with plan=",
    "tp_size": "tp_size is not needed: the model is sharded over the ranks of the context, as in paraxis.init(tp=...)",
    "device_mesh": "device_mesh is part of the context: ParallelExecutionCtx(mesh=...), or paraxis.init(dp=...)",
    "distributed_config": "distributed_config is not needed: the context has the ranks, and the plan is searched",
    "load_in_8bit": "load_in_8bit is now quantization_config={'quant_method': 'bitsandbytes', 'load_in_8bit': True}",
    "load_in_4bit": "load_in_4bit is now quantization_config={'quant_method': 'bitsandbytes', 'load_in_4bit': True}",
    "gguf_file": "gguf_file is not supported: convert it once, by loading it with transformers' from_pretrained and "
    "saving it with save_pretrained",
    "state_dict": "state_dict is not supported: load it into a module, and pass the module to parallelize_model",
    "key_mapping": "key_mapping is not supported: load the checkpoint with transformers' from_pretrained once, save it "
    "with save_pretrained, and use the new directory",
    "output_loading_info": "output_loading_info is not supported: a checkpoint that does not fit the model is an error "
    "that lists every tensor",
    "ignore_mismatched_sizes": "ignore_mismatched_sizes is not supported: load the model with transformers' "
    "from_pretrained, save it with save_pretrained, and use the new directory",
    "proxies": "proxies are not passed on: set HTTPS_PROXY in the environment of all ranks",
    "use_auth_token": "use_auth_token is now token=",
    "adapter_kwargs": "adapter_kwargs are not supported: add adapters with PEFT before or after parallelize_model",
    "use_kernels": "use_kernels is not supported: Paraxis chooses kernels for what the model computes",
    "kernel_config": "kernel_config is not supported: Paraxis chooses kernels for what the model computes",
    "allow_all_kernels": "allow_all_kernels is not supported: Paraxis chooses kernels for what the model computes",
    "fusion_config": "fusion_config is not supported: Paraxis fuses operators by itself",
    "from_tf": "from_tf is not supported: save the weights as safetensors",
    "from_flax": "from_flax is not supported: save the weights as safetensors",
}
"""Arguments that are refused unless they are None or False: why, and what to do instead."""


def split_pretrained_options(kwargs: Mapping[str, Any]) -> tuple[PretrainedOptions, dict[str, Any]]:
    """The options of :class:`PretrainedOptions` among keyword arguments, and the others.

    Raises:
        TypeError: an argument of ``from_pretrained`` that cannot have its effect here. The message says what to do.
    """
    names = {field.name for field in fields(PretrainedOptions)}
    taken, others = dict[str, Any](), dict[str, Any]()
    for name, value in kwargs.items():
        if name in WITHOUT_EFFECT:
            continue
        if name in ANSWERS:
            if value is not None and value is not False:
                raise TypeError(ANSWERS[name])
        elif name == "use_safetensors":
            if value is False:
                raise TypeError("use_safetensors=False is not supported: ranks read slices of safetensors files only")
        elif name == "torch_dtype":
            taken.setdefault("dtype", value)
        elif name in names:
            taken[name] = value
        else:
            others[name] = value
    if kwargs.get("dtype") is None and kwargs.get("torch_dtype") is not None:
        taken["dtype"] = kwargs["torch_dtype"]
    passed = {name: value for name, value in taken.items() if value is not None}
    return PretrainedOptions(**passed), others


def check_constructor_options(model_cls: type, options: Mapping[str, Any], known: Iterable[str]) -> None:
    """Raise, with a suggestion, if a model's constructor does not take these options.

    Args:
        model_cls: The class of the model.
        options: What no other part has taken.
        known: The names of the options that others take.
    """
    parameters = inspect.signature(model_cls).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    own = [name for name in parameters if name != "config"]
    unknown = [name for name in options if name not in own]
    if unknown:
        raise unknown_options(
            unknown, [*own, *known], f"no field of the configuration, and no argument of {model_cls.__name__}()"
        )


def unknown_options(unknown: Iterable[str], known: Iterable[str], where: str) -> TypeError:
    """The error for options that nobody takes, with what may have been meant."""
    known = sorted(set(known))
    parts = []
    for name in unknown:
        close = difflib.get_close_matches(name, known, n=1, cutoff=0.75)
        parts.append(f"unknown option {name!r}" + (f": did you mean {close[0]}?" if close else ""))
    text = "; ".join(parts)
    return TypeError(text if "did you mean" in text else f"{text}: no option of Paraxis or from_pretrained, {where}")


def names_of_options() -> set[str]:
    """The names that :func:`split_pretrained_options` takes."""
    return {*(field.name for field in fields(PretrainedOptions)), "torch_dtype", "use_safetensors"}
