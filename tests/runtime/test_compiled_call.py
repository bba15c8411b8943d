"""Calling a parallel model: a graph break falls back to the children, and the plan says where and why."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.host_calls import count_calls
from models.compare import batch, full, max_difference, module_errors, parallel, parallel_module, reference
from torch import nn
from torch.autograd import forward_ad

from paraxis import ParallelExecutionCtx, parallelize_model
from paraxis.plan.work import sharded_fraction
from paraxis.runtime.submodule_call import SubmoduleCall


class Inner(nn.Module):
    """A block that is one graph."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu())


class Branches(nn.Module):
    """Python that depends on the data, between blocks; a list of modules, and a parameter outside of them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Inner() for _ in range(2))
        self.scale = nn.Parameter(torch.ones(16))
        self.unused = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](x)
        if x.mean().item() > 100:
            x = -x
        return self.blocks[1](x * self.scale)


def run_with_graph_break() -> dict[str, Any]:
    """Errors, the plan, and what calling the children runs."""
    x = torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(1))
    model, unsharded, ctx = parallel_module(Branches, x)
    errors = module_errors(model, unsharded, x)
    return {
        **errors,
        "breaks": ctx.plan.breaks,
        "work": sorted((m.module, m.sharded / m.flops) for m in ctx.plan.matmuls),
        "collectives": sorted(c.module for c in ctx.plan.collectives),
        "local": {name: p.local_shape for name, p in ctx.plan.parameters.items()},
        "children": [isinstance(block._compiled_call_impl, SubmoduleCall) for block in model.blocks],
        "loaded": all(p.to_local().numel() > 0 for p in model.parameters()),
    }


def test_graph_break_compiles_the_children(ranks: Any) -> None:
    for found in ranks(2).run(run_with_graph_break):
        assert found["outputs"] < 1e-5 and found["gradients"] < 1e-4
        (broken,) = found["breaks"]
        assert "if x.mean().item() > 100" in broken and broken.startswith("the model: ")
        assert found["children"] == [True, True] and found["loaded"]
        assert found["work"] == [(f"blocks.{i}.{name}", 1.0) for i in (0, 1) for name in ("down", "up")]
        assert all(name.startswith("blocks.") for name in found["collectives"])
        assert found["local"]["blocks.0.up.weight"] == (32, 16) and found["local"]["blocks.1.down.weight"] == (16, 32)
        assert found["local"]["scale"] == (16,) and found["local"]["unused.weight"] == (2, 4)


def count_compilations() -> list[int]:
    """Compilations after calls with other batch sizes and modes."""
    x = torch.randn(2, 6, 16)
    model, _, ctx = parallel_module(Inner, x)
    counts = []
    with torch.no_grad():
        for rows in (2, 3, 4, 5):
            model(torch.randn(rows, 6, 16))
            counts.append(ctx.compile_times)
    model(x)
    return [*counts, ctx.compile_times]


def test_sizes_become_dynamic_after_the_second_call(ranks: Any) -> None:
    for first, second, third, fourth, grad in ranks(2).run(count_compilations):
        assert first == 1 and second == third == fourth == 2, "one static program, and one for all other sizes"
        assert grad == 3, "gradients need another program"


# -- host work -----------------------------------------------------------------------------------------------------


def count_host_calls(folder: str, vocabulary: int) -> dict[str, int]:
    """How many functions Python calls in a prefill and in a training step, both compiled before."""
    ctx = ParallelExecutionCtx(tp_group=dist.group.WORLD, current_device=torch.device("cpu"))
    options: dict[str, Any] = {"constraints": {"lm_head": "row"}}  # logits are partial: redistributed by vocabulary
    model = parallelize_model(
        folder, ctx, vocab_size=vocabulary, skip_load_weights=True, show_progress=False, cache_plans=False, **options
    )
    ids = torch.tensor([[1, 2, 3, 4, 5]])

    @torch.no_grad()
    def prefill() -> None:
        model(ids)

    def train() -> None:
        model(ids, labels=ids).loss.backward()

    found = {}
    for step in (prefill, train):
        for _ in range(2):
            step()
        with count_calls() as count:
            step()
        found[step.__name__] = count[0]
    return found


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.long)])
def test_host_work_does_not_grow_with_the_vocabulary(world: int, ranks: Any, checkpoints: Any) -> None:
    folder = checkpoints("llama", hidden_size=16, num_hidden_layers=1)
    small, large = (ranks(world).run(count_host_calls, folder, vocabulary) for vocabulary in (1_000, 1_000_000))
    for few, many in zip(small, large):
        for kind in few:
            assert abs(many[kind] - few[kind]) <= 20, (kind, few, many)


def _break_the_graph(module: Any, args: Any, output: torch.Tensor) -> None:
    torch._dynamo.graph_break()


def collects_hidden_states(folder: str) -> dict[str, Any]:
    """A model with a hook that must run in Python: its blocks run as graphs, inside of transformers' own forward."""
    torch._dynamo.reset()
    (model, ctx), unsharded = parallel(folder), reference(folder)
    ids, _ = batch(256)
    for each in (model, unsharded):
        each.model.embed_tokens.register_forward_hook(_break_the_graph)
    with torch.no_grad():
        model(input_ids=ids)
        found, expected = (each(input_ids=ids, output_hidden_states=True).hidden_states for each in (model, unsharded))
    errors = [max_difference(full(a), b) for a, b in zip(found, expected, strict=True)]
    return {"errors": errors, "breaks": ctx.plan.breaks}


def test_blocks_stay_graphs_where_the_model_around_them_collects_their_results(ranks: Any, checkpoints: Any) -> None:
    for found in ranks(2).run(collects_hidden_states, checkpoints("llama")):
        assert max(found["errors"]) < 1e-4 and len(found["errors"]) == 3
        assert not any("layers" in reason.split(":")[0] for reason in found["breaks"])


class Scenes(nn.Module):
    """Python that depends on the data around a tower, which only calls with an image use."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.decoder = nn.Embedding(32, 16), Inner()
        self.positions, self.tower = nn.Embedding(6, 16), nn.Sequential(Inner(), Inner())

    def forward(self, ids: torch.Tensor, image: torch.Tensor | None = None) -> torch.Tensor:
        x = self.embed(ids)
        if image is not None:
            if image.mean().item() > 100:
                image = -image
            image = image + self.positions.weight.flip(0)  # which is read in Python
            x = torch.cat([self.tower(image), x], 1)
        return self.decoder(x)


def run_with_and_without_images() -> dict[str, Any]:
    """Errors of both kinds of calls, what is planned, and which calls fall back."""
    generator = torch.Generator().manual_seed(1)
    image = {"ids": torch.tensor([[1, 2, 3]]), "image": torch.randn(1, 6, 16, generator=generator)}
    text = {"ids": torch.tensor([[4, 5, 6, 7]])}
    torch.manual_seed(0)
    unsharded = Scenes()
    torch.manual_seed(0)
    ctx = ParallelExecutionCtx(tp_group=dist.group.WORLD, current_device=torch.device("cpu"))
    model = parallelize_model(Scenes(), ctx, example_inputs=[image, text], show_progress=False)
    planned = ctx.plan
    errors = [max_difference(model(**inputs), unsharded(**inputs)) for inputs in (image, text, image, text)]
    text_graph = ctx.last_optimized_graph_module.graph
    for each in (model, unsharded):
        each(**image).square().sum().backward()
    gradients = {n: max_difference(full(p.grad), unsharded.get_parameter(n).grad) for n, p in model.named_parameters()}
    return {
        "errors": errors,
        "gradients": max(gradients.values()),
        "breaks": planned.breaks,
        "unplanned": planned.unplanned,
        "tower": {n: p.local_shape for n, p in planned.parameters.items() if n.startswith("tower.0") and "weight" in n},
        "matmuls": {m.module: (m.flops, m.local) for m in planned.matmuls},
        "shared": sharded_fraction(planned.matmuls, "tower"),
        "breaks after": ctx.plan.breaks,
        "inputs of text": sum(node.op == "placeholder" for node in text_graph.nodes),
    }


def test_parts_of_calls_that_break_the_graph_are_planned_and_other_calls_stay_graphs(ranks: Any) -> None:
    for found in ranks(2).run(run_with_and_without_images):
        assert max(found["errors"]) < 1e-5 and found["gradients"] < 1e-4
        assert found["tower"] == {"tower.0.up.weight": (32, 16), "tower.0.down.weight": (16, 32)}
        assert found["shared"] == 1.0 and found["unplanned"] == ("positions.weight",)
        modules = {f"{block}.{name}" for block in ("decoder", "tower.0", "tower.1") for name in ("up", "down")}
        assert found["matmuls"].keys() == modules, "each once, by their names in the model"
        assert all(0 < local <= flops / 2 for flops, local in found["matmuls"].values())
        assert len(found["breaks"]) == 1 and "item" in found["breaks"][0]
        assert found["breaks after"] == found["breaks"]
        assert found["inputs of text"] == 1 + 5, "the token ids, and all parameters but those of the tower"


def differentiate(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """What transforms of ``torch.func``, and forward differentiation, make of a call; then a step without them."""
    parameters = {name: p for name, p in model.named_parameters() if name.endswith("bias")}

    def loss(parameters: dict[str, torch.Tensor], x: torch.Tensor = x) -> torch.Tensor:
        return torch.func.functional_call(model, parameters, (x,)).square().mean()

    found = [*torch.func.grad(loss)(parameters).values()]
    found.append(torch.func.vmap(model)(x))
    found += torch.func.jvp(model, (x,), (x.cos(),))
    with forward_ad.dual_level(), torch.no_grad():  # where a program without gradients would run
        found.append(forward_ad.unpack_dual(model(forward_ad.make_dual(x, x.sin()))).tangent)
    torch.func.vmap(model)(x).square().mean().backward()  # differentiates what was transformed
    found += [full(p.grad) for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return found


def transforms(compile: str | None) -> dict[str, Any]:
    """Errors inside of transforms and after them, and whether the model is one graph afterwards."""
    x = torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(1))
    model, unsharded, ctx = parallel_module(Inner, x, compile=compile)
    model(x)
    pairs = zip(differentiate(model, x), differentiate(unsharded, x), strict=True)
    inside = [max_difference(a.detach(), b.detach()) for a, b in pairs]
    compiled = ctx.compile_times
    errors = module_errors(model, unsharded, x)
    return {"inside": inside, "after": errors, "breaks": ctx.plan.breaks, "compiled": ctx.compile_times - compiled}


@pytest.mark.parametrize("compile", [None, "inductor"])
def test_calls_inside_of_transforms_leave_others_as_they_are(ranks: Any, compile: str | None) -> None:
    for found in ranks(2).run(transforms, compile):
        assert len(found["inside"]) == 10 and max(found["inside"]) < 1e-5
        assert max(found["after"].values()) < 1e-5
        assert found["breaks"] == () and found["compiled"] <= 1
