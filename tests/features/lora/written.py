"""Adapters that are drawn and written as PEFT writes them, and the same model with an adapter merged into its weights."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from nanoengine import LLM, LoRARequest, SamplingParams
from nanoengine.features.lora.adapter import Adapter, Projection

CONFIG: dict[str, Any] = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "base_model_name_or_path": "a model",
    "bias": "none",
    "use_dora": False,
    "use_rslora": False,
    "modules_to_save": None,
    "init_lora_weights": True,
    "lora_dropout": 0.1,
    "rank_pattern": {},
    "alpha_pattern": {},
}
DTYPE_NAMES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "qkv_proj", "gate_up_proj")


def linear_layers(folder: Path) -> dict[str, tuple[int, ...]]:
    """(outputs, inputs) of the linear layers of a checkpoint, as transformers names them."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    return {
        name: tuple(module.weight.shape)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and name.rpartition(".")[2] in ALL
    }


def write_adapter(
    folder: Path,
    layers: Mapping[str, Sequence[int]],
    seed: int = 0,
    *,
    targets: Sequence[str] | str = ALL,
    dtype: torch.dtype = torch.float32,
    size: float = 0.1,
    **config: Any,
) -> Path:
    """An adapter of the layers whose names end so, or match so, with random A and B."""
    folder.mkdir(parents=True, exist_ok=True)
    said = CONFIG | {"r": 4, "lora_alpha": 8, "target_modules": targets if isinstance(targets, str) else [*targets]}
    said |= config
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for name, (outputs, inputs) in layers.items():
        is_target = re.fullmatch(targets, name) if isinstance(targets, str) else name.rpartition(".")[2] in targets
        if is_target:
            rank, at = rank_and_scale(said, name)[0], f"base_model.model.{name}"
            tensors[f"{at}.lora_A.weight"] = torch.randn(rank, inputs, generator=generator).mul(size).to(dtype)
            tensors[f"{at}.lora_B.weight"] = torch.randn(outputs, rank, generator=generator).mul(size).to(dtype)
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    (folder / "adapter_config.json").write_text(json.dumps(said))
    return folder


def rank_and_scale(config: Mapping[str, Any], name: str) -> tuple[int, float]:
    """As PEFT has it: the first pattern that is the end of a name counts."""

    def chosen(patterns: Mapping[str, Any], default: Any) -> Any:
        return next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", name)), default)

    rank = chosen(config["rank_pattern"], config["r"])
    alpha = chosen(config["alpha_pattern"], config["lora_alpha"])
    return rank, alpha / (math.sqrt(rank) if config["use_rslora"] else rank)


def merged(folder: Path, adapter: Path) -> Any:
    """The model of transformers whose weights are W + scale * B A."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tensors = load_file(adapter / "adapter_model.safetensors")
    config = json.loads((adapter / "adapter_config.json").read_text())
    for name, module in model.named_modules():
        if (a := tensors.get(f"base_model.model.{name}.lora_A.weight")) is not None:
            b = tensors[f"base_model.model.{name}.lora_B.weight"]
            module.weight.data += rank_and_scale(config, name)[1] * (b.double() @ a.double()).float()
    return model.eval()


def adapter_of(projections: Mapping[str, tuple[Tensor, Tensor, float]], digest: str = "") -> Adapter:
    """An adapter of these A, B and scales."""
    found = {}
    for name, (a, b, scale) in projections.items():
        kinds = DTYPE_NAMES[a.dtype], DTYPE_NAMES[b.dtype]
        own = (part.contiguous().view(torch.uint8).numpy().tobytes() for part in (a, b))
        found[name] = Projection(len(a), scale, kinds, *own)
    return Adapter("drawn", "nowhere", digest, found)


def assert_logprobs(llm: LLM, prompt: list[int], adapter: Path, right: Tensor, within: float) -> None:
    """The log probabilities of a prompt, and of the token behind it, are those of [tokens, vocab_size] `right`."""
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=5, logprobs=5)
    request = LoRARequest("own", 1, str(adapter))
    (output,) = llm.generate([prompt], params, lora_request=request, use_tqdm=False)
    entries = [*(output.prompt_logprobs or [])[1:], *(output.outputs[0].logprobs or [])]
    assert len(entries) == len(prompt)
    for at, entry in enumerate(entries):
        assert all(abs(right[at, token].item() - each.logprob) < within for token, each in entry.items())
