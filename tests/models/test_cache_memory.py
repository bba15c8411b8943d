"""What a cache leaves in memory."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import torch
from models.compare import parallel
from models.tiny import save


def held(folder: str) -> tuple[int, int]:
    """Bytes in tensors other than parameters before a generation and after it, when its cache is gone."""
    model, _ = parallel(folder)
    ids = torch.arange(64)[None] % 90 + 3

    def count() -> int:
        gc.collect()
        own = {p._local.untyped_storage().data_ptr() for p in model.parameters()}
        storages = {
            t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
            for t in gc.get_objects()
            if type(t) is torch.Tensor and t.device.type == "cpu" and t.dim() == 4
        }
        return sum(size for place, size in storages.items() if place not in own)

    before = count()
    with torch.no_grad():
        model.generate(ids, max_new_tokens=4, do_sample=False)
    return before, count()


def test_nothing_stays_of_a_cache(ranks: Any, tmp_path: Path) -> None:
    for before, after in ranks(2).run(held, save("llama", tmp_path)):
        assert after == before
