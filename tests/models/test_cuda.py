"""Two gloo ranks that share one GPU, against the unsharded model on that GPU."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from models.compare import batch, gradient_errors, parallel, reference

from paraxis.runtime.generation import step_graph

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def run_against_unsharded(folder: str, dtype: torch.dtype) -> dict[str, Any]:
    """A training step and generation, against the unsharded model in the same dtype and in float64."""
    torch.backends.cuda.matmul.allow_tf32 = False
    model, ctx = parallel(folder, "cuda:0", torch_dtype=dtype)
    unsharded, exact = reference(folder, dtype=dtype).cuda(), reference(folder, dtype=torch.float64).cuda()
    ids, labels = (t.cuda() for t in batch(exact.config.vocab_size))
    runs = [m(input_ids=ids, labels=labels) for m in (model, unsharded, exact)]
    for run in runs:
        run.loss.backward()
    parallel_run, plain_run, exact_run = runs
    logits = [r.logits.detach().double() for r in runs]
    with torch.no_grad():
        tokens = [m.generate(ids, max_new_tokens=6, do_sample=False) for m in (model, unsharded)]
    return {
        "device": {p.to_local().device.type for p in model.parameters()},
        "dtype": {p.dtype for p in model.parameters()},
        "fraction": ctx.plan.sharded_fraction,
        "logits": float((logits[0] - logits[1]).abs().max()),
        "error": float((logits[0] - logits[2]).abs().max()),
        "plain_error": float((logits[1] - logits[2]).abs().max()),
        "loss": abs(parallel_run.loss.item() - plain_run.loss.item()),
        "loss_error": abs(parallel_run.loss.item() - exact_run.loss.item()),
        "gradients": gradient_errors(model, unsharded),
        "gradients_exact": gradient_errors(model, exact),
        "plain_gradients_exact": {
            n: float((p.grad.double() - e.grad).norm() / e.grad.norm())
            for (n, p), (_, e) in zip(unsharded.named_parameters(), exact.named_parameters(), strict=True)
            if p.grad is not None
        },
        "tokens": [t.cpu() for t in tokens],
        "all": logits[0].cpu(),
    }


@pytest.mark.parametrize("name", ["llama", "llama-tied", "gpt2"])
def test_float32_equals_the_unsharded_model(name: str, ranks: Any, checkpoints: Any) -> None:
    results = ranks(2).run(run_against_unsharded, checkpoints(name), torch.float32, timeout=300)
    for found in results:
        assert found["device"] == {"cuda"} and found["fraction"] <= 0.55
        assert found["logits"] < 1e-4 and found["loss"] < 1e-5
        assert max(found["gradients"].values()) < 1e-3
        assert torch.equal(*found["tokens"])
        assert torch.equal(found["all"], results[0]["all"])


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_bfloat16_is_as_accurate_as_unsharded(name: str, ranks: Any, checkpoints: Any) -> None:
    """Rounding makes bfloat16 differ: compared with float64, the parallel model must be as close as the unsharded."""
    results = ranks(2).run(run_against_unsharded, checkpoints(name), torch.bfloat16, timeout=300)
    for found in results:
        assert found["dtype"] == {torch.bfloat16} and found["device"] == {"cuda"}
        assert found["error"] <= 1.5 * found["plain_error"]
        assert found["loss_error"] < 2e-2
        worst = max(found["plain_gradients_exact"].values())
        assert max(found["gradients_exact"].values()) <= 1.5 * worst
        assert torch.equal(found["all"], results[0]["all"])


def compiled_tokens(folder: str, mode: str | None) -> dict[str, bool]:
    """Whether a compiled model generates the unsharded one's tokens, with a dynamic and with a static cache."""
    model, _ = parallel(folder, "cuda:0", torch_dtype=torch.float32, compile="inductor", mode=mode)
    model.eval()
    unsharded = reference(folder, dtype=torch.float32).cuda()
    ids = batch(unsharded.config.vocab_size)[0].cuda()
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    expected = unsharded.generate(ids, **options)
    return {
        cache: torch.equal(model.generate(ids, cache_implementation=cache, **options), expected)
        for cache in ("dynamic", "static")
    }


@pytest.mark.parametrize(("world", "mode"), [(2, None), (1, "reduce-overhead")])
def test_compiled_model_generates_the_unsharded_tokens(
    world: int, mode: str | None, ranks: Any, checkpoints: Any
) -> None:
    """With one rank, CUDA graphs are captured; collectives of gloo cannot be."""
    for found in ranks(world).run(compiled_tokens, checkpoints("llama"), mode, timeout=400):
        assert found == {"dynamic": True, "static": True}


WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "another prompt": {},
    "sampled": {"do_sample": True, "temperature": 1.3, "top_k": 40, "top_p": 0.9, "min_p": 0.01},
    "penalty": {"repetition_penalty": 1.3, "do_sample": True},
    "n-grams": {"no_repeat_ngram_size": 2},
    "stop tokens": {"eos_token_id": list(range(3, 20)), "pad_token_id": 0, "min_new_tokens": 4, "do_sample": True},
}


def captured_steps(folder: str) -> dict[str, Any]:
    """For each way to choose tokens, whether the plain call gives transformers' twice in a row, and the random state
    after it; and how many decode steps were captured and how often the model was called, in the first and the second
    call."""
    torch.backends.cuda.matmul.allow_tf32 = False
    model, _ = parallel(folder, "cuda:0", torch_dtype=torch.float32)
    model.eval()
    unsharded = reference(folder, dtype=torch.float32).cuda()
    ids = batch(unsharded.config.vocab_size)[0].cuda()
    counts = {"captures": 0, "calls": 0}
    captured, call = step_graph.CapturedStep, type(model.forward.leads_in)
    capture, called = captured.__init__, call.__call__

    def count_capture(*args: Any) -> None:
        counts["captures"] += 1
        capture(*args)

    def count_call(*args: Any, **kwargs: Any) -> Any:
        counts["calls"] += 1
        return called(*args, **kwargs)

    def result(m: Any, prompt: torch.Tensor, options: dict[str, Any]) -> tuple[list[Any], float]:
        torch.manual_seed(5)
        tokens = m.generate(prompt, max_new_tokens=20, **{"do_sample": False, "eos_token_id": None, **options})
        return tokens.tolist(), float(torch.rand((), device="cuda"))

    found = {}
    with patch.object(captured, "__init__", count_capture), patch.object(call, "__call__", count_call):
        for name, options in WAYS.items():
            prompt = ids if name != "another prompt" else ids.flip(0)[:, 2:]
            expected = result(unsharded, prompt, options)
            same, steps = [], []
            for _ in range(2):
                before = dict(counts)
                same.append(result(model, prompt, options) == expected)
                steps.append(tuple(counts[key] - before[key] for key in counts))
            found[name] = (same, steps)
    return found


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_captured_decode_steps_generate_transformers_tokens(name: str, ranks: Any, checkpoints: Any) -> None:
    (found,) = ranks(1).run(captured_steps, checkpoints(name), timeout=500)
    for same, ((captures, _), (captures_again, calls)) in found.values():
        assert all(same), found
        assert captures <= 1 and captures_again == 0, found
        assert calls == 2, f"a prefill, and a step that looks at the guards: {found}"
    assert found["greedy"][1][0][0] == 1, found
