"""The demo model's folder: its shape, and how weights, configuration and tokenizer are laid out on disk."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

HERE = Path(__file__).parent
PIECE_BYTES = 8_000_000


def model_config(tiny: bool = False) -> Qwen3Config:
    """The demo model's shape; `tiny` is for trying the code out."""
    shape = (64, 2, 2, 1, 32, 128, 256) if tiny else (256, 5, 4, 2, 64, 704, 4096)
    hidden, layers, heads, kv_heads, head_dim, intermediate, positions = shape
    return Qwen3Config(
        vocab_size=4096,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=intermediate,
        max_position_embeddings=positions,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        rms_norm_eps=1e-6,
        attention_bias=False,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )


def save_pieces(model: Qwen3ForCausalLM, out: Path) -> None:
    """Write the weights in bfloat16 as several small safetensors files, named as Hugging Face names them."""
    pieces: list[dict[str, torch.Tensor]] = [{}]
    for name, value in model.state_dict().items():
        if name == "lm_head.weight":  # tied to the embedding
            continue
        if sum(t.nbytes for t in pieces[-1].values()) + 2 * value.numel() > PIECE_BYTES:
            pieces.append({})
        pieces[-1][name] = value.to("cpu", torch.bfloat16).contiguous()
    for number, piece in enumerate(pieces):
        save_file(piece, out / f"weights-{number}.safetensors")


def join(work: Path, pieces: Path, out: Path, tiny: bool = False) -> None:
    """Write the model folder: the pieces of the weights as one file, the configuration and the tokenizer."""
    out.mkdir(parents=True, exist_ok=True)
    weights: dict[str, torch.Tensor] = {}
    for piece in sorted(pieces.glob("weights-*.safetensors")):
        weights |= load_file(piece)
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    (out / "model.safetensors").chmod(0o644)  # safetensors leaves it to its owner alone
    config = model_config(tiny).to_dict()
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
    for name in ("tokenizer.json", "heldout.txt"):
        shutil.copyfile(work / name, out / name)
    if not (out / "chat_template.jinja").exists():
        shutil.copyfile(HERE / "chat_template.jinja", out / "chat_template.jinja")
