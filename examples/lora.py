"""Adapters: requests of one batch with different ones, and one that is replaced while the engine runs.

    python examples/lora.py

A real adapter is trained, with PEFT for example. Here are random ones, of two layers of the bundled model.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file

from nanoengine import LLM, LoRARequest, SamplingParams

RANK = 4


def save_random_adapter(folder: Path, seed: int, hidden_size: int) -> str:
    """As PEFT saves one: its config, and A and B of each layer that it changes."""
    folder.mkdir(exist_ok=True)
    torch.manual_seed(seed)
    tensors = {}
    for layer in (0, 1):
        name = f"base_model.model.model.layers.{layer}.self_attn.o_proj"
        tensors[f"{name}.lora_A.weight"] = torch.randn(RANK, hidden_size)
        tensors[f"{name}.lora_B.weight"] = torch.randn(hidden_size, RANK) * 0.02
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 2 * RANK, "target_modules": ["o_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return str(folder)


def main() -> None:
    prompt, params = "def binary_search(", SamplingParams(temperature=0.0, max_tokens=12)
    with tempfile.TemporaryDirectory() as folder, LLM("demo", enable_lora=True) as llm:
        size = llm.built.models.model_config.hidden_size
        one = LoRARequest("one", 1, save_random_adapter(Path(folder, "one"), 1, size))
        two = LoRARequest("two", 2, save_random_adapter(Path(folder, "two"), 2, size))
        outputs = llm.generate([prompt] * 3, params, lora_request=[None, one, two], use_tqdm=False)
        for name, output in zip(("no adapter", "one", "two"), outputs, strict=True):
            print(f"{name:>10}: {output.outputs[0].text!r}")
        save_random_adapter(Path(folder, "one"), 3, size)  # other weights in the same folder
        (output,) = llm.generate(prompt, params, lora_request=one, use_tqdm=False)
        print(f"{'one, anew':>10}: {output.outputs[0].text!r}")


if __name__ == "__main__":
    main()
