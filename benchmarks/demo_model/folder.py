"""The demo model's folder: its shape, and how weights, configuration and tokenizer are laid out on disk."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from nanoengine.models.names import DEMO


def model_config() -> Qwen3Config:
    """The demo model's shape."""
    return Qwen3Config(
        vocab_size=4096,
        hidden_size=256,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        intermediate_size=704,
        max_position_embeddings=4096,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        rms_norm_eps=1e-6,
        attention_bias=False,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )


def save_weights(model: Qwen3ForCausalLM, path: Path) -> None:
    """Write the weights in bfloat16, named as Hugging Face names them."""
    weights = {name: value.to("cpu", torch.bfloat16).contiguous() for name, value in model.state_dict().items()}
    del weights["lm_head.weight"]  # tied to the embedding
    save_file(weights, path, metadata={"format": "pt"})
    path.chmod(0o644)  # safetensors leaves it to its owner alone


def join(work: Path, out: Path) -> None:
    """Write the model folder: weights, configuration and tokenizer."""
    out.mkdir(parents=True, exist_ok=True)
    config = model_config().to_dict()
    # Readers older and newer than transformers 5 look for the dtype and the rotary base under different names.
    config |= {"architectures": ["Qwen3ForCausalLM"], "dtype": "bfloat16", "torch_dtype": "bfloat16"}
    config |= {"rope_theta": 10000.0, "use_cache": True}
    for key in ("_name_or_path", "transformers_version", "id2label", "label2id", "problem_type", "return_dict"):
        config.pop(key, None)
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|endoftext|>",
        "eos_token": "<|endoftext|>",
        "pad_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": config["max_position_embeddings"],
    }
    generation = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    files = {"config": config, "tokenizer_config": tokenizer_config, "generation_config": generation}
    for name, content in files.items():
        (out / f"{name}.json").write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
    for name in ("model.safetensors", "tokenizer.json", "heldout.txt"):
        shutil.copyfile(work / name, out / name)
    if not (out / "chat_template.jinja").exists():
        shutil.copyfile(DEMO / "chat_template.jinja", out / "chat_template.jinja")
