"""Returning freed memory to the operating system."""

from __future__ import annotations

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
