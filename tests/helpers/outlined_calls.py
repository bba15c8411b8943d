"""Whether calls of a model run the programs of its first blocks, and what was compiled for them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

from paraxis.runtime import inductor
from paraxis.runtime.block_programs import BlockPrograms


@dataclass
class OutlinedCalls:
    """What was seen.

    Attributes:
        pieces: The classes of the graphs that were compiled: Head, Body and Tail of outlined programs.
        outlined: How many calls have run outlined programs.
        refused: How many kinds of calls were refused.
    """

    pieces: list[str] = field(default_factory=list)
    outlined: int = 0
    refused: int = 0

    def ran_outlined(self) -> bool:
        """Whether the one call since the last question ran an outlined program."""
        found, self.outlined = self.outlined, 0
        assert found <= 1
        return found == 1


@contextmanager
def outlined_calls(eager: bool = True) -> Iterator[OutlinedCalls]:
    """Inside, calls are watched; with ``eager``, the graphs that Inductor would compile run as they are."""
    seen = OutlinedCalls()
    compile_graph, run, refuse = inductor.compile_graph, BlockPrograms.run, BlockPrograms.refuse

    def compiled(module: Any, inputs: Any, options: Any) -> Any:
        seen.pieces.append(type(module).__name__)
        return module if eager else compile_graph(module, inputs, options)

    def noted(self: BlockPrograms, *args: Any) -> Any:
        result = run(self, *args)
        seen.outlined += 1
        return result

    def refused(self: BlockPrograms, *args: Any) -> None:
        seen.refused += 1
        refuse(self, *args)

    with ExitStack() as stack:
        stack.enter_context(patch.object(inductor, "compile_graph", compiled))
        stack.enter_context(patch.object(BlockPrograms, "run", noted))
        stack.enter_context(patch.object(BlockPrograms, "refuse", refused))
        yield seen
