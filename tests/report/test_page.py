"""The page of a plan."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import dataclass
from html import unescape
from pathlib import Path

import pytest
import torch
from models.tiny import build
from torch import nn
from zoo.cases import find

from paraxis.plan import Plan
from paraxis.plan.make import plan_offline
from paraxis.plan.memory import Sizes
from paraxis.report import report, report_plan
from paraxis.report.steps import Section, Step, sections_of, steps_of


@dataclass
class Made:
    """What the tests look at; the ranks are imagined only while it is made."""

    plan: Plan
    steps: list[Step]
    sections: list[Section]
    page: str


@pytest.fixture(scope="module")
def llama() -> Made:
    with plan_offline(build("llama-tied"), 4, None, {}, Sizes(2, 64)) as planned:
        steps = steps_of(planned)
        return Made(planned.plan, steps, sections_of(steps, planned), report(planned, "a <model>"))


def test_steps_come_after_what_they_need(llama: Made) -> None:
    steps = llama.steps
    assert all(source < step.number for step in steps for source in step.sources)
    kinds = [step.kind for step in steps]
    assert kinds.count("collective") == len(llama.plan.collectives)
    layers = {layer.name for layer in llama.plan.layers if layer.kind != "cross_entropy"}
    assert layers <= {step.module for step in steps}


def test_blocks_that_are_alike_are_one_picture(llama: Made) -> None:
    sections = llama.sections
    assert [(s.title, s.count) for s in sections] == [
        ("Before the blocks", 1),
        ("model.layers.0", 2),
        ("After the blocks", 1),
    ]
    names = [step.title for step in sections[1].steps]
    assert {"q_proj", "o_proj", "gate_proj", "all-reduce"} <= set(names)
    assert [step.split for step in sections[1].steps if step.title == "o_proj"] == ["partial"]


def test_the_page_needs_nothing_else(llama: Made) -> None:
    page = llama.page
    assert "%%" not in page and "a &lt;model&gt;" in page
    assert not re.search(r"(src|href)=\"(?!data:)", page) and "http" not in page
    drawn = set(re.findall(r'data-step="(\d+)"', page))
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    assert found and set(json.loads(found[1])) == drawn
    assert "cache" in page and "2 × 64 tokens" in page


def test_other_models(tmp_path: Path) -> None:
    """Two collectives in one, and a module without transformers."""
    case = find("t5*")
    model = case.make()
    with plan_offline(model, 2, None, {"example_inputs": case.inputs(model)}, Sizes()) as planned:
        assert "all-reduce of both" in report(planned, "t5")
    plain = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    plan = report_plan(plain, 2, tmp_path / "plain.html", example_inputs={"input": torch.ones(2, 8)})
    page = (tmp_path / "plain.html").read_text()
    assert "column-parallel" in page and "Sequential on 2 ranks" in page and plan.layers[0].axis == "column"


@pytest.mark.skipif(shutil.which("chromium") is None, reason="there is no browser")
def test_in_a_browser(llama: Made, tmp_path: Path) -> None:
    """No errors; a click and the keyboard show details; searching fades the rest."""
    watch = "<script>window.seen = []; window.onerror = m => { seen.push(String(m)); };</script>"
    act = """<script>
    const wanted = document.querySelector('.step.collective');
    wanted.dispatchEvent(new MouseEvent('click', {bubbles: true}));
    seen.push(document.getElementById('panel').innerText);
    wanted.focus();
    wanted.dispatchEvent(new KeyboardEvent('keydown', {key: 'ArrowDown', bubbles: true}));
    seen.push(document.querySelector('.chosen').dataset.step);
    const box = document.getElementById('search');
    box.value = 'down_proj'; box.dispatchEvent(new Event('input'));
    seen.push([...document.querySelectorAll('.step:not(.faded)')].map(s => s.dataset.search).join(' '));
    document.getElementById('theme').click();
    seen.push(document.documentElement.dataset.theme);
    document.title = JSON.stringify(seen);
    </script>"""
    page = llama.page.replace("<head>", f"<head>{watch}").replace("</body>", f"{act}</body>")
    (tmp_path / "page.html").write_text(page)
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}/profile"]
    done = subprocess.run(
        [*command, "--dump-dom", f"file://{tmp_path}/page.html"], capture_output=True, text=True, timeout=60, check=True
    )
    title = re.search(r"<title>(.*?)</title>", done.stdout, re.S)
    assert title, done.stdout[:500]
    panel, chosen, left, theme = json.loads(unescape(title[1]))
    assert "all-reduce" in panel and "the ranks exchange data" in panel and "look-ups in parts" in panel
    assert chosen.isdigit() and "down_proj" in left and "q_proj" not in left and theme in ("light", "dark")
