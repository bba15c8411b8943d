"""The default pipeline lists every rewrite, and users can change it."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import torch
from models.compare import batch, parallel
from torch.fx import GraphModule

import paraxis.optimize
from paraxis import Config
from paraxis.distributed.operators import all_reduce
from paraxis.passes import (
    InitializeOrLoadWeightsPass,
    ParallelLayerReplacePass,
    PassBase,
    PassPipeline,
    Rewrite,
    build_parallel_pass_pipeline,
)
from paraxis.passes import pipeline as module
from paraxis.passes.pipeline import without_loading
from paraxis.passes.setting import Setting


def test_every_entry_has_a_name_of_its_own_and_one_line() -> None:
    pipeline = build_parallel_pass_pipeline()
    assert len(set(pipeline.names)) == len(pipeline)
    for step in pipeline:
        assert step.summary and "\n" not in step.summary and step.summary.endswith("."), step.title


def test_every_module_of_optimize_is_in_the_pipeline() -> None:
    """All but the patterns that several rewrites share."""
    tree = ast.parse(Path(module.__file__).read_text())
    imported = {n.module.split(".")[-1] for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.module}
    files = {path.stem for path in Path(paraxis.optimize.__file__).parent.glob("*.py")}
    assert files - imported - {"__init__", "patterns"} == set()


def test_every_rewrite_of_optimize_is_in_the_pipeline() -> None:
    """A public function of a graph module is a rewrite, and a rewrite that is in no pipeline never runs."""
    tree = ast.parse(Path(module.__file__).read_text(encoding="utf-8"))
    called = {node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    rewrites = set()
    for path in Path(paraxis.optimize.__file__).parent.rglob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            first = node.args.args[0].annotation if isinstance(node, ast.FunctionDef) and node.args.args else None
            if first is not None and ast.unparse(first) == "GraphModule" and not node.name.startswith("_"):
                rewrites.add(node.name)
    assert len(rewrites) >= 15 and rewrites - called == set()


def names_in(setting: Setting) -> list[str]:
    return [step.title for step in build_parallel_pass_pipeline() if step.applies(setting)]


def test_searching_places_loads_and_optimizes_nothing() -> None:
    assert names_in(Setting(searching=True)) == ["solve", "annotate", "replace", "merge_all_reduces", "agree"]


def test_cpu_kernels_are_for_inference_on_a_cpu() -> None:
    cpu = {"cpu_prefill_attention", "cpu_decode_attention", "cpu_matmul"}
    assert cpu <= set(names_in(Setting(device="cpu")))
    assert not cpu & {*names_in(Setting(device="cuda")), *names_in(Setting(device="cpu", grad=True))}


def test_gpu_kernels_are_for_cuda_graphs() -> None:
    gpu = {"decode_kernels", "fuse_rope_kv_write", "merge_cache_counters"}
    setting = {"device": "cuda", "compiled": True}
    assert gpu <= set(names_in(Setting(**setting, cuda_graphs=True)))
    assert not gpu & {*names_in(Setting(**setting)), *names_in(Setting(**setting, cuda_graphs=True, grad=True))}


def test_programs_with_random_numbers_are_not_lifted_for_inductor() -> None:
    assert "lift" in names_in(Setting(compiled=True))
    assert "lift" not in names_in(Setting(compiled=True, random=True))


def test_without_loading_leaves_out_the_weights_only() -> None:
    config = without_loading(Config())
    assert config.pipeline is not None and InitializeOrLoadWeightsPass not in config.pipeline
    assert [*config.pipeline.names, "initialize"] != build_parallel_pass_pipeline().names
    assert set(build_parallel_pass_pipeline().names) - set(config.pipeline.names) == {"initialize"}


class CountAllReduces(PassBase):
    """A pass of a user, on the local program."""

    def run(self, graph_module: GraphModule, ctx: Any, config: Any) -> GraphModule:
        count = len(graph_module.graph.find_nodes(op="call_function", target=all_reduce))
        ctx.seen = [*getattr(ctx, "seen", []), count]
        return graph_module


def run_with_own_pass(folder: str) -> list[int]:
    """The all-reduces that the user's pass has counted: when the model was planned, and when it was compiled."""
    pipeline = build_parallel_pass_pipeline()
    pipeline.insert_after(ParallelLayerReplacePass, CountAllReduces())
    model, ctx = parallel(folder, pipeline=pipeline)
    with torch.no_grad():
        model(input_ids=batch(256)[0])
    return ctx.seen


def test_pass_of_the_user_runs_on_the_local_program(checkpoints: Any, ranks: Any) -> None:
    assert ranks(2).run(run_with_own_pass, checkpoints("llama-tied")) == [[5, 5]] * 2


# -- users add, remove and reorder rewrites --------------------------------------------------------------------------


def changed_pipeline() -> PassPipeline:
    """A rewrite of the user's own, one less, and two in another order."""
    pipeline = build_parallel_pass_pipeline()
    negate_twice = Rewrite("negate_twice", "Negates the first result of a linear layer twice.", _negate_twice)
    pipeline.insert_before("unshard_at_first_use", negate_twice)
    pipeline.remove("append_kv_cache")
    pipeline.move_after("cpu_matmul", "fuse_eager_operators")
    return pipeline


def _negate_twice(graph_module: GraphModule, setting: Setting) -> int:
    """What a user might write: it changes the graph in place and recompiles it."""
    node = graph_module.graph.find_nodes(op="call_module")[0] if setting.ranks > 1 else None
    if node is None:
        return 0
    with graph_module.graph.inserting_after(node):
        once = graph_module.graph.call_function(torch.ops.aten.neg.default, (node,))
    with graph_module.graph.inserting_after(once):
        twice = graph_module.graph.call_function(torch.ops.aten.neg.default, (once,))
    node.replace_all_uses_with(twice, delete_user_cb=lambda user: user is not once)
    graph_module.recompile()
    return 1


@torch.no_grad()
def run_with(folder: str, changed: bool) -> tuple[list[str], set[str], torch.Tensor]:
    """The passes that ran, in order; what the program calls; the logits of two steps with a KV cache."""
    model, ctx = parallel(folder, pipeline=changed_pipeline() if changed else None)
    ctx.state.pass_seconds.clear()
    ids = batch(256)[0]
    first = model(input_ids=ids, use_cache=True)
    second = model(input_ids=ids[:, -1:], past_key_values=first.past_key_values)
    program = ctx.last_optimized_graph_module
    called = {str(getattr(node.target, "__name__", node.target)) for node in program.graph.nodes}
    return list(ctx.state.pass_seconds), called, torch.cat([first.logits, second.logits], 1)


def test_rewrites_are_added_removed_and_reordered(checkpoints: Any, ranks: Any) -> None:
    folder = checkpoints("llama")
    for default, changed in zip(*(ranks(2).run(run_with, folder, changed=each) for each in (False, True)), strict=True):
        (names, called, logits), (changed_names, changed_called, changed_logits) = default, changed
        assert set(names) - set(changed_names) == {"append_kv_cache"}
        assert set(changed_names) - set(names) == {"negate_twice"}
        assert names.index("cpu_matmul") > names.index("cpu_decode_attention")
        assert changed_names.index("cpu_matmul") == changed_names.index("fuse_eager_operators") + 1
        assert "neg.default" not in called - changed_called and "neg.default" in changed_called
        assert "cat.default" in changed_called, "the KV cache is concatenated"
        torch.testing.assert_close(changed_logits, logits)
