"""What tiles and pipeline stages have to fit into."""

from __future__ import annotations

import pytest
import torch

from paraxis.kernels.triton.shared_memory import SMALLEST, shared_memory


def test_no_gpu_has_the_smallest() -> None:
    assert shared_memory(torch.device("cpu")) == SMALLEST


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_gpu_has_at_least_that() -> None:
    assert shared_memory(torch.device("cuda", 0)) >= SMALLEST
