"""The HTML report: one file, without external resources, in the words of tensor parallelism."""

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

from paraxis.plan import Memory, Plan
from paraxis.plan.memory import Sizes
from paraxis.plan.offline import plan_offline
from paraxis.report import report, report_plan
from paraxis.report.page import _memory, _notes, count_text


@dataclass
class Made:
    """A plan and its report."""

    plan: Plan
    page: str


@pytest.fixture(scope="module")
def llama() -> Made:
    with plan_offline(build("llama-tied"), 4, None, {}, Sizes(2, 64)) as planned:
        return Made(planned.plan, report(planned, "a <model>"))


def test_the_page_has_no_external_resources(llama: Made) -> None:
    page = llama.page
    assert "%%" not in page and "a &lt;model&gt;" in page
    assert not re.search(r"(src|href)=\"(?!data:)", page) and "http" not in page
    drawn = set(re.findall(r'data-step="(\d+)"', page))
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    assert found and set(json.loads(found[1])) == drawn


def test_layers_collectives_and_memory(llama: Made) -> None:
    rows = re.findall(r"<tr data-search=\"([^\"]*)\"", llama.page)
    assert "model.layers.*.mlp.down_proj 2 linear row sharded all-reduce 64×128 64×32" in rows
    assert any(row.startswith("all-reduce model.layers.*.mlp.down_proj 2 2×8×64 4.1 kb") for row in rows)
    assert "KV cache" in llama.page and "2 × 64 tokens" in llama.page
    assert "optimal under the cost model for" in llama.page


def test_replicated_parameters_and_graph_breaks_are_listed() -> None:
    plan = Plan(2, replicated=[("layers.0.norm", "a vector"), ("layers.1.norm", "a vector")], breaks=["line 3"])
    notes = _notes(plan)
    assert notes.count("layers.*.norm") == 2, "once as text, once to search for"
    assert "Replicated parameters" in notes and "<h3>Graph breaks</h3><ul><li>line 3</li></ul>" in notes
    assert _notes(Plan(2)) == "<p>Nothing.</p>"


def test_unknown_memory_has_a_reason() -> None:
    memory = Memory(100, 0, context=8, cache_error="no ids", activations_error="no <ids>")
    text = _memory(Plan(2, memory=memory))
    assert "KV cache unknown: no ids. Activations unknown: no &lt;ids&gt;." in text
    assert _memory(Plan(2)) == "<p>Unknown.</p>"


def test_counts_as_text() -> None:
    assert [count_text(n) for n in (12, 1_234, 8_030_000_000)] == ["12", "1.23 thousand", "8.03 billion"]


def test_other_models(tmp_path: Path) -> None:
    """Two all-reduces in one, and a module without transformers."""
    case = find("t5*")
    model = case.make()
    with plan_offline(model, 2, None, {"example_inputs": case.inputs(model)}, Sizes()) as planned:
        assert "all-reduce (merged)" in report(planned, "t5")
    plain = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    plan = report_plan(plain, 2, tmp_path / "plain.html", example_inputs={"input": torch.ones(2, 8)})
    page = (tmp_path / "plain.html").read_text()
    assert "column-parallel" in page and "Sequential on 2 ranks" in page and plan.layers[0].axis == "column"


@pytest.mark.skipif(shutil.which("chromium") is None, reason="there is no browser")
def test_in_a_browser(llama: Made, tmp_path: Path) -> None:
    """No errors; a click and the keyboard show details; searching fades the rest."""
    watch = "<script>window.seen = []; window.onerror = m => { seen.push(String(m)); };</script>"
    act = """<script>
    const box = document.querySelector('.step.collective');
    box.dispatchEvent(new MouseEvent('click', {bubbles: true}));
    seen.push(document.getElementById('panel').innerText);
    box.focus();
    box.dispatchEvent(new KeyboardEvent('keydown', {key: 'ArrowDown', bubbles: true}));
    seen.push(document.querySelector('.selected').dataset.step);
    const input = document.getElementById('search');
    input.value = 'down_proj'; input.dispatchEvent(new Event('input'));
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
    panel, selected, left, theme = json.loads(unescape(title[1]))
    assert "all-reduce" in panel and "The ranks communicate here" in panel and "vocab-parallel embedding" in panel
    assert selected.isdigit() and "down_proj" in left and "q_proj" not in left and theme in ("light", "dark")
