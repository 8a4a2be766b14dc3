"""Bamba (IBM, Princeton, CMU and UIUC, 2024): Mamba 2 in most layers, attention with half of each head rotated in the others."""

from __future__ import annotations

from nanoengine.models.config_fields import MAX_LAYERS, ConfigFields
from nanoengine.models.families.common import biases_of, head_dim_of, read_decoder
from nanoengine.models.families.states import hybrid_layers, mamba_states
from nanoengine.models.model_config import ModelConfig, TensorNames
from nanoengine.models.rope_config import read_rope

ARCHITECTURES = ("BambaForCausalLM",)
KINDS = ("full_attention", "linear_attention")

NAMES = TensorNames(
    norm_before_mlp="pre_ff_layernorm",
    replaced=((".mlp.", ".feed_forward."), ("model.norm.", "model.final_layernorm.")),
)


def read_config(fields: ConfigFields, _architecture: str) -> ModelConfig:
    fields.ignore("num_logits_to_keep", "z_loss_coefficient")
    size = head_dim_of(fields)
    fields.default(partial_rotary_factor=0.5)
    fields.expect("partial_rotary_factor", 0.5)
    fields.expect("attn_rotary_emb", size // 2)
    attending = fields.layers("attn_layer_indices")
    types = [KINDS[number not in attending] for number in range(fields.integer("num_hidden_layers", most=MAX_LAYERS))]
    return read_decoder(
        fields,
        eps=1e-5,
        layers=hybrid_layers(fields, "mamba2", KINDS, read_rope(fields, size, may_be_partial=True), types),
        states=mamba_states(fields),
        mlp_bias=fields.flag("mlp_bias"),
        names=NAMES,
        **biases_of(fields),
    )
