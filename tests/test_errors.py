"""Errors that users meet, provoked on real ranks: every rank must end soon and say what to do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models.compare import batch, context, parallel
from models.tiny import save
from torch import nn

from paraxis.layers import ColumnParallelLinear
from ranks import RankOutcome, spawn_ranks

SECONDS = 60.0
"""Generous: a loaded machine imports torch and transformers in this time too."""


def fails(fn: Any, *args: Any, world: int = 2, **options: Any) -> list[RankOutcome]:
    """The outcomes of a run in which every rank must raise, and none may hang."""
    outcomes = spawn_ranks(world, fn, *args, timeout=SECONDS, **options)
    for outcome in outcomes:
        assert outcome.error not in (None, "hung", "died"), outcome
    return outcomes


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(save("llama", tmp_path_factory.mktemp("llama")))


@pytest.fixture
def checkpoint_copy(checkpoint: Path, tmp_path: Path) -> Path:
    """A copy of the checkpoint, to be corrupted."""
    for file in checkpoint.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def load(folder: str, **options: Any) -> None:
    parallel(folder, **options)


def load_without_a_group(folder: str) -> None:
    dist.destroy_process_group()
    load(folder)


def load_with_old_transformers(folder: str) -> None:
    import transformers

    transformers.__version__ = "4.49.0"
    load(folder)


def make_a_layer(features: int) -> None:
    ColumnParallelLinear(context(), nn.Linear(8, features))


def edit_config(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    data = {**json.loads(path.read_text()), **fields}
    path.write_text(json.dumps({key: value for key, value in data.items() if value is not None}))


def test_missing_process_group_names_torchrun(checkpoint: Path) -> None:
    for outcome in fails(load_without_a_group, str(checkpoint)):
        assert outcome.error == "RuntimeError"
        assert "torchrun" in outcome.message and "init_process_group" in outcome.message


def test_old_transformers_is_an_import_error(checkpoint: Path) -> None:
    for outcome in fails(load_with_old_transformers, str(checkpoint)):
        assert outcome.error == "ImportError"
        assert "Found an incompatible version of transformers. Found version 4.49.0" in outcome.message


def test_indivisible_size_names_layer_and_dimension() -> None:
    """A layer built directly is sharded evenly or not at all; ``parallelize_model`` shards unevenly where it must."""
    for outcome in fails(make_a_layer, 10, world=4):
        assert outcome.error == "DivisibilityError"
        assert "10 is not divisible by 4, " in outcome.message
        assert "`ColumnParallelLinear`" in outcome.message and "output dimension" in outcome.message


@pytest.mark.long
def test_config_without_architectures_is_a_checkpoint_error(checkpoint_copy: Path) -> None:
    edit_config(checkpoint_copy, architectures=None)
    for outcome in fails(load, str(checkpoint_copy)):
        assert outcome.error == "CheckpointError" and "architectures" in outcome.message


def test_unknown_model_class_is_a_checkpoint_error(checkpoint_copy: Path) -> None:
    edit_config(checkpoint_copy, architectures=["LlamaForTelepathy"])
    for outcome in fails(load, str(checkpoint_copy)):
        assert outcome.error == "CheckpointError" and "LlamaForTelepathy" in outcome.message


def test_checkpoint_without_safetensors_says_how_to_convert(checkpoint_copy: Path) -> None:
    (checkpoint_copy / "model.safetensors").rename(checkpoint_copy / "pytorch_model.bin")
    for outcome in fails(load, str(checkpoint_copy)):
        assert outcome.error == "CheckpointError"
        assert "pytorch_model.bin" in outcome.message and "save_pretrained" in outcome.message


def test_missing_parameters_and_wrong_shapes_are_all_listed(checkpoint_copy: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(checkpoint_copy / "model.safetensors")
    del tensors["model.norm.weight"], tensors["model.layers.1.mlp.up_proj.weight"]
    tensors["lm_head.weight"] = tensors["lm_head.weight"][:200].clone()
    save_file(tensors, checkpoint_copy / "model.safetensors", metadata={"format": "pt"})
    for outcome in fails(load, str(checkpoint_copy)):
        assert outcome.error == "CheckpointError"
        for text in (
            "model.norm.weight",
            "model.layers.1.mlp.up_proj.weight",
            "lm_head.weight",
            "(200, 64)",
            "(256, 64)",
        ):
            assert text in outcome.message


class Misfit(nn.Module):
    """A forward that fails for every input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + x[:, :3]  # the error must quote this line


def load_misfit() -> None:
    from paraxis import parallelize_model

    torch.manual_seed(0)
    parallelize_model(Misfit(), context(), example_inputs=torch.ones(2, 8))


def test_capture_error_quotes_the_failing_line() -> None:
    for outcome in fails(load_misfit):
        assert outcome.error == "CaptureError"
        assert "test_errors.py" in outcome.message and "return self.linear(x) + x[:, :3]" in outcome.message


def differing_weights() -> None:
    from paraxis import parallelize_model

    torch.manual_seed(dist.get_rank())
    parallelize_model(nn.Linear(8, 8), context(), example_inputs=torch.ones(2, 8))


def test_ranks_with_different_weights_are_refused() -> None:
    for outcome in fails(differing_weights):
        assert outcome.error == "CheckpointError" and "different values" in outcome.message


def call_with_different_shapes(folder: str) -> None:
    model, _ = parallel(folder, check_ranks=False)  # which would name the argument instead
    ids, _ = batch(256, rows=2, length=6 + dist.get_rank())
    with torch.no_grad():
        model(input_ids=ids)


def test_ranks_that_compile_different_graphs_show_both(checkpoint: Path) -> None:
    for outcome in fails(call_with_different_shapes, str(checkpoint)):
        assert outcome.error == "RuntimeError"
        assert "different graphs" in outcome.message and "(2, 6)" in outcome.message and "(2, 7)" in outcome.message


def recompile_on_one_rank(folder: str) -> None:
    """Only the first rank has a new shape and recompiles; the second calls compiled code."""
    model, _ = parallel(folder, sync_timeout=5, check_ranks=False)
    ids, _ = batch(256)
    with torch.no_grad():
        model(input_ids=ids)
        model(input_ids=ids[:, : 10 - 3 * (dist.get_rank() == 0)])


def test_recompilation_on_one_rank_times_out_on_all(checkpoint: Path) -> None:
    first, second = fails(recompile_on_one_rank, str(checkpoint), group_timeout=8)
    assert "compiling" in first.message and "rank 1" in first.message and "5 s" in first.message
    assert second.error == "CollectiveError", second
    assert "rank 1 of 2" in second.message and "all_reduce" in second.message


def leave_early(folder: str) -> None:
    """The second rank skips a call for which both have compiled code."""
    model, _ = parallel(folder)
    ids, _ = batch(256)
    with torch.no_grad():
        model(input_ids=ids)
        if dist.get_rank() == 0:
            model(input_ids=ids)
        else:
            import time

            time.sleep(9)
            raise RuntimeError("left early")


def test_timed_out_collective_names_rank_and_operation(checkpoint: Path) -> None:
    first, second = fails(leave_early, str(checkpoint), group_timeout=5)
    assert first.error == "CollectiveError" and "rank 0 of 2" in first.message and "all_reduce" in first.message
    assert "left early" in second.message
