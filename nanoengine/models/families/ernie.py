"""ERNIE 4.5 (Baidu, 2025): Llama with interleaved rotation; the sparse models choose experts by probabilities and a bias, in a
range of layers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from nanoengine.models.config_fields import ConfigFields
from nanoengine.models.families.common import head_dim_of, read_decoder
from nanoengine.models.families.routed import SHARED, routed_experts, sparse_after
from nanoengine.models.model_config import ExpertsConfig, LayerConfig, ModelConfig, TensorNames
from nanoengine.models.rope_config import read_rope

SPARSE = "Ernie4_5_MoeForCausalLM"
ARCHITECTURES = ("Ernie4_5ForCausalLM", SPARSE)
NAMES = TensorNames(replaced=((".gate.e_score_correction_bias", ".moe_statics.e_score_correction_bias"), SHARED))


def read_config(fields: ConfigFields, architecture: str) -> ModelConfig:
    head_dim = None if architecture == SPARSE else 128
    layer = LayerConfig(rope=replace(read_rope(fields, head_dim_of(fields, head_dim), 5e5), interleaved=True))
    if architecture == SPARSE:
        layers = tuple(replace(layer, has_experts=is_sparse) for is_sparse in _sparse_layers(fields))
        experts = _experts(fields)
        return read_decoder(fields, eps=1e-5, tied=True, layers=layers, experts=experts, names=NAMES)
    biases: dict[str, Any] = dict.fromkeys(("qkv_bias", "o_bias", "mlp_bias"), fields.flag("use_bias"))
    return read_decoder(fields, head_dim=head_dim, eps=1e-5, tied=True, layers=(layer,), **biases)


def _sparse_layers(fields: ConfigFields) -> list[bool]:
    """Whether each layer has experts."""
    sparse, end = sparse_after(fields, "moe_layer_start_index", 1), fields.integer("moe_layer_end_index", -1, least=-1)
    step, last = fields.integer("moe_layer_interval", 1), len(sparse) - 1 if end == -1 else end
    return [is_sparse and i <= last and (i + 1) % step == 0 for i, is_sparse in enumerate(sparse)]


def _experts(fields: ConfigFields) -> ExpertsConfig:
    for key, value in {"use_bias": False, "use_rmsnorm": True, "moe_gate": "topk", "moe_use_aux_free": True}.items():
        fields.expect(key, value)
    fields.ignore("moe_capacity", "num_nextn_predict_layers")
    chosen, shared = fields.get("moe_k", 6), fields.get("moe_num_shared_experts", 2)
    fields.default(num_experts_per_tok=chosen, n_shared_experts=shared)
    return routed_experts(
        fields,
        "moe_num_experts",
        scores="softmax",
        normalize=True,
        bias_shape=(1, fields.integer("moe_num_experts")),
        least_sum=fields.number("moe_norm_min", 1e-12),
    )
