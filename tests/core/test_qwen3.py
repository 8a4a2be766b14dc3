"""The core's Qwen3 against transformers: the logits after every token, with nothing of the package but the core."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from nanoengine.core.attention import AttentionMetadata
from nanoengine.core.kernels import Kernels
from nanoengine.core.model_config import read_config
from nanoengine.core.qwen3 import Decoder, build_qwen3
from nanoengine.core.torch_attention import TorchAttention
from nanoengine.core.weights import load_weights

CPU = torch.device("cpu")
BLOCK_SIZE = 16
NUM_TOKENS = 75
TOKENS = torch.randint(0, 250, (NUM_TOKENS,), generator=torch.Generator().manual_seed(0))

SHAPES: dict[str, dict[str, Any]] = {
    "tied": {},
    "untied": {"tie_word_embeddings": False},
    "group of 3": {"num_attention_heads": 6, "num_key_value_heads": 2},
    "biases": {"attention_bias": True},
    "odd sizes": {"vocab_size": 257, "hidden_size": 37, "intermediate_size": 53, "head_dim": 10},
    "other rope and norm": {"rope_theta": 1e6, "rms_norm_eps": 0.1},
}


def reference(folder: Path, **changes: Any) -> Qwen3ForCausalLM:
    """A random model of transformers, saved in the folder."""
    options = {"vocab_size": 300, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "head_dim": 16}
    options |= {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True} | changes
    theta = options.pop("rope_theta", 1e4)
    torch.manual_seed(0)
    rope = {"rope_type": "default", "rope_theta": theta}
    model = Qwen3ForCausalLM(Qwen3Config(**options, rope_parameters=rope, dtype="float32")).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(0, parameter.shape[-1] ** -0.5 * 1.5)
    model.save_pretrained(folder)
    return model


def load(folder: Path) -> Decoder:
    model = build_qwen3(read_config(folder), Kernels(), TorchAttention(BLOCK_SIZE), torch.float32, CPU)
    load_weights(model.checkpoint_tensors(), folder)
    model.prepare(NUM_TOKENS)
    return model


@torch.inference_mode()
def logits_of(model: Decoder, lens: list[int]) -> Tensor:
    """[num_tokens, vocab_size]: the text in chunks of these lengths, in shuffled blocks of a pool full of NaN."""
    config, num_blocks = model.config, -(-NUM_TOKENS // BLOCK_SIZE) + 1
    shape = TorchAttention(BLOCK_SIZE).kv_shape(num_blocks, config.num_kv_heads, config.head_dim)
    caches = [(torch.full(shape, torch.nan), torch.full(shape, torch.nan)) for _ in range(config.num_layers)]
    table = torch.arange(num_blocks - 1, 0, -1, dtype=torch.int32)[None]
    logits, start = [], 0
    for length in lens:
        positions = torch.arange(start, start + length)
        metadata = AttentionMetadata(
            kv_cache=caches,
            slot_mapping=table[0, positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE,
            num_decodes=int(length == 1),
            query_start_loc=torch.tensor([0, length], dtype=torch.int32),
            seq_lens=torch.tensor([start + length], dtype=torch.int32),
            block_tables=table,
            query_lens_list=[length],
            seq_lens_list=[start + length],
        )
        hidden = model.forward(TOKENS[positions], positions, [metadata] * config.num_layers)
        logits.append(model.compute_logits(hidden))
        start += length
    return torch.cat(logits)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_logits_at_every_position_are_those_of_transformers(tmp_path: Path, shape: dict[str, Any]) -> None:
    theirs = reference(tmp_path, **shape)
    with torch.inference_mode():
        right = theirs(TOKENS[None]).logits[0]
    assert right.std() > 0.3, "a model whose logits differ, so that 1e-4 means something"
    model = load(tmp_path)
    for lens in ([NUM_TOKENS], [15, 1, 1, 31, 27], [40] + [1] * 35):
        torch.testing.assert_close(logits_of(model, lens), right, rtol=0, atol=1e-4)
