"""`paraxis export`: what it prints and writes. Whether the plans are exact is tested in tests/export."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli.helpers import call

from paraxis.cli.export import by_reason, file_contents, show
from paraxis.export import Export
from paraxis.export.candidates import Candidates, Group
from paraxis.export.targets import restricted


def test_text_and_file(folder: str, tmp_path: Path) -> None:
    found = call("export", folder, "--tp", "2")
    assert found.exit_code == 0, found.output
    assert '"model.layers.*.mlp.down_proj": "rowwise",' in found.stdout
    assert "Sharded without gathers in between: model.layers.*.self_attn, model.layers.*.mlp." in found.stdout
    assert "Verified on 2 simulated ranks" in found.stdout and "of the parameters per rank." in found.stdout
    out = tmp_path / "plan.py"
    found = call("export", folder, "--tp", "2", "--format", "torch", "--no-verify", "--out", str(out))
    assert found.exit_code == 0 and f"Wrote {out}." in found.stdout and "Not verified: " in found.stdout
    assert "parallelize_module(model, mesh, PLAN)" in out.read_text()


def test_what_vllm_shards_itself_is_not_called_replicated(capsys: pytest.CaptureFixture[str]) -> None:
    found = Candidates([Group("a", {"model.embed_tokens": "vocab"}), Group("b", {"lm_head": "column-gathered"})])
    left = restricted(found, "vllm")
    assert not left.groups
    show(Export("vllm", 2, "Model", {"a": "colwise"}, replicated=left.replicated), None)
    printed = capsys.readouterr().out
    assert "for vLLM, which shards embedding and lm_head itself." in printed
    assert "Not in the plan: model.embed_tokens: vLLM shards the input embedding itself." in printed
    assert "Replicated" not in printed


def test_files_of_json_formats() -> None:
    plans = {"tp_plan": {"model.a": "colwise"}, "base_model_tp_plan": {"a": "colwise"}}
    export = Export("transformers", 2, "Model", plans["tp_plan"], plans["base_model_tp_plan"])
    assert json.loads(file_contents(export)) == plans
    export = Export("vllm", 2, "Model", plans["base_model_tp_plan"])
    assert json.loads(file_contents(export)) == {"base_model_tp_plan": {"a": "colwise"}}


def test_modules_with_one_reason_share_a_line() -> None:
    lines = by_reason("Replicated", {"a": "too small", "b": "no style", "c": "too small"})
    assert lines == ["Replicated: a, c: too small.", "Replicated: b: no style."]
