"""GGUF files of hybrids: what llama.cpp's converter makes of a folder, by the gguf package's table of names."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from gguf import MODEL_ARCH, GGMLQuantizationType, get_tensor_name_map
from gguf.constants import MODEL_ARCH_NAMES
from safetensors.torch import load_file
from torch import Tensor

from tests.models.gguf.written import write_file

Tensors = dict[str, Tensor]
ARCHITECTURES = {
    "lfm2": MODEL_ARCH.LFM2,
    "lfm2_moe": MODEL_ARCH.LFM2MOE,
    "qwen3_next": MODEL_ARCH.QWEN3NEXT,
    "qwen3_5_text": MODEL_ARCH.QWEN35,
    "qwen3_5_moe_text": MODEL_ARCH.QWEN35MOE,
    "granitemoehybrid": MODEL_ARCH.GRANITE_HYBRID,
    "falcon_h1": MODEL_ARCH.FALCON_H1,
    "nemotron_h": MODEL_ARCH.NEMOTRON_H,
}
COMMON = {"block_count": "num_hidden_layers", "context_length": "max_position_embeddings"}
COMMON |= {"embedding_length": "hidden_size", "attention.head_count": "num_attention_heads"}
EXPERTS = {"expert_used_count": "num_experts_per_tok"}
DELTA = {
    "attention.head_count_kv": "num_key_value_heads",
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "linear_num_value_heads",
    "expert_count": "num_experts",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
MAMBA = {
    "ssm.conv_kernel": "mamba_d_conv",
    "ssm.state_size": "mamba_d_state",
    "ssm.group_count": "mamba_n_groups",
    "ssm.time_step_rank": "mamba_n_heads",
    "expert_count": "num_local_experts",
    "expert_shared_feed_forward_length": "shared_intermediate_size",
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}
OF_STATES = ("mamba_d_conv", "mamba_d_state", "mamba_n_groups", "mamba_n_heads", "mamba_d_ssm")
FALCON = dict(zip(("conv_kernel", "state_size", "group_count", "time_step_rank", "inner_size"), OF_STATES, strict=True))
FALCON = {f"ssm.{key}": name for key, name in FALCON.items()} | {"attention.head_count_kv": "num_key_value_heads"}
OF_STATES = ("conv_kernel", "ssm_state_size", "n_groups", "mamba_num_heads")
NEMOTRON = dict(zip(FALCON, OF_STATES, strict=False)) | {"attention.layer_norm_rms_epsilon": "layer_norm_epsilon"}
NEMOTRON_MOE = {"count": "n_routed_experts", "feed_forward_length": "moe_intermediate_size"}
NEMOTRON_MOE |= {"shared_feed_forward_length": "moe_shared_expert_intermediate_size", "group_count": "n_group"}
NEMOTRON_MOE |= {"weights_norm": "norm_topk_prob", "weights_scale": "routed_scaling_factor"}
NEMOTRON_MOE |= {"shared_count": "n_shared_experts", "group_used_count": "topk_group"}
OWN = {"granitemoehybrid": MAMBA, "falcon_h1": FALCON, "nemotron_h": NEMOTRON}


def write_hybrid(
    folder: Path,
    path: Path,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    *,
    rename: Callable[[str], str] = str,
    more_tensors: Mapping[str, Tensor] | None = None,
    legacy: bool = False,
    **keys: Any,
) -> Path:
    """The model of a folder, its matrices in the format `kind`.

    Args:
        rename: of names in the file.
        legacy: Qwen3-Next as it was converted first, with its projections in one tensor.
        keys: further ones of the architecture, or other values; "__" stands for a dot, None is left out.
    """
    config = json.loads((folder / "config.json").read_text())
    arch = ARCHITECTURES[config["model_type"]]
    if "moe" in config.get("layers_block_type", ()):
        arch = MODEL_ARCH.NEMOTRON_H_MOE
    metadata = _metadata(config) | {key.replace("__", "."): value for key, value in keys.items()}
    name_of_arch = MODEL_ARCH_NAMES[arch]
    metadata = {f"{name_of_arch}.{key}": value for key, value in metadata.items() if value is not None}
    names = get_tensor_name_map(arch, len(config.get("layers_block_type", ())) or config["num_hidden_layers"])
    stored: Tensors = {}
    for name, tensor in _converted(load_file(folder / "model.safetensors"), config, legacy).items():
        found = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert found is not None, name
        stored[rename(found)] = tensor
    stored |= more_tensors or {}
    arrays = {name: tensor.float().contiguous().numpy() for name, tensor in stored.items()}
    return write_file(path, name_of_arch, metadata, arrays, kind)


def _metadata(config: Mapping[str, Any]) -> dict[str, Any]:
    model_type, rope = config["model_type"], config.get("rope_parameters") or {}
    own = DELTA if model_type.startswith("qwen") else OWN.get(model_type, {})
    values = {key: config[name] for key, name in (COMMON | EXPERTS | own).items() if config.get(name) is not None}
    eps = config.get("norm_eps", config.get("rms_norm_eps"))
    values.setdefault("attention.layer_norm_rms_epsilon", eps)
    values["rope.freq_base"] = rope.get("rope_theta", 1e4)
    size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    values |= {"attention.key_length": size, "attention.value_length": size, "vocab_size": config["vocab_size"]}
    values["feed_forward_length"] = config.get("intermediate_size", 0) or None
    if model_type == "falcon_h1":
        return values
    if model_type == "nemotron_h":
        kinds = config["layers_block_type"]
        values["attention.head_count_kv"] = [config["num_key_value_heads"] * (own == "full_attention") for own in kinds]
        values["feed_forward_length"] = [config["intermediate_size"] * (own == "mlp") for own in kinds]
        if "moe" in kinds:
            values |= {f"expert_{key}": config[name] for key, name in NEMOTRON_MOE.items()}
            values |= {"moe_latent_size": config["moe_latent_size"]} if config["moe_latent_size"] else {}
            widths = {"moe": config["moe_intermediate_size"], "mlp": config["intermediate_size"]}
            values["feed_forward_length"] = [widths.get(own, 0) for own in kinds]
        else:
            del values["expert_used_count"]
        inner = config["mamba_num_heads"] * config["mamba_head_dim"]
        return values | {"block_count": len(kinds), "ssm.inner_size": inner}
    kinds = config["layer_types"]
    if model_type.startswith("qwen"):
        values["attention.recurrent_layers"] = [kind == "linear_attention" for kind in kinds]
        values["ssm.inner_size"] = config["linear_num_value_heads"] * config["linear_value_head_dim"]
        values["full_attention_interval"] = config.get("full_attention_interval", 4)
        values["rope.dimension_count"] = int(size * rope.get("partial_rotary_factor", 0.25))
        values |= {"rope.dimension_sections": [11, 11, 10, 0]} if model_type != "qwen3_next" else {}
        return values
    attends = [kind in ("full_attention", "attention") for kind in kinds]
    values["attention.head_count_kv"] = [config["num_key_value_heads"] * own for own in attends]
    if model_type == "lfm2_moe":
        values |= {"expert_count": config["num_experts"], "leading_dense_block_count": config["num_dense_layers"]}
        values |= {"expert_feed_forward_length": config["moe_intermediate_size"], "expert_gating_func": 2}
    if model_type.startswith("lfm2"):
        return values | {"shortconv.l_cache": config["conv_L_cache"]}
    values["ssm.inner_size"] = config["mamba_expand"] * config["hidden_size"]
    if not config["num_local_experts"]:
        values |= {"feed_forward_length": config["shared_intermediate_size"], "expert_used_count": 0}
    return values | {
        "rope.scaling.finetuned": config["position_embedding_type"] == "rope",
        "rope.dimension_count": size,
    }


def _converted(tensors: Mapping[str, Tensor], config: Mapping[str, Any], legacy: bool) -> Tensors:
    """With all that the converter changes, under names that the table of the package knows."""
    model_type, done = config["model_type"], dict[str, Tensor]()
    for name, tensor in tensors.items():
        for found, changed in _split(name, tensor, config, legacy).items():
            done[found] = _changed(found, changed, config)
    if model_type in ("lfm2_moe", "qwen3_next", "qwen3_5_moe_text"):
        return _stacked(done)
    if model_type == "nemotron_h":
        renamed = {name.replace(".mixer.experts", ".mlp.experts"): own for name, own in _stacked(done).items()}
        return {re.sub(r"backbone(.*mlp\.experts)", r"model\1", name): own for name, own in renamed.items()}
    return done


def _changed(name: str, tensor: Tensor, config: Mapping[str, Any]) -> Tensor:
    model_type = config["model_type"]
    if name.endswith(".A_log"):
        tensor = -torch.exp(tensor)
    if "conv.conv" in name or "conv1d.weight" in name:
        tensor = tensor.squeeze(1)
    if model_type.startswith("qwen") and name.endswith("norm.weight") and "linear_attn" not in name:
        tensor = tensor + 1
    if model_type.startswith("qwen3_5") and "linear_attn." in name:
        tensor = _tiled(name, tensor, config)
    if model_type in OWN:
        if name.endswith((".A_log", ".D")):
            tensor = tensor[:, None]
        if name.endswith(("mamba.norm.weight", "mixer.norm.weight")):
            tensor = tensor.view(config.get("mamba_n_groups", config.get("n_groups")), -1)
    if model_type == "falcon_h1":
        tensor = _multiplied(name, tensor, config)
    if model_type == "granitemoehybrid":
        heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
        if count := heads.get(name.split(".")[-2]):
            tensor = tensor.view(count, 2, -1, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)
    return tensor


def _multiplied(name: str, tensor: Tensor, config: Mapping[str, Any]) -> Tensor:
    factors = {key.removesuffix("_multiplier"): value for key, value in config.items() if key.endswith("_multiplier")}
    gate, down = config["mlp_multipliers"]
    if name.endswith("in_proj.weight"):
        inner, shared = config["mamba_d_ssm"], config["mamba_n_groups"] * config["mamba_d_state"]
        parts = tensor.split([inner, inner, shared, shared, config["mamba_n_heads"]])
        multipliers = config["ssm_multipliers"]
        return torch.cat([part * own * factors["ssm_in"] for part, own in zip(parts, multipliers, strict=True)])
    own = {"q_proj": factors["attention_in"], "k_proj": factors["attention_in"] * factors["key"]}
    own |= {"v_proj": factors["attention_in"], "o_proj": factors["attention_out"], "out_proj": factors["ssm_out"]}
    own |= {"gate_proj": gate, "down_proj": down, "lm_head": factors["lm_head"], "embed_tokens": factors["embedding"]}
    return tensor * own.get(name.split(".")[-2], 1.0)


def _split(name: str, tensor: Tensor, config: Mapping[str, Any], legacy: bool) -> Tensors:
    """Matrices that Hugging Face has in one tensor, and names that the table has otherwise."""
    before = name.rpartition(".linear_attn.")[0]
    if ".feed_forward.experts." in name:
        return {name.removeprefix("model."): tensor}
    if name.endswith("mixer.gate.e_score_correction_bias"):
        return {name.replace("correction_bias", "correction.bias"): tensor}
    if name.endswith(".expert_bias"):
        return {f"{name}.bias": tensor}
    if name.endswith(".dt_bias"):
        return {f"{name.removesuffix('.dt_bias')}.dt_proj.bias": tensor}
    if name.endswith(".in_proj_qkvz.weight") and not legacy:
        groups, depth = config["linear_num_key_heads"], config["linear_key_head_dim"]
        own = config["linear_num_value_heads"] // groups * config["linear_value_head_dim"]
        parts = tensor.view(groups, -1, tensor.shape[1]).split([depth, depth, own, own], 1)
        q, k, v, z = (part.flatten(0, 1) for part in parts)
        return {
            f"{before}.linear_attn.in_proj_qkv.weight": torch.cat([q, k, v]),
            f"{before}.linear_attn.in_proj_z.weight": z,
        }
    layer = name.split(".")[2] if name.startswith("model.layers.") else ""
    if name.endswith("block_sparse_moe.input_linear.weight"):
        gate, up = tensor.chunk(2, 1)
        return {f"blk.{layer}.ffn_gate_exps.weight": gate, f"blk.{layer}.ffn_up_exps.weight": up}
    kind = "_shexp" if config.get("num_local_experts") else ""
    if name.endswith("shared_mlp.input_linear.weight"):
        gate, up = tensor.chunk(2)
        return {f"blk.{layer}.ffn_gate{kind}.weight": gate, f"blk.{layer}.ffn_up{kind}.weight": up}
    if name.endswith("shared_mlp.output_linear.weight"):
        return {f"blk.{layer}.ffn_down{kind}.weight": tensor}
    return {name: tensor}


def _tiled(name: str, tensor: Tensor, config: Mapping[str, Any]) -> Tensor:
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


def _stacked(tensors: Tensors) -> Tensors:
    """With the experts of a layer in one tensor."""
    found: dict[str, list[Tensor]] = {}
    for name, tensor in sorted(tensors.items(), key=lambda item: (len(item[0]), item[0])):
        before, _, after = name.partition(".experts.")
        found.setdefault(f"{before}.experts.{after.split('.', 1)[1]}" if after else name, []).append(tensor)
    return {name: torch.stack(parts) if ".experts." in name else parts[0] for name, parts in found.items()}
