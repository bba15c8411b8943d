"""A model whose code comes with its checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

CONFIGURATION = """
from transformers import PretrainedConfig


class HomemadeConfig(PretrainedConfig):
    model_type = "homemade"

    def __init__(self, width=32, vocabulary=64, **kwargs):
        self.width, self.vocabulary = width, vocabulary
        super().__init__(**kwargs)
"""

MODELING = """
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from .configuration_homemade import HomemadeConfig


class HomemadeForCausalLM(PreTrainedModel):
    config_class = HomemadeConfig

    def __init__(self, config):
        super().__init__(config)
        self.embed = nn.Embedding(config.vocabulary, config.width)
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.post_init()

    def forward(self, input_ids, **kwargs):
        x = self.embed(input_ids)
        return CausalLMOutput(logits=self.head(x + self.down(torch.relu(self.up(x)))))
"""


def save_homemade(folder: Path) -> Path:
    """Write the checkpoint, with its code, to a new folder."""
    folder.mkdir(parents=True)
    (folder / "configuration_homemade.py").write_text(CONFIGURATION)
    (folder / "modeling_homemade.py").write_text(MODELING)
    auto_map = {
        "AutoConfig": "configuration_homemade.HomemadeConfig",
        "AutoModelForCausalLM": "modeling_homemade.HomemadeForCausalLM",
    }
    config = {"model_type": "homemade", "architectures": ["HomemadeForCausalLM"], "auto_map": auto_map, "width": 32}
    (folder / "config.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    shapes = {"embed.weight": (64, 32), "up.weight": (128, 32), "up.bias": (128,), "head.weight": (64, 32)}
    shapes |= {"down.weight": (32, 128), "down.bias": (32,)}
    tensors = {name: torch.randn(shape) * 0.2 for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
