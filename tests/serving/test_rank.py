"""A rank of a service: what can be said of it without a model. All else is tested by running ``paraxis serve``."""

from __future__ import annotations

import logging

import pytest

from paraxis.serving import rank
from paraxis.serving.options import ServeOptions


def test_a_port_that_is_taken_is_an_error_with_its_address() -> None:
    first = rank._listen(ServeOptions("m", "m", port=0))
    try:
        first.listen()
        port = first.getsockname()[1]
        with pytest.raises(OSError, match=f"127.0.0.1:{port}: "):
            rank._listen(ServeOptions("m", "m", port=port))
    finally:
        first.close()


def test_the_log_has_one_handler() -> None:
    before = list(rank.logger.handlers)
    try:
        rank.set_up_log()
        rank.set_up_log()
        assert len(rank.logger.handlers) == 1 and rank.logger.level == logging.INFO
    finally:
        rank.logger.handlers, rank.logger.propagate = before, True
