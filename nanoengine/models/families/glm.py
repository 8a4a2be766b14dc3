"""GLM-4 (Zhipu AI, 2024 and 2025): half of each head has interleaved rotation; since 2025, norms after parts. GLM-4.5 to 4.7
(Z.ai, 2025): half of each head rotates; after the first layers, experts beside an MLP of all tokens.
"""

from __future__ import annotations

from dataclasses import replace

from nanoengine.models.config_fields import ConfigFields
from nanoengine.models.families.common import head_dim_of, read_decoder
from nanoengine.models.families.routed import SHARED, routed_experts, sparse_after
from nanoengine.models.model_config import LayerConfig, ModelConfig, TensorNames
from nanoengine.models.rope_config import read_rope

NAMES = {
    "GlmForCausalLM": TensorNames(gate_up=("gate_up_proj",)),
    "Glm4ForCausalLM": TensorNames(
        gate_up=("gate_up_proj",), norm_after_attention="post_self_attn_layernorm", norm_after_mlp="post_mlp_layernorm"
    ),
    "Glm4MoeForCausalLM": TensorNames(replaced=(SHARED,)),
}
ARCHITECTURES = tuple(NAMES)


def read_config(fields: ConfigFields, architecture: str) -> ModelConfig:
    fields.default(partial_rotary_factor=0.5)
    if architecture == "Glm4MoeForCausalLM":
        return _read_sparse(fields)
    rope = replace(read_rope(fields, head_dim_of(fields, 128), may_be_partial=True), interleaved=True)
    return read_decoder(
        fields,
        head_dim=128,
        eps=1.5625e-7,
        layers=(LayerConfig(rope=rope),),
        qkv_bias=fields.flag("attention_bias", True),
        names=NAMES[architecture],
    )


def _read_sparse(fields: ConfigFields) -> ModelConfig:
    fields.default(norm_topk_prob=True, n_shared_experts=1)
    fields.ignore("num_nextn_predict_layers", "num_mtp_layers")
    rope = read_rope(fields, head_dim_of(fields), may_be_partial=True)
    sparse = sparse_after(fields, "first_k_dense_replace", 1)
    return read_decoder(
        fields,
        eps=1e-5,
        layers=tuple(LayerConfig(rope=rope, has_experts=is_sparse) for is_sparse in sparse),
        experts=routed_experts(fields, "n_routed_experts", added_to_sum=1e-20),
        qkv_bias=fields.flag("attention_bias"),
        qk_norm="head" if fields.flag("use_qk_norm") else None,
        names=NAMES["Glm4MoeForCausalLM"],
    )
