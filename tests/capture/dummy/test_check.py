"""Example inputs that contradict the model."""

from __future__ import annotations

import pytest
import torch
from capture.dummy.tiny_multimodal import IMAGE_TOKEN, llava, on_meta

from paraxis import plan_model
from paraxis.capture.dummy.check import check_placeholders


def test_image_tokens_must_agree_with_features() -> None:
    ids = torch.ones(1, 20, dtype=torch.int64)
    ids[:, :10] = IMAGE_TOKEN
    inputs = {"input_ids": ids, "pixel_values": torch.zeros(1, 3, 32, 32)}
    model = on_meta(llava)
    with pytest.raises(ValueError, match=r"10 image tokens \(id 99\), and LlavaFor.* computes 16 features"):
        check_placeholders(model, inputs)
    with pytest.raises(ValueError, match="10 image tokens"):
        plan_model(llava(), 2, example_inputs=inputs)
    ids[:, :16] = IMAGE_TOKEN
    check_placeholders(model, inputs)
    check_placeholders(model, {"input_ids": ids})  # text alone
