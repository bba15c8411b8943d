"""Choosing the largest part of a plan that another library runs exactly, by running it as that library would."""

from __future__ import annotations

from dataclasses import dataclass, field

from .candidates import Candidates, Group
from .check import Check
from .styles import GATHERED, ROW_SPLIT, VOCAB, parse_parameter_style

ALWAYS_EXACT = (GATHERED, ROW_SPLIT, VOCAB)
"""Styles that are exact whatever the code around a module does."""


@dataclass
class Choice:
    """The styles to export.

    Attributes:
        styles: The style of every sharded module or parameter, by generic names.
        replicated: The other modules, with the reason.
        gathered: Modules that are sharded separately although the plan has them in a group, with the reason.
        error: The largest error of the sharded model; None if it was not run.
        groups: The groups that are sharded as such.
    """

    styles: dict[str, str]
    replicated: dict[str, str]
    gathered: dict[str, str] = field(default_factory=dict)
    error: float | None = None
    groups: list[Group] = field(default_factory=list)


def choose_unverified(found: Candidates, reason: str) -> Choice:
    """Without running anything: only styles that are always exact, for this reason."""
    choice = Choice({}, dict(found.replicated))
    for group in found.groups:
        if set(group.styles.values()) <= set(ALWAYS_EXACT):
            _add(choice, group)
        else:
            _add_separately(choice, group, reason)
    return choice


def choose(found: Candidates, check: Check) -> Choice:
    """The groups that are exact when they run on ranks; of the others the modules that are exact separately.

    The returned combination has run: all groups together or, if that is not exact, those that are exact one by one.
    """
    choice = Choice({}, dict(found.replicated))
    everything = {p: style for group in found.groups for p, style in group.styles.items()}
    if not everything:
        return choice
    outcome = check(everything)
    if outcome.exact:
        for group in found.groups:
            _add(choice, group)
        choice.error = outcome.error
        return choice
    for group in found.groups:
        first = check(group.styles)
        styles = group.styles if first.exact else _exact_alternative(group, check)
        if styles is not None:
            group.styles = styles
            _add(choice, group)
        else:
            _add_separately(choice, group, first.reason)
    outcome = check(choice.styles)
    if not outcome.exact:
        _drop_conflicting(choice, check)
        outcome = check(choice.styles)
    if choice.styles and not outcome.exact:
        reason = f"the combination is not exact: {outcome.reason}"
        choice.replicated.update(dict.fromkeys(choice.styles, reason))
        choice.styles, choice.groups = {}, []
    choice.error = outcome.error if choice.styles else None
    return choice


def _exact_alternative(group: Group, check: Check) -> dict[str, str] | None:
    return next((styles for styles in group.alternatives if check(styles).exact), None)


def _add(choice: Choice, group: Group) -> None:
    """Shard a group."""
    choice.styles.update(group.styles)
    choice.groups.append(group)
    if group.reason:
        choice.gathered.update(dict.fromkeys(group.styles, group.reason))


def _add_separately(choice: Choice, group: Group, reason: str) -> None:
    """Shard the modules of a group each on its own, and replicate those that cannot be."""
    for pattern, style in group.styles.items():
        if pattern in group.separate:
            choice.styles[pattern] = group.separate[pattern]
            choice.gathered[pattern] = reason
        elif parse_parameter_style(style) is None:
            choice.replicated[pattern] = reason


def _drop_conflicting(choice: Choice, check: Check) -> None:
    """Add groups and single modules one after another; replicate those that are not exact with the ones before."""
    accepted: dict[str, str] = {}
    units = [dict(group.styles) for group in choice.groups]
    in_groups = {pattern for unit in units for pattern in unit}
    units += [{p: style} for p, style in choice.styles.items() if p not in in_groups]
    for unit in units:
        outcome = check({**accepted, **unit})
        if outcome.exact:
            accepted.update(unit)
        else:
            modules = [p for p, style in unit.items() if parse_parameter_style(style) is None]
            choice.replicated.update(dict.fromkeys(modules, outcome.reason))
            choice.gathered = {p: r for p, r in choice.gathered.items() if p not in unit}
    choice.styles = accepted
    choice.groups = [group for group in choice.groups if set(group.styles) <= set(accepted)]
