"""The picture of a section: boxes in rows, each below what it needs, and the data that flows between them."""

from __future__ import annotations

from html import escape

from .steps import Section, Step

WIDTH, HEIGHT = 206, 44
GAP_X, GAP_Y = 22, 30
MARGIN = 80
"""Room at the sides for arrows that pass rows."""
LANES = 7
"""Arrows that may pass there side by side."""


def rows_of(section: Section) -> list[list[Step]]:
    """The steps by how many others have to run before; within a row near to what they need."""
    depth: dict[int, int] = {}
    for step in section.given:
        depth[step.number] = 0
    for step in section.steps:
        depth[step.number] = 1 + max((depth[n] for n in step.sources if n in depth), default=-1)
    rows: list[list[Step]] = [[] for _ in range(max(depth.values(), default=-1) + 1)]
    for step in (*section.given, *section.steps):
        rows[depth[step.number]].append(step)
    position: dict[int, float] = {}
    for row in rows:
        wanted = {s.number: _mean([position[n] for n in s.sources if n in position], default=0.0) for s in row}
        row.sort(key=lambda s: (wanted[s.number], s.number))
        for i, step in enumerate(row):
            position[step.number] = i - (len(row) - 1) / 2
    return rows


def _mean(values: list[float], default: float) -> float:
    return sum(values) / len(values) if values else default


def svg(section: Section) -> str:
    """The picture as SVG; every box has the number of its step."""
    rows = rows_of(section)
    widest = max((len(row) for row in rows), default=1)
    width = 2 * MARGIN + widest * WIDTH + (widest - 1) * GAP_X
    height = len(rows) * (HEIGHT + GAP_Y) - GAP_Y + 8
    centre: dict[int, tuple[float, float, int]] = {}
    for r, row in enumerate(rows):
        left = (width - len(row) * WIDTH - (len(row) - 1) * GAP_X) / 2
        for i, step in enumerate(row):
            centre[step.number] = (left + i * (WIDTH + GAP_X) + WIDTH / 2, 4 + r * (HEIGHT + GAP_Y), r)
    parts = [
        f'<svg viewBox="0 0 {width:.0f} {height:.0f}" style="--width: {width:.0f}px" role="group" '
        f'aria-label="{escape(section.title)}">'
    ]
    splits = {s.number: s.split for s in (*section.given, *section.steps)}
    edges = [(source, step.number) for step in section.steps for source in sorted(step.sources) if source in centre]
    lanes = {1: 0, -1: 0}
    for source, target in edges:
        (sx, sy, above), (x, y, below) = centre[source], centre[target]
        if below - above == 1:
            bend = GAP_Y / 2
            top, end = sy + HEIGHT, y - 5
            path = f"M{sx:.0f},{top:.0f} C{sx:.0f},{top + bend:.0f} {x:.0f},{end - bend:.0f} {x:.0f},{end:.0f}"
        else:  # around what lies between: on the side of its source or, if that is in the middle, where there are fewer
            side = 1 if sx > width / 2 + 1 else -1 if sx < width / 2 - 1 else 1 if lanes[1] <= lanes[-1] else -1
            reach = max(len(row) * (WIDTH + GAP_X) - GAP_X for row in rows[above : below + 1]) / 2
            turn = lanes[side] % LANES
            lane = width / 2 + side * (reach + 12 + 9 * turn)
            lanes[side] += 1
            start, end, aside = sy + HEIGHT, y - 5, side * WIDTH / 4
            down = GAP_Y * (1 + turn % 3) / 5  # flows that turn in the same gap do not run into one another
            path = (
                f"M{sx + aside:.0f},{start:.0f} V{start + down:.0f} H{lane:.0f} V{end - down:.0f} "
                f"H{x + aside:.0f} V{end:.0f}"
            )
        parts.append(f'<path class="flow {splits[source]}" d="{path}" marker-end="url(#tip)"/>')
    for step in section.steps:
        x, y, _ = centre[step.number]
        parts.append(_box(step, x - WIDTH / 2, y))
    for step in section.given:
        x, y, _ = centre[step.number]
        text = step.title if step.kind != "collective" else f"{step.module.rpartition('.')[2]}, {step.title}"
        parts.append(
            f'<g class="given" transform="translate({x - WIDTH / 2:.0f},{y:.0f})"><rect width="{WIDTH}" '
            f'height="{HEIGHT}" rx="7"/><text class="shape" x="{WIDTH / 2:.0f}" y="18">from</text><text class="title" '
            f'x="{WIDTH / 2:.0f}" y="34">{escape(_cut(text, 27))}</text></g>'
        )
    parts.append("</svg>")
    return "\n".join(parts)


def _box(step: Step, x: float, y: float) -> str:
    collective = step.kind == "collective"
    shape = "×".join(step.local)
    label = f"{step.title}: {step.kind}, {step.placement}" + (f", {shape} on this rank" if shape else "")
    below = {"column": "column-parallel", "row": "row-parallel", "vocab": "vocabulary-parallel"}.get(step.kind, "")
    text = f"{below} · {shape}" if below else shape
    corner = HEIGHT / 2 if collective else 7
    return (
        f'<g class="step {step.split} {"collective" if collective else "compute"}" tabindex="0" role="button" '
        f'data-step="{step.number}" data-search="{escape((step.module + " " + step.title + " " + step.kind).lower())}" '
        f'aria-label="{escape(label)}" transform="translate({x:.0f},{y:.0f})">'
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="{corner:.0f}"/>'
        f'<text class="title" x="{WIDTH / 2:.0f}" y="18">{escape(_cut(step.title, 24))}</text>'
        f'<text class="shape" x="{WIDTH / 2:.0f}" y="34">{escape(_cut(text, 31))}</text></g>'
    )


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"
