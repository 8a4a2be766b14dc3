"""What families need of kernels, by those for GPUs: biases, norms of all heads, rotations of a part or none, scales, experts,
windows and chunks, soft caps, sinks, other gates, and layers with states.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from tests.kernels.formulas import DEVICE
from tests.models.families import engine, family_checkpoint
from tests.support import backend_of, forced_logits, model_runner, reference_logits, reference_model

ON_GPU = DEVICE.type == "cuda"
LENGTH, CHUNK = (75, 17) if ON_GPU else (9, 6)
TOKENS = torch.randint(0, 250, (LENGTH,), generator=torch.Generator().manual_seed(0)).tolist()

HYBRID = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"], "head_dim": 16}
SHAPES: dict[str, dict[str, Any]] = {  # the kernels want heads of a multiple of 16
    "Phi3, partial, long factors": {},
    "OLMo2, biases, no groups": {"hidden_size": 48, "num_attention_heads": 3, "num_key_value_heads": 3},
    "SmolLM3, others without rotation": {"num_hidden_layers": 2, "no_rope_layers": [0, 1], "head_dim": 16},
    "Qwen3-MoE, some layers dense": {"num_hidden_layers": 2, "mlp_only_layers": []},
    "Gemma2": {"num_hidden_layers": 2, "sliding_window": 4},
    "Gemma4": {"num_hidden_layers": 2, "sliding_window": 4, "head_dim": 16, "global_head_dim": 32},
    "gpt-oss": {"num_hidden_layers": 2, "sliding_window": 5},
    "LFM2": {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"], "head_dim": 16},
    "Qwen3.5": HYBRID | {"linear_num_value_heads": 2},
    "Granite 4, dense, rotated": HYBRID,
    "Llama 4": {"num_hidden_layers": 2, "no_rope_layers": [1, 0], "attention_chunk_size": 4},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_at_every_position_are_those_of_transformers(tmp_path: Path, shape: str) -> None:
    folder = family_checkpoint(tmp_path, shape, seed=1, **SHAPES[shape])
    # Below the trained length of long factors, transformers takes the short ones.
    max_len = 40 if "Phi3" in shape else None
    options: dict[str, Any] = {"kernels": "triton", "attention_backend": "triton", "num_kv_blocks": 30}
    with engine(folder, device=DEVICE.type, max_model_len=None if ON_GPU else max_len, **options) as llm:
        assert (model_runner(llm).kernels.name, backend_of(llm).name) == ("triton", "triton")
        logits = forced_logits(llm, TOKENS, num_prompt_tokens=LENGTH - 1, chunk=CHUNK)
    right = reference_logits(reference_model(folder), TOKENS)
    torch.testing.assert_close(logits.cpu(), right, rtol=0, atol=1e-3 if ON_GPU else 1e-4)
