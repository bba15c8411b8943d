"""Shards that stay in the file: what is written to them does not reach it, and the file may be replaced."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
from marks import long
from models.compare import batch, parallel, reference
from models.tiny import save


def fingerprint(folder: str) -> str:
    return hashlib.sha256(Path(folder, "model.safetensors").read_bytes()).hexdigest()


def trained(folder: str) -> dict[str, Any]:
    """A step of SGD on mapped shards beside the unsharded model, then saved over the files that they lie in."""
    from paraxis.weights import load

    before, load._MAPPED = load._MAPPED, 0
    try:
        model, _ = parallel(folder)
    finally:
        load._MAPPED = before
    maps = Path("/proc/self/maps").read_text().count("model.safetensors")
    unsharded = reference(folder)
    kept = fingerprint(folder)
    ids, labels = batch(model.config.vocab_size)
    for each in (model, unsharded):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        each(input_ids=ids, labels=labels).loss.backward()
        optimizer.step()
    same = fingerprint(folder) == kept
    torch.distributed.barrier()
    model.save_pretrained(folder)
    with torch.no_grad():
        off = float((model(input_ids=ids).logits - unsharded(input_ids=ids).logits).abs().max())
        saved = float((reference(folder)(input_ids=ids).logits - unsharded(input_ids=ids).logits).abs().max())
    return {"maps": maps, "same": same, "off": off, "saved": saved}


@long
def test_they_are_written_to_and_the_file_is_not(ranks: Any, tmp_path: Path) -> None:
    for found in ranks(2).run(trained, save("llama", tmp_path)):
        assert found["maps"] and found["same"]
        assert found["off"] < 1e-4 and found["saved"] < 1e-4
