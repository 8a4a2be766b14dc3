"""The tensors of a GGUF file, from those of a folder: what llama.cpp's converter changes in them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

Tensors = dict[str, Tensor]
Config = Mapping[str, Any]

PAIRED = ("llama", "mixtral", "ministral3", "smollm3", "granite", "granitemoe", "granitemoeshared", "granitemoehybrid")
"""Types whose rows of q and k llama.cpp has in another order."""

DELTA_NETS = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
EXPERT = re.compile(r"\w+\.layers\.(\d+)\..*\.experts\.(\d+)\.(\w+)\.weight")
PARTS = {"w1": "gate", "w2": "down", "w3": "up", "gate_proj": "gate", "down_proj": "down", "up_proj": "up"}
OF_GEMMA4 = {
    "layer_scalar": "layer_output_scale.weight",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "experts.gate_up_proj": "ffn_gate_up_exps.weight",
    "experts.down_proj": "ffn_down_exps.weight",
}
"""Ends of names that the table of the package lacks: those without "weight" at their end."""


def converted(tensors: Mapping[str, Tensor], config: Config, legacy: bool) -> Tensors:
    """The tensors under names that the table of the package knows, or under those in the file."""
    stored, experts = dict[str, Tensor](), dict[str, dict[int, Tensor]]()
    for name, tensor in tensors.items():
        for part_name, part in _split(name, tensor, config, legacy).items():
            changed = _changed(part_name, part, config)
            if match := EXPERT.fullmatch(part_name):
                layer, number, kind = match.groups()
                experts.setdefault(f"blk.{layer}.ffn_{PARTS[kind]}_exps.weight", {})[int(number)] = changed
            else:
                stored[part_name] = changed
    if config["model_type"] == "gemma4_text":
        stored["rope_freqs.weight"] = torch.tensor([1.0] * 8 + [1e30] * 24)
    return stored | {name: torch.stack([of[i] for i in range(len(of))]) for name, of in experts.items()}


def _split(name: str, tensor: Tensor, config: Config, legacy: bool) -> Tensors:
    """Names that the table has otherwise, and a tensor for each matrix, outputs first, where Hugging Face has several in one."""
    model_type, parts = config["model_type"], name.split(".")
    layer = f"blk.{parts[2]}" if parts[1] == "layers" else ""
    end = ".".join(parts[3:])
    if model_type == "gemma4_text" and end in OF_GEMMA4:
        return {f"{layer}.{OF_GEMMA4[end]}": tensor}
    if end.endswith(("expert_bias", "sinks")):
        return {f"{name}.{'bias' if end.endswith('bias') else 'weight'}": tensor}
    if end.endswith("e_score_correction_bias"):
        return {name.replace("correction_bias", "correction.bias"): tensor.flatten()}
    if end.endswith(".dt_bias"):
        return {name.replace(".dt_bias", ".dt_proj.bias"): tensor}
    if end.endswith(".in_proj_qkvz.weight") and not legacy:
        groups, depth = config["linear_num_key_heads"], config["linear_key_head_dim"]
        width = config["linear_num_value_heads"] // groups * config["linear_value_head_dim"]
        matrices = tensor.view(groups, -1, tensor.shape[1]).split([depth, depth, width, width], 1)
        q, k, v, z = (matrix.flatten(0, 1) for matrix in matrices)
        qkv = name.replace("qkvz", "qkv")
        return {qkv: torch.cat([q, k, v]), name.replace("qkvz", "z"): z}
    is_stacked = model_type in ("gpt_oss", "llama4_text") and ".experts." in name
    if not is_stacked and not end.endswith(("input_linear.weight", "output_linear.weight")):
        return {name: tensor}
    kind, stack, rows_at = "bias" if end.endswith("_bias") else "weight", "_exps", 1
    if ".shared_mlp." in name:
        stack, rows_at = "_shexp" if config.get("num_local_experts") else "", 0
    if is_stacked and kind == "weight":
        tensor = tensor.transpose(1, 2)
    if ".down_proj" in name or end.endswith("output_linear.weight"):
        return {f"{layer}.ffn_down{stack}.{kind}": tensor}
    rows = torch.arange(tensor.shape[rows_at])
    rows = rows.view(-1, 2).T if model_type == "gpt_oss" else rows.view(2, -1)
    return {
        f"{layer}.ffn_{part}{stack}.{kind}": tensor.index_select(rows_at, of)
        for part, of in zip(("gate", "up"), rows, strict=True)
    }


def _changed(name: str, tensor: Tensor, config: Config) -> Tensor:
    model_type = config["model_type"]
    is_shifted = model_type in ("gemma2", "gemma3_text", *DELTA_NETS) and "linear_attn" not in name
    if is_shifted and name.endswith("norm.weight"):
        tensor = tensor + 1
    if name.endswith(".A_log"):
        tensor = -torch.exp(tensor)
    if "conv.conv" in name or "conv1d.weight" in name:
        tensor = tensor.squeeze(1)
    if model_type in ("qwen3_5_text", "qwen3_5_moe_text") and "linear_attn." in name:
        tensor = _tiled(name, tensor, config)
    if model_type in ("granitemoehybrid", "falcon_h1", "nemotron_h"):
        if name.endswith((".A_log", ".D")):
            tensor = tensor[:, None]
        if name.endswith(("mamba.norm.weight", "mixer.norm.weight")):
            tensor = tensor.view(config.get("mamba_n_groups", config.get("n_groups")), -1)
    if model_type == "falcon_h1":
        tensor = _multiplied(name, tensor, config)
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    if model_type in PAIRED and (count := heads.get(name.split(".")[-2])):
        tensor = tensor.view(count, 2, -1, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)
    return tensor


def _multiplied(name: str, tensor: Tensor, config: Config) -> Tensor:
    """Falcon H1's factors are in its weights."""
    factors = {key.removesuffix("_multiplier"): value for key, value in config.items() if key.endswith("_multiplier")}
    gate, down = config["mlp_multipliers"]
    if name.endswith("in_proj.weight"):
        inner, shared = config["mamba_d_ssm"], config["mamba_n_groups"] * config["mamba_d_state"]
        parts = tensor.split([inner, inner, shared, shared, config["mamba_n_heads"]])
        multipliers = config["ssm_multipliers"]
        return torch.cat([part * factor * factors["ssm_in"] for part, factor in zip(parts, multipliers, strict=True)])
    of_module = {"q_proj": factors["attention_in"], "k_proj": factors["attention_in"] * factors["key"]}
    of_module |= {"v_proj": factors["attention_in"], "o_proj": factors["attention_out"]}
    of_module |= {"out_proj": factors["ssm_out"], "gate_proj": gate, "down_proj": down}
    of_module |= {"lm_head": factors["lm_head"], "embed_tokens": factors["embedding"]}
    return tensor * of_module.get(name.split(".")[-2], 1.0)


def _tiled(name: str, tensor: Tensor, config: Config) -> Tensor:
    """Heads of values: the first of each key's, the second of each, and so on."""
    groups, width = config["linear_num_key_heads"], config["linear_value_head_dim"]
    count = config["linear_num_value_heads"] // groups
    part = name.split("linear_attn.")[1].split(".")[0]

    def turned(rows: Tensor, size: int) -> Tensor:
        return rows.reshape(groups, count, size, -1).transpose(0, 1).reshape(rows.shape)

    if part in ("in_proj_qkv", "conv1d"):
        first = 2 * groups * config["linear_key_head_dim"]
        return torch.cat([tensor[:first], turned(tensor[first:], width)])
    if part == "out_proj":
        return turned(tensor.T, width).T
    size = {"in_proj_z": width, "in_proj_b": 1, "in_proj_a": 1, "A_log": 1, "dt_proj": 1}.get(part)
    return tensor if size is None else turned(tensor, size)
