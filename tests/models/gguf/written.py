"""GGUF files of tiny models of transformers, written with the gguf package and its own table of names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import MODEL_ARCH, GGMLQuantizationType, GGUFWriter, get_tensor_name_map
from gguf.constants import GGML_QUANT_SIZES, MODEL_ARCH_NAMES
from gguf.quants import quantize
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

F32 = GGMLQuantizationType.F32
ARCHITECTURES = {
    "llama": MODEL_ARCH.LLAMA,
    "mixtral": MODEL_ARCH.LLAMA,
    "qwen2": MODEL_ARCH.QWEN2,
    "qwen3": MODEL_ARCH.QWEN3,
    "qwen2_moe": MODEL_ARCH.QWEN2MOE,
    "qwen3_moe": MODEL_ARCH.QWEN3MOE,
    "ministral3": MODEL_ARCH.MISTRAL3,
    "smollm3": MODEL_ARCH.SMOLLM3,
    "gpt_oss": MODEL_ARCH.GPT_OSS,
    "llama4_text": MODEL_ARCH.LLAMA4,
    "granitemoe": MODEL_ARCH.GRANITE_MOE,
    "granitemoeshared": MODEL_ARCH.GRANITE_MOE,
    "olmo3": MODEL_ARCH.OLMO2,
    "phi3": MODEL_ARCH.PHI3,
    "granite": MODEL_ARCH.GRANITE,
    "olmo2": MODEL_ARCH.OLMO2,
    "gemma2": MODEL_ARCH.GEMMA2,
    "gemma3_text": MODEL_ARCH.GEMMA3,
    "gemma4_text": MODEL_ARCH.GEMMA4,
    "seed_oss": MODEL_ARCH.SEED_OSS,
    "glm4": MODEL_ARCH.GLM4,
    "exaone4": MODEL_ARCH.EXAONE4,
    "ernie4_5": MODEL_ARCH.ERNIE4_5,
    "hunyuan_v1_dense": MODEL_ARCH.HUNYUAN_DENSE,
    "glm4_moe": MODEL_ARCH.GLM4_MOE,
    "minimax_m2": MODEL_ARCH.MINIMAXM2,
    "ernie4_5_moe": MODEL_ARCH.ERNIE4_5_MOE,
    "dots1": MODEL_ARCH.DOTS1,
}
"""Hugging Face's model types, and llama.cpp's architecture of each."""

PAIRED = ("llama", "mixtral", "ministral3", "smollm3", "granite", "granitemoe", "granitemoeshared")
SPLIT = ("gpt_oss", "llama4_text", "granitemoe", "granitemoeshared")
"""Types whose rows of q and k llama.cpp has in another order, and those whose experts Hugging Face has in one tensor."""

SHAPE = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
SHAPE |= {"num_key_value_heads": 2, "max_position_embeddings": 128}
SHAPE |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
ROUTED = {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "routed_scaling_factor": 2.5, "norm_topk_prob": True}
ROUTED |= {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1, "n_shared_experts": 2}
GRANITE = {
    "attention_multiplier": 0.22,
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.3,
    "logits_scaling": 8.0,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 5000.0, "original_max_position_embeddings": 32}
BY_TYPE = {
    "full_attention": YARN | {"attention_factor": 1.2},
    "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
}
GROWING: dict[str, Any] = {"rope_type": "yarn", "rope_theta": 5000.0, "factor": 16.0, "llama_4_scaling_beta": 0.25}
GROWING |= {"original_max_position_embeddings": 16, "mscale": 1.0, "mscale_all_dim": 1.0}
OWN: dict[str, dict[str, Any]] = {
    "glm4_moe": ROUTED | {"attention_bias": True, "use_qk_norm": True, "partial_rotary_factor": 0.5},
    "minimax_m2": {"head_dim": 32, "num_local_experts": 4, "num_experts_per_tok": 2, "rotary_dim": 16},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32},
    "dots1": ROUTED | {"sliding_window": None},
    "llama": {"attention_bias": True, "mlp_bias": True},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3": {"head_dim": 32},
    "qwen3_moe": {"head_dim": 32, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    | {"norm_topk_prob": True, "decoder_sparse_step": 1},
    "qwen2_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": False}
    | {"shared_expert_intermediate_size": 64},
    "phi3": {"sliding_window": 20},
    "glm4": {"head_dim": 32, "partial_rotary_factor": 0.5},
    "ministral3": {"head_dim": 32, "rope_parameters": GROWING},
    "exaone4": {"sliding_window": 20, "layer_types": ["full_attention", "sliding_attention"]},
    "hunyuan_v1_dense": {"head_dim": 32},
    "smollm3": {"num_hidden_layers": 4},
    "gpt_oss": {"head_dim": 32, "sliding_window": 20, "num_local_experts": 4, "num_experts_per_tok": 2}
    | {"intermediate_size": 64}
    | {"rope_parameters": YARN | {"truncate": False}},
    "llama4_text": {"head_dim": 32, "num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size_mlp": 64}
    | {"interleave_moe_layer_step": 2, "num_hidden_layers": 4},
    "granite": GRANITE,
    "granitemoe": GRANITE | {"num_local_experts": 4},
    "granitemoeshared": GRANITE | {"num_local_experts": 4, "shared_intermediate_size": 32},
    "olmo3": {"num_hidden_layers": 4, "sliding_window": 20, "rope_parameters": BY_TYPE},
    "gemma2": {"tie_word_embeddings": True, "head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 20}
    | {"attn_logit_softcapping": 5.0},
    "gemma3_text": {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 20},
    "gemma4_text": {"tie_word_embeddings": True, "head_dim": 32, "global_head_dim": 64, "sliding_window": 20}
    | {"num_hidden_layers": 5, "layer_types": [f"{kind}_attention" for kind in ("sliding", "full", "sliding") * 2][:5]}
    | {
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
    }
    | {"hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": 96, "final_logit_softcapping": 30.0},
}
"""What the types have besides."""

EXPERTS_OF_GEMMA4 = {
    "count": "num_experts",
    "used_count": "top_k_experts",
    "feed_forward_length": "moe_intermediate_size",
}


def tiny_model(model_type: str, folder: Path, **options: Any) -> tuple[Any, dict[str, Tensor]]:
    """A random model, and its tensors under the names of its checkpoint, which is left in `folder`."""
    torch.manual_seed(0)
    rope = {"rope_type": "default", "rope_theta": 5000.0}
    rope = options.pop("rope_parameters", OWN.get(model_type, {}).get("rope_parameters", rope))
    if model_type == "gemma3_text":
        rope = {"full_attention": rope, "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}
    if model_type == "gemma4_text":
        rope = {"full_attention": rope | {"rope_type": "proportional", "partial_rotary_factor": 0.25}}
        rope |= {"sliding_attention": {"rope_type": "default", "rope_theta": 20000.0}}
    options = SHAPE | {"tie_word_embeddings": False} | OWN.get(model_type, {}) | options | {"rope_parameters": rope}
    config = AutoConfig.for_model(model_type, **options, dtype="float32")
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3)
        for name, buffer in model.named_buffers():
            if name.endswith("_bias"):  # of a router
                buffer.normal_(0, 0.3)
    model.save_pretrained(folder)
    return model, load_file(folder / "model.safetensors")


def write_gguf(
    model: Any,
    tensors: Mapping[str, Tensor],
    path: Path,
    kind: GGMLQuantizationType = F32,
    more_tensors: Mapping[str, Tensor] | None = None,
    architecture: str | None = None,
    rename: Callable[[str], str] = str,
    **keys: Any,
) -> Path:
    """The model as llama.cpp's converter writes it, its matrices in the format `kind`.

    Args:
        architecture: the name of another that is computed in the same way.
        rename: of names in the file.
        more_tensors: further ones, under their names in the file.
        keys: further ones of the architecture, or other values; "__" stands for a dot, None is left out.
    """
    config = model.config
    config.allow_global_per_layer_attribute_access = True  # those of most layers, where layers differ
    arch = ARCHITECTURES[config.model_type]
    name_of_arch = architecture or MODEL_ARCH_NAMES[arch]
    values = _metadata(config) | {key.replace("__", "."): value for key, value in keys.items()}
    values = {f"{name_of_arch}.{key}": value for key, value in values.items() if value is not None}
    values |= {f"tokenizer.ggml.{name}_token_id": getattr(config, f"{name}_token_id") for name in ("bos", "eos")}
    names = get_tensor_name_map(arch, config.num_hidden_layers)
    stored: dict[str, Tensor] = {}
    for name, tensor in _paired(_stacked(_split(tensors, config.model_type)), config).items():
        if config.model_type == "gemma4_text" and (own := _of_gemma4(name)) is not None:
            stored[own] = tensor
            continue
        name = name.replace("_correction_bias", "_correction.bias")
        tensor = tensor.flatten() if name.endswith("_correction.bias") else tensor
        found = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert found is not None, name
        is_shifted = config.model_type in ("gemma2", "gemma3_text") and name.endswith("norm.weight")
        stored[rename(found)] = tensor + 1 if is_shifted else tensor
    if config.model_type == "gemma4_text":
        stored["rope_freqs.weight"] = torch.tensor([1.0] * 8 + [1e30] * 24)
    stored |= more_tensors or {}
    return write_file(
        path, name_of_arch, values, {name: tensor.float().contiguous().numpy() for name, tensor in stored.items()}, kind
    )


def write_file(
    path: Path,
    architecture: str,
    keys: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    kind: GGMLQuantizationType | None = None,
) -> Path:
    """A file of these keys and tensors, its matrices in the format `kind`; None: as they are."""
    writer = GGUFWriter(path, architecture)
    for key, value in keys.items():
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        add.get(type(value), writer.add_array)(key, value)
    for name, data in tensors.items():
        is_whole = kind is not None and data.ndim > 1 and data.shape[-1] % GGML_QUANT_SIZES[kind][0] == 0
        form = None if kind is None else kind if is_whole else F32
        writer.add_tensor(name, data if form is None else quantize(np.ascontiguousarray(data), form), raw_dtype=form)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _metadata(config: Any) -> dict[str, Any]:
    values = {"block_count": config.num_hidden_layers, "context_length": config.max_position_embeddings}
    values |= {"embedding_length": config.hidden_size, "feed_forward_length": config.intermediate_size}
    values |= {
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
    }
    values["attention.layer_norm_rms_epsilon"] = config.rms_norm_eps
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    values["rope.freq_base"] = rope["rope_theta"]
    if config.model_type == "gemma4_text":
        return values | _metadata_of_gemma4(config.to_dict())
    if rope["rope_type"] == "yarn":
        values |= {"rope.scaling.type": "yarn", "rope.scaling.factor": rope["factor"]}
        values["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    if config.model_type == "ministral3":
        values["rope.scaling.yarn_log_multiplier"] = rope["mscale_all_dim"]
        values["attention.temperature_scale"] = rope["llama_4_scaling_beta"]
    if head_dim := getattr(config, "head_dim", None):
        values |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
    if config.model_type in PAIRED:
        size = head_dim or config.hidden_size // config.num_attention_heads
        values |= {"vocab_size": config.vocab_size, "rope.dimension_count": size}
    if experts := getattr(config, "num_experts", getattr(config, "num_local_experts", None)):
        values |= {"expert_count": experts, "expert_used_count": config.num_experts_per_tok}
    if config.model_type in ("glm4_moe", "minimax_m2", "ernie4_5_moe", "dots1"):
        values |= _routed(config, config.rope_parameters.get("partial_rotary_factor", 1.0))
    if config.model_type in ("qwen2_moe", "qwen3_moe"):
        values["expert_feed_forward_length"] = config.moe_intermediate_size
    if config.model_type == "qwen2_moe":
        values["expert_shared_feed_forward_length"] = config.shared_expert_intermediate_size
    if config.model_type == "granitemoeshared":
        values["expert_shared_feed_forward_length"] = config.shared_intermediate_size
    if config.model_type in ("gpt_oss", "llama4_text"):
        values["expert_feed_forward_length"] = config.intermediate_size
    if config.model_type == "llama4_text":
        values["feed_forward_length"] = config.intermediate_size_mlp
        values["interleave_moe_layer_step"] = config.interleave_moe_layer_step
    if config.model_type == "olmo3":
        values["rope.scaling.attn_factor"] = rope.get("attention_factor")
        values["attention.sliding_window_pattern"] = [kind == "sliding_attention" for kind in config.layer_types]
    if config.model_type == "gemma2":
        values |= {name: getattr(config, name) for name in ("attn_logit_softcapping", "final_logit_softcapping")}
    if config.model_type == "glm4":
        values["rope.dimension_count"] = int(head_dim * config.rope_parameters["partial_rotary_factor"])
    if config.model_type == "exaone4":
        values["attention.sliding_window_pattern"] = [kind == "sliding_attention" for kind in config.layer_types]
    if config.model_type in ("phi3", "gemma2", "gemma3_text", "exaone4", "gpt_oss", "olmo3"):
        values["attention.sliding_window"] = config.sliding_window or 0
    if config.model_type.startswith("granite"):
        values |= {"attention.scale": config.attention_multiplier, "embedding_scale": config.embedding_multiplier}
        values |= {"residual_scale": config.residual_multiplier, "logit_scale": config.logits_scaling}
    return values


def _metadata_of_gemma4(table: Mapping[str, Any]) -> dict[str, Any]:
    slides = [kind == "sliding_attention" for kind in table["layer_types"]]
    full, width = next(iter(table["per_layer_config"].values())), table["intermediate_size"]
    first = len(slides) - table["num_kv_shared_layers"]
    sizes = {"": full["head_dim"], "_swa": table["head_dim"]}
    heads = full.get("num_key_value_heads", table["num_key_value_heads"]), table["num_key_value_heads"]
    values = {f"attention.{what}_length{end}": size for end, size in sizes.items() for what in ("key", "value")}
    values |= {f"rope.dimension_count{end}": size for end, size in sizes.items()}
    values |= {f"expert_{key}": table[name] or 0 for key, name in EXPERTS_OF_GEMMA4.items()}
    return values | {
        "attention.head_count_kv": [heads[own] for own in slides],
        "attention.shared_kv_layers": table["num_kv_shared_layers"],
        "attention.sliding_window": table["sliding_window"],
        "attention.sliding_window_pattern": slides,
        "embedding_length_per_layer_input": table["hidden_size_per_layer_input"],
        "feed_forward_length": [
            width * (1 + (table["use_double_wide_mlp"] and i >= first)) for i in range(len(slides))
        ],
        "final_logit_softcapping": table["final_logit_softcapping"],
        "rope.freq_base_swa": table["rope_parameters"]["sliding_attention"]["rope_theta"],
    }


def _of_gemma4(name: str) -> str | None:
    """Names that the table of the package has not: those without "weight" at their end."""
    ends = {
        "layer_scalar": "layer_output_scale.weight",
        "router.scale": "ffn_gate_inp.scale",
        "router.per_expert_scale": "ffn_down_exps.scale",
        "experts.gate_up_proj": "ffn_gate_up_exps.weight",
        "experts.down_proj": "ffn_down_exps.weight",
    }
    before, _, end = name.removeprefix("model.layers.").partition(".")
    return f"blk.{before}.{ends[end]}" if end in ends else None


def _routed(config: Any, rotated: float) -> dict[str, Any]:
    """What the converter says of a router and its experts."""
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    values = {"rope.dimension_count": int(size * rotated), "expert_gating_func": 2}
    values["expert_feed_forward_length"] = getattr(config, "moe_intermediate_size", config.intermediate_size)
    if config.model_type == "ernie4_5_moe":
        more = {"expert_shared_count": config.moe_num_shared_experts, "expert_gating_func": 1}
        more |= {"leading_dense_block_count": config.moe_layer_start_index}
        more["interleave_moe_layer_step"] = config.moe_layer_interval
        return values | more | {"expert_shared_feed_forward_length": 7}  # no width of any tensor
    if config.model_type == "minimax_m2":
        return values
    return values | {
        "expert_shared_count": config.n_shared_experts,
        "leading_dense_block_count": config.first_k_dense_replace,
        "expert_weights_scale": config.routed_scaling_factor,
        "expert_weights_norm": config.norm_topk_prob,
        "expert_group_count": config.n_group,
        "expert_group_used_count": config.topk_group,
    }


def _split(tensors: Mapping[str, Tensor], model_type: str) -> dict[str, Tensor]:
    """With a tensor for each matrix, outputs first, where Hugging Face has gates and ups together."""
    result: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        layer = f"blk.{name.split('.')[2]}" if name.startswith("model.layers.") else ""
        kind = "bias" if name.endswith("_bias") else "weight"
        shared, outputs_at = ("_shexp", 0) if ".shared_mlp." in name else ("_exps", 1)
        is_stacked = model_type in ("gpt_oss", "llama4_text") and ".experts." in name
        if is_stacked and kind == "weight":
            tensor = tensor.transpose(1, 2)
        if (is_stacked and ".down_proj" in name) or name.endswith("output_linear.weight"):
            result[f"{layer}.ffn_down{shared}.{kind}"] = tensor
        elif is_stacked or name.endswith("input_linear.weight"):
            outputs = tensor.shape[outputs_at] // 2
            order = torch.arange(2 * outputs)
            order = order.view(-1, 2).T.flatten() if model_type == "gpt_oss" else order
            parts = tensor.index_select(outputs_at, order).split(outputs, outputs_at)
            result |= {
                f"{layer}.ffn_{own}{shared}.{kind}": part for own, part in zip(("gate", "up"), parts, strict=True)
            }
        else:
            result[f"{name}.weight" if name.endswith("sinks") else name] = tensor
    return result


def _stacked(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """With the experts of a layer in one tensor, under the name that the converter gives it."""
    found: dict[str, list[Tensor]] = {}
    for name, tensor in sorted(tensors.items()):
        before, _, after = name.partition(".experts.")
        if after[:1].isdecimal():
            number, rest = after.split(".", 1)
            before = before.replace("model.layers", "layers").replace("block_sparse_moe", "feed_forward")
            before = f"model.{before}" if before.endswith("mlp") else before
            name = f"{before}.experts.{rest}"
            assert len(found.setdefault(name, [])) == int(number)
            found[name].append(tensor)
        else:
            found[name] = [tensor]
    return {name: torch.stack(parts) if len(parts) > 1 else parts[0] for name, parts in found.items()}


def _paired(tensors: Mapping[str, Tensor], config: Any) -> dict[str, Tensor]:
    """With each row of a head of q and k beside the one that it is rotated with, where llama.cpp wants that."""
    result = dict(tensors)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    if config.model_type in PAIRED:
        for name, tensor in tensors.items():
            if count := heads.get(name.split(".")[-2]):
                halves = tensor.reshape(count, 2, -1, *tensor.shape[1:])
                result[name] = torch.stack([halves[:, 0], halves[:, 1]], 2).reshape(tensor.shape)
    return result
