"""ERNIE 4.5 with experts (Baidu, 2025): they are chosen by probabilities and a bias, in all layers of a range; the two of a pair
that rotates stand side by side.
"""

from __future__ import annotations

from dataclasses import replace

from nanoengine.models.config_fields import ConfigFields
from nanoengine.models.families.common import head_dim_of, read_decoder
from nanoengine.models.families.routed import SHARED, routed_experts, sparse_after
from nanoengine.models.model_config import LayerConfig, ModelConfig, TensorNames
from nanoengine.models.rope_config import read_rope

ARCHITECTURES = ("Ernie4_5_MoeForCausalLM",)
NAMES = TensorNames(replaced=((".gate.e_score_correction_bias", ".moe_statics.e_score_correction_bias"), SHARED))


def read_config(fields: ConfigFields, architecture: str) -> ModelConfig:
    fields.expect("use_bias", False)
    fields.expect("use_rmsnorm", True)
    fields.expect("moe_gate", "topk")
    fields.expect("moe_use_aux_free", True)
    fields.ignore("moe_capacity", "num_nextn_predict_layers")
    fields.default("num_experts_per_tok", fields.get("moe_k", 6))
    fields.default("n_shared_experts", fields.get("moe_num_shared_experts", 2))
    sparse, end = sparse_after(fields, "moe_layer_start_index", 1), fields.get("moe_layer_end_index", -1)
    if isinstance(end, bool) or not isinstance(end, int) or end < -1:
        raise fields.wrong("moe_layer_end_index", end, "it must be the number of a layer, or -1 for the last")
    step, last = fields.integer("moe_layer_interval", 1), len(sparse) - 1 if end == -1 else end
    rope = replace(read_rope(fields, head_dim_of(fields), 500_000.0), interleaved=True)
    return read_decoder(
        fields,
        architecture,
        eps=1e-5,
        tied=True,
        layers=tuple(
            LayerConfig(rope=rope, has_experts=sparse[i] and i <= last and (i + 1) % step == 0)
            for i in range(len(sparse))
        ),
        experts=routed_experts(
            fields,
            "moe_num_experts",
            scores="softmax",
            normalize=True,
            bias_shape=(1, fields.integer("moe_num_experts")),
            least_sum=fields.number("moe_norm_min", 1e-12),
        ),
        names=NAMES,
    )
