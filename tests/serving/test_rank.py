"""A rank of a service: what can be said of it without a model. All else is tested by running ``paraxis serve``."""

from __future__ import annotations

import asyncio
import logging
import threading
from types import SimpleNamespace

import pytest
from serving.counting import make_service

from paraxis.runtime.batching.request import Request
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


def test_a_failed_batch_ends_the_server_though_other_ranks_do_not_listen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank, "FAILURE", 0.1)
    monkeypatch.setattr(rank, "ABORT", 0.1)
    service, server = make_service(), SimpleNamespace(should_exit=False)
    service.active.add(Request("a", [1], 5))  # whose client does not read
    try:
        service.engine.failure = RuntimeError("no memory")
        asyncio.run(asyncio.wait_for(rank.watch(server, service, threading.Event()), 60))
        assert server.should_exit
    finally:
        service.engine.stop(abort=True)


def test_the_log_has_one_handler() -> None:
    before = list(rank.logger.handlers)
    try:
        rank.set_up_log()
        rank.set_up_log()
        assert len(rank.logger.handlers) == 1 and rank.logger.level == logging.INFO
    finally:
        rank.logger.handlers, rank.logger.propagate = before, True
