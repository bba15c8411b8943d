"""Extras of Triton that are not part of its documented language. Needs a Triton with CUDA support.

``gdc_wait`` and ``gdc_launch_dependents`` are programmatic dependent launch: a kernel starts before the one that it
depends on has ended, and waits inside. Seen with Triton 3.6.
"""

from __future__ import annotations

from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

__all__ = ["gdc_launch_dependents", "gdc_wait"]
