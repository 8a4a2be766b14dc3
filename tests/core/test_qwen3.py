"""The core's Qwen3 against transformers: the logits after every token, with nothing of the package but the core."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from nanoengine.core.llm import CoreLLM
from tests.support import fill_kv_with_nan, forced_logits, reference_logits, reference_model, tiny_checkpoint

TOKENS = torch.randint(0, 250, (75,), generator=torch.Generator().manual_seed(0)).tolist()

SHAPES: dict[str, dict[str, Any]] = {
    "tied": {"num_hidden_layers": 3},
    "untied": {"tie_word_embeddings": False},
    "group of 3": {"num_attention_heads": 6, "num_key_value_heads": 2},
    "biases": {"attention_bias": True},
    "odd sizes": {"vocab_size": 257, "hidden_size": 37, "intermediate_size": 53, "head_dim": 10},
    "other rope and norm": {"rope_theta": 1e6, "rms_norm_eps": 0.1},
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_logits_at_every_position_are_those_of_transformers(tmp_path: Path, shape: dict[str, Any]) -> None:
    """In blocks of a pool full of NaN."""
    right = reference_logits(reference_model(tiny_checkpoint(tmp_path, **shape)), TOKENS)
    assert right.std() > 0.15, "a model whose logits differ, so that 1e-4 means something"
    with CoreLLM(str(tmp_path), dtype="float32", num_kv_blocks=40) as llm:
        fill_kv_with_nan(llm)  # type: ignore[arg-type]
        for num_prompt, chunk in ((75, 75), (60, 17), (40, 40)):
            logits = forced_logits(llm, TOKENS, num_prompt, chunk)  # type: ignore[arg-type]
            torch.testing.assert_close(logits, right, rtol=0, atol=1e-4)
