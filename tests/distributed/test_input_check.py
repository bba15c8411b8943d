"""Ranks that are called with different inputs raise, all of them, with the argument and the ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from paraxis.distributed import checksum
from paraxis.distributed.input_check import STORE_INTERVAL, InputCheck, compare_arguments
from paraxis.errors import RankMismatchError

IDS = torch.arange(12).view(2, 6)


class Model(nn.Module):
    """Names the arguments."""

    def forward(self, input_ids: torch.Tensor, mask: Any = None, **kwargs: Any) -> None: ...


class Call:
    """A call with a collective, as every call of a parallel model has one."""

    module = Model()

    def __call__(self, *args: Any, **kwargs: Any) -> str:
        dist.barrier()
        return "done"


def check(transport: str, late: bool = False) -> InputCheck:
    """A comparison through this transport; ``late``: as for inputs on a device."""
    checksum.is_on_host = (lambda tensor: False) if late else (lambda tensor: tensor.is_cpu)  # type: ignore[assignment]
    group: Any = dist.group.WORLD
    if transport == "store":
        return InputCheck(group, 20.0, None)
    found = InputCheck.create(group, 20.0)
    assert found is not None and found.board is not None
    return found


def message(function: Any, *args: Any) -> str:
    try:
        function(*args)
    except RankMismatchError as error:
        return str(error)
    return ""


def differing(transport: str, odd: int, late: bool = False) -> dict[str, str]:
    """The message of this rank for each kind of difference, each after a call that is the same everywhere."""
    compared, call = check(transport, late), Call()
    mine = dist.get_rank() == odd
    cases: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
        "same": ((IDS,), {"mask": torch.tensor([float("nan")])}),
        "positional": ((IDS + mine,), {}),
        "keyword": ((), {"input_ids": IDS, "labels": IDS + 2 * mine}),
        "nested": ((IDS,), {"past": {"states": [torch.ones(2), torch.full((2,), float(mine))]}}),
        "plain": ((IDS,), {"use_cache": mine}),
        "absent": ((IDS,), {"mask": IDS} if mine else {}),
        "shape": ((IDS[:, : 6 - mine],), {}),
    }
    found = {}
    for name, (args, kwargs) in cases.items():
        compared.run(call, (IDS,), {})
        found[name] = message(compared.run, call, args, kwargs)
        if late:  # the number of a call is read by the next one
            found[name] = found[name] or message(compared.run, call, (IDS,), {})
    return found


@pytest.mark.parametrize("transport", ["board", "store"])
@pytest.mark.parametrize(("world", "odd", "late"), [(2, 1, False), (4, 2, False), (2, 1, True)])
def test_the_argument_and_the_rank_are_named(ranks: Any, transport: str, world: int, odd: int, late: bool) -> None:
    others = "rank 0" if world == 2 else "ranks 0, 1, 3"
    results = ranks(world).run(differing, transport, odd, late)
    assert all(found == results[0] for found in results), "all ranks raise the same"
    found = results[0]
    assert found.pop("same") == "", "NaN equals NaN"
    assert f"the values of input_ids on rank {odd} differ from those on {others} (" in found["positional"]
    assert f"the values of labels on rank {odd} differ" in found["keyword"]
    assert "past" in found["nested"] and "input_ids" not in found["nested"]
    assert f"use_cache differs: False on {others}, True on rank {odd}" in found["plain"]
    assert "mask differs: it is absent" in found["absent"] and "shape (2, 6)" in found["absent"]
    assert "shape (2, 6)" in found["shape"] and "shape (2, 5)" in found["shape"]
    assert all("test_input_check.py:" in text and "check_ranks=False" in text for text in found.values())


def decode_steps(transport: str, late: bool) -> tuple[int, str, str]:
    """How many steps after a difference it is raised, its message, and whether the ranks may go on."""
    compared, call = check(transport, late), Call()
    token = torch.tensor([[3]])
    steps, text = 0, ""
    compared.steps = 1
    with torch.no_grad():
        for step in range(3 * STORE_INTERVAL):
            text = message(compared.run, call, (token + (step == 5 and dist.get_rank() == 1),), {})
            if text:
                steps = step - 5
                break
        compared.steps = 0
        return steps, text, message(compared.run, call, (IDS,), {}) + message(compared.flush)


@pytest.mark.parametrize(
    ("transport", "late", "limit"), [("board", False, 0), ("board", True, 1), ("store", False, 16)]
)
def test_tokens_that_differ_are_sampled_ones(ranks: Any, transport: str, late: bool, limit: int) -> None:
    first, second = ranks(2).run(decode_steps, transport, late)
    assert first == second
    steps, text, after = first
    assert steps <= limit and "The ranks sampled different tokens" in text and "torch.Generator" in text
    assert after == "", "the ranks may go on"


def last_call(transport: str, late: bool) -> list[str]:
    """The message of a flush after a difference that no other call follows."""
    compared, call = check(transport, late), Call()
    with torch.no_grad():
        token = torch.tensor([[dist.get_rank()]])
        run = message(compared.run, call, (token,), {}) if transport == "store" or late else ""
        return [run, message(compared.flush) if run == "" and (transport == "store" or late) else ""]


@pytest.mark.parametrize(("transport", "late"), [("store", False), ("board", True)])
def test_a_flush_compares_the_last_call(ranks: Any, transport: str, late: bool) -> None:
    for run, flushed in ranks(2).run(last_call, transport, late):
        assert run == "" and "input_ids on rank 1" in flushed


def nested_calls() -> tuple[list[int], str]:
    """The comparison looks at the outermost call; a call inside may have other inputs on every rank."""
    compared = check("board")
    seen = []

    class Outer(Call):
        def __call__(self, *args: Any, **kwargs: Any) -> str:
            seen.append(compared.active)
            return super().__call__()

    compared.run(Outer(), (IDS,), {})
    return [int(x) for x in seen], message(compared.flush)


def test_calls_inside_of_a_call_see_that_it_is_active(ranks: Any) -> None:
    assert ranks(2).run(nested_calls) == [([1], "")] * 2


def arguments(odd: bool) -> tuple[list[Any], str]:
    group: Any = dist.group.WORLD
    rank = dist.get_rank()
    found = compare_arguments(group, "generate", {"x": IDS}, 10.0, lambda: rank)
    return found, message(compare_arguments, group, "generate", {"x": IDS, "top_k": rank if odd else 1}, 10.0)


def test_arguments_are_compared_and_something_comes_with_them(ranks: Any) -> None:
    assert ranks(2).run(arguments, False) == [([0, 1], "")] * 2
    for _, text in ranks(2).run(arguments, True):
        assert "top_k differs: 0 on rank 0, 1 on rank 1" in text


def compares_tokens(transport: str) -> dict[str, Any]:
    """Tokens of decode steps that are the same, and then differ."""
    compared, rank = check(transport), dist.get_rank()
    compared.steps = 2
    with compared.comparing_tokens():
        assert compared.active
        for token in range(3):
            compared.compare_tokens(torch.tensor([token]))
            dist.barrier()

        def differ() -> None:
            for _ in range(STORE_INTERVAL):
                compared.compare_tokens(torch.tensor([7 + rank]))
                compared.flush()  # as a collective does: the first rank waits for the second, and looks

        found = message(differ)
    return {"message": found, "active": compared.active}


@pytest.mark.parametrize("transport", ["board", "store"])
def test_tokens_of_a_generation_loop_are_compared(ranks: Any, transport: str) -> None:
    for found in ranks(2).run(compares_tokens, transport):
        assert "input_ids" in found["message"] and "sampled different tokens" in found["message"]
        assert not found["active"]
