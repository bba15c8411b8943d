"""Loading a rank's shards: the values of sliced full tensors, and only those are read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from weights.tiny_models import fake_rank, place, planned, save, tiny_model

from paraxis.distributed.redistribute import slice_box
from paraxis.errors import CheckpointError
from paraxis.placement import REPLICATE, SHARED, Layout, Placement, Shard, local_index
from paraxis.tensor.parameter_meta import HashableSlice
from paraxis.weights import load
from paraxis.weights.load import load_buffers, load_parameters, load_shard, slice_mapping, slice_parameters
from paraxis.weights.meta_init import MetaAwareMethodsPatcher, attach_parameter_meta, tied_names
from paraxis.weights.weight_map import collect_weight_map, match_parameters

CPU = torch.device("cpu")

PACKED = Layout.concat([(8, Layout.even(8, 4)), (4, Layout.even(4, 4, 2)), (4, Layout.even(4, 4))])
PLACEMENTS: dict[str, Placement] = {
    "replicate": REPLICATE,
    "shared": SHARED,
    "rows": Shard.of(0, Layout.even(16, 4)),
    "columns": Shard.of(1, Layout.even(12, 4)),
    "uneven": Shard.of(1, Layout.even(12, 4, 2)),
    "copies": Shard.of(0, Layout.even(16, 4, 8)),
    "packed": Shard.of(0, PACKED),
    "repeating": Shard.of(1, Layout.of(4, [[(r, r + 1)] for r in range(4)])),
    "box": Shard.of({0: PACKED, 1: Layout.even(12, 4)}),
    "packed box": Shard.of({0: PACKED, 1: Layout.of(4, [[(r, r + 1)] for r in range(4)]), 2: Layout.even(4, 4)}),
    "empty on some ranks": Shard.of(2, Layout.of(4, [[(0, 1)], [], [(1, 4)], []])),
}


@pytest.mark.parametrize("kind", sorted(PLACEMENTS))
@pytest.mark.parametrize("max_pieces", [1, 128])
def test_shards_of_any_placement(tmp_path: Path, kind: str, max_pieces: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "_MAX_PIECES", max_pieces)
    full = torch.arange(16 * 12 * 4, dtype=torch.float32).view(16, 12, 4)
    save_file({"w": full}, tmp_path / "w.safetensors")
    placement = PLACEMENTS[kind]
    with safe_open(tmp_path / "w.safetensors", "pt") as handle:
        for rank in range(4):
            shard = load_shard(handle, "w", placement, (16, 12, 4), rank, torch.float64, CPU)
            assert shard.dtype == torch.float64 and shard.is_contiguous()
            assert torch.equal(shard, slice_box(full, placement, rank).double())


def test_scalars_and_vectors(tmp_path: Path) -> None:
    save_file({"s": torch.tensor(3.0), "v": torch.arange(6)}, tmp_path / "w.safetensors")
    with safe_open(tmp_path / "w.safetensors", "pt") as handle:
        assert load_shard(handle, "s", REPLICATE, (), 0, torch.float32, CPU).item() == 3
        even = Shard.of(0, Layout.even(6, 4))
        parts = [load_shard(handle, "v", even, (6,), r, torch.int64, CPU).tolist() for r in range(4)]
        assert parts == [[0, 1], [2, 3], [4], [5]]


def test_only_the_slices_are_read() -> None:
    """As many elements as the shard has."""
    full = torch.arange(16 * 12 * 4).view(16, 12, 4)
    read = []

    class Stored:
        def __getitem__(self, index: tuple[slice, ...]) -> torch.Tensor:
            read.append(full[index].numel())
            return full[index]

    class Handle:
        def get_slice(self, key: str) -> Stored:
            return Stored()

    for placement in PLACEMENTS.values():
        read.clear()
        shard = load_shard(Handle(), "w", placement, (16, 12, 4), 1, torch.int64, CPU)
        assert sum(read) == shard.numel()


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "GPT2LMHeadModel", "BloomForCausalLM", "FalconForCausalLM"])
@pytest.mark.parametrize("files", [1, 3])
def test_models_in_one_file_and_in_several(tmp_path: Path, name: str, files: int) -> None:
    real = tiny_model(name)
    weight_map = collect_weight_map(save(real, tmp_path, files))
    values = dict(real.named_parameters())
    for rank in range(4):
        with fake_rank(rank, 4) as group:
            model, params = planned(name, 4, group)
            keys = match_parameters(params, tied_names(model), weight_map, model.base_model_prefix, model)
            before = dict(params)
            load_parameters(params, keys, weight_map, rank, CPU, progress=rank == 0)
        for key, param in model.named_parameters():
            meta = param.meta_info
            assert param is before[key] and not meta.need_initialize
            assert torch.equal(param.local, slice_box(values[key].detach(), meta.placement, rank)), key
            assert all(piece.source == keys[key] for piece in meta.mapping.values())


def test_the_mapping_has_the_source_of_every_slice() -> None:
    mapping = slice_mapping(Shard.of(0, PACKED), (16, 3), 2, 0, "w")
    assert {(k.start, k.stop): v.index for k, v in mapping.items()} == {
        (0, 2): slice(4, 6),
        (2, 4): slice(10, 12),
        (4, 5): slice(14, 15),
    }
    assert slice_mapping(REPLICATE, (5,), 0, 0, "w")[HashableSlice(0, 5)].index == slice(0, 5)
    assert slice_mapping(REPLICATE, (), 0, 0, "w")[HashableSlice()].index is None


def test_other_dtypes_are_converted_into_own_memory(tmp_path: Path) -> None:
    weight_map = collect_weight_map(save(tiny_model("GPT2LMHeadModel").bfloat16(), tmp_path))
    with fake_rank(0, 2) as group:
        model, params = planned("GPT2LMHeadModel", 2, group)
        keys = match_parameters(params, tied_names(model), weight_map, model.base_model_prefix, model)
        load_parameters(params, keys, weight_map, 0, CPU)
        for file in set(weight_map.values()):
            Path(file).write_bytes(b"")  # what is loaded does not depend on the file
        assert all(p.local.dtype == torch.float32 for p in params.values())  # type: ignore[attr-defined]
        assert all(p.local.isfinite().all() for p in params.values())  # type: ignore[attr-defined]


def test_parameters_that_are_not_planned(tmp_path: Path) -> None:
    save_file({"weight": torch.ones(2, 2)}, tmp_path / "model.safetensors")
    weight_map = collect_weight_map(tmp_path)
    model = nn.Linear(2, 2, bias=False)
    with pytest.raises(TypeError, match="attach_parameter_meta"):
        load_parameters(dict(model.named_parameters()), {"weight": "weight"}, weight_map, 0, CPU)
    params = attach_parameter_meta(model, CPU)
    with pytest.raises(RuntimeError, match="'weight' has no placement"):
        load_parameters(params, {"weight": "weight"}, weight_map, 0, CPU)


def test_slices_of_a_module_with_weights() -> None:
    for rank in range(3):
        real = tiny_model("BloomForCausalLM")
        values = {name: param.detach().clone() for name, param in real.named_parameters()}
        with fake_rank(rank, 3) as group:
            params = attach_parameter_meta(real, CPU, group)
            place(params, 3)
            sources = [p.meta_info.source.data_ptr() for p in params.values()]  # type: ignore[attr-defined]
            slice_parameters(params, rank, CPU)
        for (name, param), source in zip(params.items(), sources):
            meta, local = param.meta_info, param.local  # type: ignore[attr-defined]
            assert meta.source is None and not meta.need_initialize
            assert torch.equal(local, slice_box(values[name], meta.placement, rank))
            assert local.is_contiguous() and local.data_ptr() != source


def test_persistent_buffers_are_loaded(tmp_path: Path) -> None:
    def build() -> nn.Module:
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        model.register_buffer("scratch", torch.zeros(2), persistent=False)
        return model

    trained = build()
    trained[1].running_mean += 5  # type: ignore[index]
    save_file({**trained.state_dict(), "scratch": torch.ones(2)}, tmp_path / "model.safetensors")
    weight_map = collect_weight_map(tmp_path)
    with MetaAwareMethodsPatcher():
        model = build()
    attach_parameter_meta(model, CPU)
    mean = model[1].running_mean  # type: ignore[index]
    names = ["1.running_mean", "1.running_var", "1.num_batches_tracked"]
    assert load_buffers(model, weight_map) == names
    assert mean.tolist() == [5.0] * 4 and model.scratch.tolist() == [0, 0]
    model[1].running_var = torch.ones(3)  # type: ignore[index]
    with pytest.raises(CheckpointError, match=r"buffer 1\.running_var: shape \(4,\) in the checkpoint, \(3,\)"):
        load_buffers(model, weight_map)


# -- on real ranks -------------------------------------------------------------------------------------------


def load_and_gather(folder: str, name: str) -> dict[str, torch.Tensor]:
    rank, world = dist.get_rank(), dist.get_world_size()
    model, params = planned(name, world, dist.group.WORLD)
    weight_map = collect_weight_map(folder)
    keys = match_parameters(params, tied_names(model), weight_map, model.base_model_prefix, model)
    load_parameters(params, keys, weight_map, rank, CPU)
    return {key: param.full_tensor().detach() for key, param in params.items()}  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "GPT2LMHeadModel"])
def test_gathered_shards_are_the_full_tensors(tmp_path: Path, name: str, ranks) -> None:  # type: ignore[no-untyped-def]
    real = tiny_model(name)
    save(real, tmp_path, 3)
    for gathered in ranks(2).run(load_and_gather, str(tmp_path), name):
        for key, param in real.named_parameters():
            assert torch.equal(gathered[key], param), key


def test_same_as_transformers(tmp_path: Path) -> None:
    """The loaded weights are those that `from_pretrained` loads."""
    save(tiny_model("OPTForCausalLM"), tmp_path, 2)
    reference = dict(transformers.OPTForCausalLM.from_pretrained(tmp_path).named_parameters())
    weight_map = collect_weight_map(tmp_path)
    with fake_rank(0, 1) as group:
        model, params = planned("OPTForCausalLM", 1, group)
        keys = match_parameters(params, tied_names(model), weight_map, model.base_model_prefix, model)
        load_parameters(params, keys, weight_map, 0, CPU)
    assert set(params) == set(reference)
    for key, param in params.items():
        assert torch.equal(param.local, reference[key]), key  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", sorted(PLACEMENTS))
def test_mapped_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """The same values; they outlive the open file, and writing to them does not change it."""
    monkeypatch.setattr(load, "_MIN_MAPPED_BYTES", 0)
    full = torch.randn(16, 12, 4)
    path = tmp_path / "model.safetensors"
    save_file({"x": full}, path)
    before = path.read_bytes()
    mapped = 0
    for rank in range(4):
        expected = slice_box(full, PLACEMENTS[kind], rank)
        with safe_open(path, "pt") as handle:
            shard = load_shard(handle, "x", PLACEMENTS[kind], (16, 12, 4), rank, torch.float32, CPU)
            mapped += (
                load._mapped(
                    handle, "x", tuple(local_index(PLACEMENTS[kind], (16, 12, 4), rank)), (16, 12, 4), torch.float32
                )
                is not None
            )
        assert torch.equal(shard, expected) and shard.is_contiguous()
        shard.add_(1)
        assert torch.equal(shard, expected + 1)
    assert path.read_bytes() == before
    assert mapped == (4 if kind in ("replicate", "shared", "rows", "copies") else 0)
