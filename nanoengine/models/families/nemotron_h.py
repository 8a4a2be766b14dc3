"""Nemotron-H (NVIDIA, 2025): a layer is one norm and one part: Mamba 2, attention without rotation, an MLP without a gate, or a
mixture of such MLPs.
"""

from __future__ import annotations

from nanoengine.models.config_fields import MAX_LAYERS, ConfigFields
from nanoengine.models.families.common import read_decoder
from nanoengine.models.families.routed import SHARED, routed_experts
from nanoengine.models.families.states import check_time_steps, read_states
from nanoengine.models.model_config import ExpertsConfig, LayerConfig, ModelConfig, StateConfig, TensorNames

ARCHITECTURES = ("NemotronHForCausalLM",)
MAMBA = LayerConfig(rope=None, attends=False, mixer="mamba2", has_mlp=False)
ATTENTION = LayerConfig(rope=None, has_mlp=False)
MLP = LayerConfig(rope=None, attends=False)
EXPERTS = LayerConfig(rope=None, attends=False, has_experts=True)
LETTERS = {"M": MAMBA, "*": ATTENTION, "-": MLP, "E": EXPERTS}
WORDS = {"moe": EXPERTS, "mamba": MAMBA, "attention": ATTENTION, "mlp": MLP}
WORDS |= {"linear_attention": MAMBA, "full_attention": ATTENTION}
OF_EXPERTS = (
    *("n_routed_experts", "n_shared_experts", "num_experts_per_tok", "norm_topk_prob", "n_group", "topk_group"),
    *("routed_scaling_factor", "moe_intermediate_size", "moe_latent_size", "moe_shared_expert_intermediate_size"),
    "moe_shared_expert_overlap",
)
"""Fields of mixtures of experts; files of models without experts have them, too."""

STATE_KEYS = {
    "taps": ("conv_kernel", 4),
    "num_heads": ("mamba_num_heads", 128),
    "num_groups": ("n_groups", 8),
    "depth": ("ssm_state_size", 128),
    "width": ("mamba_head_dim", 64),
}
"""Fields and defaults of the sizes of Mamba 2 layers."""

NAMES = TensorNames(
    norm_before_attention="norm",
    norm_before_mlp="norm",
    gate_up=("up_proj",),
    expert_gate_up_down=("up_proj", "down_proj"),
    replaced=(*((f".{part}.", ".mixer.") for part in ("self_attn", "mamba", "mlp")), SHARED),
)


def read_config(fields: ConfigFields, _architecture: str) -> ModelConfig:
    layers = _layers(fields)
    eps = fields.get("layer_norm_epsilon", 1e-5)
    facts = {"num_hidden_layers": len(layers), "rms_norm_eps": eps, "norm_eps": eps}
    fields.default(**facts)
    for key, value in facts.items():
        fields.expect(key, value)
    fields.default(head_dim=fields.get("attention_head_dim", 128))
    fields.ignore("rope_theta", "rope_parameters", "partial_rotary_factor", "num_logits_to_keep", *OF_EXPERTS)
    bias = fields.flag("mlp_bias")
    experts = _experts(fields, bias) if EXPERTS in layers else None
    fields.refuse("attention_bias", "attention without biases is supported")
    fields.refuse("sliding_window", "attention without a window is supported")
    fields.expect("mlp_hidden_act", "relu2")
    return read_decoder(
        fields,
        head_dim=128,
        layers=layers,
        states=_states(fields),
        activation="relu2",
        experts=experts,
        mlp_bias=bias,
        names=NAMES,
    )


def _layers(fields: ConfigFields) -> tuple[LayerConfig, ...]:
    """Layers by a list of words, or by a pattern of letters.

    Raises:
        UnsupportedModel: neither, or an invalid word or letter.
    """
    fields.ignore("hybrid_override_pattern", "mtp_hybrid_override_pattern")
    fields.ignore("num_nextn_predict_layers", "mtp_layers_block_type")
    key = next((name for name in ("layers_block_type", "layer_types") if fields.get(name)), "hybrid_override_pattern")
    stated, kinds = fields.get(key), LETTERS if key == "hybrid_override_pattern" else WORDS
    is_known = isinstance(stated, list | str) and all(isinstance(kind, str) and kind in kinds for kind in stated)
    if not is_known or not 0 < len(stated) <= MAX_LAYERS:
        raise fields.wrong(key, stated, f"it must name each layer: {', '.join(kinds)}")
    return tuple(kinds[kind] for kind in stated)


def _experts(fields: ConfigFields, bias: bool) -> ExpertsConfig:
    if bias:
        raise fields.wrong("mlp_bias", bias, "beside mixtures of experts, MLPs without biases are supported")
    fields.default(norm_topk_prob=True)
    latent = fields.integer("moe_latent_size", 0, least=0)
    shared = fields.integer("moe_shared_expert_intermediate_size")
    return routed_experts(fields, "n_routed_experts", added_to_sum=1e-20, shared_size=shared, latent_size=latent)


def _states(fields: ConfigFields) -> StateConfig:
    check_time_steps(fields)
    fields.expect("mamba_hidden_act", "silu")
    fields.ignore("expand", "mamba_proj_bias", "use_mamba_kernels", "mamba_ssm_cache_dtype", "rescale_prenorm_residual")
    biases = {"conv_bias": fields.flag("use_conv_bias", True), "proj_bias": fields.flag("use_bias")}
    return read_states(fields, STATE_KEYS, **biases)
