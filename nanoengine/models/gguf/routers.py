"""Routers: fields of a config.json for routers with a bias or with sigmoid scores, from the metadata of a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nanoengine.models.gguf.file import GGUFFile
from nanoengine.models.gguf.keys import Keys

COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Names of the number of experts in configs."""

NORMALIZED = dict.fromkeys(("Glm4MoeForCausalLM", "Dots1ForCausalLM", "NemotronHForCausalLM"), False)
NORMALIZED |= dict.fromkeys(("MiniMaxM2ForCausalLM", "Lfm2MoeForCausalLM", "Ernie4_5_MoeForCausalLM"), True)
"""Architecture -> whether the weights of a token's experts are divided by their sum, if the file does not say."""

SOFTMAX, SIGMOID = 1, 2


def num_experts(config: Mapping[str, Any]) -> int:
    return next((config[key] for key in COUNTS if key in config), 0)


def complete_router(keys: Keys, config: dict[str, Any], file: GGUFFile) -> None:
    """Add the fields of the router, and those that follow from the list of tensors.

    Raises:
        UnsupportedModel: another router than that of the architecture.
    """
    name = config["architectures"][0]
    right = SOFTMAX if name == "Ernie4_5_MoeForCausalLM" else SIGMOID
    if (kind := keys.number("expert_gating_func", default=right)) not in (0, right):
        raise keys.unsupported("expert_gating_func", kind, str(right))
    is_normalized = keys.flag("expert_weights_norm", default=NORMALIZED[name])
    if NORMALIZED[name] and not is_normalized:
        raise keys.unsupported("expert_weights_norm", False, "true")
    config["norm_topk_prob"] = is_normalized
    config["routed_scaling_factor"] = float(keys.number("expert_weights_scale", default=0.0)) or 1.0
    config["num_hidden_layers"] -= keys.number("nextn_predict_layers", default=0)  # of multi-token prediction
    for key, field in (("expert_group_count", "n_group"), ("expert_group_used_count", "topk_group")):
        config[field] = keys.number(key, default=1) or 1
    # Counts of shared experts are those of tensors: some files have another width beside them.
    for key in ("expert_shared_count", "expert_shared_feed_forward_length"):
        keys.number(key, default=0)
    rows = next((record.shape[0] for key, record in file.tensors.items() if key.endswith(".ffn_gate_shexp.weight")), 0)
    width = config.get("moe_intermediate_size") or 1
    if rows % width:
        raise keys.unsupported("expert_feed_forward_length", width, f"a divisor of the {rows} rows of shared experts")
    config["n_shared_experts"] = rows // width
    if name == "Lfm2MoeForCausalLM":
        config["use_expert_bias"] = any(key.endswith(".exp_probs_b.bias") for key in file.tensors)
    if name == "Glm4MoeForCausalLM":
        config |= {"use_qk_norm": "blk.0.attn_q_norm.weight" in file.tensors, "partial_rotary_factor": 1.0}
