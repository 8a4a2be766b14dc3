"""MiniMax-M2 (MiniMax, 2025): experts in every layer, QK norms over all heads, and rotation of a part of each head."""

from __future__ import annotations

from nanoengine.models.config_fields import MAX_LAYERS, ConfigFields
from nanoengine.models.families.common import head_dim_of, read_decoder
from nanoengine.models.families.routed import routed_experts
from nanoengine.models.model_config import LayerConfig, ModelConfig, TensorNames
from nanoengine.models.rope_config import read_rope

ARCHITECTURES = ("MiniMaxM2ForCausalLM",)
NAMES = TensorNames(
    experts="block_sparse_moe",
    expert_gate_up_down=("w1", "w3", "w2"),
    replaced=((".gate.e_score_correction_bias", ".e_score_correction_bias"),),
)


def read_config(fields: ConfigFields, _architecture: str) -> ModelConfig:
    # Every layer has attention.
    fields.expect("attn_type_list", [1] * fields.integer("num_hidden_layers", most=MAX_LAYERS))
    for key in ("use_qk_norm", "use_routing_bias"):
        fields.expect(key, True)
    fields.expect("qk_norm_type", "per_layer")
    fields.ignore("mtp_transformer_layers", "num_mtp_modules", "use_mtp")
    size = head_dim_of(fields, 128)
    fields.default(partial_rotary_factor=fields.integer("rotary_dim", size, size) / size)
    fields.default(moe_intermediate_size=fields.integer("intermediate_size"))
    rope = read_rope(fields, size, 5e6, may_be_partial=True)
    return read_decoder(
        fields,
        head_dim=128,
        layers=(LayerConfig(rope=rope, has_experts=True),),
        experts=routed_experts(fields, "num_local_experts", normalize=True),
        qk_norm="full",
        names=NAMES,
    )
