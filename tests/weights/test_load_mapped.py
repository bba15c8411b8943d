"""Memory-mapped shards: training on them does not change the file, and the file may be replaced."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
from models.compare import batch, parallel, reference
from models.tiny import save


def fingerprint(folder: str) -> str:
    return hashlib.sha256(Path(folder, "model.safetensors").read_bytes()).hexdigest()


def trained(folder: str) -> dict[str, Any]:
    """A step of SGD on mapped shards beside the unsharded model, then saved over the mapped files."""
    from paraxis.weights import load

    before, load._MIN_MAPPED_BYTES = load._MIN_MAPPED_BYTES, 0
    try:
        model, _ = parallel(folder)
    finally:
        load._MIN_MAPPED_BYTES = before
    maps = Path("/proc/self/maps").read_text().count("model.safetensors")
    unsharded = reference(folder)
    digest = fingerprint(folder)
    ids, labels = batch(model.config.vocab_size)
    for each in (model, unsharded):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        each(input_ids=ids, labels=labels).loss.backward()
        optimizer.step()
    same = fingerprint(folder) == digest
    torch.distributed.barrier()
    model.save_pretrained(folder)
    with torch.no_grad():
        off = float((model(input_ids=ids).logits - unsharded(input_ids=ids).logits).abs().max())
        saved = float((reference(folder)(input_ids=ids).logits - unsharded(input_ids=ids).logits).abs().max())
    return {"maps": maps, "same": same, "off": off, "saved": saved}


@pytest.mark.long
def test_training_writes_to_the_shards_and_not_to_the_file(ranks: Any, tmp_path: Path) -> None:
    for found in ranks(2).run(trained, save("llama", tmp_path)):
        assert found["maps"] and found["same"]
        assert found["off"] < 1e-4 and found["saved"] < 1e-4
