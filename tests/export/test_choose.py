"""The largest exact part of a plan."""

from __future__ import annotations

from typing import Any

from export.models import ATTENTION, ENDS, MLP, check, llama

from paraxis.export.candidates import Candidates, Group
from paraxis.export.check import Outcome
from paraxis.export.choose import choose, choose_unverified

SEPARATE = {p: "row-split" if style == "row" else "column-gathered" for p, style in ATTENTION.items()}


def candidates() -> Candidates:
    singles = [Group(p, {p: style}) for p, style in ENDS.items()]
    return Candidates([Group("attention", ATTENTION, separate=SEPARATE), Group("mlp", MLP), *singles])


def test_inexact_groups_are_sharded_separately() -> None:
    """One KV head on two ranks: the attention is gathered layer by layer, the rest stays grouped."""
    choice = choose(candidates(), check(llama(num_key_value_heads=1)))
    assert choice.styles == {**SEPARATE, **MLP, **ENDS}
    assert set(choice.gathered) == set(ATTENTION) and choice.error is not None and choice.error < 1e-4


def test_without_verification_only_exact_styles() -> None:
    choice = choose_unverified(candidates(), "not verified")
    assert choice.styles == {**SEPARATE, **ENDS} and set(choice.replicated) == set(MLP) and choice.error is None


def choose_with(exact: Any, *groups: Group) -> Any:
    """Choose with a check that knows which combinations are exact."""

    def check(styles: dict[str, str]) -> Outcome:
        return Outcome(True, 0.0) if exact(styles) else Outcome(False, 1.0, "wrong")

    return choose(Candidates(list(groups)), check)  # type: ignore[arg-type]


def test_an_alternative_is_tried() -> None:
    group = Group("e", {"e": "experts", "e.up": "shard:-2:2"}, [{"e": "experts", "e.up": "shard:-2:1"}])
    choice = choose_with(lambda styles: styles.get("e.up") == "shard:-2:1", group)
    assert choice.styles == {"e": "experts", "e.up": "shard:-2:1"} and choice.groups == [group]


def test_groups_that_conflict_are_replicated() -> None:
    """Each is exact alone: the first two are accepted, the third conflicts with them."""
    groups = [Group(name, {name: "column-gathered"}) for name in "abc"]
    choice = choose_with(lambda styles: set(styles) != set("abc"), *groups)
    assert set(choice.styles) == {"a", "b"} and choice.replicated == {"c": "wrong"}


def test_nothing_exact() -> None:
    choice = choose_with(lambda styles: not styles, Group("a", {"a": "column"}))
    assert not choice.styles and choice.replicated == {"a": "wrong"} and choice.error is None
