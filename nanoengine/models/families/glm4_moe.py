"""GLM-4.5 to 4.7 (Z.ai, 2025): half of each head rotates; experts behind the first layers, beside one that all tokens share."""

from __future__ import annotations

from nanoengine.models.config_fields import ConfigFields
from nanoengine.models.families.common import head_dim_of, read_decoder
from nanoengine.models.families.routed import SHARED, routed_experts, sparse_after
from nanoengine.models.model_config import LayerConfig, ModelConfig, TensorNames
from nanoengine.models.rope_config import read_rope

ARCHITECTURES = ("Glm4MoeForCausalLM",)


def read_config(fields: ConfigFields, architecture: str) -> ModelConfig:
    for key, value in {"partial_rotary_factor": 0.5, "norm_topk_prob": True, "n_shared_experts": 1}.items():
        fields.default(key, value)
    fields.ignore("num_nextn_predict_layers", "num_mtp_layers")
    rope = read_rope(fields, head_dim_of(fields), may_be_partial=True)
    sparse = sparse_after(fields, "first_k_dense_replace", 1)
    return read_decoder(
        fields,
        architecture,
        eps=1e-5,
        layers=tuple(LayerConfig(rope=rope, has_experts=has_experts) for has_experts in sparse),
        experts=routed_experts(fields, "n_routed_experts", added_to_sum=1e-20),
        qkv_bias=fields.flag("attention_bias"),
        qk_norm="head" if fields.flag("use_qk_norm") else None,
        names=TensorNames(replaced=(SHARED,)),
    )
