"""Every rule against the real operator: what it offers must give the result, on any shards it accepts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from paraxis.capture import mark_output_op
from paraxis.placement import PARTIAL, REPLICATE, Layout, Shard
from paraxis.rules import Strategy, rule_for
from paraxis.rules.base import _families, _rules
from paraxis.rules.validation import check
from paraxis.rules.validation.calls import pointwise_overloads, recorded_calls, working_call
from paraxis.rules.validation.check import NO_VALUE, givens, placements
from paraxis.rules.validation.draw import b, f, i
from paraxis.rules.validation.run import assemble, call_of, cut, indices, same
from paraxis.rules.validation.samples import FAMILIES

aten = torch.ops.aten

WHOLE = {
    "aten.addmm.default (4, 12)",  # a matrix added, not a bias
    "aten.addmm.default (12,)",  # with beta and alpha
    "aten.linear.default (4, 8)",  # with a vector for a weight
    "aten.matmul.default (8,)",  # a vector times a batch of matrices
    "aten.matmul.default (4, 8)",  # a matrix times a vector
    "aten.index.Tensor (4, 6, 8)",  # with a mask
    "aten.convolution.default (2, 8, 6)",  # transposed, in groups
    "aten.slice.Tensor (4, 8)",  # every second one, from the middle
}
"""Sample calls for which the rule may offer nothing."""

SAME_RULE = {"aten::_grouped_mm"}
"""Runs in bfloat16 only, too coarse to compare; its rule is checked on an operator that means the same."""
DIVIDES_NOTHING = {"loss", "factory"}
"""Families of operators that are replaced by a parallel layer, or have nothing to divide."""


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.filterwarnings("ignore")
def test_samples(family: str) -> None:
    torch.manual_seed(0)
    for op, args, kwargs in FAMILIES[family]():
        report = check(op, *args, skip_kinds=("vocab",), gradients=(2,), **kwargs)
        assert not report.wrong, "\n".join(report.wrong[:5])
        shape = next(tuple(t.shape) for t in pytree.tree_leaves(args) if isinstance(t, torch.Tensor))
        if not report.checked:
            assert family in DIVIDES_NOTHING or f"{op} {shape}" in WHOLE or max(shape, default=1) == 1, (
                f"nothing offered: {op} {shape}"
            )


def test_every_rule_has_samples() -> None:
    """A rule needs sample calls in its family before it is trusted, and each operator one that is divided."""
    sampled = {op._schema.name: family for family in FAMILIES for op, _, _ in FAMILIES[family]()}
    pointwise = set(pointwise_overloads(_rules))
    for op, family in _families.items():
        if op in pointwise or op is mark_output_op or family == "factory" or op._schema.name in SAME_RULE:
            continue
        assert sampled.get(op._schema.name) == family, f"no sample of {op} in the family {family}"


@pytest.mark.filterwarnings("ignore")
def test_every_pointwise_operator() -> None:
    """All operators that torch calls pointwise, with arguments made from their schemas, broadcasting included."""
    torch.manual_seed(0)
    tried, wrong, silent = 0, [], []
    for op in pointwise_overloads(_rules):
        for shapes in ([(8, 1, 4), (6, 4), (8, 6, 1)], [(4, 6)]):
            call = working_call(op, shapes)
            if call is None:
                continue
            report = check(op, *call[0], worlds=(2,), **call[1])
            tried += 1
            wrong += report.wrong[:1]
            if not report.checked:
                silent.append(str(op))
    assert tried > 450 and not silent
    assert not wrong, "\n".join(wrong)


@pytest.mark.filterwarnings("ignore")
def test_samples_of_torch() -> None:
    """What torch's own operator database calls, wherever a rule would see it."""
    recorded = recorded_calls(_rules)
    checked, wrong = 0, []
    for func, calls in recorded.items():
        if func is aten.equal.default or func._schema.name in NO_VALUE:
            continue
        for _, args, kwargs in calls:
            report = check(func, *args, worlds=(2,), skip_kinds=("vocab",), **kwargs)
            wrong += report.wrong[:1]
            checked += len(report.checked)
    assert len(recorded) > 200 and checked > 1800
    assert not wrong, "\n".join(wrong)


# -- operators of which the values cannot be compared --------------------------------------------------------------


def test_random_operators_draw_nothing_twice() -> None:
    """No element on two ranks, which would draw different numbers for it."""
    for op, args in ((aten.rand_like.default, (f(4, 8),)), (aten.native_dropout.default, (f(4, 8), 0.5, True))):
        for world in (2, 4):
            call, _ = call_of(op, args, {}, world)
            for given in givens(call, world, free=True):
                for strategy in rule_for(op)(call, given):  # type: ignore[misc]
                    assert not any(isinstance(p, Shard) and p.has_copies for p in strategy.outputs)


def test_feature_dropout_keeps_planes_together() -> None:
    call, _ = call_of(aten.feature_dropout.default, (f(2, 4, 8), 0.5, True), {}, 2)
    rule = rule_for(aten.feature_dropout.default)
    assert rule is not None
    assert list(rule(call, [Shard.of(1, Layout.even(4, 2))]))
    assert not list(rule(call, [Shard.of(2, Layout.even(8, 2))]))


def test_vocabulary_embedding() -> None:
    """Each rank looks up the ids it has rows for and gives zeros for the others: the sum is the embedding."""
    table, ids = f(13, 6), i(13, 4, 5)
    for world in (2, 4):
        call, _ = call_of(aten.embedding.default, (table, ids), {}, world)
        found = [
            s
            for given in givens(call, world, free=True)
            for s in rule_for(aten.embedding.default)(call, given)  # type: ignore[misc]
            if s.kind == "vocab"
        ]
        assert found
        for strategy in found:
            assert strategy.inputs[1] == REPLICATE and strategy.outputs == (PARTIAL,)
            layout = strategy.inputs[0].dims[0]  # type: ignore[union-attr]
            total = torch.zeros(4, 5, 6, dtype=torch.float64)
            for rank in range(world):
                rows = indices(layout, 13, rank)
                assert rows == list(range(rows[0], rows[-1] + 1)), "a rank's ids must be one range"
                mine = (ids >= rows[0]) & (ids <= rows[-1])
                local = aten.embedding.default(cut(table, strategy.inputs[0], rank), (ids - rows[0]) * mine)
                total += local * mine[..., None]
            assert same(total, aten.embedding.default(table, ids))


def test_cross_entropy_wants_contiguous_classes_and_index_targets() -> None:
    rule = rule_for(aten.cross_entropy_loss.default)
    assert rule is not None

    def kinds(logits: torch.Tensor, target: torch.Tensor, placed: Shard, *more: Any) -> list[str]:
        call, tensors = call_of(aten.cross_entropy_loss.default, (logits, target, *more), {}, 2)
        return [s.kind for s in rule(call, [placed, *[REPLICATE] * (len(tensors) - 1)])]

    even, packed = Layout.even(8, 2), Layout.even(4, 2)
    assert kinds(f(6, 8), i(8, 6), Shard.of(1, even)) == ["vocab"]
    assert kinds(f(8), torch.tensor(3), Shard.of(0, even)) == ["vocab"]
    assert kinds(f(6, 8), i(8, 6), Shard.of(1, packed)) == []
    assert kinds(f(6, 8), f(6, 8), Shard.of(1, even)) == []
    assert kinds(f(6, 8), i(8, 6), Shard.of(1, even), torch.ones(8, dtype=torch.float64)) == ["vocab"]
    assert kinds(f(8, 8), i(8, 8), Shard.of(0, even)) == []


# -- what the rules must offer -------------------------------------------------------------------------------------

HALVES = Layout.even(8, 2)


@pytest.mark.parametrize(
    ("op", "args", "inputs", "outputs"),
    [
        (aten.linear.default, (f(2, 8), f(12, 8), f(12)), ("R", "S(0)", "S(0)"), ("S(1)",)),
        (aten.linear.default, (f(2, 8), f(12, 8), f(12)), ("S(1)", "S(1)", "P"), ("P",)),
        (aten.addmm.default, (f(12), f(2, 8), f(8, 12)), ("S(0)", "R", "S(1)"), ("S(1)",)),
        (aten.matmul.default, (f(2, 8), f(8, 6)), ("S(1)", "S(0)"), ("P",)),
        (aten.view.default, (f(2, 24), [2, 4, 6]), ("S(1)",), ("S(1)",)),
        (aten.view.default, (f(2, 4, 6), [2, 24]), ("S(1)",), ("S(1)",)),
        (aten.view.default, (f(2, 8), [16]), ("P",), ("P",)),
        (aten.transpose.int, (f(2, 4, 6), 1, 2), ("S(1)",), ("S(2)",)),
        (aten.add.Tensor, (f(4, 8), f(4, 8)), ("P", "P"), ("P",)),
        (aten.add.Tensor, (f(4, 8), f(8)), ("S(1)", "S(0)"), ("S(1)",)),
        (aten.mul.Tensor, (f(4, 8), f(4, 1)), ("S(1)", "R"), ("S(1)",)),
        (aten.mul.Tensor, (f(4, 8), f(4, 8)), ("P", "R"), ("P",)),
        (aten.sum.dim_IntList, (f(4, 8), [1]), ("S(1)",), ("P",)),
        (aten.mean.dim, (f(4, 8), [-1], True), ("S(1)",), ("P",)),
        (aten.slice.Tensor, (f(4, 12), 1, 2, 12), ("S(1: 0:7,0:2+7:12 of 12)",), ("S(1: even)",)),
        (aten.cat.default, ([f(4, 8), f(4, 8)], 1), ("S(1)", "S(1)"), ("S(1)",)),
        (aten.index.Tensor, (f(4, 6, 8), [None, i(6, 3)]), ("S(2)", "R"), ("S(2)",)),
        (aten.gather.default, (f(4, 6), 1, i(6, 4, 2)), ("S(0)", "S(0)"), ("S(0)",)),
        (aten.embedding.default, (f(12, 8), i(12, 4)), ("S(1)", "R"), ("S(1)",)),
        (aten.masked_fill.Scalar, (f(4, 8), b(4, 8), 0), ("S(1)", "S(1)"), ("S(1)",)),
    ],
)
def test_offers(op: Any, args: Any, inputs: tuple[str, ...], outputs: tuple[str, ...]) -> None:
    checked = {(i, o) for i, o, _ in check(op, *args, worlds=(2,), skip_kinds=("vocab",)).checked}
    wanted = tuple(x.replace(": even", "") for x in outputs)
    assert (inputs, wanted) in checked, f"{sorted(checked)}"


def test_offers_packed_segments() -> None:
    """``[q|k|v]`` comes apart into even thirds; the same through a chunk of ``[gate|up]``."""
    qkv = Layout.concat([(4, Layout.even(4, 2))] * 3)
    call, _ = call_of(aten.split_with_sizes.default, (f(2, 12), [4, 4, 4], 1), {}, 2)
    (strategy,) = rule_for(call.target)(call, [Shard.of(1, qkv)])  # type: ignore[misc]
    assert strategy.outputs == (Shard.of(1, Layout.even(4, 2)),) * 3
    call, _ = call_of(aten.cat.default, ([f(2, 8), f(2, 8)], 1), {}, 2)
    strategies = list(rule_for(call.target)(call, [Shard.of(1, HALVES)] * 2))  # type: ignore[misc]
    assert [s.outputs for s in strategies] == [(Shard.of(1, Layout.concat([(8, HALVES)] * 2)),)]


def test_offers_grouped_queries() -> None:
    """Two KV heads on four ranks: each rank has the KV head of its two query heads."""
    sdpa = aten.scaled_dot_product_attention.default
    args = (f(1, 8, 3, 4), f(1, 2, 3, 4), f(1, 2, 3, 4))
    call, _ = call_of(sdpa, args, {"enable_gqa": True}, 4)
    q, k = Shard.of(1, Layout.even(8, 4)), Shard.of(1, Layout.even(2, 4))
    found = [s.inputs for s in rule_for(sdpa)(call, [q, k, k])]  # type: ignore[misc]
    assert (q, k, k) in found
    wrong = Shard.of(1, Layout.of(2, [[(1, 2)], [(1, 2)], [(0, 1)], [(0, 1)]]))
    assert (q, wrong, wrong) not in [s.inputs for s in rule_for(sdpa)(call, [q, wrong, wrong])]  # type: ignore[misc]


def test_repeated_key_value_heads_follow_the_queries() -> None:
    """``k[:, :, None].expand(...)`` on ranks that share a KV head gives each rank its own query heads."""
    k = Shard.of(1, Layout.even(2, 4))
    call, _ = call_of(aten.expand.default, (f(1, 2, 1, 3, 4), [1, 2, 4, 3, 4]), {}, 4)
    outputs = [s.outputs[0] for s in rule_for(call.target)(call, [k])]  # type: ignore[misc]
    mine = Shard.of({1: Layout.even(2, 4), 2: Layout.of(4, [[(0, 2)], [(2, 4)], [(0, 2)], [(2, 4)]])})
    assert mine in outputs
    flat, _ = call_of(aten.reshape.default, (f(1, 2, 4, 3, 4), [1, 8, 3, 4]), {}, 4)
    (strategy,) = rule_for(flat.target)(flat, [mine])  # type: ignore[misc]
    assert strategy.outputs == (Shard.of(1, Layout.even(8, 4)),)


def test_no_sum_over_copies() -> None:
    """Features that live on two ranks must not be summed over the ranks: they would count twice."""
    copies = Layout.even(8, 4, unit=4)
    for op, args, dims in (
        (aten.linear.default, (f(2, 8), f(6, 8)), (1, 1)),
        (aten.addmm.default, (f(6), f(2, 8), f(8, 6)), (None, 1, 0)),
        (aten.matmul.default, (f(2, 8), f(8, 6)), (1, 0)),
        (aten.bmm.default, (f(4, 2, 8), f(4, 8, 6)), (2, 1)),
        (aten.sum.dim_IntList, (f(2, 8), [1]), (1,)),
    ):
        call, _ = call_of(op, args, {}, 4)
        given = [REPLICATE if d is None else Shard.of(d, copies) for d in dims]
        assert all(PARTIAL not in s.outputs for s in rule_for(op)(call, given)), op  # type: ignore[misc]


# -- the harness itself --------------------------------------------------------------------------------------------


def _same_dimension(call: Any, given: Any) -> Any:
    """Broken: a transpose that forgets to move the layout."""
    if isinstance(given[0], Shard):
        yield Strategy((given[0],), (given[0],))


def _sum_through_relu(call: Any, given: Any) -> Any:
    """Broken: a nonlinear function of a sum is not the sum of the function."""
    if given[0] == PARTIAL:
        yield Strategy((PARTIAL,), (PARTIAL,))


def _sum_of_copies(call: Any, given: Any) -> Any:
    """Broken: counts twice what lives on two ranks."""
    if isinstance(given[0], Shard) and list(given[0].dims) == [1]:
        layout = given[0].dims[1]
        yield Strategy((Shard.of(1, layout), Shard.of(0, layout)), (PARTIAL,))


def _global_sizes(call: Any, given: Any) -> Any:
    """Broken: a view whose sizes stay global."""
    if isinstance(given[0], Shard) and 1 in given[0].dims:
        yield Strategy((given[0],), (given[0],))


def _softmax_anywhere(call: Any, given: Any) -> Any:
    """Broken: a softmax along the sharded dimension."""
    if isinstance(given[0], Shard):
        yield Strategy((given[0],), (given[0],))


def _claims_replicated(call: Any, given: Any) -> Any:
    """Broken: the ranks do not have the same."""
    if isinstance(given[0], Shard) and list(given[0].dims) == [1]:
        yield Strategy((given[0],), (REPLICATE,))


BROKEN = [
    (_same_dimension, aten.transpose.int, (f(8, 8), 0, 1)),
    (_sum_through_relu, aten.relu.default, (f(4, 8),)),
    (_sum_of_copies, aten.matmul.default, (f(4, 8), f(8, 6))),
    (_global_sizes, aten.reshape.default, (f(2, 8, 3), [2, 8, 3])),
    (_softmax_anywhere, aten.softmax.int, (f(4, 8), 1)),
    (_claims_replicated, aten.sum.dim_IntList, (f(4, 8), [1])),
]


@pytest.mark.parametrize(("rule", "op", "args"), BROKEN)
def test_a_broken_rule_is_caught(rule: Any, op: Any, args: Any) -> None:
    assert check(op, *args, rule=rule).wrong


def test_assemble_notices_what_is_missing_or_differs() -> None:
    whole = f(4, 8)
    half = Shard.of(1, HALVES)
    parts = [cut(whole, half, r) for r in range(2)]
    assert same(assemble(parts, half, whole), whole)  # type: ignore[arg-type]
    assert isinstance(assemble([parts[0], parts[1][:, :2]], half, whole), str)
    assert isinstance(assemble([whole, whole + 1], REPLICATE, whole), str)
    hole = Shard.of(1, Layout(8, (((0, 4),), ((5, 8),))))
    assert isinstance(assemble([cut(whole, hole, r) for r in range(2)], hole, whole), str)
    assert len(placements((4, 8), 4)) > 10
