"""The diagram of a section as SVG: a box per step, in rows below their inputs, and arrows for the data flow."""

from __future__ import annotations

from html import escape

from .steps import Section, Step

WIDTH, HEIGHT = 206, 44
GAP_X, GAP_Y = 22, 30
MARGIN = 80
"""Space at both sides for arrows that skip rows."""
LANES = 7
"""How many such arrows fit side by side."""

Positions = dict[int, tuple[float, float, int]]
"""For every step the horizontal centre and the top of its box, and its row."""


def rows_of(section: Section) -> list[list[Step]]:
    """The steps by the length of the longest path to them; within a row, close to their inputs."""
    depth: dict[int, int] = {}
    for step in section.external:
        depth[step.number] = 0
    for step in section.steps:
        depth[step.number] = 1 + max((depth[n] for n in step.sources if n in depth), default=-1)
    rows: list[list[Step]] = [[] for _ in range(max(depth.values(), default=-1) + 1)]
    for step in (*section.external, *section.steps):
        rows[depth[step.number]].append(step)
    position: dict[int, float] = {}
    for row in rows:
        preferred = {s.number: _mean([position[n] for n in s.sources if n in position], default=0.0) for s in row}
        row.sort(key=lambda s: (preferred[s.number], s.number))
        for i, step in enumerate(row):
            position[step.number] = i - (len(row) - 1) / 2
    return rows


def _mean(values: list[float], default: float) -> float:
    return sum(values) / len(values) if values else default


def svg(section: Section) -> str:
    """The diagram; every box carries the number of its step."""
    rows = rows_of(section)
    widest = max((len(row) for row in rows), default=1)
    width = 2 * MARGIN + widest * WIDTH + (widest - 1) * GAP_X
    height = len(rows) * (HEIGHT + GAP_Y) - GAP_Y + 8
    positions: Positions = {}
    for r, row in enumerate(rows):
        left = (width - len(row) * WIDTH - (len(row) - 1) * GAP_X) / 2
        for i, step in enumerate(row):
            positions[step.number] = (left + i * (WIDTH + GAP_X) + WIDTH / 2, 4 + r * (HEIGHT + GAP_Y), r)
    elements = [
        f'<svg viewBox="0 0 {width:.0f} {height:.0f}" style="--width: {width:.0f}px" role="group" '
        f'aria-label="{escape(section.title)}">',
        *_arrows(section, rows, positions, width),
    ]
    for step in section.steps:
        x, y, _ = positions[step.number]
        elements.append(_box(step, x - WIDTH / 2, y))
    for step in section.external:
        x, y, _ = positions[step.number]
        elements.append(_external_box(step, x - WIDTH / 2, y))
    return "\n".join([*elements, "</svg>"])


def _arrows(section: Section, rows: list[list[Step]], positions: Positions, width: float) -> list[str]:
    """One arrow per input of every step: a curve to the next row, or lines around the boxes of the rows between."""
    shardings = {s.number: s.sharding for s in (*section.external, *section.steps)}
    edges = [(source, step.number) for step in section.steps for source in sorted(step.sources) if source in positions]
    used_lanes = {1: 0, -1: 0}
    arrows = []
    for source, target in edges:
        (sx, sy, above), (x, y, below) = positions[source], positions[target]
        start, end = sy + HEIGHT, y - 5
        if below - above == 1:
            bend = GAP_Y / 2
            path = f"M{sx:.0f},{start:.0f} C{sx:.0f},{start + bend:.0f} {x:.0f},{end - bend:.0f} {x:.0f},{end:.0f}"
        else:  # on the side of its source or, if that is in the middle, on the side with fewer arrows
            emptier = 1 if used_lanes[1] <= used_lanes[-1] else -1
            side = 1 if sx > width / 2 + 1 else -1 if sx < width / 2 - 1 else emptier
            reach = max(len(row) * (WIDTH + GAP_X) - GAP_X for row in rows[above : below + 1]) / 2
            number = used_lanes[side] % LANES
            used_lanes[side] += 1
            lane = width / 2 + side * (reach + 12 + 9 * number)
            aside = side * WIDTH / 4
            down = GAP_Y * (1 + number % 3) / 5  # arrows that bend in the same gap do not overlap
            path = (
                f"M{sx + aside:.0f},{start:.0f} V{start + down:.0f} H{lane:.0f} V{end - down:.0f} "
                f"H{x + aside:.0f} V{end:.0f}"
            )
        arrows.append(f'<path class="flow {shardings[source]}" d="{path}" marker-end="url(#tip)"/>')
    return arrows


def _box(step: Step, x: float, y: float) -> str:
    """The box of a step of the section; a click on it shows details."""
    collective = step.kind == "collective"
    shape = "×".join(step.local_shape)
    label = f"{step.title}: {step.kind}, {step.placement}" + (f", {shape} on this rank" if shape else "")
    parallel = {"column": "column-parallel", "row": "row-parallel", "vocab": "vocab-parallel"}.get(step.kind, "")
    text = f"{parallel} · {shape}" if parallel else shape
    corner = HEIGHT / 2 if collective else 7
    return (
        f'<g class="step {step.sharding} {"collective" if collective else "compute"}" tabindex="0" role="button" '
        f'data-step="{step.number}" data-search="{escape((step.module + " " + step.title + " " + step.kind).lower())}" '
        f'aria-label="{escape(label)}" transform="translate({x:.0f},{y:.0f})">'
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="{corner:.0f}"/>'
        f'<text class="title" x="{WIDTH / 2:.0f}" y="18">{escape(_shortened(step.title, 24))}</text>'
        f'<text class="shape" x="{WIDTH / 2:.0f}" y="34">{escape(_shortened(text, 31))}</text></g>'
    )


def _external_box(step: Step, x: float, y: float) -> str:
    """The box of an input that another section computes."""
    text = step.title if step.kind != "collective" else f"{step.module.rpartition('.')[2]}, {step.title}"
    return (
        f'<g class="external" transform="translate({x:.0f},{y:.0f})"><rect width="{WIDTH}" '
        f'height="{HEIGHT}" rx="7"/><text class="shape" x="{WIDTH / 2:.0f}" y="18">from</text><text class="title" '
        f'x="{WIDTH / 2:.0f}" y="34">{escape(_shortened(text, 27))}</text></g>'
    )


def _shortened(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"
