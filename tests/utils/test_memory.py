"""Pausing garbage collection, and returning freed memory to the operating system."""

from __future__ import annotations

import gc
import os
from unittest import mock

import pytest

from paraxis.utils import memory


def test_trims_where_the_c_library_can() -> None:
    trim = mock.Mock(return_value=1)
    with mock.patch.object(memory, "_trim", lambda: trim):
        memory.malloc_trim()
    trim.assert_called_once_with(0)


def test_does_nothing_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_trim", lambda: None)
    memory.malloc_trim()


def test_available_memory_is_less_than_the_machine_has() -> None:
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 0 < memory.available_memory() < physical


def test_garbage_collection_is_paused_and_enabled_again() -> None:
    assert gc.isenabled()
    with memory.gc_paused():
        with memory.gc_paused():
            assert not gc.isenabled()
        assert not gc.isenabled(), "the outer one goes on"
    assert gc.isenabled()


def test_garbage_collection_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        with memory.gc_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
