"""The SVG of a section: rows by depth, one box per step, one arrow per input."""

from __future__ import annotations

from xml.etree import ElementTree

from paraxis.report.drawing import LANES, rows_of, svg
from paraxis.report.steps import Section, Step


def step(number: int, *sources: int, kind: str = "operators", title: str = "") -> Step:
    title = title or f"step {number}"
    return Step(number, f"block.{number}", kind, title, sources=set(sources), local_shape=("2", "8"))


def test_a_step_is_below_its_inputs() -> None:
    section = Section("block", [step(1, 0), step(2, 1), step(3, 1), step(4, 2, 3, 0)], external=[step(0)])
    assert [[s.number for s in row] for row in rows_of(section)] == [[0], [1], [2, 3], [4]]


def test_boxes_and_arrows() -> None:
    steps = [step(1, 0), step(2, 1, kind="collective", title="all-reduce"), step(3, 2, 0, title="a <long> " * 9)]
    drawn = ElementTree.fromstring(svg(Section("block", steps, external=[step(0)])))
    boxes = [each.get("class", "") for each in drawn if each.tag == "g"]
    assert boxes == ["step replicated compute", "step replicated collective", "step replicated compute", "external"]
    arrows = [each for each in drawn if each.tag == "path"]
    assert len(arrows) == 4 and all(each.get("class") == "flow replicated" for each in arrows)
    (title,) = [t.text for g in drawn if g.get("data-step") == "3" for t in g if t.get("class") == "title"]
    assert title is not None and title.endswith("…") and len(title) == 24


def test_arrows_around_rows_take_turns() -> None:
    """Every arrow that skips rows has a lane, until all lanes are taken."""
    chain = [step(n, *([n - 1] if n else [])) for n in range(2 * LANES)]
    chain.append(step(2 * LANES, *range(2 * LANES)))
    drawn = ElementTree.fromstring(svg(Section("block", chain)))
    lanes = {each.get("d", "").split("H")[1].split()[0] for each in drawn if " H" in each.get("d", "")}
    assert len(lanes) == 2 * LANES - 1


def test_a_parallel_layer_says_so() -> None:
    text = svg(Section("block", [step(0, kind="row", title="down_proj")]))
    assert "row-parallel · 2×8" in text and 'aria-label="down_proj: row' in text
