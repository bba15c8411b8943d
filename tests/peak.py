"""Former name of helpers.allocations, until all tests use the new one."""

from __future__ import annotations

from helpers.allocations import Allocations

__all__ = ["Allocations"]
