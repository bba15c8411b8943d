"""Parameters that checkpoints store in one tensor: transformers would shard that tensor before it converts it."""

from __future__ import annotations

import pytest
from zoo.cases import find

from paraxis.export.candidates import Candidates, Group
from paraxis.export.loading import sharded_before_conversion


def test_packed_checkpoints_cannot_be_loaded_sharded() -> None:
    assert not sharded_before_conversion(find("llama").make())
    pytest.importorskip("transformers.models.hrm_text")
    model = find("hrm_text").make()
    found = sharded_before_conversion(model)
    assert "attn.gqkv_proj.weight" in found["model.L_module.layers.*.self_attn.k_proj"]
    assert "model.L_module.layers.*.self_attn.o_proj" not in found and "lm_head" not in found
    mlp = {f"model.H_module.layers.*.mlp.{name}_proj": style for name, style in (("up", "column"), ("down", "row"))}
    candidates = Candidates([Group("mlp", mlp, separate={"model.H_module.layers.*.mlp.down_proj": "row-split"})])
    candidates.drop(found)
    assert list(candidates.replicated) == ["model.H_module.layers.*.mlp.up_proj"]
    assert [group.styles for group in candidates.groups] == [{"model.H_module.layers.*.mlp.down_proj": "row-split"}]
