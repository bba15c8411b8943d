"""Frames of compiled programs leave room for the calls they make."""

from __future__ import annotations

import pytest
import torch

from paraxis.capture import trace
from paraxis.compat import frames


@pytest.mark.parametrize("slots", [10, 900, 1100, 1700, 1990, 2010, 2030, 2045, 2100, 5000])
def test_large_frames_have_pieces_of_their_own(slots: int) -> None:
    code = trace.forward_entry.__code__.replace(co_stacksize=slots)
    roomy = frames.with_room(code)
    if frames.PIECE // 2 <= frames.frame_of(code) < frames.PIECE:
        assert frames.PIECE <= frames.frame_of(roomy) < frames.PIECE + frames.SLOT
    else:
        assert roomy is code
    assert roomy.co_code == code.co_code


def test_what_dynamo_compiles_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    with_room = trace.with_room
    monkeypatch.setattr(trace, "with_room", lambda code: seen.append(code) or with_room(code))
    entry = trace.fresh_entry(gather_outputs=False)
    compiled = torch.compile(entry, backend="eager", fullgraph=True)
    layer = torch.nn.Linear(2, 2)
    x = torch.randn(3, 2)
    assert torch.equal(compiled(layer, x), layer(x))
    assert len(seen) == 1
