"""Qualified names of modules and parameters: what repeated blocks have in common, and which block a name is in."""

from __future__ import annotations


def pattern_of(name: str) -> str:
    """A name with its numbers replaced by ``*``: the same for all repetitions of a block."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def numbered_pattern(names: list[str], others: list[str]) -> str:
    """The pattern of some of the names that share one, with their numbers: ``layers.[0-2,5].mlp``.

    A number that takes the same values in the ``others`` (all names of the pattern) does not tell them apart: ``*``.
    """

    def values(each: list[str], position: int) -> list[int]:
        return sorted({int(name.split(".")[position]) for name in each})

    parts = pattern_of(names[0]).split(".")
    for position, part in enumerate(parts):
        if part == "*" and values(names, position) != values(others, position):
            parts[position] = f"[{_ranges(values(names, position))}]"
    return ".".join(parts)


def _ranges(numbers: list[int]) -> str:
    """Sorted numbers as text, neighbours as a range: ``0-2,5``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def block_of(name: str) -> str:
    """The outermost numbered module of a name; empty if there is none."""
    parts = name.split(".")
    numbered = [i for i, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[: numbered[0] + 1]) if numbered else ""
