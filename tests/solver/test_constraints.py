"""Constraints: how they are written, and to what they apply."""

from __future__ import annotations

import re

import pytest
from solver.programs import transformer_program

from paraxis import ConstraintError
from paraxis.placement import REPLICATE, Layout, Shard
from paraxis.rules import UNPLACED
from paraxis.solver import Constraint, Program
from paraxis.solver.constraints import Constraints, check_axes, check_names, parse, weight_axes

DOWN, EMBED = "layers.0.mlp.down.weight", "embed.weight"
ROWS, COLUMNS = Shard.of(0, Layout.even(8, 4)), Shard.of(1, Layout.even(8, 4))


@pytest.fixture(scope="module")
def program() -> Program:
    return transformer_program()


def test_parsing_refuses_unknown_placements() -> None:
    assert parse(None) == []
    assert parse({"head": "Column"}) == [Constraint("head", "column")]
    assert parse({"head": ["not row", "shard( 1 )"]}) == [
        Constraint("head", "row", forbidden=True),
        Constraint("head", "shard(1)"),
    ]
    assert [str(c) for c in parse({"a.*": "not replicated"})] == ["'a.*': not replicated"]
    text = "constraint 'head': 'diagonal' is not a placement: use 'column', 'row', 'vocab'"
    with pytest.raises(ConstraintError, match=re.escape(text)):
        parse({"head": "diagonal"})


@pytest.mark.parametrize(
    ("old", "new"),
    [("whole", "replicated"), ("not whole", "sharded"), ("split", "sharded"), ("not split", "replicated")],
)
def test_words_of_earlier_versions_are_accepted_with_a_warning(old: str, new: str) -> None:
    with pytest.warns(DeprecationWarning, match=f"constraint 'head': '{old}' is now called '{new}'"):
        assert parse({"head": old}) == parse({"head": new})


def test_patterns_match_parameters_and_modules() -> None:
    constraint = Constraint("*.down", "row")
    assert constraint.matches(["layers.0.mlp.down.weight"]) and constraint.matches(["up.weight", "a.down"])
    assert not constraint.matches(["layers.0.mlp.down_proj.weight"])


def test_constraint_holds_for_its_placements() -> None:
    axes = {"column": 0, "row": 1}
    for placement, fitting in (
        ("replicated", [REPLICATE]),
        ("sharded", [ROWS, COLUMNS]),
        ("column", [ROWS]),
        ("row", [COLUMNS]),
        ("shard(1)", [COLUMNS]),
    ):
        for found in (REPLICATE, ROWS, COLUMNS):
            assert Constraint("x", placement).holds(found, axes) == (found in fitting)
            assert Constraint("x", placement, forbidden=True).holds(found, axes) == (found not in fitting)


def test_axes_are_dimensions_of_the_weight(program: Program) -> None:
    axes = {program.parameters[v]: a for v, a in weight_axes(program).items()}
    assert axes[DOWN] == {"column": 0, "row": 1}
    assert axes[EMBED] == {"vocab": 0}
    assert "norm.weight" not in axes


def test_a_step_may_not_violate_a_constraint(program: Program) -> None:
    permit = Constraints(parse({"*.down": "row"}), program).permit
    value = next(v for v, name in program.parameters.items() if name == DOWN)
    step = next(s for s in program.steps if value in s.inputs)
    after = [tuple(p if v == value else REPLICATE for v in step.inputs) for p in (ROWS, COLUMNS)]
    before = tuple(UNPLACED if v == value else REPLICATE for v in step.inputs)
    strategy = object()
    assert [permit(step, strategy, before, x) for x in after] == [False, True]  # type: ignore[arg-type]
    assert permit(step, strategy, after[0], after[0])  # type: ignore[arg-type]


def test_unknown_names() -> None:
    names = {"embed.weight": ["embed.weight", "head.weight"], "up.weight": ["up.weight"]}
    check_names(parse({"head": "replicated", "u*": "sharded"}), names)
    text = "'haed': replicated: no parameter or module matches this name. Did you mean 'head'"
    with pytest.raises(ConstraintError, match=text):
        check_names(parse({"haed": "replicated"}), names)


@pytest.mark.parametrize(
    ("name", "axis", "text"),
    [
        (
            "norm",
            "column",
            "constraint 'norm': column: norm.weight is not the weight of a layer that can be column-par",
        ),
        ("head", "vocab", "head.weight is not the weight of a layer that can be vocab-parallel"),
    ],
)
def test_axes_of_other_layers(program: Program, name: str, axis: str, text: str) -> None:
    constraints = parse({name: axis})
    with pytest.raises(ConstraintError, match=re.escape(text)):
        check_axes(constraints, Constraints(constraints, program), program)
