"""Checkpoints of real shapes with random weights, so that real sizes can be measured without downloading anything.

    python -m benchmarks.random_weights qwen3-0.6b FOLDER

Speed does not depend on what the weights are. The names and files are those that transformers would save.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

SEED = 0

_QWEN3: dict[str, Any] = {
    "vocab_size": 151936,
    "head_dim": 128,
    "num_key_value_heads": 8,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "architectures": ["Qwen3ForCausalLM"],
}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": _QWEN3
    | {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
    "qwen3-4b": _QWEN3
    | {
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "tie_word_embeddings": True,
    },
    "lfm2-1.2b": {
        "vocab_size": 65536,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "block_auto_adjust_ff_dim": False,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "full_attn_idxs": [2, 5, 8, 10, 12, 14],
        "architectures": ["Lfm2ForCausalLM"],
    },
    "qwen3.5-0.8b": {
        "vocab_size": 248320,
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "num_hidden_layers": 24,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
        "tie_word_embeddings": True,
        "architectures": ["Qwen3_5ForCausalLM"],
    },
    "tiny": _QWEN3
    | {
        "vocab_size": 4096,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "tie_word_embeddings": True,
    },
}


def write_checkpoint(shape: str, folder: str) -> None:
    """bfloat16 weights from a normal distribution (0, 0.02), norms of one; the same ones every time."""
    import torch
    import transformers

    torch.manual_seed(SEED)
    (architecture,) = SHAPES[shape]["architectures"]
    config = getattr(transformers, architecture).config_class(**SHAPES[shape])
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)


@contextmanager
def random_checkpoint(shape: str) -> Iterator[str]:
    """A folder with such a checkpoint, for as long as it is needed. Another process makes it: its memory is not ours.

    Raises:
        ModuleNotFoundError: transformers is not installed.
    """
    if find_spec("transformers") is None:
        raise ModuleNotFoundError("random weights are written by transformers", name="transformers")
    with tempfile.TemporaryDirectory(prefix=f"{shape}-random-") as folder:
        print(f"making random weights of the shape {shape} ...", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "benchmarks.random_weights", shape, folder], check=True)
        yield folder


if __name__ == "__main__":
    write_checkpoint(*sys.argv[1:])
