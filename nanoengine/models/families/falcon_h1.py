"""Falcon H1 (TII, 2025): parallel attention and Mamba 2 in every layer, and muP factors of their inputs and outputs. All but two
of the factors are multiplied into the weights at load.
"""

from __future__ import annotations

from nanoengine.models.config_fields import ConfigFields
from nanoengine.models.families.bamba import NAMES
from nanoengine.models.families.common import head_dim_of, read_decoder
from nanoengine.models.families.states import mamba_states
from nanoengine.models.model_config import LayerConfig, ModelConfig, StateConfig, WeightFactor
from nanoengine.models.rope_config import read_rope

ARCHITECTURES = ("FalconH1ForCausalLM",)
FACTORS = 1e-6, 1e6
"""Limits of each factor: products of them stay finite."""


def read_config(fields: ConfigFields, _architecture: str) -> ModelConfig:
    for key in ("attention_bias", "mlp_bias", "mamba_proj_bias", "projectors_bias"):
        fields.refuse(key, "projections without biases are supported")
    fields.ignore("num_logits_to_keep", "mlp_expansion_factor", "mamba_use_mlp")
    fields.expect("mamba_use_mlp", True)
    size, states = head_dim_of(fields), _states(fields)
    inward, keys = (fields.number(f"{name}_multiplier", 1.0, *FACTORS) for name in ("attention_in", "key"))
    return read_decoder(
        fields,
        eps=1e-5,
        layers=(LayerConfig(rope=read_rope(fields, size), mixer="mamba2"),),
        states=states,
        attention_scale=size**-0.5 * inward**2 * keys,
        embedding_scale=fields.number("embedding_multiplier", 1.0, *FACTORS),
        logits_divisor=1 / fields.number("lm_head_multiplier", 1.0, *FACTORS),
        factors=_factors(fields, states, inward),
        names=NAMES,
    )


def _states(fields: ConfigFields) -> StateConfig:
    inner = fields.nullable("mamba_d_ssm", 1024, fields.integer)
    norm, is_before = fields.flag("mamba_rms_norm"), fields.flag("mamba_norm_before_gate", True)
    return mamba_states(fields, inner, has_norm=norm, gate_first=not is_before)


def _factors(fields: ConfigFields, states: StateConfig, inward: float) -> tuple[WeightFactor, ...]:
    """Factors of weights. `inward`: of the input of attention; the scale of scores has it for q and k, `o_proj` for v."""
    fields.default(mlp_multipliers=[1.0] * 2, ssm_multipliers=[1.0] * 5)
    gate, down = fields.numbers("mlp_multipliers", 2, *FACTORS)
    names = ("attention_out", "ssm_in", "ssm_out")
    outward, into, out = (fields.number(f"{name}_multiplier", 1.0, *FACTORS) for name in names)
    inner, shared = states.num_heads * states.width, states.num_groups * states.depth
    of_projections = tuple(into * factor for factor in fields.numbers("ssm_multipliers", 5, *FACTORS))
    rows = (inner, inner, shared, shared, states.num_heads)
    factors = (
        WeightFactor(".self_attn.o_proj.weight", (inward * outward,)),
        WeightFactor(".mamba.in_proj.weight", of_projections, rows),
        WeightFactor(".mamba.out_proj.weight", (out,)),
        WeightFactor(".mlp.gate_proj.weight", (gate,)),
        WeightFactor(".mlp.down_proj.weight", (down,)),
    )
    return tuple(factor for factor in factors if set(factor.factors) != {1.0})
