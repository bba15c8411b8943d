"""The models of the zoo: every causal-LM type of the installed transformers, models of other kinds, plain modules."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from zoo.tiny import tiny_config


@dataclass(frozen=True)
class Case:
    """One model: how it is built, and its inputs."""

    name: str
    kind: str  # "causal-lm", "other" or "module"
    build: Callable[..., nn.Module]
    inputs: Callable[[nn.Module], dict[str, Any]]
    generates: bool = False
    overrides: dict[str, Any] = field(default_factory=dict)

    def make(self) -> nn.Module:
        """The model, with weights from a fixed seed; norms, biases and scales are random too."""
        torch.manual_seed(0)
        model = self.build(**self.overrides).eval()
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in model.parameters():
                if not parameter.is_floating_point():
                    continue
                if parameter.ndim <= 1:
                    parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
                elif not bool(parameter.any()) or not bool(parameter.isfinite().all()):
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
                elif float(parameter.std()) < 0.05:
                    parameter.mul_(0.1 / max(float(parameter.std()), 1e-6))
        return model


def causal_types() -> list[str]:
    """All model types with a causal language model."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def causal_lm(model_type: str, **overrides: Any) -> Case:
    """The causal language model of this type."""

    def build(**fields: Any) -> nn.Module:
        from transformers import AutoModelForCausalLM
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

        config = tiny_config(model_type, **fields)
        if model_type in OF_THE_DECODER:
            return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config.decoder)
        return AutoModelForCausalLM.from_config(config)

    return Case(model_type, "causal-lm", build, token_inputs, generates=True, overrides=overrides)


OF_THE_DECODER = ("musicgen", "musicgen_melody")
"""Types whose causal language model is built from the decoder's configuration."""


def token_inputs(model: Any) -> dict[str, Any]:
    """Token ids and, if the model computes a loss, labels with some to be ignored."""
    config = model.config.get_text_config()
    generator = torch.Generator().manual_seed(7)
    rows = 2 * getattr(config, "num_codebooks", 1) if type(model).__name__.startswith("Musicgen") else 2
    ids = torch.randint(3, min(250, config.vocab_size), (rows, 10), generator=generator)
    inputs = {"input_ids": ids}
    takes = "labels" in inspect.signature(model.forward).parameters
    if takes and rows == 2 and model.config.model_type != "git":  # whose loss is on the text after an image
        labels = ids.clone()
        labels[0, :3] = -100
        inputs["labels"] = labels
    return inputs


def all_cases() -> dict[str, Case]:
    """Every case of the zoo, by name."""
    from zoo.modules import module_cases
    from zoo.others import other_cases

    cases = [*(causal_lm(t) for t in causal_types()), *other_cases(), *module_cases()]
    return {case.name: case for case in cases}


def find(name: str) -> Case:
    """The case of this name; ``name[field=value,...]`` overrides fields of its configuration."""
    base, _, rest = name.partition("[")
    pairs = (pair.split("=") for pair in rest.rstrip("]").split(",") if pair)
    return replace(all_cases()[base], overrides={key: int(value) for key, value in pairs})
