"""Rewrites by Inductor's options: residual sums of a prefill are stored, and CPU matmuls replaced."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from helpers.graphs import trace
from torch.fx import GraphModule

from paraxis.optimize.cpu_matmul import CpuMatmulPass
from paraxis.passes.inductor_options import store_residual_sums, use_cpu_matmul_in_inductor
from paraxis.passes.lift import LIFTED, Lifted, lifted_of


def lifted_program(rows: int) -> GraphModule:
    """A linear layer on so many rows."""
    program = trace(torch.nn.functional.linear, [torch.randn(rows, 8), torch.randn(8, 8)])
    program.meta[LIFTED] = Lifted(program)
    return program


@pytest.mark.parametrize(("rows", "expected"), [(1, {}), (1000, {"realize_reads_threshold": 1})])
def test_residual_sums_are_stored_in_a_prefill(rows: int, expected: dict[str, int]) -> None:
    program = lifted_program(rows)
    assert store_residual_sums(program) == len(expected)
    assert lifted_of(program).inductor == expected


def test_cpu_matmul_pass_is_an_option_of_this_compilation() -> None:
    program = lifted_program(1)
    assert use_cpu_matmul_in_inductor(program) == 1
    assert isinstance(lifted_of(program).inductor["post_grad_custom_pre_pass"], CpuMatmulPass)


def test_custom_pass_of_the_user_is_not_replaced() -> None:
    program = lifted_program(1)
    with mock.patch("paraxis.passes.inductor_options.has_custom_pre_pass", return_value=True):
        assert use_cpu_matmul_in_inductor(program) == 0
    assert lifted_of(program).inductor == {}
